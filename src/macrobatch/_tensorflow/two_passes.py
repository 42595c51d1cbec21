"""Two passes, for losses in which examples meet: the loss sees the outputs of the whole batch, and
activations are those of one micro-batch.

    outputs_j = forward(B_j)                   first pass: for all j, nothing is kept but outputs
    G         = d loss(outputs) / d outputs    the loss of the whole batch, once
    gradient  = sum_j d <forward(B_j), G_j>    second pass: with a tape

That is the chain rule, so the gradient is that of one tape over the same forward passes. Both
passes start from the same values, of seeds for instance, so that random layers draw the same.
"""

from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from macrobatch import _loop_checks
from macrobatch._tensorflow import graph, leaves, replicas, sums, trial
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.gather import Gathered
from macrobatch._tensorflow.loop import Loop
from macrobatch._tensorflow.parts import after, gradients_of
from macrobatch._tensorflow.trace import Traced
from macrobatch._types import (
    Batch,
    ForwardPass,
    Gradient,
    How,
    MicroBatches,
    Part,
    Run,
    Size,
    Tensor,
)


class Loss(NamedTuple):
    """What a loss has made of the outputs of the whole batch.

    Attributes:
        value: what to take gradients of.
        result: what else has come of it.
    """

    value: Tensor
    result: Any = None


# A function of the outputs and the totals of the whole batch.
LossOfBatch = Callable[[Any, List[Tensor]], Loss]


class TwoPasses:
    """A batch, its forward pass, and gradients of a loss of all of its outputs.

    Attributes:
        loop: the first pass. In a graph it is traced when the object is made.
        part: what the first pass has brought, once it has run.
    """

    part: Part

    def __init__(
        self,
        name: str,
        forward: ForwardPass,
        micro_batches: MicroBatches,
        values: Callable[[], List[Tensor]],
        fits: Callable[[List[Tensor]], bool],
        jit_compile: bool = False,
    ):
        """Prepares the first pass.

        Args:
            name: of the outputs, for messages.
            forward: the forward pass.
            micro_batches: the batch, and how it is cut.
            values: a function that reads the variables whose values go into a forward pass.
            fits: a function that tells whether values are all that must go in.
            jit_compile: whether XLA compiles the passes of micro-batches, and not what is around.
        """
        self._name, self._forward, self._micro_batches = name, forward, micro_batches
        self._options = values, fits, jit_compile, True
        self.loop = Loop(self._first, micro_batches, *self._options)
        if not tf.executing_eagerly():
            _loop_checks.draws_nothing_anew(self.loop.operations())
        self._synchronized: Sequence[str] = ()

    def _first(self, micro_batch: Batch, values: Any, _: Any, how: How) -> Part:
        """The step of the first pass."""
        found = self._forward(micro_batch, values, how)
        outputs = self.checked(found.outputs, micro_batch)
        return Part(list(found.totals), (), found.written, found.moments, aux=outputs)

    def checked(self, outputs: Any, micro_batch: Batch) -> Any:
        """Outputs as tensors, once it is known that they have the examples first."""
        examples = ENGINE.examples(micro_batch)
        message = _loop_checks.not_of_examples(self._name)

        def check(leaf: Any) -> Any:
            if leaf is None:
                return None
            _loop_checks.is_not_sparse(self._name, leaves.kind_of(leaf))
            _loop_checks.outputs_of_examples(self._name, leaf, examples)
            if leaf.shape[0] is not None or not isinstance(leaf, tf.Tensor):
                return leaf
            return graph.checked(leaf, (tf.equal(tf.shape(leaf)[0], examples), message))

        return tf.nest.map_structure(check, graph.to_tensors(outputs))

    def run(self, synchronized: Sequence[str] = ()) -> None:
        """Runs the first pass.

        Args:
            synchronized: the names of layers in which replicas meet.
        """
        self._synchronized = synchronized
        part = self.loop.run(synchronized=synchronized)
        examples = self._micro_batches.examples
        for leaf in tf.nest.flatten(part.aux):
            if isinstance(leaf, tf.Tensor) and isinstance(examples, int):
                leaf.set_shape([examples, *leaf.shape[1:]])  # which joining has lost
        self.part = part

    def loss(self, loss: LossOfBatch, gathered: Gathered) -> Loss:
        """What a loss makes of the outputs of the whole batch, over all replicas."""
        return loss(gathered.whole(self.part.aux), self._totals())

    def _totals(self) -> List[Tensor]:
        totals = list(self.part.sums)
        return replicas.sum_over_replicas(totals) if totals else []

    def loss_and_gradients(
        self, loss: LossOfBatch, gathered: Gathered, weights: List[Any]
    ) -> Tuple[Loss, List[Gradient]]:
        """What a loss makes of the outputs of the whole batch, and its gradients.

        In a replica they are its part of the gradients: their sum over replicas is the whole.
        """
        outputs, totals = gathered.whole(self.part.aux), self._totals()
        flat = tf.nest.flatten(outputs)
        floats = [i for i, leaf in enumerate(flat) if leaf is not None and _is_float(leaf)]
        watched = [_flat(flat[i]) for i in floats]
        with tf.GradientTape() as tape:
            tape.watch([*watched, *totals])
            found = loss(outputs, totals)
        of_all = tape.gradient(found.value, [*watched, *totals, *weights])
        of_outputs: List[Any] = [None] * len(flat)
        for i, gradient in zip(floats, of_all):
            of_outputs[i] = None if gradient is None else _like(flat[i], gradient)
        of_totals = of_all[len(watched) : len(of_all) - len(weights)]
        # Each replica has all of the gradients for what the loss itself uses.
        of_weights = of_all[len(of_all) - len(weights) :]
        own = [sums.widened(gradient) for gradient in of_weights]
        if replicas.in_several():
            own = [sums.scaled(gradient, 1 / replicas.count()) for gradient in own]
        # Or micro-batches of both passes would be in memory side by side.
        with graph.refuse_unless(*_same_on_all_replicas(found.value)), after(of_outputs):
            gradients = self._second(gathered.own(of_outputs), of_totals, weights)
            return found, [sums.add(*pair) for pair in zip(gradients, own)]

    def _second(
        self, of_outputs: List[Any], of_totals: List[Gradient], weights: List[Any]
    ) -> List[Gradient]:
        """Runs the second pass."""
        used = [gradient is not None for gradient in of_outputs]
        if not weights or not (any(used) or any(each is not None for each in of_totals)):
            return [None] * len(weights)
        flat = tf.nest.flatten(self.part.aux)
        pairs = [(g, output) for g, output in zip(of_outputs, flat) if g is not None]
        micro_batches = WithRows(self._micro_batches, pairs)

        def step(micro_batch: Batch, values: Any, _: Any, how: How) -> Part:
            micro_batch, pairs = micro_batch
            with tf.GradientTape() as tape:
                found = self._forward(micro_batch, values, how)
                outputs = tf.nest.flatten(graph.to_tensors(found.outputs))
                outputs = [output for output, is_used in zip(outputs, used) if is_used]
                totals = [t for t, g in zip(found.totals, of_totals) if g is not None]
                targets = [*map(_flat, outputs), *totals]
            given = [self._sized(pair[0], output) for pair, output in zip(pairs, outputs)]
            given += [gradient for gradient in of_totals if gradient is not None]
            given = [tf.cast(_flat(g), target.dtype) for g, target in zip(given, targets)]
            gradients = gradients_of(tape, targets, weights, given)
            before = [self._sized(pair[1][:1], output) for pair, output in zip(pairs, outputs)]
            differ = _differ(before, [output[:1] for output in outputs])
            return Part([*gradients, differ], written=found.written)

        loop = Loop(step, micro_batches, *self._options)
        *gradients, differ = loop.run(synchronized=self._synchronized).sums
        with graph.refuse_unless((tf.equal(differ, 0.0), _loop_checks.PASSES_DIFFER)):
            return [
                None if g is None else tf.nest.map_structure(tf.identity, g, expand_composites=True)
                for g in gradients
            ]

    def _sized(self, rows: Any, output: Any) -> Any:
        """Rows of the whole batch, as long as an output of a micro-batch that may be cut."""
        is_cut = self._micro_batches.axis is not None
        return leaves.sized_like(rows, output) if is_cut else rows


class WithRows(MicroBatches):
    """Micro-batches, each with its rows of a nest that has all examples first."""

    def __init__(self, micro_batches: MicroBatches, nest: Any):
        self._micro_batches, self._nest = micro_batches, nest
        self.examples, self.runs = micro_batches.examples, micro_batches.runs

    def get(self, run: Run, index: Size) -> Batch:
        return self._micro_batches.get(run, index), self._micro_batches.rows(self._nest, run, index)

    def first_index(self) -> Size:
        return self._micro_batches.first_index()


def outcome(run: Callable[[Batch, Batch], trial.Found], micro_batches: MicroBatches) -> Any:
    """A function for a trial, of a micro-batch and the same one whole; in a graph, traced once."""
    traces: List[Traced] = []

    def found(pair: Any) -> trial.Found:
        if tf.executing_eagerly():
            return run(*pair)
        if not traces:
            like = WithRows(micro_batches, micro_batches.whole).first()
            traces.append(Traced(run, *like))
        return traces[0](*pair)

    return found


def at_whole_length(outputs: Any, of_whole: Any) -> Any:
    """Outputs of a micro-batch that was cut, padded as those of the same one whole."""
    return tf.nest.map_structure(
        lambda one, other: None if one is None else leaves.sized_like(one, other),
        graph.to_tensors(outputs),
        graph.to_tensors(of_whole),
    )


def _is_float(leaf: Any) -> bool:
    return bool(leaf.dtype.is_floating or leaf.dtype.is_complex)


def _flat(leaf: Any) -> Tensor:
    """The values of a tensor that depend on variables."""
    return leaf.flat_values if isinstance(leaf, tf.RaggedTensor) else leaf


def _like(leaf: Any, values: Tensor) -> Any:
    values = tf.convert_to_tensor(values)  # a loss may have gathered rows
    return leaf.with_flat_values(values) if isinstance(leaf, tf.RaggedTensor) else values


def _same_on_all_replicas(value: Tensor) -> List[Any]:
    """A check that all replicas have come to the same loss."""
    if not replicas.in_several():
        return []
    value = tf.reduce_sum(tf.cast(value, tf.float64))
    (total,) = replicas.sum_over_replicas([value])
    error = tf.abs(total - value * replicas.count())
    # Where it is not finite, it is no number to compare.
    good = tf.logical_not(error > 1e-3 * tf.abs(total))
    return [(good, _loop_checks.LOSSES_DIFFER)]


def _differ(some: Sequence[Any], others: Sequence[Any]) -> Tensor:
    """1.0 if outputs of one pass are not those of the other, but for rounding; 0.0 if they are."""
    if graph.in_xla():  # It drops checks.
        return tf.zeros([])
    differ = [tf.constant(False)]
    for one, other in zip(map(_flat, some), map(_flat, others)):
        # The same kernels run in both passes. A graph may be optimised differently in each.
        tolerance = trial.TOLERANCES.get(one.dtype.name, trial.COARSE)
        if not tf.executing_eagerly() and one.dtype != tf.float64:
            tolerance = trial.COARSE
        error = tf.reduce_sum(tf.abs(sums.widened(one) - sums.widened(other)))
        size = tf.reduce_sum(tf.abs(sums.widened(one)))
        differ.append(error > tolerance * size)
    return tf.cast(tf.reduce_any(tf.stack(differ)), tf.float32)

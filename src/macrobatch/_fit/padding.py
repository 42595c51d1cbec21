"""Sequences in fit(): which parts of a batch are cut, and the trial whether anything depends on
padding. Where micro-batches are not made by length, there is nothing to do.
"""

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches import checks
from macrobatch._batches.cut import Cut
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import report
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import without
from macrobatch._keras.sequences import low_precision
from macrobatch._tensorflow import replicas, trial
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._tensorflow.memory import Memory
from macrobatch._tensorflow.trace import Traced
from macrobatch._types import Batch, MicroBatches, Part, Size, Tensor, Whole


class Padding:
    """What is known of the padding of a model's batches.

    Attributes:
        done: whether it is known that nothing depends on padding, in testing and in training.
    """

    def __init__(self, cut: Cut, strategy: Any):
        self._cut = cut
        self.done = [
            replicas.variable(strategy, [], tf.int32, f"padding_checked_{i}", summed=False)
            for i in range(2)
        ]
        self._memory = Memory(strategy)
        self._explained: Callable[[Exception], Exception] = lambda error: error

    def cut(self, model: Any, batch: Batch, examples: Size, few_shapes: bool) -> MicroBatches:
        """Cuts a batch of x, y and sample_weight."""
        (x, y, sample_weight), axis = batch, self._cut.axis
        fixed: List[Tensor] = []
        if axis is not None:
            fixed = fixed_parts(models.inputs_of(model), x, axis)
            fixed += fixed_parts(getattr(model, "outputs", None) or [], y, axis)
        return self._cut.apply(
            batch, examples, ENGINE, batch, x, sample_weight, fixed, few_shapes, self._memory
        )

    def check(self, loop: Loop, model: ModelStep, micro_batches: MicroBatches) -> None:
        """Tries, once, whether anything depends on padding."""
        outcomes = [lambda micro_batch: self._outcome(loop, model, micro_batch)]
        if model.trained:
            outcomes.append(_of_moved_weights(loop, model, micro_batches))
        trial.check(
            micro_batches,
            trial.Trial(
                outcomes,
                lambda: model.written.drew,
                model.model,
                low_precision(_internals.layers_of(model.model)),
                lambda: not model.inexact,
                lambda: (
                    "" if model.reaches_loss else keras_checks.no_mask(models.unmasked(model.model))
                ),
            ),
            self.done[model.training],
        )

    def _outcome(self, loop: Loop, model: ModelStep, micro_batch: Batch) -> trial.Found:
        """What a micro-batch comes to, by name: the loss with its gradients, and the metrics."""
        # Over 1, shares are sums.
        part = loop.part(micro_batch, [1.0] * len(model.counts), model.written.dropped)
        return _found(model, trial.comparable(part.sums), part)

    @contextlib.contextmanager
    def explaining(self, model: Any, micro_batches: MicroBatches) -> Iterator[None]:
        """Says so where a model fails on sequences that are cut, and not on whole ones."""

        def dry_run(like: Batch) -> None:
            _dry_run(model, like)

        with checks.explaining(micro_batches, dry_run) as explained:
            self._explained = explained
            yield

    def diagnosed(self, error: Exception) -> Exception:
        """The error that a graph has raised, or what is known of its cause."""
        if self._cut.axis is not None and _internals.is_of_unknown_shape(error):
            return ValueError(checks.not_compilable(self._cut.axis))
        return self._explained(error)


def _of_moved_weights(loop: Loop, model: ModelStep, micro_batches: MicroBatches) -> Any:
    """What a micro-batch comes to where the weights are some way off, without gradients.

    At the start of training much is the same for all inputs.
    """

    def run(micro_batch: Batch) -> Part:
        weights = moved([variable.value for variable in model.trained])
        whole = Whole(1, guesses=[])
        found = model(micro_batch, loop.values, whole, alone=True, drops=False, weights=weights)
        return Part(found.reported, found.counts, found.written)

    def found(micro_batch: Batch) -> trial.Found:
        function: Any = run
        if not tf.executing_eagerly():
            traced = traces or [Traced(run, micro_batches.first())]
            traces[:] = traced
            function = traced[0]
        part = function(micro_batch)
        return _found(model, part.sums, part)

    traces: List[Traced] = []
    return found


def _found(model: ModelStep, sums: Sequence[Tensor], part: Part) -> trial.Found:
    dtype = keras.config.floatx()
    found = {"loss": [*sums, *(tf.cast(count, dtype) for count in part.counts)]}
    after = dict(zip(map(id, model.written.variables), part.written[1:]))
    for metric in without(models.metrics_of(model.model), report.trackers_of(model.model)):
        # Not its result: what is wrong by a factor would go unnoticed there.
        values = [after.get(id(variable)) for variable in metric.variables]
        found.setdefault(metric.name, []).extend(v for v in values if v is not None)
    return found


def _dry_run(model: Any, like: Batch) -> None:
    """Traces a step into a graph that is thrown away."""
    values = model.values()

    def run(micro_batch: Batch) -> None:
        model(micro_batch, values, Whole(1, guesses=[]), alone=True)

    tf.function(run, autograph=False).get_concrete_function(like)


def moved(weights: List[Any]) -> List[Tensor]:
    """The values of weights, and as much again in random directions; large ones as they are."""
    found = []
    for seed, weight in enumerate(weights):
        value = tf.convert_to_tensor(weight)
        if value.shape.num_elements() > 2**20:
            found.append(value)
            continue
        noise = tf.random.stateless_normal(tf.shape(value), [seed, 0], dtype=value.dtype)
        size = tf.maximum(tf.math.reduce_std(value), tf.cast(0.05, value.dtype))
        found.append(value + size * noise)
    return found


def fixed_parts(declared: Sequence[Any], nest: Any, axis: int) -> List[Tensor]:
    """What of a nest has a size along an axis that the model declares: no sequences, then."""
    names = [tensor.name for tensor in declared]
    leaves = tf.nest.flatten(nest)
    if isinstance(nest, dict) and set(names) <= set(nest):
        leaves = [nest[name] for name in names]
    if len(leaves) != len(declared):
        return []
    return [
        leaf
        for tensor, leaf in zip(declared, leaves)
        if leaf is not None and len(tensor.shape) > axis and tensor.shape[axis] is not None
    ]

"""The loop: micro-batch -> gradients -> sum. It goes from values to values and writes no variable,
so whatever fails in it has changed nothing.

What the loop means, whichever way it runs:

    for micro_batch in batch:
        part = step(micro_batch, values, counts)
        sums, counts += part.sums, part.counts
        values = part.written, where it is not None
        moments = moments.merged(part.moments)
        latest = part.latest
        aux.append(part.aux)
    return Part(sums, counts, values, moments, latest, concatenated(aux))
"""

from typing import Any, Callable, List, Optional, Sequence, Set

import tensorflow as tf

from macrobatch._tensorflow import checks, folds, graph, leaves, parts, progress, replicas, sums
from macrobatch._tensorflow.trace import Traced
from macrobatch._types import Batch, How, MicroBatches, Part, Run, Step, Tensor

# Zeros that the first gradients are added to are a pass over memory as large as the model. Leaving
# it out takes a second copy of the step in the graph, which is some 20 MiB of what kernels keep: so
# it pays where sums are larger than caches. Measured: 14 M parameters, 10 % of a step.
LARGE_SUMS = 2**25  # bytes


class Loop:
    """A step and the micro-batches that it runs on. In a graph the step is traced here, once.

    Attributes:
        micro_batches: the batch, and how it is cut.
        values: the values of the step's variables before the batch.
        like: in a graph, the part of the first micro-batch, with symbolic tensors.
    """

    def __init__(
        self,
        step: Step,
        micro_batches: MicroBatches,
        values: Callable[[], List[Tensor]] = list,
        fits: Callable[[List[Tensor]], bool] = lambda values: True,
        jit_compile: bool = False,
        apart: bool = False,
    ):
        """Traces a step.

        Args:
            step: the step.
            micro_batches: the batch, and how it is cut.
            values: a function that reads the variables whose values go into the step.
            fits: a function that tells whether values are all that must go into the step. A run
                may find more: the step is traced again then.
            jit_compile: whether XLA compiles the step, and not what is around it.
            apart: whether the step gets no counts, in a graph too.
        """
        self._step, self.micro_batches, self._apart = step, micro_batches, apart
        self._read, self._fits = values, fits
        self.values = values()
        self._aux: Any = ()
        self._before = 0
        self._without_dropout: Optional[Traced] = None
        if not tf.executing_eagerly():
            self._traced = self._trace()
            self.like: Part = self._traced.result
            self._call = self._traced.compiled() if jit_compile else self._traced

    def _trace(self) -> Traced:
        # How many counts there are is known after the trace.
        counts = None if self._apart else tf.TensorSpec([None], "float64")
        while True:
            first = self.micro_batches.first()
            if len(self.micro_batches.runs) > 1:  # full micro-batches and a tail, of one trace
                first = graph.specs_of(first, any_size=True)
            traced = Traced(self._step_in_graph, first, self.values, counts)
            if self._fits(self.values):
                return traced
            self.values = self._read()

    def _step_in_graph(self, micro_batch: Batch, values: Any, counts: Optional[Tensor]) -> Part:
        # In a function that a replica traces, replicas cannot meet.
        part = self._step(micro_batch, values, counts, How(alone=True))
        gradients = part.sums
        if graph.in_xla():  # XLA has no tensors of unknown size, so no sparse sums.
            gradients = [sums.dense(gradient) for gradient in gradients]
        kept = [leaf for leaf in tf.nest.flatten(part.aux) if leaf is not None]
        length = self.micro_batches.length_of(micro_batch)
        kept = [self.micro_batches.padded([leaf], [length])[0] for leaf in kept]
        pieces = [leaves.pieces(leaf) for leaf in kept]
        self._aux = part.aux, pieces
        return part._replace(sums=gradients, aux=[each.parts for each in pieces])

    def is_empty(self) -> bool:
        """Whether there is no micro-batch here, which only a replica in eager mode can know."""
        return tf.executing_eagerly() and not any(r.count for r in self.micro_batches.runs)

    def run(
        self,
        counts: Optional[Sequence[Tensor]] = None,
        synchronized: Any = (),
        before: int = 0,
    ) -> Part:
        """The part of the whole batch.

        Args:
            counts: the counts of the whole batch, over all replicas, if they are known.
            synchronized: the names of layers in which replicas meet. In a loop of a graph they
                cannot, so the loop is unrolled.
            before: how many micro-batches of the batch come before those of this loop.
        """
        self._before = before
        vector = None
        if counts is not None:
            doubles = [tf.cast(count, tf.float64) for count in counts]
            vector = tf.stack(doubles) if doubles else tf.zeros([0], tf.float64)
        if synchronized:
            self._check_replicas(synchronized)
            return self._run_one_by_one(vector)
        if not tf.executing_eagerly():
            return self._run_in_graph(self._call, self.like, vector, progress.current())
        if self.is_empty():  # Only a trace can tell what is summed.
            return tf.function(self._run_traced, autograph=False)()
        return self._run_one_by_one(vector)

    def counts(self) -> List[Tensor]:
        """The counts of this replica's micro-batches, before the step runs. In a graph only.

        The graph has only what counts depend on, so that no predictions are made.
        """
        wanted = [False] * len(self.values)

        def counting(part: Part) -> Part:
            written = [v if want else None for v, want in zip(part.written, wanted)]
            return Part([], part.counts, written, aux=[])

        # Masks may be random: then the seeds that they are drawn from go from one micro-batch to
        # the next.
        needed = self._traced.needs(counting, 1)
        while needed != wanted:
            wanted = needed
            needed = [a or b for a, b in zip(wanted, self._traced.needs(counting, 1))]
        call = self._traced.only(counting)
        if graph.in_xla():  # which leaves out by itself what is not used
            call = lambda *arguments: counting(self._traced(*arguments))  # noqa: E731
        ones = tf.ones([len(self.like.counts)], tf.float64)
        return list(self._run_in_graph(call, counting(self.like), ones).counts)

    def operations(self) -> Set[str]:
        """The types of all operations in the step. In a graph only."""
        return self._traced.operations()

    def _run_traced(self) -> Part:
        return Loop(self._step, self.micro_batches, self._read, self._fits, apart=True).run()

    def part(self, micro_batch: Batch, counts: Sequence[float], dropped: bool) -> Part:
        """The part of one micro-batch, for these counts and without dropout.

        Args:
            micro_batch: the micro-batch.
            counts: the counts of the whole batch.
            dropped: whether the step has dropout. Otherwise its trace needs no other one beside it.
        """

        def without_dropout(micro_batch: Batch, values: Any, counts: Optional[Tensor]) -> Part:
            return self._step(micro_batch, values, counts, How(alone=True, drops=False))._replace(
                aux=()
            )

        if tf.executing_eagerly():
            return without_dropout(micro_batch, self.values, None)
        given = tf.constant(counts, tf.float64, [len(counts)])
        if self._without_dropout is None:
            self._without_dropout = self._traced
            if dropped:
                first = self.micro_batches.first()
                self._without_dropout = Traced(without_dropout, first, self.values, given)
        return self._without_dropout(micro_batch, self.values, given)

    def _check_replicas(self, synchronized: Sequence[str]) -> None:
        examples = self.micro_batches.examples
        checks.static_batch(examples, synchronized)
        replicas.compare(examples, lambda all: checks.even_replicas(all, synchronized))

    def _run_one_by_one(self, counts: Optional[Tensor]) -> Part:
        micro_batches, values = self.micro_batches, list(self.values)
        total: Optional[Part] = None
        collected: List[Any] = []
        lengths: List[Any] = []
        told = progress.current()
        if told is not None:
            told.begin(self._before + sum(run.count for run in micro_batches.runs))
        for run in micro_batches.runs:
            for index in range(int(run.count)):
                if told is not None:
                    told.at(self._before, len(lengths))
                # In a graph they could be in memory side by side.
                with parts.after(() if total is None else (total.sums, values)):
                    micro_batch = micro_batches.get(run, index)
                    part = self._step(micro_batch, values, counts, How())
                if len(part.written) > len(values):
                    values += self._read()[len(values) :]
                values = [old if new is None else new for new, old in zip(part.written, values)]
                total = parts.added(total, part)
                collected.append(part.aux)
                lengths.append(micro_batches.length_of(micro_batch))
        assert total is not None
        if told is not None:
            told.end(total.sums)
        probe = micro_batches.probe(lengths) if tf.nest.flatten(collected) else None
        if probe is not None:
            collected.append(self._step(probe, values, counts, How()).aux)
            lengths.append(micro_batches.length_of(probe))
        count = len(lengths) - (probe is not None)
        aux = tf.nest.map_structure(
            lambda *parts: leaves.concatenated(micro_batches.padded(list(parts), lengths)[:count]),
            *collected,
        )
        return total._replace(aux=micro_batches.restored(aux))

    def _run_in_graph(
        self,
        call: Callable[..., Part],
        like: Part,
        counts: Optional[Tensor],
        told: Optional[progress.Progress] = None,
    ) -> Part:
        micro_batches, runs = self.micro_batches, self.micro_batches.runs
        count = sum(run.count for run in runs)
        changing = [i for i, value in enumerate(like.written) if value is not None]
        # Replicas with different numbers of examples must have gradients of the same kinds.
        may_be_dense = not replicas.in_several()
        present = [each for each in (*like.sums, *like.counts) if each is not None]
        all_folds = [folds.summed(each, count, may_be_dense) for each in present]
        all_folds += [folds.carried(self.values[i]) for i in changing]
        all_folds += [folds.pooled(each) for each in like.moments]
        all_folds += [folds.latest(like.latest)]
        # A replica may be without examples; XLA would compile the step twice.
        starts_with_first = sums.dense_bytes(like.sums) >= LARGE_SUMS and not (
            replicas.in_several() or graph.in_xla() or micro_batches.may_be_empty
        )
        pieces = self._aux[1] if like.aux else []

        def part_of(micro_batch: Batch, state: List[Any]) -> Any:
            values = list(self.values)
            for i, value in zip(changing, state[len(present) :]):
                values[i] = value
            part = call(micro_batch, values, counts)
            return parts.items_of(part), part.aux

        def run_all(run: Run, done: Any, state: List[Any]) -> Any:
            everything = folds.All(run, pieces)

            def body(index: Any, state: List[Any], kept: Any) -> Any:
                if told is not None:
                    told.at(self._before + done, index)
                items, aux = part_of(micro_batches.get(run, index), state)
                pairs = zip(all_folds, state, items)
                state = [fold.push(so_far, item, done + index) for fold, so_far, item in pairs]
                return index + 1, state, everything.push(kept, aux, index)

            index, kept = tf.constant(0), everything.start
            if starts_with_first and run is runs[0]:
                items, aux = part_of(micro_batches.first(), state)
                state = [fold.first(*pair) for fold, *pair in zip(all_folds, state, items)]
                kept = everything.push(kept, aux, 0)
                # Or its activations could be in memory beside the next ones'.
                with parts.after(state):
                    index = tf.constant(1)
            # The default of 10 parallel iterations would let their activations overlap in memory.
            _, state, kept = tf.while_loop(
                lambda index, *_: index < run.count,
                body,
                (index, state, kept),
                parallel_iterations=1,
            )
            return state, everything.finish(kept)

        if told is not None:
            told.begin(self._before + count)
        done: Any = 0
        state, collected = [fold.start for fold in all_folds], []
        for run in runs:
            state, kept = run_all(run, done, state)
            collected.append(kept)
            done += run.count
        if told is not None:
            told.end(state)
        results = [fold.finish(each) for fold, each in zip(all_folds, state)]
        return parts.rebuilt(like, results)._replace(aux=self._joined(like, collected))

    def _joined(self, like: Part, collected: List[Any]) -> Any:
        if not like.aux:
            return self._aux[0] if self._aux else ()
        nest, pieces = self._aux
        parts = tf.nest.map_structure(lambda *runs: tf.concat(runs, 0), *collected)
        found = iter([leaves.joined(each.kind, p) for each, p in zip(pieces, parts)])
        flat = [None if leaf is None else next(found) for leaf in tf.nest.flatten(nest)]
        return self.micro_batches.restored(tf.nest.pack_sequence_as(nest, flat))

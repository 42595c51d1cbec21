"""A train step or test step of a user's own, on a whole batch.

The step runs once, on the first micro-batch. What it takes for the gradient of a loss is the one of
the whole batch: its own part, and a loop over the other micro-batches, in which the step runs again
up to there, in a scope where nothing is written. So clipping, updates and averages of weights are
the user's own code, run once, on the right numbers.
"""

from typing import Any, Callable, Dict, List, Optional

import keras
import tensorflow as tf

from macrobatch._batches.in_order import Rest
from macrobatch._keras import batch_norm, stateless
from macrobatch._keras import model as models
from macrobatch._keras.scope import Written, is_seed
from macrobatch._own_steps import modes
from macrobatch._own_steps.plan import Plan
from macrobatch._own_steps.runs import Counting, Place, Real, Replay, Running
from macrobatch._own_steps.scope import StepScope
from macrobatch._tensorflow import parts, replicas, sums
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._types import Batch, Gradient, How, Logs, MicroBatches, Part, Size, Tensor

# How far apart the seeds of micro-batches are: random numbers depend on both halves of a seed, of
# which Keras counts up the second.
STRIDE = 0x9E3779B9


class BatchStep:
    """A step on one batch."""

    def __init__(
        self,
        model: Any,
        step: Callable[[Batch], Any],
        plan: Plan,
        micro_batches: MicroBatches,
        examples: Size,
        weight: Optional[Callable[..., Any]] = None,
        begun: Any = None,
    ):
        """Reads what the step is about to change.

        Args:
            model: the model.
            step: its step, as a function of a micro-batch.
            plan: what the step does.
            micro_batches: the batch, and how it is cut.
            examples: the number of its examples, over all replicas.
            weight: a function of (x, y, sample_weight) that gives the weight of a micro-batch.
            begun: a variable that counts batches whose last gradient is there, or None.
        """
        self._model, self._step, self._plan, self._begun = model, step, plan, begun
        self._micro_batches, self._examples, self._weight = micro_batches, examples, weight
        self._counts: Optional[List[Tensor]] = None
        self._others: Optional[Part] = None
        self._chained = {id(variable) for variable in plan.chained}
        moving = [v for layer in plan.pooled for v in batch_norm.statistics(layer)]
        self._statistics = {id(variable): modes.read(variable) for variable in moving}
        # Replays need what changes before their gradient as it was, and seeds.
        self._before: Dict[int, Tensor] = {
            id(variable): modes.read(variable)
            for variable in plan.variables
            if self._changes_before(variable, plan.last)
        }
        self._running: Any = None  # the one that runs

    def _changes_before(self, variable: Any, place: int) -> bool:
        return is_seed(variable) or self._plan.written_after[id(variable)] <= place

    def run(self) -> Logs:
        """Runs the step, and returns the logs of the whole batch."""
        plan, first = self._plan, self._micro_batches.first()
        if plan.counts or self._weight is not None:
            self._counts = self._counted()
        real = Real(plan, self._place(first), self._other_parts, self._begun)
        with batch_norm.recorded() as calls:
            if plan.last < 0:
                self._other_parts(real, -1, [])
            with modes.running(real):
                logs = self._step(first)
        real.finish()
        self._move_statistics(calls)
        return self._logs(logs, real)

    def _place(self, micro_batch: Batch) -> Place:
        """What a micro-batch is in the whole batch."""
        own, whole = ENGINE.examples(micro_batch), self._examples
        if self._weight is None:
            return Place(own, whole, modes.share_of(own, whole), True, self._counts)
        weight = self._weight_of(micro_batch)
        if self._counts is None:
            return Place(own, whole, modes.share_of(weight, weight), False)
        total, *counts = self._counts
        return Place(own, whole, modes.share_of(weight, total), False, counts)

    def _weight_of(self, micro_batch: Batch) -> Tensor:
        assert self._weight is not None
        arguments = keras.utils.unpack_x_y_sample_weight(micro_batch)
        return models.user_weight(self._weight, arguments, ENGINE).own

    def _counted(self) -> List[Tensor]:
        """The denominators of the whole batch, and before them the user's weight."""
        written = self._written()

        def step(micro_batch: Batch, values: Any, counts: Any, how: How) -> Part:
            own = [] if self._weight is None else [self._weight_of(micro_batch)]
            index, unchanged = values[0] + 1, [None] * len(written.variables)
            if self._plan.counts:
                run = Counting(self._plan, self._place(micro_batch))
                self._run_again(run, micro_batch, written, values, how)
                own += run.counts
            return Part([], own, [index, *unchanged])

        def values() -> List[Any]:
            return [tf.constant(0, tf.int64), *map(modes.read, written.variables)]

        loop = Loop(step, self._micro_batches, values)
        own = loop.run().counts if tf.executing_eagerly() else loop.counts()
        return replicas.total_counts(own)

    def _other_parts(self, real: Real, group: int, ready: List[Gradient]) -> List[List[Gradient]]:
        """The parts of the other micro-batches in the gradients of a group; without any, empty."""
        rest, is_last = Rest(self._micro_batches, ENGINE), group == self._plan.last
        if not rest.runs:
            return [[]] * len(self._plan.gradients)
        written = self._written()
        sizes: List[int] = []

        def step(micro_batch: Batch, values: Any, counts: Any, how: How) -> Part:
            replay = Replay(self._plan, self._place(micro_batch), group, real)
            result = self._run_again(replay, micro_batch, written, values, how)
            sizes[:] = [len(each) for each in replay.own]
            gradients = [gradient for each in replay.own for gradient in each]
            index, unchanged = values[0] + 1, [None] * len(written.variables)
            if not is_last:
                return Part(gradients, written=[index, *unchanged])
            replay.finish()
            logs = [sums.widened(log) for log in replay.parts_of_logs(result.value)]
            return Part([*gradients, *logs], (), [index, *result.written], result.moments)

        def values() -> List[Any]:
            return [tf.constant(1, tf.int64), *(self._start(v, group) for v in written.variables)]

        # Or two micro-batches would be in memory.
        with parts.after([gradient for gradient in ready if gradient is not None]):
            part = Loop(step, rest, values).run([], before=1)
        if is_last:
            self._others = part
            for variable, value in zip(written.variables, part.written[1:]):
                if value is not None:
                    variable.assign(value)
        remaining = iter(part.sums)
        return [[next(remaining) for _ in range(size)] for size in sizes]

    def _run_again(
        self, run: Running, micro_batch: Batch, written: Written, values: List[Any], how: How
    ) -> stateless.Result:
        """Runs the step on another micro-batch, from values to values."""
        self._running = run
        starts = self._with_seeds(written, values)
        return stateless.run(
            lambda: run.run(self._step, micro_batch), written, starts, alone=how.alone
        )

    def _written(self) -> Written:
        plan = self._plan

        def scope(*given: Any) -> StepScope:
            self._running.scope = StepScope(self._running, *given)
            return self._running.scope

        written = Written(plan.variables, [], ENGINE, scope)
        written.pooled, written.decaying = dict(plan.pooled), list(plan.decaying)
        written.passing = [v for v in plan.variables if id(v) not in self._chained]
        return written

    def _start(self, variable: Any, group: int) -> Optional[Tensor]:
        """What a variable is at the start of a replay; None if it is what it is now."""
        if id(variable) in self._chained:
            return modes.read(variable) if group == self._plan.last else None
        return self._before[id(variable)] if self._changes_before(variable, group) else None

    def _with_seeds(self, written: Written, values: List[Any]) -> List[Any]:
        """The values, with seeds of this micro-batch's own: the same ones for each gradient."""
        index, *starts = values
        return [
            _shifted(start, index) if is_seed(variable) else start
            for variable, start in zip(written.variables, starts)
        ]

    def _logs(self, logs: Any, real: Real) -> Logs:
        parts = real.parts_of_logs(logs)
        others: List[Any] = [None] * len(parts)
        if self._others is not None:
            others = self._others.sums[len(self._others.sums) - len(others) :] if others else []
        totals = iter(
            [
                tf.cast(sums.add(sums.widened(own), rest), own.dtype)
                for own, rest in zip(parts, others)
            ]
        )
        flat = zip(tf.nest.flatten(logs), self._plan.logs)
        found = [log if kind == "once" else next(totals) for log, kind in flat]
        return tf.nest.pack_sequence_as(logs, found)

    def _move_statistics(self, calls: batch_norm.Calls) -> None:
        """Moves the statistics of BatchNormalization once, by the moments of the whole batch."""
        if self._others is None:
            return
        for (layer, masked), others in zip(self._plan.pooled.items(), self._others.moments):
            moments = calls[layer][0].moments.merged(others)
            for variable in batch_norm.statistics(layer):
                variable.assign(self._statistics[id(variable)])
            batch_norm.update(layer, moments, masked)


def _shifted(seed: Tensor, index: Tensor) -> Tensor:
    """The seed of the micro-batch with that index."""
    shift = tf.cast(index * STRIDE % 2**31, seed.dtype)
    return seed + tf.concat([[shift], tf.zeros_like(seed[1:])], 0)

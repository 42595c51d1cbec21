"""A train step or test step of a user's own, on a whole batch.

The step runs once, on the first micro-batch. What it takes for the gradient of a loss is the one of
the whole batch: its own part, and a loop over the other micro-batches, in which the step runs again
up to there, in a scope where nothing is written. So clipping, updates and averages of weights are
the user's own code, run once, on the right numbers.
"""

from typing import Any, Callable, Dict, List, Optional

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches.in_order import Rest
from macrobatch._keras import batch_norm, stateless
from macrobatch._keras import checks as keras_checks
from macrobatch._keras.scope import Written, is_seed
from macrobatch._own_steps import modes, tracing
from macrobatch._own_steps.plan import Plan
from macrobatch._own_steps.runs import Real, Replay
from macrobatch._own_steps.scope import StepScope
from macrobatch._tensorflow import parts, sums
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._types import Batch, Gradient, How, Logs, MicroBatches, Part, Size, Tensor, names

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
    ):
        """Reads what the step is about to change.

        Args:
            model: the model.
            step: its step, as a function of a micro-batch.
            plan: what the step does.
            micro_batches: the batch, and how it is cut.
            examples: the number of its examples, over all replicas.
        """
        self._model, self._step, self._plan = model, step, plan
        self._micro_batches, self._examples = micro_batches, examples
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
        self._replay: Any = None  # the one that runs

    def _changes_before(self, variable: Any, place: int) -> bool:
        return is_seed(variable) or self._plan.written_after[id(variable)] <= place

    def run(self) -> Logs:
        """Runs the step, and returns the logs of the whole batch."""
        plan, first = self._plan, self._micro_batches.first()
        real = Real(plan, self._share(first), self._other_parts)
        with batch_norm.recorded() as calls:
            if plan.last < 0:
                self._other_parts(real, -1, [])
            with modes.running(real):
                logs = self._step(first)
        real.finish()
        self._move_statistics(calls)
        return self._logs(logs, real.share)

    def _share(self, micro_batch: Batch) -> Tensor:
        return modes.share_of(ENGINE.examples(micro_batch), self._examples)

    def _other_parts(self, real: Real, place: int, own: List[Gradient]) -> List[Gradient]:
        """The parts of the other micro-batches in a gradient."""
        rest, is_last = Rest(self._micro_batches, ENGINE), place == self._plan.last
        if not rest.runs:
            return [None] * len(own)
        written = self._written()

        def step(micro_batch: Batch, values: Any, counts: Any, how: How) -> Part:
            replay = Replay(self._plan, self._share(micro_batch), place, real)
            self._replay = replay
            result = stateless.run(
                lambda: replay.run(self._step, micro_batch),
                written,
                self._with_seeds(written, values),
                alone=how.alone,
            )
            gradients = self._shaped(replay.own, own)
            index, unchanged = values[0] + 1, [None] * len(written.variables)
            if not is_last:
                return Part(gradients, written=[index, *unchanged])
            replay.finish()
            logs = [sums.widened(self._part_of_log(log, replay.share)) for log in self._means(result.value)]
            return Part([*gradients, *logs], (), [index, *result.written], result.moments)

        def values() -> List[Any]:
            return [tf.constant(1, tf.int64), *(self._start(v, place) for v in written.variables)]

        # Or two micro-batches would be in memory.
        with parts.after([g for g in own if g is not None]):
            part = Loop(step, rest, values).run([])
        if is_last:
            self._others = part
            for variable, value in zip(written.variables, part.written[1:]):
                if value is not None:
                    variable.assign(value)
        return list(part.sums[: len(own)])

    def _written(self) -> Written:
        plan = self._plan

        def scope(*given: Any) -> StepScope:
            made = StepScope(self._replay, *given)
            self._replay.scope = made
            return made

        written = Written(plan.variables, [], ENGINE, scope)
        written.pooled, written.decaying = dict(plan.pooled), list(plan.decaying)
        written.passing = [v for v in plan.variables if id(v) not in self._chained]
        return written

    def _start(self, variable: Any, place: int) -> Optional[Tensor]:
        """What a variable is at the start of a replay; None if it is what it is now."""
        if id(variable) in self._chained:
            return modes.read(variable) if place == self._plan.last else None
        return self._before[id(variable)] if self._changes_before(variable, place) else None

    def _with_seeds(self, written: Written, values: List[Any]) -> List[Any]:
        """The values, with seeds of this micro-batch's own: the same ones for each gradient."""
        index, *starts = values
        return [
            _shifted(start, index) if is_seed(variable) else start
            for variable, start in zip(written.variables, starts)
        ]

    def _shaped(self, gradients: List[Gradient], like: List[Gradient]) -> List[Gradient]:
        return [
            None if other is None else parts.shaped(gradient, other.shape)
            for gradient, other in zip(gradients, like)
        ]

    def _means(self, logs: Any) -> List[Any]:
        return [log for log, is_mean in zip(tf.nest.flatten(logs), self._plan.logs) if is_mean]

    def _part_of_log(self, log: Any, share: Tensor) -> Tensor:
        log = tf.convert_to_tensor(log)
        log = log if log.dtype.is_floating else tf.cast(log, keras.config.floatx())
        return log * tf.cast(share, log.dtype)

    def _logs(self, logs: Any, share: Tensor) -> Logs:
        flat = tf.nest.flatten(logs)
        others: List[Any] = [None] * sum(self._plan.logs)
        if self._others is not None:
            others = self._others.sums[len(self._others.sums) - len(others) :] if others else []
        remaining = iter(others)
        found = []
        for log, is_mean in zip(flat, self._plan.logs):
            if is_mean:
                own = self._part_of_log(log, share)
                log = tf.cast(sums.add(sums.widened(own), next(remaining)), own.dtype)
            found.append(log)
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

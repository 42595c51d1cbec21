"""A step on one micro-batch: once for real, and again, without writing anything, for the others."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._own_steps import checks, modes
from macrobatch._own_steps.modes import Mode
from macrobatch._own_steps.plan import Asked, Plan
from macrobatch._tensorflow import sums
from macrobatch._types import Batch, Gradient, Tensor, Variable

# What variables were after a call of an optimizer; None after the last gradient.
Snapshot = Optional[List[Tuple[Variable, Tensor]]]


class Running(Mode):
    """A step that runs on a micro-batch, as a part of the whole batch.

    Attributes:
        plan: what the step does.
        share: the part of the whole batch that is in the micro-batch.
    """

    def __init__(self, plan: Plan, share: Tensor):
        super().__init__()
        self.plan, self.share = plan, share
        self._inner = self._updates = 0

    def gradient_of_tensors(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        self._inner += 1
        checks.as_traced_so_far(self._inner, len(self.plan.inner), "tape.gradient of tensors")
        return self.part_of(plain, tape, target, sources, output_gradients, self.plan.inner[self._inner - 1])

    def part_of(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any, asked: Asked
    ) -> Any:
        """The gradient of what is this micro-batch's part in the targets of the whole batch."""
        if asked.of_examples:
            output_gradients = modes.weighted(
                target, output_gradients, self.share, asked.per_example
            )
        return plain(tape, target, sources, output_gradients)

    def update_state(
        self, plain: Any, metric: Any, values: Any, sample_weight: Any = None
    ) -> Any:
        self._updates += 1
        checks.as_traced_so_far(self._updates, len(self.plan.updates), "update_state of a metric")
        kind = self.plan.updates[self._updates - 1]
        if kind == "once":
            return self.update_once(plain, metric, values, sample_weight)
        # Of a known size, a number of examples may be given that the trace did not know.
        if kind == "scaled" or (kind == "share" and sample_weight is None):
            values = keras.ops.convert_to_tensor(values, metric.dtype)
            weight = 1.0 if sample_weight is None else sample_weight
            weight = keras.ops.convert_to_tensor(weight, metric.dtype)
            sample_weight = tf.ones_like(values) * weight * tf.cast(self.share, values.dtype)
        return plain(metric, values, sample_weight)

    def update_once(self, plain: Any, metric: Any, values: Any, sample_weight: Any) -> Any:
        """Updates a metric with what does not depend on the examples."""
        return plain(metric, values, sample_weight)

    def loss(
        self, plain: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        return plain(loss, y_true, y_pred, sample_weight)

    def finish(self) -> None:
        """Raises if the step has done something else than in the trace."""
        plan = self.plan
        checks.as_traced(len(plan.gradients), len(self.gradients), "tape.gradient")
        checks.as_traced(len(plan.updates), self._updates, "update_state of metrics")


class Real(Running):
    """The run of the first micro-batch, in which everything happens for real.

    Attributes:
        snapshots: what each call of an optimizer has left.
    """

    def __init__(
        self,
        plan: Plan,
        share: Tensor,
        others: Callable[["Real", int, List[Gradient]], List[Gradient]],
    ):
        """Starts a run.

        Args:
            plan: what the step does.
            share: the part of the whole batch that is in the first micro-batch.
            others: a function of this run, of the place of a gradient and of this micro-batch's
                part in it: the parts of the other micro-batches.
        """
        super().__init__(plan, share)
        self._others = others
        self.snapshots: List[Snapshot] = []

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        place = len(self.gradients)
        checks.as_traced_so_far(place + 1, len(self.plan.gradients), "tape.gradient")
        asked = self.plan.gradients[place]
        found = self.part_of(plain, tape, target, sources, output_gradients, asked)
        checks.nothing_records(_internals.is_recording())
        if asked.of_examples:
            own = tf.nest.flatten(found)
            others = self._others(self, place, own)
            total = [_total(s, *pair) for s, *pair in zip(tf.nest.flatten(sources), own, others)]
            found = tf.nest.pack_sequence_as(sources, total)
        self.gradients.append(found)
        return found

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = modes.variables_of(optimizer, trainable_variables)
        with modes.plainly():
            result = plain(optimizer, grads, trainable_variables)
        snapshot: Snapshot = None
        if len(self.gradients) <= self.plan.last:
            changed = modes.updated_by(optimizer, variables)
            snapshot = [(variable, modes.read(variable)) for variable in changed]
        self.snapshots.append(snapshot)
        return result


def _total(source: Any, own: Gradient, others: Gradient) -> Gradient:
    """The gradient of the whole batch. That of a tensor is of its own micro-batch."""
    if own is None or not modes.is_variable(source):
        return own
    total = sums.merge_rows(sums.add(sums.widened(own), others))
    return sums.cast(total, own.dtype)


class Enough(BaseException):
    """Ends a run that has come to the gradient that it is for."""


class Replay(Running):
    """The run of another micro-batch, up to a gradient; up to the end for the last one.

    Attributes:
        own: this micro-batch's part in the gradient.
        scope: in which the step runs.
    """

    def __init__(self, plan: Plan, share: Tensor, place: int, real: Real):
        super().__init__(plan, share)
        self._place, self._real = place, real
        self._applied = 0
        self.own: List[Gradient] = []
        self.scope: Any = None

    def run(self, step: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        """What the step returns, if it ends."""
        try:
            with modes.running(self):
                return step(micro_batch)
        except Enough:
            return None

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        place = len(self.gradients)
        if place < self._place:
            found = self._real.gradients[place]
        elif place == self._place:
            asked = self.plan.gradients[place]
            found = self.part_of(plain, tape, target, sources, output_gradients, asked)
            self.own = tf.nest.flatten(found)
            if place != self.plan.last:
                raise Enough
        else:  # It does not depend on examples, so that nothing here depends on it.
            found = tf.nest.map_structure(lambda source: tf.zeros_like(source), sources)
        self.gradients.append(found)
        return found

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        known = self._real.snapshots
        snapshot = known[self._applied] if self._applied < len(known) else None
        self._applied += 1
        for variable, value in snapshot or ():
            self.scope.add_update((variable, value))

    def update_once(self, plain: Any, metric: Any, values: Any, sample_weight: Any) -> Any:
        return None

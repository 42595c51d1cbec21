"""A step on one micro-batch: once for real, and again, without writing anything, for the others."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._own_steps import checks, losses, modes
from macrobatch._own_steps.modes import Mode
from macrobatch._own_steps.plan import Asked, Plan
from macrobatch._tensorflow import parts, sums
from macrobatch._types import Batch, Gradient, Size, Tensor, Variable

# What variables were after a call of an optimizer; None after the last gradient.
Snapshot = Optional[List[Tuple[Variable, Tensor]]]


class Place(NamedTuple):
    """What a micro-batch is in the whole batch.

    Attributes:
        examples: the number of its examples.
        whole: the number of examples in the whole batch.
        share: what part of the whole batch it is: of its examples, or of the user's weights.
        by_examples: whether it is of its examples.
        counts: the denominators of the whole batch that are counted; None if they are not known.
    """

    examples: Size
    whole: Size
    share: Tensor
    by_examples: bool = True
    counts: Optional[List[Tensor]] = None


def _shaped(gradient: Gradient, source: Any) -> Gradient:
    """A gradient with the shape of its variable; None if it is of a tensor."""
    return parts.shaped(gradient, source.shape) if modes.is_variable(source) else None


class Enough(BaseException):
    """Ends a run that has come to the gradient that it is for."""


class Running(Mode):
    """A step that runs on a micro-batch, as a part of the whole batch.

    Attributes:
        plan: what the step does.
        place: what the micro-batch is in the whole batch.
        counts: the denominators of the micro-batch that are counted.
        scope: in which the step runs; None if it runs for real.
    """

    def __init__(self, plan: Plan, place: Place):
        super().__init__()
        self.plan, self.place = plan, place
        self.counts: List[Tensor] = []
        self.scope: Any = None
        self._inner = self._updates = 0

    def run(self, step: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        """What the step returns, if it ends."""
        try:
            with modes.running(self):
                return step(micro_batch)
        except Enough:
            return None

    def gradient_of_tensors(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        self._inner += 1
        checks.as_traced_so_far(self._inner, len(self.plan.inner), "tape.gradient of tensors")
        asked = self.plan.inner[self._inner - 1]
        return self.part_of(asked, plain, tape, target, sources, output_gradients)

    def part_of(
        self, asked: Asked, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        """The gradient of what is this micro-batch's part in the targets of the whole batch."""
        share = self.place.share
        if not asked.of_examples:
            return plain(tape, target, sources, output_gradients)
        start = modes.weighted(target, output_gradients, share, asked.per_example)
        found = plain(tape, target, sources, start)
        if self.place.by_examples:
            return found
        # A mean over nothing may be 0 / 0, and counts nothing.
        flat = [sums.scaled(gradient, share > 0) for gradient in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, flat)

    def update_state(self, plain: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        self._updates += 1
        checks.as_traced_so_far(self._updates, len(self.plan.updates), "update_state of a metric")
        kind = self.plan.updates[self._updates - 1]
        if kind == "once":
            return self.update_once(plain, metric, values, sample_weight)
        if kind == "sum":  # A batch has one value: with the shares as weights, sums add up to it.
            values = keras.ops.convert_to_tensor(values, metric.dtype)
            sample_weight = tf.cast(self.place.share, values.dtype)
            return plain(metric, tf.math.divide_no_nan(values, sample_weight), sample_weight)
        # Of a known size, a number of examples may be given that the trace did not know.
        if kind == "scaled" or (kind == "share" and sample_weight is None):
            values = keras.ops.convert_to_tensor(values, metric.dtype)
            weight = 1.0 if sample_weight is None else sample_weight
            weight = keras.ops.convert_to_tensor(weight, metric.dtype)
            share = tf.cast(self.place.share, values.dtype)
            sample_weight = tf.ones_like(values) * weight * share
            values = tf.where(share > 0, values, tf.zeros_like(values))
        return plain(metric, values, sample_weight)

    def parts_of_logs(self, logs: Any) -> List[Tensor]:
        """This micro-batch's part in each of the logs that are of the examples."""
        parts = []
        for log, kind in zip(tf.nest.flatten(logs), self.plan.logs):
            if kind != "once":
                log = tf.convert_to_tensor(log)
                log = log if log.dtype.is_floating else tf.cast(log, keras.config.floatx())
                share = 1.0 if kind == "sum" else tf.cast(self.place.share, log.dtype)
                parts.append(tf.math.multiply_no_nan(log, share))
        return parts

    def update_once(self, plain: Any, metric: Any, values: Any, sample_weight: Any) -> Any:
        """Updates a metric with what does not depend on the examples."""
        return plain(metric, values, sample_weight)

    def loss(
        self, plain: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        place = self.place
        with modes.plainly():
            part = losses.part_of(
                loss, y_true, y_pred, sample_weight, place.examples, place.whole, place.by_examples
            )
        if part is None:
            return plain(loss, y_true, y_pred, sample_weight)
        if part.counted is None:
            return part.value(None, place.share)
        self.counts.append(part.counted.own)
        checks.as_traced_so_far(len(self.counts), self.plan.counts, "losses with masks or weights")
        known = place.counts
        whole = part.counted.own if known is None else known[len(self.counts) - 1]
        return part.value(whole, place.share)

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
        place: Place,
        others: Callable[["Real", int, List[Gradient]], List[List[Gradient]]],
        begun: Any = None,
    ):
        """Starts a run.

        Args:
            plan: what the step does.
            place: what the first micro-batch is in the whole batch.
            others: a function of this run, of the place of a group of gradients, and of what
                must be there before: the parts of the other micro-batches, for each of the group;
                empty where there are none.
            begun: a variable that counts batches whose last gradient is there, or None.
        """
        super().__init__(plan, place)
        self._others, self._begun = others, begun
        self._ready: List[Any] = []  # what later updates wait for
        self.snapshots: List[Snapshot] = []
        self._found: List[List[Gradient]] = []

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        index = len(self.gradients)
        checks.as_traced_so_far(index + 1, len(self.plan.gradients), "tape.gradient")
        asked = self.plan.gradients[index]
        found = self.part_of(asked, plain, tape, target, sources, output_gradients)
        checks.nothing_records(_internals.is_recording())
        if asked.of_examples:
            own = tf.nest.flatten(found)
            if not self._found:
                self._found = self._others(self, asked.group, own)
            others = self._found.pop(0) or [None] * len(own)  # which may be of any number
            total = [_total(s, *pair) for s, *pair in zip(tf.nest.flatten(sources), own, others)]
            found = tf.nest.pack_sequence_as(sources, total)
        if index == self.plan.end and self._begun is not None:
            found = self._begin(found)
        self.gradients.append(found)
        return found

    def _begin(self, found: Any) -> Any:
        """The last gradients, after which nothing is taken back."""
        with parts.after(found):
            begun = self._begun.assign_add(1)
        self._ready = [] if tf.executing_eagerly() else [begun]
        with tf.control_dependencies(self._ready):
            return tf.nest.map_structure(
                lambda each: None if each is None else tf.identity(each),
                found,
                expand_composites=True,
            )

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = modes.variables_of(optimizer, trainable_variables)
        # An optimizer counts updates, and lets weights decay, without asking for gradients.
        with modes.plainly(), tf.control_dependencies(self._ready):
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


class Replay(Running):
    """The run of another micro-batch, up to a group of gradients; for the last one to the end.

    Attributes:
        own: this micro-batch's parts in the gradients of the group.
    """

    def __init__(self, plan: Plan, place: Place, group: int, real: Real):
        super().__init__(plan, place)
        self._group, self._real = group, real
        self._end = plan.ends(group) if group >= 0 else -1
        self._applied = 0
        self.own: List[List[Gradient]] = []

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        index = len(self.gradients)
        if index < self._group:
            found = self._real.gradients[index]
        elif index <= self._end and self.plan.gradients[index].of_examples:
            asked = self.plan.gradients[index]
            found = self.part_of(asked, plain, tape, target, sources, output_gradients)
            self.own.append(
                [_shaped(*pair) for pair in zip(*map(tf.nest.flatten, (found, sources)))]
            )
        else:  # Nothing here depends on it.
            found = tf.nest.map_structure(lambda source: tf.zeros_like(source), sources)
        if index == self._end and self._group != self.plan.last:
            raise Enough
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


class Counting(Running):
    """A run of a micro-batch for its denominators. In a graph, nothing else is left of it."""

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        found = tf.nest.map_structure(lambda source: tf.zeros_like(source), sources)
        self.gradients.append(found)
        return found

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        return None

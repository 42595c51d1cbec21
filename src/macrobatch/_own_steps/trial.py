"""A step in the trial whether examples meet: the losses whose gradients it asks for, and what it
reports as means over the examples.
"""

from typing import Any, Callable, Dict, List, Optional, Sequence

import keras
import tensorflow as tf

from macrobatch._keras import comparison, meeting, meeting_checks, stateless
from macrobatch._keras import model as models
from macrobatch._keras.scope import Written
from macrobatch._own_steps import checks
from macrobatch._own_steps.plan import Plan
from macrobatch._own_steps.runs import Counting, Place
from macrobatch._own_steps.scope import StepScope
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch, Tensor

# What rounding may bring to a mean of examples that come twice.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 5e-2

# Kinds of values. A value is known by its kind, a place, and another place or a name.
LOSS, REPORTED = "loss", "reported"


class _Trying(Counting):
    """A run of a micro-batch for its values. It has no gradients, and updates nothing.

    Attributes:
        values: the losses, and what goes into metrics and logs as a mean over the examples.
    """

    def __init__(self, plan: Plan, place: Place):
        super().__init__(plan, place)
        self.values: Dict[str, Tensor] = {}

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        place, targets = len(self.gradients), tf.nest.flatten(target)
        factors = [1.0] * len(targets)
        if output_gradients is not None:
            factors = [1.0 if f is None else f for f in tf.nest.flatten(output_gradients)]
        for index, (value, factor) in enumerate(zip(targets, factors)):
            # A number takes up a factor for each value, too.
            value = tf.convert_to_tensor(value)
            self.values[f"{LOSS} {place} {index}"] = value * tf.cast(factor, value.dtype)
        # Some steps divide by the norm of a gradient.
        found = tf.nest.map_structure(lambda source: tf.ones_like(source), sources)
        self.gradients.append(found)
        return found

    def update_state(self, plain: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        result = super().update_state(plain, metric, values, sample_weight)
        if self.plan.updates[self._updates - 1] in ("share", "scaled"):
            self._report(metric.name, values)
        return result

    def note_logs(self, logs: Any) -> None:
        """Notes the logs that are means over the examples."""
        for name, is_mean in zip(sorted(logs), self.plan.logs):
            if is_mean:
                self._report(name, logs[name])

    def _report(self, name: str, value: Any) -> None:
        value = tf.convert_to_tensor(value)
        floating = value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
        self.values[f"{REPORTED} {len(self.values)} {name}"] = floating


class TriedStep(meeting.Tried):
    """A train step as a function of a micro-batch that leaves everything as it was."""

    def __init__(
        self,
        step: Callable[[Batch], Any],
        plan: Plan,
        weight: Optional[Callable[..., Any]] = None,
    ):
        """Takes a step.

        Args:
            step: the step.
            plan: what it does.
            weight: a function of (x, y, sample_weight) that gives the weight of a micro-batch.
        """
        self._step, self._plan, self._weight = step, plan, weight
        self._drew = plan.draws_anew
        self._sizes: Dict[str, float] = {}  # of each value, the largest that was found

    def found(self, micro_batch: Batch) -> comparison.Found:
        """What the values bring to those of a whole batch, each a sum over examples."""
        place = self._place(micro_batch)
        found = {}
        for name, value in self._values(micro_batch, place).items():
            if self._is_sum(name):  # The tape sums a value for each example.
                found[name] = tf.reduce_sum(value)
            else:
                found[name] = tf.reduce_sum(value * tf.cast(place.share, value.dtype))
        return found

    def _is_sum(self, name: str) -> bool:
        kind, place, index = name.split(maxsplit=2)
        return kind == LOSS and self._plan.gradients[int(place)].per_example[int(index)]

    def _place(self, micro_batch: Batch) -> Place:
        """A micro-batch as a part of a batch in which every denominator is 1."""
        examples = ENGINE.examples(micro_batch)
        share, ones = tf.cast(examples, tf.float64), [tf.ones([])] * self._plan.counts
        if self._weight is None:
            return Place(examples, 1, share, True, ones)
        arguments = keras.utils.unpack_x_y_sample_weight(micro_batch)
        own = models.user_weight(self._weight, arguments, ENGINE).own
        return Place(examples, 1, tf.cast(own, tf.float64), False, ones)

    def _values(self, micro_batch: Batch, place: Place, drops: bool = True) -> Dict[str, Tensor]:
        run = _Trying(self._plan, place)

        def scope(*given: Any) -> StepScope:
            run.scope = StepScope(run, *given)
            return run.scope

        written = Written(self._plan.variables, [], ENGINE, scope)
        values = [None] * len(self._plan.variables)

        def code() -> None:
            run.note_logs(run.run(self._step, micro_batch))

        stateless.run(code, written, values, alone=True, drops=drops)
        self._drew = self._drew or written.drew
        for name, value in run.values.items():
            self._sizes[name] = max(self._sizes.get(name, 0.0), float(tf.reduce_max(tf.abs(value))))
        return run.values

    def messages(self, groups: comparison.Groups, verdict: meeting.Verdict) -> List[str]:
        """What to say of a trial."""
        if verdict.is_random:
            return [meeting_checks.RANDOM]
        places = _places(verdict.values)
        if verdict.layers or places:
            return [checks.examples_meet(verdict.layers, places)]
        if _places(verdict.unknown):
            return [meeting_checks.NOT_FINITE]
        others = self._of_other_sizes(groups.micro_batches[0])
        sums = [name for name in others if self._is_sum(name)]
        others = [name for name in others if not self._is_sum(name)]
        if sums or _places(others):
            found = [checks.no_sum(_places(sums))] if sums else []
            return [*found, checks.no_mean(_places(others))] if _places(others) else found
        reported = [name.split(maxsplit=2)[2] for name in (*verdict.values, *others)]
        return [checks.reported_as_means(list(dict.fromkeys(reported)))] if reported else []

    def _of_other_sizes(self, micro_batch: Batch) -> Sequence[str]:
        """The names of means that are another number for the same examples twice, and of sums that
        are not twice as much.

        A sum, or a sum over a constant batch size, has no examples that meet. It is no mean either.
        """
        half = max(1, ENGINE.examples(micro_batch) // 2)  # so that no run is larger than others

        def times(count: int) -> Batch:
            return tf.nest.map_structure(
                lambda leaf: (
                    None
                    if leaf is None
                    else ENGINE.concatenated([ENGINE.slice_of(leaf, 0, half, False)] * count)
                ),
                micro_batch,
            )

        # The second half would draw other numbers. Dropout can keep everything, others cannot.
        once, both = (self._values(each, self._place(each), False) for each in map(times, (1, 2)))
        if self._drew:
            return []

        def is_as_expected(name: str) -> bool:
            if not self._is_sum(name):
                return _same(once[name], both[name], self._sizes[name])
            sums = 2 * tf.reduce_sum(once[name]), tf.reduce_sum(both[name])
            return _same(*sums, float(tf.reduce_sum(tf.abs(both[name]))))

        return [name for name in once if not is_as_expected(name)]


def _places(names: Sequence[str]) -> List[int]:
    """Which gradients the losses among some values are of."""
    split = [name.split(maxsplit=2) for name in names]
    return sorted({int(place) for kind, place, _ in split if kind == LOSS})


def _same(one: Tensor, other: Tensor, size: float) -> bool:
    """Whether values are the same but for rounding, beside the largest that was found.

    A mean may be close to 0 by chance, and have the rounding of its parts.
    """
    if not tf.reduce_all(tf.math.is_finite(one) & tf.math.is_finite(other)):
        return True  # Nobody can tell.
    tolerance = TOLERANCES.get(one.dtype.name, COARSE)
    return bool(tf.reduce_all(tf.abs(one - other) <= tf.cast(tolerance * size, one.dtype)))

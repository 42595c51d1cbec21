"""A step in the trial whether examples meet: the losses whose gradients it asks for, and what it
reports as means over the examples.
"""

from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import keras
import numpy as np
import tensorflow as tf

from macrobatch._keras import comparison, meeting, meeting_checks, stateless
from macrobatch._keras import model as models
from macrobatch._keras.scope import Written, is_seed
from macrobatch._own_steps import checks
from macrobatch._own_steps.plan import Plan
from macrobatch._own_steps.runs import Counting, Place
from macrobatch._own_steps.scope import StepScope
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch, Tensor

# What rounding may bring to a mean of examples that come twice.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 5e-2

# Examples that are made up.
MADE_UP = 16

# Kinds of values. A value is known by its kind, a place, and another place or a name.
LOSS, REPORTED, SUMMED = "loss", "reported", "summed"


class _Trying(Counting):
    """A run of a micro-batch for its values. It has no gradients, and updates nothing.

    Attributes:
        values: the losses, and what goes into metrics and logs as a mean or a sum over examples.
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
        self._report(metric.name, values, self.plan.updates[self._updates - 1])
        return result

    def note_logs(self, logs: Any) -> None:
        """Notes the logs that are means or sums over the examples."""
        for name, kind in zip(sorted(logs), self.plan.logs):
            self._report(name, logs[name], kind)

    def _report(self, name: str, value: Any, kind: str) -> None:
        if kind in ("once", "own"):
            return
        value = tf.convert_to_tensor(value)
        floating = value if value.dtype.is_floating else tf.cast(value, keras.config.floatx())
        kind = SUMMED if kind == "sum" else REPORTED
        self.values[f"{kind} {len(self.values)} {name}"] = floating


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
        if kind != LOSS:
            return kind == SUMMED
        return self._plan.gradients[int(place)].per_example[int(index)]

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
        found, _ = self._run(micro_batch, place, [None] * len(self._plan.variables), drops)
        for name, value in found.items():
            self._sizes[name] = max(self._sizes.get(name, 0.0), float(tf.reduce_max(tf.abs(value))))
        return found

    def _run(
        self, micro_batch: Batch, place: Place, starts: List[Any], drops: bool
    ) -> Tuple[Dict[str, Tensor], List[Any]]:
        """The values, and what variables are afterwards; where None, what they were.

        Args:
            micro_batch: the micro-batch.
            place: what it is in a whole batch.
            starts: what the variables are before; where None, what they are now.
            drops: whether dropout drops anything.
        """
        run = _Trying(self._plan, place)

        def scope(*given: Any) -> StepScope:
            run.scope = StepScope(run, *given)
            return run.scope

        written = Written(self._plan.variables, [], ENGINE, scope)

        def code() -> None:
            run.note_logs(run.run(self._step, micro_batch))

        result = stateless.run(code, written, starts, alone=True, drops=drops)
        self._drew = self._drew or written.drew
        return run.values, list(result.written)

    def messages(self, groups: comparison.Groups, verdict: meeting.Verdict) -> List[str]:
        """What to say of a trial."""
        if verdict.is_random:
            return [meeting_checks.RANDOM]
        places = _places(verdict.values)
        if verdict.layers or places:
            return [checks.examples_meet(verdict.layers, places)]
        if _places(verdict.unknown):
            return [meeting_checks.NOT_FINITE]
        same = groups.micro_batches[0]
        others = self._of_other_sizes(same)
        sums = _places(name for name in others if self._is_sum(name))
        means = _places(name for name in others if not self._is_sum(name))
        if sums or means:
            found = [checks.no_sum(sums)] if sums else []
            return [*found, checks.no_mean(means)] if means else found
        reported = [name.split(maxsplit=2)[2] for name in (*verdict.values, *others)]
        reported += self._metrics_of_micro_batches(same)
        return [checks.reported_as_means(list(dict.fromkeys(reported)))] if reported else []

    def _of_other_sizes(self, micro_batch: Batch) -> Sequence[str]:
        """The names of means that are another number for the same examples twice, and of sums that
        are not twice as much.

        A sum, or a sum over a constant batch size, has no examples that meet. It is no mean either.
        """
        half = max(1, ENGINE.examples(micro_batch) // 2)  # so that no run is larger than others

        def times(count: int) -> Batch:
            return tf.nest.map_structure(
                lambda leaf: None if leaf is None else ENGINE.concatenated([leaf] * count),
                _rows(micro_batch, 0, half),
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

    def _metrics_of_micro_batches(self, micro_batch: Batch) -> List[str]:
        """The paths of what metrics keep that tells micro-batches from the batch, as the last value
        does, or a number of micro-batches.
        """
        plan = self._plan
        if plan.pooled or plan.decaying:  # Micro-batches have statistics of their own.
            return []
        size = ENGINE.examples(micro_batch)
        cuts = [(0, size)], [(0, size // 2), (size // 2, size - size // 2)]
        whole, pieces = (self._after([_rows(micro_batch, *cut) for cut in each]) for each in cuts)
        if self._drew:
            return []
        chained = [v for v in plan.chained if not is_seed(v)]
        pairs = [(v, whole[id(v)], pieces[id(v)]) for v in chained]
        return [
            v.path
            for v, one, other in pairs
            if one is not None
            and other is not None
            and not _same(one, other, float(tf.reduce_max(tf.abs(one))))
        ]

    def _after(self, micro_batches: List[Batch]) -> Dict[int, Any]:
        """What the variables are after some micro-batches, by id."""
        # Metrics start with zeros, as after their reset: the largest so far hides what comes.
        chained = {id(variable) for variable in self._plan.chained if not is_seed(variable)}
        values: List[Any] = [
            tf.zeros(v.shape, v.dtype) if id(v) in chained else None for v in self._plan.variables
        ]
        for each in micro_batches:
            found = self._run(each, self._place(each), values, drops=False)[1]
            values = [old if new is None else new for new, old in zip(found, values)]
        return {id(v): value for v, value in zip(self._plan.variables, values)}


def made_up(specs: Any) -> Batch:
    """Examples of these types and shapes, which differ from each other where numbers are floats."""
    random = np.random.default_rng(0)

    def leaf(spec: Any) -> Any:
        if spec is None:
            return None
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise TypeError(f"Nothing can be made up for {spec}.")
        shape = [MADE_UP, *(4 if size is None else size for size in spec.shape[1:])]
        if spec.dtype.is_floating:
            return tf.constant(random.uniform(0.05, 0.95, shape), spec.dtype)
        # Numbers of classes and of words, of which there are two at least.
        return tf.cast(tf.constant(random.integers(0, 2, shape)), spec.dtype)

    return tf.nest.map_structure(leaf, specs)


def _rows(batch: Batch, start: int, count: int) -> Batch:
    """Some examples of a batch."""
    return tf.nest.map_structure(
        lambda leaf: None if leaf is None else ENGINE.slice_of(leaf, start, count, False), batch
    )


def _places(names: Iterable[str]) -> List[int]:
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

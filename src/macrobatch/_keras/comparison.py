"""What is the same, but for rounding, in four runs of a few examples: see meeting.py."""

from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import keras
from keras import ops

from macrobatch._keras import calls
from macrobatch._types import Batch, Tensor

# What comes of a micro-batch, by name. A scalar must be a sum over examples, but for a constant.
# Anything else must have the examples first, each with rows of its own.
Found = Dict[str, Tensor]

# How many layers a message names.
NAMED = 3


class Tolerance(NamedTuple):
    """What rounding may bring.

    Rows are computed in the same places by the same operations, so they differ by little or
    nothing. Sums are not: the rounding of a sum is that of its largest parts.

    Attributes:
        rows: in rows, over the largest number.
        spread: in sums, over their spread.
        size: in sums, over the largest.
    """

    rows: float
    spread: float
    size: float


# A float64 model may well have a loss that computes in float32.
DOUBLE = Tolerance(rows=1e-9, spread=1e-5, size=1e-6)
SINGLE = Tolerance(rows=1e-4, spread=1e-3, size=1e-5)
COARSE = Tolerance(rows=1e-2, spread=5e-2, size=1e-2)


class Groups(NamedTuple):
    """Four micro-batches of groups of examples: (a, b), (a', b), (a, b'), (a', b').

    Attributes:
        micro_batches: the four.
        first: the number of examples in a, and in a'.
        size: that of a micro-batch.
    """

    micro_batches: List[Batch]
    first: int
    size: int

    def start_of_last(self, axis: int, shape: Sequence[int]) -> Optional[int]:
        """Where b starts along an axis; None if the axis cannot be that of the examples."""
        if len(shape) <= axis or not shape[axis] or shape[axis] % self.size:
            return None
        return int(shape[axis] // self.size * self.first)


class Outcome(NamedTuple):
    """What four runs show.

    Attributes:
        meeting: the names of the values in which examples meet.
        unknown: the names of the sums that are not finite in some run.
    """

    meeting: List[str]
    unknown: Tuple[str, ...]


# Of each run: the run before it in which its first half was the same, and that of its last half.
BEFORE = [(None, None), (None, 0), (0, None), (1, 2)]


class Comparison:
    """What is the same but for rounding, of four runs."""

    def __init__(self, groups: Groups, is_coarse: bool):
        self._groups, self._is_coarse = groups, is_coarse

    def outcome(self, runs: Iterable[Found]) -> Outcome:
        """What four runs show, taken one after the other.

        Of each run only what is still to be compared is kept. All predictions of four runs might
        take more memory than training does.
        """
        seen: Dict[str, Union[_Sum, _Rows]] = {}
        following = iter(runs)
        for place in range(len(BEFORE)):
            self._take(place, next(following), seen)
        sums = [(name, each) for name, each in seen.items() if isinstance(each, _Sum)]
        return Outcome(
            [name for name, each in seen.items() if not each.are_apart()],
            tuple(name for name, each in sums if not all(map(_finite, each.values))),
        )

    def _take(self, place: int, found: Found, seen: Dict[str, Any]) -> None:
        for name, value in found.items():
            if not place:
                kind = _Rows if len(value.shape) else _Sum
                seen[name] = kind(self._groups, value, self._tolerance(value))
            seen[name].take(place, value)

    def are_sums(self, runs: Sequence[Sequence[Any]]) -> bool:
        """Whether arrays are finite, and sums over examples: gradients and losses of four runs.

        Nothing is left to rounding, so False may mean nothing.
        """
        largest = max([0.0, *(float(abs(each).max(initial=0)) for each in runs[0])])

        def is_sum(values: Sequence[Any]) -> bool:
            here, other_a, other_b, both = values
            own = max(float(abs(each).max(initial=0)) for each in values)
            # The gradient of a bias that has no effect is rounding alone.
            allowed = self._tolerance(here).size * (own + largest / 10)
            rest = float(abs(here - other_a - other_b + both).max(initial=0))
            return rest <= allowed < float("inf")

        return all(map(is_sum, zip(*runs)))

    def _are_rows(self, values: Sequence[Tensor], axes: Iterable[int]) -> Optional[bool]:
        """Whether, along one of some axes, each example has its own; None if nobody can tell."""
        shape = values[0].shape
        if any(each.shape != shape for each in values):  # ragged inputs have various lengths
            return None
        starts = {axis: self._groups.start_of_last(axis, shape) for axis in axes}
        known = [(axis, start) for axis, start in starts.items() if start is not None]
        if not known:
            return None
        return any(self._are_own(values, axis, start) for axis, start in known)

    def _are_own(self, values: Sequence[Tensor], axis: int, start: int) -> bool:
        """Whether each group has the same beside one group and beside the other."""
        if keras.backend.standardize_dtype(values[0].dtype) == "string":
            return True
        # From here on with arrays of NumPy: JAX would compile each operation.
        halves = [_halves(calls.on_host(each), axis, start) for each in values]
        tolerance = self._tolerance(values[0]).rows
        return all(
            _close(halves[before][index], half, tolerance)
            for own, places in zip(halves, BEFORE)
            for index, (half, before) in enumerate(zip(own, places))
            if before is not None
        )

    def differ(self, some: Found, others: Found) -> bool:
        """Whether two runs of the same examples differ."""
        return not all(
            value.shape == others[name].shape
            and _close(value, others[name], self._tolerance(value).rows)
            for name, value in some.items()
        )

    def culprits(self, recorded: Sequence[List[calls.Call]]) -> List[Tuple[calls.Call, ...]]:
        """The calls whose inputs are those of each example, and whose outputs are not.

        None if Python took another way in some of the runs.
        """
        first = [(call.name, call.start) for call in recorded[0]]
        if any([(call.name, call.start) for call in each] != first for each in recorded):
            return []
        found: List[Tuple[calls.Call, ...]] = []
        for same in zip(*recorded):
            # A layer has the outputs of the layers in it.
            inside = any(same[0].start < culprit[0].start for culprit in found)
            if not inside and self._is_culprit(same) and len(found) < NAMED:
                found.append(same)
        return found

    def _is_culprit(self, same: Tuple[calls.Call, ...]) -> bool:
        outputs = list(zip(*(call.outputs for call in same)))
        if all(self._along_any(values) is not False for values in outputs):
            return False
        # A mean over the batch is no row of anybody: whoever puts it into rows is the culprit.
        inputs = list(zip(*(call.inputs for call in same)))
        return all(self._along_any(values) is not False for values in inputs)

    def _along_any(self, values: Sequence[Tensor]) -> Optional[bool]:
        if all(
            each.shape == values[0].shape and _close(values[0], each, self._tolerance(each).rows)
            for each in values[1:]
        ):
            return True
        return self._are_rows(values, range(len(values[0].shape)))

    def as_if_apart(self, same: Tuple[calls.Call, ...]) -> Optional[List[List[Tensor]]]:
        """The outputs of a call in four runs, with those of each example made of its own half.

        None where it is not known which these are.
        """
        made: List[List[Tensor]] = [[], [], [], []]
        for own, *_, other in zip(*(call.outputs for call in same)):
            start = self._groups.start_of_last(0, own.shape)
            if start is None or own.shape != other.shape or not same[0].is_dense:
                return None
            a, b = _halves(own, 0, start)
            other_a, other_b = _halves(other, 0, start)
            groups = [(a, b), (other_a, b), (a, other_b), (other_a, other_b)]
            for outputs, pair in zip(made, groups):
                outputs.append(ops.concatenate(pair, 0))
        return made

    def _tolerance(self, value: Tensor) -> Tolerance:
        name = keras.backend.standardize_dtype(value.dtype)
        if self._is_coarse or name in ("float16", "bfloat16"):
            return COARSE
        return DOUBLE if name == "float64" else SINGLE


class _Sum:
    """A value that must be a sum over examples, but for a constant."""

    def __init__(self, groups: Groups, value: Tensor, tolerance: Tolerance):
        self._tolerance = tolerance
        self.values: List[float] = []

    def take(self, place: int, value: Tensor) -> None:
        """Takes the value of the next run."""
        self.values.append(float(calls.on_host(value)))

    def are_apart(self) -> bool:
        """Whether nothing shows that examples meet."""
        here, other_a, other_b, both = self.values
        size = max(map(abs, self.values))
        if not size < float("inf"):  # nor if it is not a number
            return True
        spread = max(self.values) - min(self.values)
        allowed = self._tolerance.spread * spread + self._tolerance.size * size
        return abs(here - other_a - other_b + both) <= allowed


class _Rows:
    """A value in which each example must have rows of its own."""

    def __init__(self, groups: Groups, value: Tensor, tolerance: Tolerance):
        self._shape, self._tolerance = value.shape, tolerance.rows
        self._start = groups.start_of_last(0, value.shape)
        self._differ = False
        self._kept: Dict[Tuple[int, int], Any] = {}

    def take(self, place: int, value: Tensor) -> None:
        """Takes the value of the next run."""
        if value.shape != self._shape:  # Ragged inputs have various lengths.
            self._start = None
        if self._start is None or keras.backend.standardize_dtype(value.dtype) == "string":
            return
        # With arrays of NumPy: JAX would compile each operation.
        halves = _halves(calls.on_host(value), 0, self._start)
        for index, (half, before) in enumerate(zip(halves, BEFORE[place])):
            if before is None:
                self._kept[place, index] = half.copy()  # A part would keep the whole.
            elif not _close(self._kept.pop((before, index)), half, self._tolerance):
                self._differ = True

    def are_apart(self) -> bool:
        """Whether nothing shows that examples meet."""
        return self._start is None or not self._differ


def _halves(values: Tensor, axis: int, start: int) -> Tuple[Tensor, Tensor]:
    """What is before and what is behind a place along an axis."""
    before = (slice(None),) * axis
    first, last = (*before, slice(start)), (*before, slice(start, None))
    return values[first], values[last]


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether values are the same but for rounding."""
    dtype = keras.backend.standardize_dtype(one.dtype)
    if dtype == "string":
        return True
    one, other = calls.on_host(one), calls.on_host(other)
    if not keras.backend.is_float_dtype(dtype):
        return bool((one == other).all())
    if dtype in ("float16", "bfloat16"):
        one, other = one.astype("float32"), other.astype("float32")
    finite = _finite(one)
    if not (finite == _finite(other)).all():
        return False
    one, other = one[finite], other[finite]
    size = max(abs(one).max(initial=0), abs(other).max(initial=0))
    return bool(abs(one - other).max(initial=0) <= tolerance * size)


def _finite(array: Any) -> Any:
    """Which numbers of an array are finite."""
    return abs(array) < float("inf")

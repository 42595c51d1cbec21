"""Whether what comes of an example depends on how many examples there are, or on its place.

All runs of meeting.py have one size. So here some examples run once more together, and in two
pieces c and d. For a sum over examples

    L(c, d) = L(c) + L(d)

and what has a row for each example has the rows of c, and then those of d. Devices compute sizes in
different ways, so that rounding differs. Only differences that rounding cannot make count.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import keras
from keras import tree

from macrobatch._engine import BatchEngine
from macrobatch._keras import calls
from macrobatch._keras.comparison import COARSE, NAMED, Found, Groups
from macrobatch._types import Batch, Tensor

# Differences over the largest number. What divides by the number of examples is off by a half.
TOLERANCE, OF_COARSE = 1e-2, COARSE.spread


class Pieces(NamedTuple):
    """Some examples together, and the same examples in two pieces.

    Attributes:
        batches: the examples, the first of them, and the others.
        sizes: how many examples there are in each of these.
        is_coarse: whether numbers are of less than 32 bits somewhere.
    """

    batches: List[Batch]
    sizes: List[int]
    is_coarse: bool

    def differing(self, runs: Sequence[Found]) -> List[str]:
        """The names of values that are not made of those of the two pieces."""
        whole, *pieces = runs
        return [
            name
            for name, value in whole.items()
            if not self._is_made_of(value, [each.get(name) for each in pieces])
        ]

    def _is_made_of(self, whole: Tensor, pieces: Sequence[Optional[Tensor]]) -> bool:
        """Whether a value is that of its pieces, as far as these are known."""
        whole = calls.on_host(whole)
        first, last = (None if each is None else calls.on_host(each) for each in pieces)
        if whole.shape:
            known = [
                (each, place) for place, each in enumerate((first, last), 1) if each is not None
            ]
            return all(self._has(whole, each, place) for each, place in known)
        if first is None or last is None:
            return True
        size = max(abs(float(each)) for each in (whole, first, last))
        difference = abs(float(whole) - float(first) - float(last))
        return not size < float("inf") or difference <= self._tolerance(whole) * size

    def culprits(self, run: Callable[[Batch], Found], engine: BatchEngine) -> List[str]:
        """The names of the calls that make other rows of the same rows, in one of the pieces."""
        recorded = []
        for batch in self.batches:
            with calls.watched({}, engine) as made:
                run(batch)
            recorded.append(made)
        found: List[calls.Call] = []
        for same in zip(*recorded):
            if len({(call.name, call.start) for call in same}) > 1:
                break  # Python took another way.
            # A layer has the outputs of the layers in it.
            inside = any(same[0].start < each.start for each in found)
            if (
                not inside
                and self._are_same(same, "inputs")
                and not self._are_same(same, "outputs")
            ):
                found.append(same[0])
        return list(dict.fromkeys(call.name for call in found))[:NAMED]

    def _are_same(self, same: Sequence[calls.Call], kind: str) -> bool:
        whole, *pieces = (getattr(call, kind) for call in same)
        return all(
            self._has(one, other, place)
            for place, piece in enumerate(pieces, 1)
            for one, other in zip(whole, piece)
        )

    def _has(self, whole: Any, piece: Any, place: int) -> bool:
        """Whether an array has the rows of a piece, as far as anybody can tell.

        Where a layer rounds, or takes the largest, rounding alone may change a few examples. So
        most examples must differ.
        """
        size, (of_whole, first, _) = self.sizes[place], self.sizes
        if not whole.shape or whole.shape[0] % of_whole:
            return True
        times = whole.shape[0] // of_whole
        start = 0 if place == 1 else times * first
        rows = whole[start : start + times * size]
        if rows.shape != piece.shape or not keras.backend.is_float_dtype(whole.dtype.name):
            return True
        tolerance, found = self._tolerance(whole), 0
        examples = zip(rows.reshape(size, -1), piece.reshape(size, -1))
        for pair in examples:  # One at a time: predictions may be large.
            one, other = (each.astype("float64") for each in pair)
            largest = max(abs(one).max(initial=0), abs(other).max(initial=0))
            if not largest < float("inf"):
                return True
            found += bool(abs(one - other).max(initial=0) > tolerance * largest)
        return found < size / 2

    def _tolerance(self, value: Any) -> float:
        is_coarse = self.is_coarse or value.dtype.name in ("float16", "bfloat16")
        return OF_COARSE if is_coarse else TOLERANCE


def of(groups: Groups, engine: BatchEngine, is_coarse: bool) -> Optional[Pieces]:
    """The last micro-batch of a trial, and its pieces; None if they are too few to tell."""
    batch, size, first = groups.micro_batches[-1], groups.size, groups.first
    # Rows of ragged tensors are as wide as the longest row that is there.
    if size - first < 4 or engine.widest(batch):
        return None

    def rows(start: int, count: int) -> Batch:
        return tree.map_structure(
            lambda leaf: None if leaf is None else engine.slice_of(leaf, start, count, False), batch
        )

    batches = [batch, rows(0, first), rows(first, size - first)]
    return Pieces(batches, [size, first, size - first], is_coarse)

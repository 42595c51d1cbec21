"""What of a batch are sequences along an axis, how long they are, and how they are cut."""

import functools
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

from keras import ops, tree

from macrobatch._batches import checks
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, Size, Tensor

# Whether something holds: known now, or when the graph runs.
Truth = Union[bool, Tensor]


class Memory:
    """What earlier batches have shown: which parts of a batch are no sequences.

    A part that had another size than the sequences in any batch is no sequence, even in a batch in
    which the sizes happen to be equal. This memory remembers nothing.
    """

    def differed(self, kinds: Tuple[Optional[int], ...]) -> Sequence[Truth]:
        """For each part, whether an earlier batch of these kinds had that part in another size."""
        return [False] * len(kinds)

    def note(self, kinds: Tuple[Optional[int], ...], differ: Sequence[Truth]) -> None:
        """Remembers for each part whether its size differs in this batch."""


class MemoryAtOnce(Memory):
    """A memory of batches whose sizes are known."""

    def __init__(self) -> None:
        self._differed: Dict[Any, List[bool]] = {}

    def differed(self, kinds: Any) -> Sequence[bool]:
        return self._differed.get(kinds, [False] * len(kinds))

    def note(self, kinds: Any, differ: Sequence[Any]) -> None:
        before = self.differed(kinds)
        self._differed[kinds] = [one or bool(other) for one, other in zip(before, differ)]


class Sequences:
    """What of a batch are sequences along an axis, padded or ragged.

    All sequences have one size along that axis: that of the largest integer input, or, where there
    is none, sample weight, or any input; or the longest row of a ragged input, if that is larger.

    Attributes:
        axis: the axis.
        size: the size of the sequences along it.
        are_sequences: for each tensor of the batch, whether it is a sequence.
        ragged: inputs that are as wide as their longest row, whatever it is cut to.
    """

    def __init__(
        self,
        axis: int,
        batch: Batch,
        x: Any,
        weights: Any,
        fixed: Sequence[Tensor],
        engine: BatchEngine,
        memory: Memory,
    ):
        """Looks at a batch.

        Args:
            axis: the axis.
            batch: the batch.
            x: the part of the batch that tells, by integers that are not 0, how long examples are.
            weights: the part of the batch that tells so by numbers of any kind.
            fixed: tensors that are no sequences, whatever their size.
            engine: the backend.
            memory: what earlier batches have shown.
        """
        self.axis, self._engine = axis, engine

        def along_axis(nest: Any, *kinds: str) -> List[Tensor]:
            leaves = [leaf for leaf in tree.flatten(nest) if leaf is not None]
            leaves = [leaf for leaf in leaves if not _is_among(leaf, fixed)]
            leaves = [leaf for leaf in leaves if engine.kind_of(leaf) in kinds]
            return [leaf for leaf in leaves if len(leaf.shape) > axis]

        self.ragged = along_axis(x, "ragged")
        dense = along_axis(x, "dense")
        self._integers = [leaf for leaf in dense if "int" in _dtype(leaf)]
        self._weights = along_axis(weights, "dense")
        likely = self._integers or self._weights or dense
        checks.has_sequences([*likely, *self.ragged], axis, batch)
        sizes = [self.size_of(leaf) for leaf in likely]
        # Where some sizes are not known before the batch is there, those are the sequences'.
        unknown = [size for size in sizes if not isinstance(size, int)]
        self._dense_size = largest(unknown or sizes or [1])
        self.size = largest([self._dense_size, *(self.longest_row(leaf) for leaf in self.ragged)])
        self._cuttable = along_axis(batch, "dense", "sparse")
        self._only = likely if len(unknown) == 1 and not self.ragged else []
        leaves = tree.flatten(batch)
        have_size = [leaf is not None and self._has_size(leaf) for leaf in leaves]
        kinds = checks.kinds_of(batch)
        earlier = memory.differed(kinds)
        lasting = [both(has, opposite(before)) for has, before in zip(have_size, earlier)]
        # Inputs may take turns in being the longest. Then the longest is a sequence all the same.
        of_likely = [truth for leaf, truth in zip(leaves, lasting) if _is_among(leaf, likely)]
        none_lasts = opposite(any_of(of_likely))
        self.are_sequences = [
            either(lasts, both(has, none_lasts)) if _is_among(leaf, likely) else lasts
            for leaf, has, lasts in zip(leaves, have_size, lasting)
        ]
        tell = [_is_among(leaf, self._cuttable) and self._tells(leaf) for leaf in leaves]
        memory.note(kinds, [both(tells, opposite(has)) for tells, has in zip(tell, have_size)])
        self._of_leaf = list(zip(leaves, self.are_sequences))

    def _has_size(self, leaf: Tensor) -> Truth:
        """Whether a tensor has the size of the sequences along the axis."""
        if not _is_among(leaf, self._cuttable):
            return False
        size = leaf.shape[self.axis]
        if isinstance(size, int) or self._engine.kind_of(leaf) == "sparse":
            if isinstance(self.size, int):
                return size == self.size
            # A size that is known although that of sequences is not, is not that size; but rows
            # may be as long.
            known = isinstance(self._dense_size, int) and size == self._dense_size
            return known and ops.equal(self.size, size)
        return _is_among(leaf, self._only) or ops.equal(self.size_of(leaf), self.size)

    def _tells(self, leaf: Tensor) -> Truth:
        """Whether the size of a tensor tells anything. A size of 1 may be broadcast."""
        size = leaf.shape[self.axis]
        if size is None and self._engine.kind_of(leaf) == "dense":
            return ops.not_equal(self.size_of(leaf), 1)
        return bool(size != 1)

    def lengths(self) -> Tensor:
        """For each example, the last position where anything is not 0."""
        telling = [*self._integers, *self._weights]
        checks.has_lengths([*telling, *self.ragged], self.axis)
        found = [self._engine.lengths_of(leaf, self.axis) for leaf in self.ragged]
        for leaf in telling:
            is_sequence = next(truth for each, truth in self._of_leaf if each is leaf)
            if is_sequence is not False:
                lengths = self._engine.lengths_of(leaf, self.axis)
                found.append(ops.where(is_sequence, lengths, ops.zeros_like(lengths)))
        return ops.max(ops.stack(found), 0)

    def cut(self, leaf: Tensor, is_sequence: Truth, length: Size, exactly: bool) -> Tensor:
        """A leaf of some examples, without what is behind that length.

        If `exactly`, and its own size is not known, it is as long in any case.
        """
        if is_sequence is False or self._engine.kind_of(leaf) == "ragged":
            return leaf
        if is_sequence is not True and self._engine.kind_of(leaf) == "dense":
            length = ops.where(is_sequence, length, self.size_of(leaf))
        return self._engine.shortened(leaf, self.axis, length, exactly)

    def size_of(self, leaf: Tensor) -> Size:
        """The size of a dense tensor along the axis."""
        return size_along(self.axis, leaf)

    def longest_row(self, leaf: Tensor) -> Size:
        """The length of the longest row of a ragged tensor, if any."""
        lengths = self._engine.lengths_of(leaf, self.axis)
        longest = ops.max(ops.concatenate([lengths, ops.zeros([1], lengths.dtype)], 0))
        return int(longest) if self._engine.is_eager() else longest


def size_along(axis: int, leaf: Tensor) -> Size:
    """The size of a dense tensor along an axis."""
    size = ops.shape(leaf)[axis]
    return int(size) if isinstance(size, int) else size


def larger(size: Size, other: Size) -> Size:
    """The larger of two sizes."""
    return largest([size, other])


def smaller(size: Size, other: Size) -> Size:
    """The smaller of two sizes."""
    if isinstance(size, int) and isinstance(other, int):
        return min(size, other)
    return ops.minimum(ops.cast(size, "int32"), ops.cast(other, "int32"))


def same(size: Size, other: Size) -> Truth:
    """Whether two sizes are equal."""
    known = isinstance(size, int) and isinstance(other, int)
    return size == other if known else ops.equal(size, other)


def both(one: Truth, other: Truth) -> Truth:
    """Whether both hold."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    return ops.logical_and(one, other)


def either(one: Truth, other: Truth) -> Truth:
    """Whether at least one holds."""
    return opposite(both(opposite(one), opposite(other)))


def any_of(truths: Sequence[Truth]) -> Truth:
    """Whether at least one of them holds."""
    return functools.reduce(either, truths, False)


def opposite(truth: Truth) -> Truth:
    """Whether it does not hold."""
    return not truth if isinstance(truth, bool) else ops.logical_not(truth)


def largest(sizes: List[Size]) -> Size:
    """The largest of some sizes."""
    if all(isinstance(size, int) for size in sizes):
        return max(sizes)
    return functools.reduce(ops.maximum, [ops.cast(size, "int32") for size in sizes])


def _dtype(leaf: Tensor) -> str:
    return str(getattr(leaf.dtype, "name", leaf.dtype))


def _is_among(leaf: Optional[Tensor], leaves: Iterable[Tensor]) -> bool:
    return any(leaf is each for each in leaves)

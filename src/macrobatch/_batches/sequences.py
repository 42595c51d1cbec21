"""What of a batch are sequences along an axis, how long they are, and how they are cut."""

from typing import Any, Iterable, List, Sequence

import tensorflow as tf

from macrobatch._batches import checks as _length_checks


class Sequences:
    """What of a batch are sequences along an axis, padded or ragged.

    They all have one size along that axis: that of the largest integer input, or, where there is
    none, sample weight, or any input; or the longest row of a ragged input, if that is larger. What
    has another size is none.

    Attributes:
        axis: the axis.
        size: their size along it: an int where it is known, else a scalar tensor.
        shares: for each tensor of the batch, whether it is one: a bool, or a scalar tensor.
        ragged: inputs that are as wide as their longest row, whatever it is cut to.
    """

    def __init__(self, axis: int, batch: Any, x: Any, weights: Any, fixed: Sequence[Any]):
        self.axis = axis

        def along_axis(nest: Any, kind: Any) -> List[Any]:
            leaves = [leaf for leaf in tf.nest.flatten(nest) if isinstance(leaf, kind)]
            leaves = [leaf for leaf in leaves if not _is_among(leaf, fixed)]
            return [leaf for leaf in leaves if len(leaf.shape) > axis]

        self.ragged = along_axis(x, tf.RaggedTensor)
        dense = along_axis(x, tf.Tensor)
        self._integers = [leaf for leaf in dense if leaf.dtype.is_integer]
        self._weights = along_axis(weights, tf.Tensor)
        likely = self._integers or self._weights or dense
        _length_checks.has_sequences([*likely, *self.ragged], axis, batch)
        sizes = [size_along(axis, leaf) for leaf in likely]
        # Where some sizes are not known before the batch is there, those are the sequences'.
        unknown = [size for size in sizes if not isinstance(size, int)]
        self._dense_size = largest(unknown or sizes or [1])
        self.size = largest([self._dense_size, *(longest_row(axis, leaf) for leaf in self.ragged)])
        self._cuttable = along_axis(batch, (tf.Tensor, tf.SparseTensor))
        self._likely = likely if len(unknown) == 1 and not self.ragged else []
        self.shares = [self._is_sequence(leaf) for leaf in tf.nest.flatten(batch)]

    def _is_sequence(self, leaf: Any) -> Any:
        if not _is_among(leaf, self._cuttable):
            return False
        size = leaf.shape[self.axis]
        if isinstance(size, int) or isinstance(leaf, tf.SparseTensor):
            if isinstance(self.size, int):
                return size == self.size
            # A size that is known although that of sequences is not, is not that size; but rows
            # may be as long.
            known = isinstance(self._dense_size, int) and size == self._dense_size
            return known and tf.equal(self.size, size)
        return _is_among(leaf, self._likely) or tf.equal(size_along(self.axis, leaf), self.size)

    def lengths(self) -> Any:
        """For each example, the last position where anything is not 0."""
        telling = [*self._integers, *self._weights]
        _length_checks.has_lengths([*telling, *self.ragged], self.axis)
        found = [_row_lengths(self.axis, leaf) for leaf in self.ragged]
        for leaf in telling:
            shares = self._is_sequence(leaf)
            if shares is not False:
                found.append(tf.where(shares, _last_position(self.axis, leaf), 0))
        return tf.reduce_max(tf.stack(found), 0)

    def cut(self, leaf: Any, shares: Any, length: Any, exactly: bool) -> Any:
        """A leaf of some examples, without what is behind that length.

        If `exactly`, and its own size is not known, it is as long in any case.
        """
        if shares is False or isinstance(leaf, tf.RaggedTensor):
            return leaf
        if isinstance(leaf, tf.SparseTensor):
            shape = leaf.dense_shape
            is_axis = tf.equal(tf.range(len(leaf.shape)), self.axis)
            shape = tf.where(is_axis, tf.minimum(tf.cast(length, shape.dtype), shape), shape)
            piece = tf.sparse.slice(leaf, tf.zeros_like(shape), shape)
            known = leaf.shape.as_list()
            known[self.axis] = None
            piece.set_shape(known)
            return piece
        size = size_along(self.axis, leaf)
        end = length if shares is True else tf.where(shares, length, size)
        piece = leaf[(slice(None),) * self.axis + (slice(end),)]
        if exactly and not isinstance(size, int):
            piece = padded(piece, self.axis, tf.maximum(end, size_along(self.axis, piece)))
        return piece


def size_along(axis: int, leaf: Any) -> Any:
    """The size of a tensor along an axis: an int where it is known, else a scalar tensor."""
    return tf.shape(leaf)[axis] if leaf.shape[axis] is None else int(leaf.shape[axis])


def longest_row(axis: int, leaf: tf.RaggedTensor) -> Any:
    """The length of the longest row of a ragged tensor, if any: an int where it is known."""
    longest = tf.reduce_max(tf.concat([_row_lengths(axis, leaf), [0]], 0))
    return int(longest) if tf.executing_eagerly() else longest


def same(size: Any, other: Any) -> Any:
    """Whether two sizes are equal: a bool where that is known, else a scalar tensor."""
    known = isinstance(size, int) and isinstance(other, int)
    return size == other if known else tf.equal(size, other)


def largest(sizes: List[Any]) -> Any:
    """The largest of some sizes: an int where all are known."""
    known = all(isinstance(size, int) for size in sizes)
    return max(sizes) if known else tf.reduce_max(tf.stack(sizes))


def padded(leaf: Any, axis: int, size: Any) -> Any:
    """A tensor with zeros behind it, up to a size along an axis."""
    missing = size - size_along(axis, leaf)
    amounts = [[0, missing if i == axis else 0] for i in range(len(leaf.shape))]
    shape = leaf.shape.as_list()
    longer = tf.pad(leaf, amounts)
    shape[axis] = size if isinstance(size, int) else None
    longer.set_shape(shape)
    return longer


def _last_position(axis: int, leaf: Any) -> Any:
    there = tf.not_equal(leaf, tf.zeros([], leaf.dtype))
    others = [i for i in range(1, len(leaf.shape)) if i != axis]
    there = tf.reduce_any(there, others)
    positions = tf.range(1, tf.shape(there)[1] + 1)
    return tf.reduce_max(tf.where(there, positions, 0), 1, keepdims=True)[:, 0]


def _row_lengths(axis: int, leaf: tf.RaggedTensor) -> Any:
    lengths = tf.cast(leaf.row_lengths(axis), tf.int32)
    while len(lengths.shape) > 1:
        lengths = tf.reduce_max(lengths, -1)
    return lengths


def _is_among(leaf: Any, leaves: Iterable[Any]) -> bool:
    return any(leaf is each for each in leaves)

"""Dense, ragged and sparse tensors of a batch: their sizes, how they are cut, taken apart and
joined.
"""

from typing import Any, List, NamedTuple, Sequence

import tensorflow as tf

from macrobatch._types import Size, Tensor


def examples_of(leaf: Tensor) -> Size:
    """The size of the first dimension."""
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]


def size_along(axis: int, leaf: Tensor) -> Size:
    """The size of a dense tensor along an axis."""
    return tf.shape(leaf)[axis] if leaf.shape[axis] is None else int(leaf.shape[axis])


def kind_of(leaf: Any) -> str:
    """Which of the kinds of tensor this is."""
    if isinstance(leaf, tf.RaggedTensor):
        return "ragged"
    return "sparse" if isinstance(leaf, tf.SparseTensor) else "dense"


def slice_of(leaf: Tensor, start: Size, size: Size, static: bool) -> Tensor:
    """`size` examples from one on; if not `static`, maybe fewer at the end."""
    if isinstance(leaf, tf.SparseTensor):
        return _sparse_slice(leaf, start, size)
    if isinstance(leaf, tf.RaggedTensor) or not static:
        return leaf[start : start + size]
    rest = [size_along(axis, leaf) for axis in range(1, len(leaf.shape))]
    return tf.slice(leaf, [start] + [0] * len(rest), [size, *rest])


def _sparse_slice(tensor: tf.SparseTensor, start: Size, size: Size) -> tf.SparseTensor:
    dense_shape = tensor.dense_shape
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(dense_shape[1:])], 0)
    extent = tf.concat([[tf.cast(size, tf.int64)], dense_shape[1:]], 0)
    piece = tf.sparse.slice(tensor, begin, extent)
    # The slice has lost what is known of the shape, and layers are built from it.
    piece.set_shape([None, *tensor.shape[1:]])
    return piece


def in_order(leaf: Tensor, order: Tensor) -> Tensor:
    """The leaf, if its rows can be gathered; a sparse tensor, with its rows put in that order."""
    if not isinstance(leaf, tf.SparseTensor):
        return leaf
    return _reordered(leaf, tf.math.invert_permutation(order))


def taken(leaf: Tensor, order: Tensor, start: Size, end: Size) -> Tensor:
    """The examples at these places of the order; of a sparse tensor, one from `in_order`."""
    if isinstance(leaf, tf.SparseTensor):
        return _sparse_slice(leaf, start, end - start)
    return tf.gather(leaf, order[start:end])


def permuted(leaf: Tensor, rows: Tensor) -> Tensor:
    """The leaf with these of its rows."""
    if isinstance(leaf, tf.SparseTensor):
        return _reordered(leaf, tf.math.invert_permutation(rows))
    return tf.gather(leaf, rows)


def selected(leaf: Tensor, rows: Sequence[int]) -> Tensor:
    """The leaf with some of its rows: of a sparse tensor each at most once, in their order."""
    if not isinstance(leaf, tf.SparseTensor):
        return tf.gather(leaf, tf.constant(rows, tf.int32, [len(rows)]))
    is_there = tf.reduce_any(tf.equal(leaf.indices[:, :1], tf.constant([rows], tf.int64)), 1)
    some = tf.sparse.retain(leaf, is_there)
    places = tf.searchsorted(tf.constant(rows, tf.int64, [len(rows)]), some.indices[:, 0])
    indices = tf.concat([tf.cast(places, tf.int64)[:, None], some.indices[:, 1:]], 1)
    shape = tf.concat([[tf.constant(len(rows), tf.int64)], leaf.dense_shape[1:]], 0)
    return tf.SparseTensor(indices, some.values, shape)


def _reordered(tensor: tf.SparseTensor, places: Tensor) -> tf.SparseTensor:
    """A sparse tensor whose i-th row goes to the i-th of these places."""
    rows = tf.gather(tf.cast(places, tf.int64), tensor.indices[:, 0])
    indices = tf.concat([rows[:, None], tensor.indices[:, 1:]], 1)
    moved = tf.sparse.reorder(tf.SparseTensor(indices, tensor.values, tensor.dense_shape))
    moved.set_shape(tensor.shape)
    return moved


def shortened(leaf: Tensor, axis: int, length: Size, exactly: bool) -> Tensor:
    """The leaf without what is behind a length along an axis.

    If `exactly`, and its own size is not known, it is as long in any case.
    """
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        is_axis = tf.equal(tf.range(len(leaf.shape)), axis)
        shape = tf.where(is_axis, tf.minimum(tf.cast(length, shape.dtype), shape), shape)
        piece = tf.sparse.slice(leaf, tf.zeros_like(shape), shape)
        known = leaf.shape.as_list()
        known[axis] = None
        piece.set_shape(known)
        return piece
    piece = leaf[(slice(None),) * axis + (slice(length),)]
    if exactly and leaf.shape[axis] is None:
        piece = lengthened(piece, axis, tf.maximum(length, size_along(axis, piece)))
    return piece


def lengthened(leaf: Tensor, axis: int, size: Size) -> Tensor:
    """A dense tensor with zeros behind it, up to a size along an axis."""
    missing = size - size_along(axis, leaf)
    amounts = [[0, missing if i == axis else 0] for i in range(len(leaf.shape))]
    shape = leaf.shape.as_list()
    longer = tf.pad(leaf, amounts)
    shape[axis] = size if isinstance(size, int) else None
    longer.set_shape(shape)
    return longer


def sized_like(leaf: Tensor, other: Tensor) -> Tensor:
    """The leaf as long as another tensor along each axis but the first, cut or with zeros."""
    if not isinstance(leaf, tf.Tensor):
        return leaf
    for axis in range(1, len(other.shape)):
        size = size_along(axis, other)
        if leaf.shape[axis] is None or leaf.shape[axis] != size:
            leaf = lengthened(shortened(leaf, axis, size, exactly=False), axis, size)
    return leaf


def last_positions(leaf: Tensor, axis: int) -> Tensor:
    """For each example of a dense tensor, the last position where anything is not 0."""
    there = tf.not_equal(leaf, tf.zeros([], leaf.dtype))
    others = [i for i in range(1, len(leaf.shape)) if i != axis]
    there = tf.reduce_any(there, others)
    positions = tf.range(1, tf.shape(there)[1] + 1)
    return tf.reduce_max(tf.where(there, positions, 0), 1, keepdims=True)[:, 0]


def row_lengths(leaf: tf.RaggedTensor, axis: int) -> Tensor:
    """For each example of a ragged tensor, the length of its longest row along an axis."""
    lengths = tf.cast(leaf.row_lengths(axis), tf.int32)
    while len(lengths.shape) > 1:
        lengths = tf.reduce_max(lengths, -1)
    return lengths


def length_of(leaf: Tensor, axis: int) -> int:
    """The size along an axis of a tensor that is there; of a ragged one, its longest row."""
    if isinstance(leaf, tf.RaggedTensor) and axis <= leaf.ragged_rank:
        return int(tf.reduce_max(tf.concat([[0], row_lengths(leaf, axis)], 0)))
    return int(leaf.shape[axis])


def widest(batch: Any) -> List[Tensor]:
    """For each ragged dimension of a batch, the example with the longest row. The first of none."""
    found = []
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            for axis in range(1, leaf.ragged_rank + 1):
                order = tf.argsort(row_lengths(leaf, axis), direction="DESCENDING")
                found.append(tf.reduce_sum(order[:1]))
    return found


class Pieces(NamedTuple):
    """A tensor as dense parts: those of several micro-batches, joined, make the joined tensor."""

    kind: str
    parts: List[Tensor]


def pieces(leaf: Tensor) -> Pieces:
    """Takes a tensor apart, for `joined`."""
    if isinstance(leaf, tf.RaggedTensor):
        return Pieces("ragged", [leaf.flat_values, *leaf.nested_row_lengths()])
    if isinstance(leaf, tf.SparseTensor):
        entries = tf.size(leaf.values)
        return Pieces("sparse", [leaf.values, leaf.indices, entries, leaf.dense_shape[None]])
    return Pieces("dense", [tf.convert_to_tensor(leaf)])


def joined(kind: str, parts: List[Tensor]) -> Tensor:
    """The tensor whose parts were joined: put one after the other, scalars stacked."""
    if kind == "ragged":
        return tf.RaggedTensor.from_nested_row_lengths(parts[0], parts[1:], validate=False)
    if kind == "sparse":
        values, indices, entries, shapes = parts
        rows = tf.repeat(tf.cumsum(shapes[:, 0], exclusive=True), entries)
        indices = tf.concat([indices[:, :1] + rows[:, None], indices[:, 1:]], 1)
        rest = tf.reduce_max(shapes[:, 1:], 0)
        shape = tf.concat([[tf.reduce_sum(shapes[:, 0])], rest], 0)
        return tf.SparseTensor(indices, values, shape)
    return parts[0]


def concatenated(leaves: List[Tensor]) -> Tensor:
    """Tensors of several micro-batches as one: put one after the other, scalars stacked."""
    if leaves[0] is None:
        return None
    apart = [pieces(leaf) for leaf in leaves]
    parts = zip(*(each.parts for each in apart))
    return joined(
        apart[0].kind, [tf.concat(p, 0) if p[0].shape.rank else tf.stack(p) for p in parts]
    )

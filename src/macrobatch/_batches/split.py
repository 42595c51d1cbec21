"""Batch -> micro-batches, and what came of micro-batches -> one for the batch: nested structures
of dense, ragged and sparse tensors, uneven tails.
"""

from typing import Any, List, NamedTuple

import tensorflow as tf

from macrobatch import _checks
from macrobatch._tensorflow.graph import in_xla, specs_of, to_tensors  # noqa: F401


class Run(NamedTuple):
    """`count` micro-batches of `size` examples, from example `start` on.

    Of a run that is not `static` the last micro-batch may be smaller.
    """

    start: Any
    size: Any
    count: Any
    static: bool


def examples_in(batch: Any, may_be_empty: bool = False) -> Any:
    """The number of examples in a batch: an int where it is known, else a scalar tensor."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    shapes = tf.nest.map_structure(lambda t: None if t is None else tuple(t.shape), batch)
    _checks.batch_shapes([tuple(leaf.shape) for leaf in leaves], shapes, may_be_empty)
    sizes = [_first_dimension(leaf) for leaf in leaves]
    known = [size for size in sizes if isinstance(size, int)]
    unknown = [size for size in sizes if not isinstance(size, int)]
    if not unknown:
        return known[0]
    first = known[0] if known else unknown[0]
    if in_xla():
        # XLA drops assertions. It does refuse, before anything runs, to give a tensor a shape of
        # another size, or to take the first of no elements; its message shows the name.
        for size in unknown:
            ones = tf.ones([first], tf.bool)
            first = tf.size(tf.reshape(ones, [size], name="parts_of_a_batch_differ_in_examples"))
        if may_be_empty:
            return first
        return first * tf.size(tf.slice(tf.ones([first]), [0], [1], name="a_batch_is_empty"))
    least = 0 if may_be_empty else 1
    checks = [tf.debugging.assert_greater_equal(first, least, _checks.empty_batch(shapes))]
    checks += [
        tf.debugging.assert_equal(size, first, _checks.uneven_batch(shapes)) for size in unknown
    ]
    # In eager mode a check has been made by now, and is None.
    with tf.control_dependencies([check for check in checks if check is not None]):
        return tf.identity(first)


def size_of(micro_batch: Any) -> Any:
    """The number of examples in a micro-batch, whose batch has been checked."""
    return next(_first_dimension(t) for t in tf.nest.flatten(micro_batch) if t is not None)


def runs(examples: Any, micro_batch_size: int) -> List[Run]:
    """How a batch is cut: one run, or full micro-batches and a tail where sizes must be static."""
    if isinstance(examples, int) and examples == 0:
        return [Run(0, micro_batch_size, 0, static=False)]
    if isinstance(examples, int):
        size = min(micro_batch_size, examples)
        full, tail = divmod(examples, size)
        if tail == 0:
            return [Run(0, size, full, static=True)]
        if in_xla():
            return [Run(0, size, full, static=True), Run(full * size, tail, 1, static=True)]
        return [Run(0, size, full + 1, static=False)]
    if in_xla():
        # To XLA these are constants. A tail that turns out to be empty runs no iteration.
        size = tf.minimum(micro_batch_size, examples)
        full, tail = examples // tf.maximum(size, 1), examples % tf.maximum(size, 1)
        tail_count = tf.cast(tail > 0, tf.int32)
        return [Run(0, size, full, static=True), Run(full * size, tail, tail_count, static=True)]
    count = (examples + micro_batch_size - 1) // micro_batch_size
    return [Run(0, micro_batch_size, count, static=False)]


class MicroBatches:
    """A batch and how it is cut: into micro-batches of one size, in the order of the batch.

    Attributes:
        batch: a nest of tensors with the examples first.
        examples: their number, from `examples_in`.
        runs: of micro-batches, one after the other.
    """

    def __init__(self, batch: Any, examples: Any, size: int):
        self.batch, self.examples = batch, examples
        self.runs = runs(examples, size)

    def get(self, run: Run, index: Any) -> Any:
        """The micro-batch of a run with that index."""
        start = run.start + index * run.size

        def cut(leaf: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, tf.SparseTensor):
                return cut_sparse(leaf, start, run.size)
            if isinstance(leaf, tf.RaggedTensor) or not run.static:
                return leaf[start : start + run.size]
            rest = [size if size is not None else tf.shape(leaf)[i] for i, size in _rest(leaf)]
            return tf.slice(leaf, [start] + [0] * len(rest), [run.size, *rest])

        return tf.nest.map_structure(cut, self.batch)

    def first(self) -> Any:
        """The first micro-batch, with as little known of its shape as of those in the loop."""
        index = 0
        if not self.runs[0].static and not tf.executing_eagerly():
            # Slices at a constant index have a constant size, others have not.
            index = tf.compat.v1.placeholder_with_default(0, [])
        return self.get(self.runs[0], index)

    def length_of(self, micro_batch: Any) -> Any:
        """The length to which the sequences of a micro-batch are cut, if they are."""
        return None

    def padded(self, leaves: List[Any], lengths: List[Any]) -> List[Any]:
        """What came of micro-batches of these lengths, in shapes that can be joined."""
        return leaves

    def probe(self, lengths: List[Any]) -> Any:
        """A further micro-batch, where micro-batches of these lengths leave `padded` in doubt."""
        return None

    def in_order(self, values: Any) -> Any:
        """What came of all micro-batches, joined, in the order of the batch."""
        return values


def asserted(values: Any, actual: Any, expected: Any, message: str) -> Any:
    """The values, once it is known that something else is as expected."""
    check = tf.debugging.assert_equal(actual, expected, message)
    # In eager mode a check has been made by now, and is None.
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(values)


class Pieces(NamedTuple):
    """A tensor as dense parts: those of several micro-batches, joined, make the joined tensor."""

    kind: str
    parts: List[Any]


def pieces(leaf: Any) -> Pieces:
    """Takes a tensor apart, for `join`."""
    if isinstance(leaf, tf.RaggedTensor):
        return Pieces("ragged", [leaf.flat_values, *leaf.nested_row_lengths()])
    if isinstance(leaf, tf.SparseTensor):
        entries = tf.size(leaf.values)
        return Pieces("sparse", [leaf.values, leaf.indices, entries, leaf.dense_shape[None]])
    leaf = tf.convert_to_tensor(leaf)
    return Pieces("dense", [leaf])


def join(kind: str, parts: List[Any]) -> Any:
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


def _rest(leaf: Any) -> Any:
    return list(enumerate(leaf.shape.as_list()))[1:]


def cut_sparse(tensor: tf.SparseTensor, start: Any, size: Any) -> tf.SparseTensor:
    """`size` rows of a sparse tensor."""
    dense_shape = tensor.dense_shape
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(dense_shape[1:])], 0)
    extent = tf.concat([[tf.cast(size, tf.int64)], dense_shape[1:]], 0)
    piece = tf.sparse.slice(tensor, begin, extent)
    # What is known of the shape is lost in the slice, and layers are built from it.
    piece.set_shape([None, *tensor.shape[1:]])
    return piece


def _first_dimension(leaf: Any) -> Any:
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows(out_type=tf.int32)
    if isinstance(leaf, tf.SparseTensor):
        return tf.cast(leaf.dense_shape[0], tf.int32)
    return tf.shape(leaf)[0]

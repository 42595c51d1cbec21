"""The arithmetic all entry points share: sums of dense, sparse and absent gradients.

A gradient is a tensor, an `IndexedSlices` (some rows of a table) or None (no dependence). Sums are
float32 or wider, whatever the gradients are, and the optimizer sees each row of a table once.
"""

from typing import Any, NamedTuple, Sequence, TypeVar, Union

import tensorflow as tf

from macrobatch._types import Gradient, Tensor

Given = TypeVar("Given", bound=Gradient)  # None stays None


class Rows(NamedTuple):
    """The running sum of a table's gradient in a graph: the touched rows of each micro-batch."""

    values: tf.TensorArray
    indices: tf.TensorArray


# The running sum of a gradient, for a loop in a graph.
Sum = Union[Tensor, Rows, None]


def wide(dtype: Any) -> Any:
    """The dtype in which values of that dtype are summed."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def cast(gradient: Given, dtype: tf.DType, index_dtype: Any = None) -> Given:
    """The gradient in another dtype, and its indices too."""
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        indices = tf.cast(gradient.indices, index_dtype or gradient.indices.dtype)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    return gradient if gradient is None else tf.cast(gradient, dtype)


def widened(gradient: Given) -> Given:
    """The gradient in the dtype in which it is summed."""
    return gradient if gradient is None else cast(gradient, wide(gradient.dtype))


def scaled(gradient: Given, factor: Any) -> Given:
    """The gradient times a factor. Times 0 it is 0, even where the gradient is not finite.

    A mean over no tokens at all is 0 / 0, and so is its gradient; with weight 0 it must not count.
    """
    if isinstance(gradient, tf.IndexedSlices):
        values = scaled(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if gradient is None:
        return gradient
    return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))


def add(left: Gradient, right: Gradient) -> Gradient:
    """The sum of two gradients. It is sparse only if both are."""
    if left is None or right is None:
        return right if left is None else left
    if isinstance(left, tf.IndexedSlices) and isinstance(right, tf.IndexedSlices):
        return add_rows(left, right)
    return dense(left) + dense(right)


def add_rows(left: tf.IndexedSlices, right: tf.IndexedSlices) -> tf.IndexedSlices:
    """The rows of both. Rows that both have come twice."""
    return tf.IndexedSlices(
        tf.concat([left.values, right.values], 0),
        tf.concat([left.indices, right.indices], 0),
        left.dense_shape,
    )


def dense(gradient: Given) -> Given:
    """The gradient as a tensor."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    known = tf.get_static_value(gradient.dense_shape)
    rows = gradient.dense_shape[0] if known is None else known[0]
    return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, rows)


def merge_rows(gradient: Given) -> Given:
    """The gradient with each row of a table once, as the sum of its slices.

    Optimizers that do more than add (Adam, clipping) give another update for repeated rows.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    indices, positions = tf.unique(gradient.indices)
    # Not the size of `indices`, which TensorFlow 1.14 takes for 0 when it optimizes some graphs.
    count = tf.reduce_max(tf.concat([[-1], positions], 0)) + 1
    values = tf.math.unsorted_segment_sum(gradient.values, positions, count)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def products(lists: Sequence[Sequence[Gradient]]) -> Tensor:
    """The inner products of lists of gradients with each other, a float64 matrix."""
    return tf.stack([tf.stack([_product(left, right) for right in lists]) for left in lists])


def _product(left: Sequence[Gradient], right: Sequence[Gradient]) -> Tensor:
    pairs = [(a, b) for a, b in zip(left, right) if a is not None and b is not None]
    each = [tf.cast(_product_of(a, b), tf.float64) for a, b in pairs]
    return tf.add_n([tf.zeros([], tf.float64), *each])


def _product_of(left: Any, right: Any) -> Tensor:
    if left is not right or left.dtype.is_complex:
        both = [widened(dense(gradient)) for gradient in (left, right)]
        return tf.reduce_sum(tf.math.real(both[0] * tf.math.conj(both[1])))
    rows = widened(merge_rows(left))
    values = rows.values if isinstance(rows, tf.IndexedSlices) else rows
    return 2 * tf.nn.l2_loss(values)  # one pass over memory, without a temporary


def are_finite(gradients: Sequence[Gradient]) -> Any:
    """Whether every number in these gradients is finite, as a scalar tensor."""
    each = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    finite = [tf.reduce_all(tf.math.is_finite(values)) for values in each]
    return tf.reduce_all(tf.stack([tf.constant(True), *finite]))


def dense_bytes(gradients: Sequence[Gradient]) -> int:
    """How large the dense ones of these gradients are together."""
    dense_ones = [g for g in gradients if isinstance(g, tf.Tensor) and g.shape.is_fully_defined()]
    return sum(g.shape.num_elements() * g.dtype.size for g in dense_ones)


def start(gradient: Gradient, count: Any, may_be_dense: bool = True) -> Sum:
    """The empty sum of `count` gradients like this one, for a loop in a graph."""
    if not isinstance(gradient, tf.IndexedSlices):
        return None if gradient is None else tf.zeros(gradient.shape, wide(gradient.dtype))
    table, rows = gradient.shape, gradient.values.shape[0]
    is_known = may_be_dense and isinstance(count, int) and rows is not None
    if is_known and rows * count >= table[0]:
        # The batch touches as many rows as the table has: a dense sum is the smaller one.
        return tf.zeros(table, wide(gradient.dtype))
    values, indices = gradient.values, gradient.indices
    return Rows(
        tf.TensorArray(
            wide(values.dtype), count, element_shape=[None, *values.shape[1:]], infer_shape=False
        ),
        tf.TensorArray(indices.dtype, count, element_shape=[None], infer_shape=False),
    )


def first(total: Sum, gradient: Any) -> Sum:
    """`total` from `start`, with the gradient of the first micro-batch in it: nothing is added."""
    if isinstance(total, Rows):
        return push(total, gradient, 0)
    return None if total is None else tf.cast(dense(gradient), total.dtype)


def push(total: Sum, gradient: Any, index: Any) -> Sum:
    """`total` from `start`, with the gradient of the micro-batch with that index added."""
    if isinstance(total, Rows):
        rows = cast(merge_rows(gradient), total.values.dtype)
        return Rows(
            total.values.write(index, rows.values), total.indices.write(index, rows.indices)
        )
    return None if total is None else total + tf.cast(dense(gradient), total.dtype)


def finish(total: Sum, like: Any) -> Gradient:
    """The sum that `start` and `push` have made of gradients like this one."""
    if not isinstance(total, Rows):
        return total
    table = tf.constant(like.shape.as_list(), like.indices.dtype)
    return merge_rows(tf.IndexedSlices(total.values.concat(), total.indices.concat(), table))

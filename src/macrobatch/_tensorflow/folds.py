"""How the parts of micro-batches become those of the batch, in a loop of a graph.

A fold starts with nothing, takes what each micro-batch brings, and finishes: a sum, the latest
value, pooled moments, or all values one after the other.
"""

from typing import Any, Callable, List, NamedTuple

import tensorflow as tf

from macrobatch import _loop_checks
from macrobatch._tensorflow import graph, leaves, sums
from macrobatch._types import Run, Size, Tensor


class Fold(NamedTuple):
    """A fold over micro-batches.

    Attributes:
        start: nothing yet.
        first: start and the value of the first micro-batch -> the fold with that.
        push: the fold so far, the value of a micro-batch, its index -> the fold with that.
        finish: the fold of all -> the value of the batch.
    """

    start: Any
    first: Callable[[Any, Any], Any]
    push: Callable[[Any, Any, Size], Any]
    finish: Callable[[Any], Any]


def summed(like: Tensor, count: Size, may_be_dense: bool) -> Fold:
    """The sum of gradients or other values like this one."""
    return Fold(
        sums.start(like, count, may_be_dense),
        sums.first,
        sums.push,
        lambda total: sums.finish(total, like),
    )


def latest(like: Any) -> Fold:
    """The value of the last micro-batch, a nest."""
    zeros = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), like)
    return Fold(zeros, lambda _, value: value, lambda _, value, index: value, lambda value: value)


def carried(start: Tensor) -> Fold:
    """The value of a variable, from micro-batch to micro-batch."""

    def push(_: Tensor, value: Tensor, index: Size = 0) -> Tensor:
        # Keras 3.12's Precision has no shape after an update. A loop wants that of the start.
        value.set_shape(start.shape)
        return value

    return Fold(start, push, push, lambda value: value)


def pooled(like: Any) -> Fold:
    """Moments of all inputs, from those of each micro-batch."""
    return latest(like)._replace(push=lambda before, value, index: before.merged(value))


class All:
    """All values of a run of micro-batches, one after the other, as TensorArrays."""

    def __init__(self, run: Run, like: List[leaves.Pieces]):
        self._run, self._like = run, like
        self.start = [[self._array(part) for part in each.parts] for each in like]

    def _array(self, like: Tensor) -> tf.TensorArray:
        """Room for a value of each micro-batch of the run."""
        _loop_checks.aux_has_rank(like)
        shape = [None, *like.shape[1:]] if like.shape.rank else []
        size = self._run.count
        if graph.in_xla() and not isinstance(size, int):
            # It compiles the loop also for a tail that is empty, and writes to an array that must
            # not be.
            size = tf.maximum(size, 1)
        return tf.TensorArray(like.dtype, size, element_shape=shape, infer_shape=False)

    def push(self, arrays: Any, parts: Any, index: Size) -> Any:
        """The arrays with the parts of a micro-batch."""
        return tf.nest.map_structure(lambda array, part: array.write(index, part), arrays, parts)

    def finish(self, arrays: Any) -> Any:
        """The parts of the whole run."""
        parts = [each.parts for each in self._like]
        return tf.nest.map_structure(self._joined, arrays, parts)

    def _joined(self, array: tf.TensorArray, like: Tensor) -> Tensor:
        if like.shape.rank and not self._run.static:
            if like.shape[1:].is_fully_defined() or graph.in_xla():
                return array.concat()
            # On a replica without examples nothing tells the other sizes.
            nothing = tf.zeros([size or 0 for size in [0, *like.shape[1:]]], like.dtype)
            is_any = tf.convert_to_tensor(self._run.count > 0)
            return tf.cond(is_any, array.concat, lambda: nothing)
        # In XLA, where sizes are static, arrays can be stacked.
        values = array.stack()[: self._run.count]
        if not like.shape.rank:
            return values
        shape = tf.shape(values)
        return tf.reshape(values, tf.concat([shape[:1] * shape[1:2], shape[2:]], 0))

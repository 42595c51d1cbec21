"""The examples of all replicas, on each of them: in the order of the replicas, which is that of the
batch. On one replica there is nothing to do.
"""

from typing import Any, List

import tensorflow as tf

from macrobatch import _loop_checks
from macrobatch._tensorflow import leaves, replicas
from macrobatch._types import Size, Tensor


class Gathered:
    """Whose examples are whose.

    Attributes:
        examples: the number of examples of all replicas.
    """

    def __init__(self, examples: Size):
        """Asks all replicas for the number of their examples.

        Args:
            examples: the number of those of this replica.
        """
        self.examples, self._own, self._start = examples, examples, 0
        if replicas.in_several():
            sizes = _of_all_replicas(tf.convert_to_tensor([examples]))[:, 0]
            total = tf.reduce_sum(sizes)
            self.examples = int(total) if tf.executing_eagerly() else total
            self._start = tf.reduce_sum(sizes[: _replica()])

    def whole(self, nest: Any) -> Any:
        """A nest with the examples of all replicas first, from each replica's own."""
        if not replicas.in_several():
            return nest
        flat = tf.nest.flatten(nest)
        apart = [leaves.pieces(leaf) for leaf in flat if leaf is not None]
        # Scalars of a sparse tensor are one for each replica.
        parts = [part if part.shape.rank else part[None] for each in apart for part in each.parts]
        found = iter(_gathered(parts))
        joined = iter([leaves.joined(p.kind, [next(found) for _ in p.parts]) for p in apart])
        return tf.nest.pack_sequence_as(
            nest, [None if leaf is None else next(joined) for leaf in flat]
        )

    def own(self, nest: Any) -> Any:
        """The examples of this replica, in a nest with those of all."""
        if not replicas.in_several():
            return nest
        return tf.nest.map_structure(
            lambda leaf: (
                None if leaf is None else leaves.slice_of(leaf, self._start, self._own, False)
            ),
            nest,
        )


def _replica() -> Tensor:
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def _of_all_replicas(numbers: Tensor) -> Tensor:
    """Numbers that each replica has, one row for each."""
    place = tf.one_hot(_replica(), replicas.count(), dtype=tf.int64)
    (rows,) = replicas.sum_over_replicas([place[:, None] * tf.cast(numbers, tf.int64)[None]])
    return tf.cast(rows, tf.int32)


def _gathered(parts: List[Tensor]) -> List[Tensor]:
    """The rows of all replicas, one replica after the other.

    Each replica puts its rows where they belong among zeros, and the sum is what all have. To
    gather would take half of the bytes, but TensorFlow 2.21 crashes where it gathers from many who
    all have nothing.
    """
    if not parts:
        return []
    _loop_checks.can_be_gathered(parts)
    shapes = [tf.shape(part) for part in parts]
    # One row for each replica; a replica without examples may know sizes of 0 only.
    of_all = tf.split(_of_all_replicas(tf.concat(shapes, 0)), [p.shape.rank for p in parts], 1)
    placed = []
    for part, shape, sizes in zip(parts, shapes, of_all):
        before = tf.reduce_sum(sizes[: _replica(), 0])
        after = tf.reduce_sum(sizes[_replica() + 1 :, 0])
        missing = tf.reduce_max(sizes, 0)[1:] - shape[1:]
        amounts = tf.stack(
            [
                tf.concat([[before], tf.zeros_like(missing)], 0),
                tf.concat([[after], missing], 0),
            ],
            1,
        )
        placed.append(tf.pad(tf.cast(part, _sent_as(part.dtype)), amounts))
    found = []
    for part, rows in zip(parts, replicas.sum_over_replicas(placed)):
        rows = tf.cast(rows, part.dtype)
        rows.set_shape([None, *part.shape[1:]])
        found.append(rows)
    return found


def _sent_as(dtype: tf.DType) -> tf.DType:
    """A dtype that has room for the values of another one, and that collectives know."""
    if dtype.is_floating:
        return tf.float64 if dtype == tf.float64 else tf.float32
    return tf.int32 if dtype.size < 4 or dtype == tf.int32 else tf.int64

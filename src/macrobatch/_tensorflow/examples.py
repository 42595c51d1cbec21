"""The examples of a batch that is there, on whichever replicas they are, and batches of some."""

from typing import Any, List, Optional, Sequence

import tensorflow as tf

from macrobatch._tensorflow import graph, leaves, replicas
from macrobatch._types import Batch


class Examples:
    """The examples of a batch by their places in it: those of the first replica come first.

    Attributes:
        count: how many there are, on all replicas of all workers.
    """

    def __init__(self, batch: Batch, strategy: Any):
        self._strategy = strategy
        self._parts = [graph.to_tensors(part) for part in replicas.parts_of_batch(strategy, batch)]
        self._replicas = _local_replicas(strategy)[: len(self._parts)]
        sizes = _of_all(strategy, self._replicas, [_size(part) for part in self._parts])
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._sizes, self.count = sizes, sum(sizes)

    def some(
        self, chosen: Sequence[int], as_many: bool = False, beside: Sequence[int] = ()
    ) -> Batch:
        """A batch of these examples only, each on its replica.

        Args:
            chosen: their places, in ascending order.
            as_many: whether a replica that has any of them gets as many examples as before, so
                that no shape changes. Not of sparse tensors.
            beside: the examples that a replica is filled up with; if it has none of them, the same
                ones again.
        """
        parts = []
        for part, replica in zip(self._parts, self._replicas):
            rows = self._rows(chosen, replica)
            if as_many and rows and not _is_sparse(part):
                size, others = self._sizes[replica], self._rows(beside, replica) or rows
                rows = sorted([*rows, *others * size][:size])
            parts.append(_selected(part, rows))
        return self._joined(parts)

    def _joined(self, parts: List[Batch]) -> Batch:
        """The batch of which the replicas of this process have these parts."""
        if len(parts) == 1 and not replicas.has_several_workers(self._strategy):
            return parts[0]
        places = {replica: place for place, replica in enumerate(self._replicas)}

        def joined(*leaves: Any) -> Any:
            if not _is_leaf(leaves[0]):
                return leaves[0]
            return self._strategy.experimental_distribute_values_from_function(
                lambda context: leaves[places[context.replica_id_in_sync_group]]
            )

        return tf.nest.map_structure(joined, *parts)

    def alone(self, example: int) -> Optional[Batch]:
        """One example as a batch; None if another process has it."""
        for part, replica in zip(self._parts, self._replicas):
            rows = self._rows([example], replica)
            if rows:
                return _selected(part, rows)
        return None

    def _rows(self, chosen: Sequence[int], replica: int) -> List[int]:
        start, size = self._starts[replica], self._sizes[replica]
        return [place - start for place in chosen if start <= place < start + size]


def _is_leaf(leaf: Any) -> bool:
    """Whether examples lie in it. Keras has an Optional where a batch has None."""
    return leaf is not None and not isinstance(leaf, tf.experimental.Optional)


def _is_sparse(part: Batch) -> bool:
    return any(isinstance(leaf, tf.SparseTensor) for leaf in tf.nest.flatten(part))


def _selected(part: Batch, rows: List[int]) -> Batch:
    return tf.nest.map_structure(
        lambda leaf: leaves.selected(leaf, rows) if _is_leaf(leaf) else leaf, part
    )


def _size(part: Batch) -> int:
    return int(leaves.examples_of(next(filter(_is_leaf, tf.nest.flatten(part)))))


def _local_replicas(strategy: Any) -> List[int]:
    """Which of all replicas are in this process."""
    if strategy is None:
        return [0]
    found: List[int] = []

    def note(context: Any) -> Any:
        found.append(int(context.replica_id_in_sync_group))
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    return found


def _of_all(strategy: Any, local: List[int], own: List[int]) -> List[int]:
    """The numbers of all replicas, of which this process has some."""
    if not replicas.has_several_workers(strategy):
        return own
    numbers = dict(zip(local, own))

    def mine(context: Any) -> Any:
        replica = context.replica_id_in_sync_group
        return tf.one_hot(replica, strategy.num_replicas_in_sync, float(numbers[replica]), 0.0)

    rows = strategy.experimental_distribute_values_from_function(mine)
    return [int(number) for number in strategy.reduce("SUM", rows, axis=None).numpy()]

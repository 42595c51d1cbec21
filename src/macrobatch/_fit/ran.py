"""How many batches and micro-batches there were in training, where anybody wants to know."""

from typing import Any, List

import tensorflow as tf

from macrobatch._tensorflow import replicas
from macrobatch._types import Size


class Ran:
    """Counts of one model. Nothing is added to a graph unless they were started before."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self.variable: Any = None  # batches on each replica, and micro-batches

    def start(self) -> None:
        """Counts what is traced from now on."""
        if self.variable is None:
            self.variable = replicas.variable(self._strategy, [2], tf.int64, "ran")

    def add(self, micro_batches: Size) -> None:
        """Counts a batch. In a replica, its part."""
        if self.variable is not None:
            self.variable.assign_add(tf.cast(tf.stack([1, micro_batches]), tf.int64))

    def now(self) -> List[Any]:
        """The counts so far, of each replica."""
        if self.variable is None:
            return []
        return [part.read_value() for part in replicas.parts(self._strategy, self.variable)]

    def put_back(self, counts: List[Any]) -> None:
        """Lets the counts be as they were, before a batch is run again."""
        if counts:
            for part, value in zip(replicas.parts(self._strategy, self.variable), counts):
                part.assign(value)

    def totals(self) -> Any:
        """Batches and micro-batches so far, over all replicas of this process."""
        count = 1 if self._strategy is None else self._strategy.num_replicas_in_sync
        parts = replicas.parts(self._strategy, self.variable)
        batches, micro_batches = (sum(int(part[i]) for part in parts) for i in range(2))
        return batches // min(count, len(parts)), micro_batches

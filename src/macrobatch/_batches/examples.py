"""The examples of a batch that is there, and batches of some of them. For batches of one device, or
of several that share one batch.
"""

from typing import List, Sequence

from keras import ops, tree

from macrobatch._engine import BatchEngine
from macrobatch._types import Batch


class Examples:
    """The examples of a batch by their places in it.

    Attributes:
        count: how many there are.
    """

    def __init__(self, batch: Batch, engine: BatchEngine):
        self._batch, self._engine = batch, engine
        self.count = int(engine.examples(batch))

    def some(
        self, chosen: Sequence[int], as_many: bool = False, beside: Sequence[int] = ()
    ) -> Batch:
        """A batch of these examples only.

        Args:
            chosen: their places, in ascending order.
            as_many: whether the batch gets as many examples as before, so that no shape changes.
            beside: the examples that it is filled up with; if there are none, the same ones again.
        """
        rows: List[int] = list(chosen)
        if as_many:
            rows = sorted([*rows, *list(beside or chosen) * self.count][: self.count])
        with self._engine.on_host():
            order = ops.convert_to_tensor(rows, "int32")
        return tree.map_structure(
            lambda leaf: None if leaf is None else self._engine.permuted(leaf, order), self._batch
        )

    def alone(self, example: int) -> Batch:
        """One example as a batch."""
        return self.some([example])

"""A size of micro-batches in a variable, so that another size needs no other graph."""

from typing import Any

import tensorflow as tf

from macrobatch._tensorflow import graph, replicas
from macrobatch._types import Size


class ChosenSize:
    """The size that all replicas cut their part of the batch by: see _batches.cut.Chosen.

    Attributes:
        in_tokens: whether it is examples times the longest of them, and not examples.
        current: the size of now.
    """

    def __init__(self, strategy: Any, in_tokens: bool = False):
        self.in_tokens, self.current = in_tokens, 1
        self._variable = replicas.variable(strategy, [], tf.int32, "micro_batch_size", summed=False)
        self._variable.assign(1)

    def set(self, size: int) -> None:
        """Lets the next batch be cut by another size."""
        if size != self.current:
            self._variable.assign(size)
            self.current = size

    def now(self) -> Size:
        """The size of now: in a graph, a tensor."""
        # To a compiler, sizes are constants: there is a graph for each.
        if tf.executing_eagerly() or graph.in_xla():
            return self.current
        return replicas.read(self._variable)

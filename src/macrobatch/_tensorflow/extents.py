"""Batches that are there, in Python: how large they are, and some of their examples."""

import math
from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from macrobatch._tensorflow import graph, leaves, replicas
from macrobatch._types import Batch


class Measured(NamedTuple):
    """How large a batch is.

    Attributes:
        whole: the size that takes all of it at once, on the replica that has the most.
        extent: how much one example is.
    """

    whole: int
    extent: float


class Batches:
    """The batches of one model, as the replicas of this process get them."""

    def __init__(self, strategy: Any, axis: Optional[int], in_tokens: bool):
        self._strategy, self._axis, self._in_tokens = strategy, axis, in_tokens

    def parts(self, batch: Batch) -> List[Batch]:
        """The parts of the replicas."""
        kind = tf.experimental.Optional  # which stands for None in batches of datasets
        there = tf.nest.map_structure(lambda x: None if isinstance(x, kind) else x, batch)
        return replicas.parts_of_batch(self._strategy, there)

    def measured(self, batch: Batch) -> Measured:
        """How large a batch is."""
        found = [self._measured(part) for part in self.parts(batch)]
        return Measured(max(each.whole for each in found), max(each.extent for each in found))

    def _measured(self, part: Batch) -> Measured:
        there = [leaf for leaf in tf.nest.flatten(part) if leaf is not None]
        examples = max([1, *(int(leaves.examples_of(leaf)) for leaf in there)])
        if self._in_tokens:
            length = self._length(part)
            return Measured(examples * length, length)
        dense = tf.nest.flatten(part, expand_composites=True)
        elements = sum(math.prod(leaf.shape) for leaf in dense if leaf is not None)
        return Measured(examples, elements / examples)

    def rows(self, batch: Batch, size: int) -> Batch:
        """Two micro-batches of a size, so that sums are in memory beside gradients."""
        part = max(self.parts(batch), key=lambda part: self._measured(part).whole)
        if self._in_tokens:
            size = max(1, size // self._length(part))

        def rows(leaf: Any) -> Any:
            if leaf is None or isinstance(leaf, tf.SparseTensor):
                return None if leaf is None else leaves.slice_of(leaf, 0, 2 * size, static=False)
            return tf.gather(leaf, tf.range(2 * size) % tf.maximum(leaves.examples_of(leaf), 1))

        return tf.nest.map_structure(rows, graph.to_tensors(part))

    def _length(self, part: Batch) -> int:
        axis = self._axis
        assert axis is not None
        there = [leaf for leaf in tf.nest.flatten(part) if leaf is not None]
        return max([1, *(leaves.length_of(leaf, axis) for leaf in there if len(leaf.shape) > axis)])

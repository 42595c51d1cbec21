"""A predict step that cuts its batch into micro-batches: the predictions of the whole batch, in its
order.
"""

from typing import Any, List, Optional

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches import in_order, predicted
from macrobatch._batches.cut import Cut
from macrobatch._tensorflow import graph, replicas
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._types import Batch, How, Part, Size, Tensor


def predictions(model: Any, cut: Cut, data: Any) -> Any:
    """What a model predicts for a batch; in a replica, for its part of the batch.

    Micro-batches are in the order of the batch, by length or not: nothing is cut off examples.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    x = graph.to_tensors(x)
    several = replicas.in_several()
    size = _size(cut, x)
    x, examples = in_order.checked(x, ENGINE, may_be_empty=several)
    micro_batches = in_order.InOrder(x, examples, size, ENGINE)
    if not all(layer.built for layer in _internals.layers_of(model)):
        # Variables are made here, and not in a loop.
        _internals.predictions(model, micro_batches.first(), False)

    def step(micro_batch: Batch, values: Any, counts: Optional[Tensor], how: How) -> Part:
        found = _internals.predictions(model, micro_batch, False)
        _check_rows(found, ENGINE.examples(micro_batch))
        return Part([], [], [], [], (), found)

    found = Loop(step, micro_batches, apart=True).run().aux
    leaves = [leaf for leaf in tf.nest.flatten(found) if isinstance(leaf, tf.Tensor)]
    whole = [
        (tf.equal(tf.shape(leaf)[0], examples), predicted.not_first(leaf.shape)) for leaf in leaves
    ]
    with graph.refuse_unless(*whole):
        return tf.nest.map_structure(tf.identity, found)


def _size(cut: Cut, x: Any) -> Size:
    """Examples in a micro-batch."""
    size, tokens = cut.now()
    if size is not None:
        return size
    assert tokens is not None
    assert cut.axis is not None
    leaves = [leaf for leaf in tf.nest.flatten(x) if len(leaf.shape) > cut.axis]
    lengths: List[Any] = [leaf.shape[cut.axis] for leaf in leaves]
    if isinstance(tokens, int) and all(isinstance(length, int) for length in lengths):
        return max(1, tokens // max([1, *lengths]))
    longest = tf.reduce_max([1, *(tf.shape(leaf)[cut.axis] for leaf in leaves)])
    return tf.maximum(1, tf.cast(tokens, tf.int32) // longest)


def _check_rows(found: Any, examples: Size) -> None:
    """Raises for predictions that are not one for each example: they cannot be put together."""
    for leaf in tf.nest.flatten(found):
        shape = leaf.shape
        rows = shape[0] if shape.rank else 0
        is_known = shape.rank is not None and rows is not None and isinstance(examples, int)
        if shape.rank == 0 or (is_known and rows != examples):
            raise ValueError(predicted.not_first(shape))

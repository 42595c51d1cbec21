"""The first batch of what `fit` takes, as `fit` would have it."""

from typing import Any, Optional

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches import in_order
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch


def first_batch(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Batch:
    """The first batch as `fit` would have it: x, y and sample_weight, as tensors."""
    if not options:
        leaves = [leaf for leaf in tf.nest.flatten(x) if hasattr(leaf, "shape")]
        # Arrays are one batch, and all of it.
        sizes = [leaf.shape[0] for leaf in leaves if len(leaf.shape)]
        options = {"batch_size": int(sizes[0])} if sizes else {}
    data = _internals.data_of_fit(x, y=y, sample_weight=sample_weight, **options)
    found = next(iter(data.get_tf_dataset()), None)
    if found is None:
        raise ValueError("There must be a batch to try. Received: data without any.")
    batch = keras.utils.unpack_x_y_sample_weight(found)
    return in_order.checked(batch, ENGINE)[0]


def steps_of(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Optional[int]:
    """The number of batches in an epoch, if it is known."""
    data = _internals.data_of_fit(x, y=y, sample_weight=sample_weight, **options)
    return data.num_batches or None

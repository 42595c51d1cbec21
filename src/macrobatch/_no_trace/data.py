"""The first batch of what `fit` takes, as `fit` would have it."""

from typing import Any, Optional

from keras import tree

from macrobatch import _backends, _internals
from macrobatch._batches import in_order
from macrobatch._types import Batch


def first_batch(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Batch:
    """The first batch as `fit` would have it: x, y and sample_weight, as tensors."""
    if not options:
        leaves = [leaf for leaf in tree.flatten(x) if hasattr(leaf, "shape")]
        # Arrays are one batch, and all of it.
        sizes = [leaf.shape[0] for leaf in leaves if len(leaf.shape)]
        options = {"batch_size": int(sizes[0])} if sizes else {}
    data = _internals.data_of_fit(x, y=y, sample_weight=sample_weight, **options)
    trials = _backends.trials()
    batch = trials.first_batch(data)
    if batch is None:
        raise ValueError("There must be a batch to try. Received: data without any.")
    return in_order.checked(batch, trials.engine)[0]


def steps_of(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Optional[int]:
    """The number of batches in an epoch, if it is known."""
    data = _internals.data_of_fit(x, y=y, sample_weight=sample_weight, **options)
    return data.num_batches or None

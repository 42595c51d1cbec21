"""A Sequential without an Input is built for sequences of any length. Keras builds it for those of
the first batch, so that it would take no others.
"""

import contextlib
from typing import Any, List

import keras

from macrobatch import _internals


def open_along(model: Any, x: Any, axis: int) -> None:
    """Builds a Sequential for inputs like x, of any length along an axis, if it can be."""
    shape: List[Any] = [None, *getattr(x, "shape", ())[1:]]
    if axis < len(shape):
        shape[axis] = None
        # Some have a Dense behind a Flatten: Keras builds them for one length.
        with contextlib.suppress(Exception):
            _internals.build_sequential(model, tuple(shape))


class BuildsOpen:
    """What builds one model before Keras does, for engines that have a batch in hand.

    Attributes:
        model, cut: what the user gave.
    """

    model: Any
    cut: Any

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """As Keras', which makes all that is missing then."""
        model = self.model
        if isinstance(model, keras.Sequential) and not model.built:
            if data_batch is None:
                data_batch = _internals.batch_to_build_with(iterator)
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data_batch)
            open_along(model, x, self.cut.axis)
        own = getattr(type(model), _internals.BUILDING_AT_ONCE)
        own(model, iterator=iterator, data_batch=data_batch)

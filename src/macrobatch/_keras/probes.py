"""How this version of Keras computes: what differs between versions is tried, once."""

import functools

import keras
from keras import ops


def probe() -> None:
    """Finds out how this Keras computes, while nothing is being traced."""
    activity_losses_are_means()
    mask_padding()


@functools.lru_cache(maxsize=None)
def activity_losses_are_means() -> bool:
    """Whether Keras divides activity regularisers by the batch size, as it does since 3.14."""
    with keras.StatelessScope(collect_losses=True) as scope:
        keras.layers.ActivityRegularization(l1=1.0, name="probe")(ops.ones([2, 1]))
        return float(scope.losses[0]) == 1.0


@functools.lru_cache(maxsize=None)
def _pads_masks() -> bool:
    # An epsilon of 1 shows in any dtype. Some backends have no float64.
    before = keras.config.epsilon()
    keras.config.set_epsilon(1.0)
    try:
        masked = keras.layers.Masking(name="probe")(ops.ones([1, 2, 1]))
        loss = keras.losses.MeanAbsoluteError()
        return float(loss(ops.zeros([1, 2, 1]), masked)) != 1.0
    finally:
        keras.config.set_epsilon(before)


def mask_padding() -> float:
    """What Keras adds to the number of unmasked elements: an epsilon, up to 3.12."""
    return float(keras.config.epsilon()) if _pads_masks() else 0.0

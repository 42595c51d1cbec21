"""BatchNormalization: moving statistics as if the batch had been whole.

Each micro-batch brings the moments it was normalised by. Pooled by the law of total variance they
are the moments of the whole batch, and move the statistics once per update, not K times.
"""

import contextlib
import threading
from typing import Any, Dict, Iterator, List, NamedTuple

import keras
import tensorflow as tf

from macrobatch._tensorflow import replicas as _replicas


class Moments(NamedTuple):
    """Count, mean and variance of a layer's inputs, per channel."""

    count: Any
    mean: Any
    variance: Any


class Call(NamedTuple):
    """A call of a layer in training: the moments of its inputs, and whether they had a mask."""

    moments: Moments
    masked: bool


# For each layer, its calls in the order in which they were made.
Calls = Dict[Any, List[Call]]

# `_moments` is private, and the one place where the moments are at hand to full precision: from the
# updated moving statistics they come back with most digits lost.
_plain_moments = keras.layers.BatchNormalization._moments

_recording = threading.local()
_patching = threading.Lock()
_recorders = 0


@contextlib.contextmanager
def recorded(alone: bool = False) -> Iterator[Calls]:
    """Records the moments that layers compute when this thread calls them in training.

    If `alone`, layers with synchronized=True do not meet those of other replicas: in a function
    that a replica traces they cannot.
    """
    global _recorders
    before, _recording.calls = getattr(_recording, "calls", None), {}
    before_alone, _recording.alone = getattr(_recording, "alone", False), alone
    with _patching:
        _recorders += 1
        keras.layers.BatchNormalization._moments = _recording_moments
    try:
        yield _recording.calls
    finally:
        _recording.calls, _recording.alone = before, before_alone
        with _patching:
            _recorders -= 1
            if _recorders == 0:
                keras.layers.BatchNormalization._moments = _plain_moments


def _recording_moments(layer: Any, inputs: Any, mask: Any) -> Any:
    # Replicas trace one at a time up to where they meet, which they do not in here.
    synchronized = layer.synchronized
    layer.synchronized = synchronized and not getattr(_recording, "alone", False)
    try:
        mean, variance = _plain_moments(layer, inputs, mask)
    finally:
        layer.synchronized = synchronized
    calls = getattr(_recording, "calls", None)
    if calls is not None:
        calls.setdefault(layer, []).append(_call(layer, inputs, mask, mean, variance))
    return mean, variance


def _call(layer: Any, inputs: Any, mask: Any, mean: Any, variance: Any) -> Call:
    if mask is None:
        count = tf.cast(tf.size(inputs) // tf.shape(inputs)[layer.axis], mean.dtype)
        return Call(Moments(count, mean, variance), masked=False)
    count = tf.reduce_sum(tf.cast(mask, mean.dtype))
    bias = _masked_bias(count)
    return Call(Moments(count, mean * bias, variance * bias), masked=True)


def can_pool(layer: Any, calls: List[Call]) -> bool:
    """Whether one update with pooled moments is what the whole batch would have made."""
    # Renormalisation uses the moving statistics themselves; a layer that is called twice makes two
    # updates, the second with the statistics of the first.
    return len(calls) == 1 and not getattr(layer, "renorm", False)


def _masked_bias(count: Any) -> Any:
    # Keras divides masked sums by the count plus an epsilon.
    return tf.math.divide_no_nan(count + keras.config.epsilon(), count)


def nothing(layer: Any) -> Moments:
    """The moments of no inputs at all."""
    zeros = tf.zeros(layer.moving_mean.shape, _compute_dtype(layer))
    return Moments(tf.zeros([], zeros.dtype), zeros, zeros)


def _compute_dtype(layer: Any) -> Any:
    return tf.float64 if layer.compute_dtype == "float64" else tf.float32


def pooled(left: Moments, right: Moments) -> Moments:
    """The moments of two sets of inputs together (Chan, Golub and LeVeque, 1979)."""
    count = left.count + right.count
    portion = tf.math.divide_no_nan(right.count, count)
    difference = right.mean - left.mean
    within = left.variance * (1 - portion) + right.variance * portion
    between = tf.square(difference) * portion * (1 - portion)
    return Moments(count, left.mean + difference * portion, within + between)


def over_replicas(moments: List[Moments]) -> List[Moments]:
    """The moments of the inputs of all replicas, of which one may have had none."""
    if not _replicas.in_several() or not moments:
        return moments
    counts = [each.count for each in moments]
    sums = [each.count * each.mean for each in moments]
    totals = _replicas.total([*counts, *sums])  # of all layers at once
    counts, sums = totals[: len(moments)], totals[len(moments) :]
    means = [tf.math.divide_no_nan(*pair) for pair in zip(sums, counts)]
    squares = [
        tf.math.multiply_no_nan(own.variance + tf.square(own.mean - mean), own.count)
        for own, mean in zip(moments, means)
    ]
    variances = [tf.math.divide_no_nan(*p) for p in zip(_replicas.total(squares), counts)]
    return [Moments(*each) for each in zip(counts, means, variances)]


def statistics(layer: Any) -> List[Any]:
    """The variables that one update with pooled moments writes."""
    return [layer.moving_mean, layer.moving_variance]


def update(layer: Any, moments: Moments, masked: bool) -> None:
    """Moves the statistics of a layer, once, towards these moments."""
    bias = 1.0 / _masked_bias(moments.count) if masked else 1.0
    for moving, batch in zip(statistics(layer), (moments.mean, moments.variance)):
        batch = tf.cast(batch * bias, moving.dtype)
        moving.assign(moving * layer.momentum + batch * (1.0 - layer.momentum))

"""BatchNormalization: moving statistics as if the batch had been whole.

Each micro-batch brings the moments it was normalised by. Pooled by the law of total variance they
are the moments of the whole batch, and move the statistics once per update, not K times.
"""

import contextlib
import functools
from typing import Any, Iterator, List, NamedTuple, Sequence

import keras
import tensorflow as tf


class Moments(NamedTuple):
    """Count, mean and variance of a layer's inputs, per channel."""

    count: Any
    mean: Any
    variance: Any


class Call(NamedTuple):
    """A call of a layer in training: the moments of its inputs, and whether they had a mask."""

    moments: Moments
    masked: bool


def among(layers: Sequence[Any]) -> List[Any]:
    """The BatchNormalization layers among these."""
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


@contextlib.contextmanager
def recorded(layers: Sequence[Any]) -> Iterator[List[List[Call]]]:
    """Records, for each of the layers, the moments that it computes when called in training."""
    records: List[List[Call]] = [[] for _ in layers]
    # `_moments` is private, and the one place where the moments are at hand to full precision:
    # from the updated moving statistics they come back with most digits lost.
    for layer, record in zip(layers, records):
        vars(layer)["_moments"] = functools.partial(_moments, layer, record)
    try:
        yield records
    finally:
        for layer in layers:
            vars(layer).pop("_moments", None)


def _moments(layer: Any, calls: List[Call], inputs: Any, mask: Any) -> Any:
    mean, variance = type(layer)._moments(layer, inputs, mask)
    if mask is None:
        count = tf.cast(tf.size(inputs) // tf.shape(inputs)[layer.axis], mean.dtype)
        calls.append(Call(Moments(count, mean, variance), masked=False))
    else:
        count = tf.reduce_sum(tf.cast(mask, mean.dtype))
        bias = _masked_bias(count)
        calls.append(Call(Moments(count, mean * bias, variance * bias), masked=True))
    return mean, variance


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


def statistics(layer: Any) -> List[Any]:
    """The variables that one update with pooled moments writes."""
    return [layer.moving_mean, layer.moving_variance]


def update(layer: Any, moments: Moments, masked: bool) -> None:
    """Moves the statistics of a layer, once, towards these moments."""
    bias = 1.0 / _masked_bias(moments.count) if masked else 1.0
    for moving, batch in zip(statistics(layer), (moments.mean, moments.variance)):
        batch = tf.cast(batch * bias, moving.dtype)
        moving.assign(moving * layer.momentum + batch * (1.0 - layer.momentum))

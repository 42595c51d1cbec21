"""BatchNormalization: moving statistics as if the batch had been whole.

Each micro-batch brings the moments it was normalised by. Pooled by the law of total variance they
are the moments of the whole batch, and move the statistics once per update, not K times.
"""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence

import keras
from keras import ops

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._types import Tensor, Variable


class Moments(NamedTuple):
    """Count, mean and variance of a layer's inputs, per channel."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def merged(self, other: "Moments") -> "Moments":
        """The moments of two sets of inputs together (Chan, Golub and LeVeque, 1979)."""
        count = self.count + other.count
        portion = ops.divide_no_nan(other.count, count)
        difference = other.mean - self.mean
        within = self.variance * (1 - portion) + other.variance * portion
        between = ops.square(difference) * portion * (1 - portion)
        return Moments(count, self.mean + difference * portion, within + between)


class Call(NamedTuple):
    """A call of a layer in training: the moments of its inputs, and whether they had a mask."""

    moments: Moments
    masked: bool


# For each layer, its calls in the order in which they were made.
Calls = Dict[Any, List[Call]]


@contextlib.contextmanager
def recorded(alone: bool = False) -> Iterator[Calls]:
    """Records the moments that layers compute when this thread calls them in training.

    If `alone`, layers with synchronized=True do not meet those of other replicas: in a function
    that a replica traces they cannot.
    """
    calls_of: Calls = {}

    def recording(plain: Any, layer: Any, inputs: Tensor, mask: Any) -> Any:
        # Replicas trace one at a time up to where they meet, which they do not in here.
        synchronized = layer.synchronized
        layer.synchronized = synchronized and not alone
        try:
            mean, variance = _moments(plain, layer, inputs, mask)
        finally:
            layer.synchronized = synchronized
        call = _call(layer, inputs, mask, mean, variance)
        calls_of.setdefault(layer, []).append(call)
        return mean, variance

    with _internals.with_moments(recording):
        yield calls_of


_local = threading.local()


def _moments(plain: Any, layer: Any, inputs: Tensor, mask: Any) -> Any:
    """What a layer computes; inside of `frozen`, what it computed in the first run."""
    seen = getattr(_local, "frozen", None)
    if seen is None:
        return plain(layer, inputs, mask)
    first, places, is_first = seen
    place = places.get(layer, 0)
    places[layer] = place + 1
    if place == len(first.setdefault(layer, [])):
        first[layer].append(plain(layer, inputs, mask))
    elif is_first is not None:
        pairs = zip(plain(layer, inputs, mask), first[layer][place])
        first[layer][place] = tuple(ops.where(is_first, *pair) for pair in pairs)
    return first[layer][place]


@contextlib.contextmanager
def frozen() -> Iterator[Callable[[], None]]:
    """Lets layers that this thread calls normalise by the moments of the first of several runs.

    Yields:
        a function to be called before each run.
    """
    first: Dict[Any, List[Any]] = {}
    before = getattr(_local, "frozen", None)

    def next_run() -> None:
        _local.frozen = first, {}, None

    next_run()
    try:
        with _internals.with_moments(_moments):
            yield next_run
    finally:
        _local.frozen = before


@contextlib.contextmanager
def frozen_at(moments: Dict[Any, List[Any]], is_first: Any) -> Iterator[None]:
    """Lets layers that this thread calls normalise by given moments, in a run that is compiled.

    Args:
        moments: for each layer, those of its calls in the first run. Added to where there are none.
        is_first: whether this is the first run, which has its own. They replace those given.
    """
    before = getattr(_local, "frozen", None)
    _local.frozen = moments, {}, is_first
    try:
        yield
    finally:
        _local.frozen = before


def _call(layer: Any, inputs: Tensor, mask: Any, mean: Tensor, variance: Tensor) -> Call:
    if mask is None:
        sizes = ops.convert_to_tensor(ops.shape(inputs), "int32")
        count = ops.cast(ops.prod(sizes) // sizes[layer.axis], mean.dtype)
        return Call(Moments(count, mean, variance), masked=False)
    count = ops.sum(ops.cast(mask, mean.dtype))
    bias = _masked_bias(count)
    return Call(Moments(count, mean * bias, variance * bias), masked=True)


def can_pool(layer: Any, calls: List[Call]) -> bool:
    """Whether one update with pooled moments is what the whole batch would have made."""
    # Renormalisation uses the moving statistics themselves; a layer that is called twice makes two
    # updates, the second with the statistics of the first.
    return len(calls) == 1 and not getattr(layer, "renorm", False)


def _masked_bias(count: Tensor) -> Tensor:
    # Keras divides masked sums by the count plus an epsilon.
    return ops.divide_no_nan(count + keras.config.epsilon(), count)


def nothing(layer: Any) -> Moments:
    """The moments of no inputs at all."""
    dtype = "float64" if layer.compute_dtype == "float64" else "float32"
    zeros = ops.zeros(layer.moving_mean.shape, dtype)
    return Moments(ops.zeros([], dtype), zeros, zeros)


def over_replicas(moments: Sequence[Moments], engine: Engine) -> Sequence[Moments]:
    """The moments of the inputs of all replicas, of which one may have had none."""
    if engine.replicas() == 1 or not moments:
        return moments
    counts = [each.count for each in moments]
    sums = [each.count * each.mean for each in moments]
    totals = engine.sum_over_replicas([*counts, *sums])  # of all layers at once
    counts, sums = totals[: len(moments)], totals[len(moments) :]
    means = [ops.divide_no_nan(*pair) for pair in zip(sums, counts)]
    squares = [
        _times_count(own.variance + ops.square(own.mean - mean), own.count)
        for own, mean in zip(moments, means)
    ]
    variances = [ops.divide_no_nan(*p) for p in zip(engine.sum_over_replicas(squares), counts)]
    return [Moments(*each) for each in zip(counts, means, variances)]


def _times_count(value: Tensor, count: Tensor) -> Tensor:
    """value * count, and 0 where the count is 0, whatever the value is."""
    return ops.where(count > 0, value, ops.zeros_like(value)) * count


def statistics(layer: Any) -> List[Variable]:
    """The variables that one update with pooled moments writes."""
    return [layer.moving_mean, layer.moving_variance]


def update(layer: Any, moments: Moments, masked: bool) -> None:
    """Moves the statistics of a layer, once, towards these moments."""
    bias = moments.count / (moments.count + keras.config.epsilon()) if masked else 1.0
    for moving, batch in zip(statistics(layer), (moments.mean, moments.variance)):
        batch = ops.cast(batch * bias, moving.dtype)
        moving.assign(moving * layer.momentum + batch * (1.0 - layer.momentum))

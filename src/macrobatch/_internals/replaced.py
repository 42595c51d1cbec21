"""Private functions of Keras and TensorFlow that are replaced for a while."""

import contextlib
import functools
import sys
from typing import Any, Callable, Iterator

from macrobatch._internals.patch import Patch


def _module_of(name: str) -> Callable[[], Any]:
    """The module in which a public class of Keras is defined."""

    def place() -> Any:
        import keras

        found = functools.reduce(getattr, name.split("."), keras)
        return sys.modules[found.__module__]

    return place


def _batch_normalization() -> Any:
    import keras

    return keras.layers.BatchNormalization


def _resource_variable() -> Any:
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    return ResourceVariable


def _operation() -> Any:
    import keras

    return keras.Operation


def _random_of_backend() -> Any:
    from keras.src.backend import random

    return random


# Keras divides each mean by the number of replicas, so that the sum over replicas is a mean of
# means. Here each mean has a share of its own. All of Keras divides with this function, also an
# overridden compute_loss.
without_replica_scaling = Patch(
    _module_of("losses.Loss"),
    "scale_loss_for_distribution",
    lambda divide, entered, value: value,
)

# Where Keras reports a loss, it undoes that division.
without_replica_unscaling = Patch(
    _module_of("losses.Loss"),
    "unscale_loss_for_distribution",
    lambda multiply, entered, value: value,
)

# All dropout layers draw with this function of the backend. The context is entered with what is
# called instead.
with_dropout = Patch(
    _random_of_backend,
    "dropout",
    lambda drop, instead, *args, **kwargs: instead(drop, *args, **kwargs),
)

# Metrics take the mean over the positions of each example with this function. The context is
# entered with what is called instead.
with_samplewise_values = Patch(
    _module_of("metrics.Mean"),
    "reduce_to_samplewise_values",
    lambda reduce, instead, *args, **kwargs: instead(reduce, *args, **kwargs),
)

# The one place where the moments of a BatchNormalization layer are at hand to full precision. From
# the updated moving statistics they come back with most digits lost.
with_moments = Patch(
    _batch_normalization,
    "_moments",
    lambda moments, instead, *args, **kwargs: instead(moments, *args, **kwargs),
)

# Layers, and operations in functional models, all run by this method: Layer.__call__ calls it too.
# `Operation` is public, and there is no way to be told of its calls. The context is entered with
# what is called instead.
with_calls = Patch(
    _operation,
    "__call__",
    lambda call, instead, *args, **kwargs: instead(call, *args, **kwargs),
)

# The methods that write a variable of TensorFlow. Nothing else tells that one is written.
_WRITES = ("assign", "assign_add", "assign_sub", "scatter_update", "scatter_nd_update")
_writes = [
    Patch(
        _resource_variable,
        name,
        lambda write, instead, *args, **kwargs: instead(write, *args, **kwargs),
    )
    for name in _WRITES
]


@contextlib.contextmanager
def with_writes(instead: Callable[..., Any]) -> Iterator[None]:
    """Calls a function instead of each method that writes a variable of TensorFlow."""
    with contextlib.ExitStack() as stack:
        for patch in _writes:
            stack.enter_context(patch(instead))
        yield


# All random layers, and keras.random, draw with these functions of the backend. All but the last
# take a shape first. The context is entered with what is called instead.
with_draws = {
    name: Patch(
        _random_of_backend,
        name,
        lambda draw, instead, *args, **kwargs: instead(draw, *args, **kwargs),
    )
    for name in (
        *("normal", "uniform", "truncated_normal", "randint"),
        *("gamma", "binomial", "beta", "categorical"),
    )
}

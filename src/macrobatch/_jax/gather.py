"""The examples of all devices, on each of them: in the order of the devices, which is that of the
batch. On one device there is nothing to do.
"""

from typing import Any, List, Sequence

import jax
from jax import lax

from macrobatch._jax.engine import ENGINE, own_seeds, this_device
from macrobatch._keras.scope import is_seed
from macrobatch._types import Tensor, Variable


def whole(nest: Any) -> Any:
    """A nest with the examples of all devices first, from each device's own."""
    device = this_device()
    if device is None:
        return nest
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, device.axis, tiled=True), nest)


def own(nest: Any, examples: int) -> Any:
    """The examples of this device, in a nest with those of all."""
    device = this_device()
    if device is None:
        return nest
    start = lax.axis_index(device.axis) * examples
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, examples), nest)


def same_seeds(variables: Sequence[Variable], values: Sequence[Any]) -> List[Any]:
    """Values among which seeds are those of the first device, so that all draw the same."""
    return [
        ENGINE.from_first_replica([value])[0] if is_seed(variable) and value is not None else value
        for variable, value in zip(variables, values)
    ]


def apart_again(variables: Sequence[Variable], values: Sequence[Any]) -> List[Any]:
    """The opposite: each device has seeds of its own, as in the scope of a state."""

    def apart(variable: Variable, value: Tensor) -> Tensor:
        return own_seeds([value])[0] if is_seed(variable) and value is not None else value

    return [apart(*pair) for pair in zip(variables, values)]

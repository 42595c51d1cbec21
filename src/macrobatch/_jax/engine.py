"""JAX as an engine: what it offers to the Keras arithmetic and to the batches."""

import contextlib
import contextvars
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import jax
import jax.experimental.sparse
import numpy as np
from jax import lax
from jax import numpy as jnp
from keras import tree

from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, Check, Size, Tensor


class Devices(NamedTuple):
    """The devices that make an update together, each with its own part of the batch."""

    axis: str
    count: Any  # an int; a tuple has a method of that name


# What runs inside of jax.shard_map, on each of several devices. None on one device.
_devices: "contextvars.ContextVar[Optional[Devices]]" = contextvars.ContextVar(
    "macrobatch_devices", default=None
)


class Jax(BatchEngine):
    """JAX, at once or in a compiled step, on one device or several. A device is a replica."""

    def replicas(self) -> int:
        devices = _devices.get()
        return 1 if devices is None else devices.count

    def assigned(self, value: Tensor) -> Tensor:
        return value  # In plain Keras on JAX, too, a gradient flows through it.

    def gradients_of(
        self, function: Callable[[List[Tensor]], List[Tensor]], tensors: List[Tensor]
    ) -> List[List[Tensor]]:
        backward = jax.vjp(function, tensors)[1]
        numbers = jax.eval_shape(function, tensors)
        units = [
            [jnp.asarray(i == j, n.dtype) for j, n in enumerate(numbers)]
            for i in range(len(numbers))
        ]
        return [backward(unit)[0] for unit in units]

    def sum_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        devices = _devices.get()
        if devices is None or not values:
            return values
        return list(lax.psum(tuple(values), devices.axis))

    def from_first_replica(self, values: List[Tensor]) -> List[Tensor]:
        return self.sum_over_replicas([self.on_first_replica(value) for value in values])

    def max_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        # All devices run the same code on as many micro-batches: they count alike.
        return values

    def on_first_replica(self, value: Tensor) -> Tensor:
        devices = _devices.get()
        if devices is None:
            return value
        return jnp.where(lax.axis_index(devices.axis) == 0, value, jnp.zeros_like(value))

    def checked(self, values: Tensor, *checks: Check) -> Tensor:
        # What a compiled step computes cannot be looked at.
        known = [check for check in checks if not is_traced(check[0])]
        return super().checked(values, *known)

    def with_other_size(self, function: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        found = []

        def traced(micro_batch: Batch) -> None:
            found.append(function(micro_batch))

        def twice(leaf: Any) -> Any:
            if leaf is None:
                return None
            return jax.ShapeDtypeStruct((2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)

        jax.eval_shape(traced, tree.map_structure(twice, micro_batch))
        return found[0]

    def is_eager(self) -> bool:
        return False

    def has_static_sizes(self) -> bool:
        return True

    def is_traced(self, value: Any) -> bool:
        return is_traced(value)

    def slice_of(self, leaf: Tensor, start: Size, size: Size, static: bool) -> Tensor:
        if isinstance(start, int):
            return leaf[start : start + size]
        # No micro-batch of a run is smaller: nothing is clamped.
        return lax.dynamic_slice_in_dim(leaf, start, size)

    def permuted(self, leaf: Tensor, rows: Tensor) -> Tensor:
        # On the host: where devices share a batch, some of its rows may be on any of them.
        found = np.asarray(leaf)[np.asarray(rows)]
        if not isinstance(leaf, jax.Array):
            return found
        count = len(leaf.sharding.device_set)
        spreads = count > 1 and len(found) % count == 0
        return jax.device_put(found, leaf.sharding) if spreads else jnp.asarray(found)

    def agreed_size(
        self, batch: Batch, sizes: List[Size], least: int, uneven: str, empty: str
    ) -> Tuple[Batch, Size]:
        return batch, sizes[0]  # All sizes are known, so they have been compared.


ENGINE = Jax()


@contextlib.contextmanager
def on_devices(devices: Devices) -> Iterator[None]:
    """A context for code that runs on each of several devices."""
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def this_device() -> Optional[Devices]:
    """The devices among which code runs on this one; None if there is one."""
    return _devices.get()


def arrays(nest: Any) -> Any:
    """A nest with all that it has as arrays. Sparse ones become dense: a part of a compiled batch
    has to have a shape that is known, and its numbers have none.
    """

    def array(leaf: Any) -> Any:
        if isinstance(leaf, jax.experimental.sparse.JAXSparse):
            leaf = leaf.todense()
        return None if leaf is None else jnp.asarray(leaf)

    return tree.map_structure(array, nest)


def is_traced(value: Any) -> bool:
    """Whether a value is only known when a compiled step runs."""
    return isinstance(value, jax.core.Tracer)


def any_is_traced(nest: Any) -> bool:
    """Whether any value of a nest is only known when a compiled step runs."""
    return any(is_traced(leaf) for leaf in tree.flatten(nest))


def own_seeds(values: Sequence[Tensor], backwards: bool = False) -> List[Tensor]:
    """Seeds that each device draws other numbers from; `backwards`, the seeds they came from."""
    devices = _devices.get()
    if devices is None:
        return list(values)
    step = lax.axis_index(devices.axis).astype("uint32") * jnp.uint32(0x9E3779B9)  # wraps around
    found = []
    for value in values:
        shift = step.astype(value.dtype)
        first = value[0] - shift if backwards else value[0] + shift
        found.append(value.at[0].set(first))
    return found

"""Several devices: each runs the loop on its own part of the batch, and sums meet once, at the end.

No part of the batch is moved from one device to another.
"""

from typing import Any, Callable

import jax
import keras
from jax.sharding import PartitionSpec

from macrobatch._jax import checks
from macrobatch._jax.engine import ENGINE, Devices, on_devices
from macrobatch._types import Batch


def distribution() -> Any:
    """What Keras spreads batches with, once it is known to be exact; None if nothing does."""
    found = keras.distribution.distribution()
    kind = keras.distribution.DataParallel
    checks.distribution(found, isinstance(found, kind), jax.process_count())
    return found


def count() -> int:
    """The number of devices over which a batch is spread."""
    found = distribution()
    return 1 if found is None else int(found.device_mesh.devices.size)


def are_several() -> bool:
    """Whether a batch is spread over several devices."""
    return count() > 1


def spread(
    function: Callable[[Any, Batch], Any], state: Any, batch: Batch, by_example: bool = False
) -> Any:
    """What a function comes to of a state and of the parts of a batch: on all devices the same.

    If `by_example`, the function returns something for each example, and each device has its own.

    A batch without some of its examples may not be divided: then each device computes all of it.
    """
    found = distribution()
    if not are_several() or ENGINE.examples(batch) % int(found.device_mesh.devices.size):
        return function(state, batch)
    mesh = found.device_mesh.backend_mesh
    devices = Devices(found.batch_dim_name, int(found.device_mesh.devices.size))

    def of_device(state: Any, batch: Batch) -> Any:
        with on_devices(devices):
            return function(state, batch)

    same, parts = PartitionSpec(), PartitionSpec(devices.axis)
    out = parts if by_example else same
    # What comes out is the same on all devices because the function sums it: JAX need not prove it.
    spread_out = jax.shard_map(
        of_device, mesh=mesh, in_specs=(same, parts), out_specs=out, check_vma=False
    )
    return spread_out(state, batch)

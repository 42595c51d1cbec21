"""The memory of the GPU that Keras computes on: torch counts what is in use, and the peak of it."""

from typing import Any, List, Optional

import torch
from keras import ops

from macrobatch._torch import checks


def gpus() -> List[Any]:
    """The module of torch for the GPU that Keras computes on; none on a CPU."""
    kind = ops.zeros([]).device.type
    return [] if kind == "cpu" else [getattr(torch, kind)]


def names() -> List[str]:
    """The names of the GPUs."""
    return [
        str(module.get_device_name() if hasattr(module, "get_device_name") else module.__name__)
        for module in gpus()
    ]


def size() -> Optional[int]:
    """Bytes of the GPU; None if torch does not say."""
    found = [
        int(module.get_device_properties(module.current_device()).total_memory)
        for module in gpus()
        if hasattr(module, "get_device_properties")
    ]
    return found[0] if found else None


def wait() -> None:
    """Waits until the GPU has done what it was given."""
    for module in gpus():
        module.synchronize()


def give_back() -> None:
    """Gives memory back that torch keeps for later: it may be in pieces that are too small."""
    for module in gpus():
        module.empty_cache()


class GpuCounter:
    """The peak of the GPU. See _sizes.peaks.Counter."""

    can_reset = True

    def __init__(self) -> None:
        (self._module,) = gpus()
        checks.counts_memory(self._module.__name__, hasattr(self._module, "max_memory_allocated"))

    def reset(self) -> None:
        """Forgets peaks of the past."""
        self._module.reset_peak_memory_stats()

    def read(self) -> int:
        """The peak since, in bytes."""
        return int(self._module.max_memory_allocated())

    def now(self) -> int:
        """What is in use, in bytes."""
        return int(self._module.memory_allocated())

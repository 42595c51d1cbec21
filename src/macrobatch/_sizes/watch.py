"""Whether memory has to be watched, and with what: on a GPU or a CPU, with a limit or without."""

from typing import Any, List, NamedTuple, Optional, Protocol

from macrobatch._sizes import limit as limits
from macrobatch._sizes.peaks import Counter, ProcessCounter


class DeviceMemory(Protocol):
    """What a backend tells of GPUs. Each engine has a module of these names, device_memory."""

    def gpus(self) -> List[Any]:
        """The GPUs that the backend computes on."""

    def size(self) -> Optional[int]:
        """Bytes of the smallest of them; None if nobody knows."""

    def GpuCounter(self) -> Counter:
        """What counts the memory of the GPU that has the most in use."""


class Watch(NamedTuple):
    """What memory is watched with.

    Attributes:
        limit: how much there may be.
        counter: tells peaks.
        before: bytes that there were before any batch.
    """

    limit: limits.Limit
    counter: Counter
    before: int


def needed(memory_limit: Any, device: DeviceMemory, host_raises: bool = True) -> Optional[Watch]:
    """What memory is watched with; None if running out of memory is an error, and no limit given.

    Otherwise the kernel might kill the process.

    Args:
        memory_limit: what the user gave.
        device: what the backend tells of GPUs.
        host_raises: whether the backend raises an error where the kernel gives it no memory.
    """
    on_gpu = bool(device.gpus())
    is_error = limits.running_out_is_an_error(on_gpu) and (on_gpu or host_raises)
    if memory_limit is None and is_error:
        return None
    limit = limit_of_gpu(memory_limit, device) if on_gpu else limits.memory_limit(memory_limit)
    assert limit is not None
    counter: Counter = device.GpuCounter() if on_gpu else ProcessCounter()
    before = counter.now()
    limits.check_room(limit, before, "the program and its data")
    return Watch(limit, counter, before)


def limit_of_gpu(given: limits.MemoryLimit, device: DeviceMemory) -> Optional[limits.Limit]:
    """The limit on a GPU; None if neither the user nor the backend has one."""
    size = device.size()
    if size is None and given is None:
        return None
    if size is None and not isinstance(limits.parsed(given), int):
        raise ValueError(
            "The backend does not say how much memory a GPU has, so that a fraction of it is not "
            f"known. Received: memory_limit={given!r}. Pass a size, for instance "
            "memory_limit='6GiB'."
        )
    return limits.memory_limit(given, of_device=size or limits.NO_LIMIT)

"""Whether memory has to be watched, and with what: on a GPU or a CPU, with a limit or without."""

from typing import Any, NamedTuple, Optional

from macrobatch._sizes import limit as limits
from macrobatch._sizes.peaks import Counter, ProcessCounter
from macrobatch._tensorflow import device_memory


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


def needed(memory_limit: Any) -> Optional[Watch]:
    """What memory is watched with; None if running out of memory is an error, and no limit given.

    Otherwise the kernel might kill the process.
    """
    on_gpu = bool(device_memory.gpus())
    if memory_limit is None and limits.running_out_is_an_error(on_gpu):
        return None
    of_device = device_memory.size() if on_gpu else None
    limit = limits.memory_limit(memory_limit, of_device=of_device)
    counter: Counter = device_memory.GpuCounter() if on_gpu else ProcessCounter()
    before = counter.now()
    limits.check_room(limit, before, "the program and its data")
    return Watch(limit, counter, before)

"""Peak memory of a piece of work, and the line through the peaks of several sizes.

A micro-batch of a size takes `base + slope * size`: the base is there whatever the size is
(weights, slots, the batch, TensorFlow itself), the slope is what one example needs. So the peaks
of small sizes tell whether a larger one fits, before anybody runs out of memory. No TensorFlow
here: the counter of a GPU is in _tensorflow/device_memory.py.
"""

import ctypes
import gc
import os
import sys
from typing import Callable, List, NamedTuple, Protocol, Sequence, Tuple

from macrobatch._sizes import limit

# How much of a limit stays free: allocators round, and no two runs are alike.
MARGIN = 0.05


class Counter(Protocol):
    """Something that remembers the most memory that was in use."""

    can_reset: bool  # False: the peak is that of the whole life of the process so far.

    def reset(self) -> None:
        """Forgets peaks of the past."""

    def read(self) -> int:
        """The peak since, in bytes."""

    def now(self) -> int:
        """What is in use, in bytes."""


class Peak(NamedTuple):
    """What a piece of work took.

    Attributes:
        before: bytes in use before it.
        bytes: the peak while it ran, of all that was in use.
        is_new: whether it is the peak of this work. Where a counter cannot be reset, earlier work
            may have had a higher one: the work then took this, or less.
    """

    before: int
    bytes: int
    is_new: bool


def peak_of(work: Callable[[], object], counter: Counter) -> Peak:
    """Runs a piece of work, and says what it took."""
    give_back()
    counter.reset()
    before, earlier = counter.now(), counter.read()
    work()
    peak = max(counter.read(), before)
    return Peak(before, peak, counter.can_reset or peak > earlier)


def give_back() -> None:
    """Gives memory that was freed back to the system, where the C library can.

    It keeps memory for later otherwise, and the peak of a size would be that of the size before.
    """
    gc.collect()
    if sys.platform == "linux":
        # musl has no such function.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


class ProcessCounter:
    """The peak of this process: its resident memory, of which the kernel keeps a high-water mark.

    Where Linux lets nobody reset the mark, and on macOS, there is only `ru_maxrss`: the highest
    ever. It tells nothing of work that takes less than earlier work did.
    """

    def __init__(self, proc: str = "/proc"):
        self._proc = proc
        self.can_reset = self._reset()

    def reset(self) -> None:
        """Forgets peaks of the past, if `can_reset`."""
        if self.can_reset:
            self._reset()

    def _reset(self) -> bool:
        try:
            with open(os.path.join(self._proc, "self", "clear_refs"), "w") as file:
                file.write("5")
            return "VmHWM" in limit.status(self._proc)
        except OSError:
            return False

    def read(self) -> int:
        """The peak, in bytes."""
        if self.can_reset:
            return limit.status(self._proc)["VmHWM"]
        return highest_ever()

    def now(self) -> int:
        """What is resident now; without /proc, the highest ever."""
        try:
            return limit.status(self._proc)["VmRSS"]
        except (OSError, KeyError):
            return highest_ever()


def highest_ever() -> int:
    """The most memory that this process ever had, in bytes."""
    try:
        import resource
    except ImportError as error:
        raise ValueError(
            "Peak memory is measured on Linux and macOS. "
            f"Received: {sys.platform}. On Windows, use WSL (Windows Subsystem for Linux)."
        ) from error
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


class Line(NamedTuple):
    """The memory of each size: `base + slope * size`, and never less than what was seen.

    Attributes:
        base: bytes that are there whatever the size is.
        slope: bytes of one example more.
        seen: sizes and peaks, from the smallest size on.
    """

    base: float
    slope: float
    seen: Tuple[Tuple[int, int], ...]

    def at(self, size: int) -> float:
        """The peak of a size."""
        below = [peak for known, peak in self.seen if known <= size]
        return max([self.base + self.slope * size, *below])

    def fits(self, size: int, most: int, margin: float = MARGIN) -> bool:
        """Whether a size stays below a limit, with a margin. If it does, all smaller ones do."""
        return self.at(size) <= most * (1 - margin)

    def largest(self, most: int, sizes: Sequence[int], margin: float = MARGIN) -> int:
        """The largest of these sizes that fits, or 0."""
        return max([size for size in sizes if self.fits(size, most, margin)], default=0)


def line_through(points: Sequence[Tuple[int, int]], before: int) -> Line:
    """The line through the peaks of sizes, on the safe side.

    The slope is that of least squares, or that from the second largest size to the largest, if it
    is steeper: that part of the line is the next one's neighbour, and has the least noise. One
    point alone counts as if all of it came from its examples.

    Args:
        points: sizes and their peaks in bytes. A size that was run several times counts with its
            highest peak.
        before: bytes that were there before any of them ran.
    """
    highest = {size: 0 for size, _ in sorted(points)}
    for size, peak in points:
        highest[size] = max(highest[size], peak)
    seen = tuple(highest.items())
    sizes, peaks = list(highest), list(highest.values())
    slopes = [0.0]
    if len(seen) == 1:
        slopes.append((peaks[0] - before) / sizes[0])
    elif seen:
        last = (peaks[-1] - peaks[-2]) / (sizes[-1] - sizes[-2])
        slopes += [_least_squares(sizes, peaks), last]
    slope = max(slopes)
    # No point is above the line, and nothing gives back what was there before.
    base = max([float(before), *(peak - slope * size for size, peak in seen)])
    return Line(base, slope, seen)


def _least_squares(sizes: List[int], peaks: List[int]) -> float:
    mean, level = sum(sizes) / len(sizes), sum(peaks) / len(peaks)
    spread = sum((size - mean) ** 2 for size in sizes)
    return sum((s - mean) * (p - level) for s, p in zip(sizes, peaks)) / spread

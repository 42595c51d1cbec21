"""Which size comes next: a search that is told what happened. No TensorFlow and no clock here.

    fitting   the largest size that fits: rehearsed from small to large, if memory is watched, and
              otherwise the whole batch, and less whenever that runs out of memory
    ranging   from there down, one update for each size, until smaller ones are clearly slower
    timing    those that are left, in turns, until one of them is the fastest
    settled   that one. If a batch runs out of memory: the next smaller one

A size is a power of two or the whole batch: of examples, or of tokens. Where each size is compiled,
few are looked at: only powers of two, of which the largest takes the whole batch, and smaller ones
only as long as each is faster than all before it.
"""

import statistics
from typing import Dict, List, NamedTuple, Optional, Tuple

from macrobatch._sizes.peaks import line_through

GROWTH = 4  # how much larger than what was rehearsed the next size may be
ROUNDS = 3, 7  # how many updates each size is timed for: at least, at most
SLOWER = 1.05  # a size that takes so much longer than the fastest is out
FAR_SLOWER = 1.3  # twice in a row: then sizes that are smaller still are not looked at
AS_FAST = 1.01  # of sizes that differ less, the smallest is taken: it needs the least memory


def power_above(batch: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(0, batch - 1).bit_length()


class Peak(NamedTuple):
    """What a rehearsal took: examples of some extent (how much one example is), and bytes."""

    extent: float
    bytes: int


class Search:
    """A search for one kind of step: it is told outcomes, and says which size is next.

    Attributes:
        size: of the latest batch.
        is_settled: whether it looks no further.
        looks: whether it looks for the fastest size, and not only for one that fits.
    """

    def __init__(
        self,
        limit: Optional[int] = None,
        looks: bool = True,
        first: Optional[int] = None,
        power: int = 2,
        is_compiled: bool = False,
    ):
        """Starts a search.

        Args:
            limit: of bytes, if memory is watched. Otherwise running out of memory is an error.
            looks: whether it looks for the fastest size.
            first: a size that was found before, with which it has settled.
            power: what an example of twice the extent takes is at most 2 to this power as much.
            is_compiled: whether each size is compiled anew.
        """
        self._limit, self.looks, self._first, self._power = limit, looks, first, power
        self._is_compiled = is_compiled
        self._batch, self._most, self._extent = 0, 0, 0.0
        self._failed: Optional[int] = None
        self._peaks: Dict[int, Peak] = {}
        self._beyond = 0  # bytes that an update takes beyond its rehearsal
        self.size = 0
        self._start("fitting")

    def _start(self, phase: str) -> None:
        self._phase = phase
        self._seconds: Dict[int, List[float]] = {}
        self._warm: List[int] = []
        self._contenders: List[int] = []

    @property
    def is_settled(self) -> bool:
        return self._phase == "settled"

    @property
    def has_fitted(self) -> bool:
        """Whether it is known which sizes fit."""
        return self._phase != "fitting"

    def best(self) -> int:
        """The size that was found; while it still looks for the fastest, the largest that fits."""
        return self.size if self.is_settled else self.largest()

    @property
    def times(self) -> bool:
        """Whether it has to be told how long an update takes."""
        return self._phase in ("ranging", "timing")

    def meet(self, batch: int, extent: float) -> None:
        """Hears of the next batch.

        Args:
            batch: the size that takes all of it at once.
            extent: how much one example is.
        """
        self._extent, self._batch = max(self._extent, extent), max(self._batch, batch)
        batch = power_above(batch) if self._is_compiled else batch
        if batch > self._most:
            was_whole = self.size >= self._most
            self._most = batch
            if not self.is_settled or (was_whole and self._first is None):
                self._start("fitting")

    def to_rehearse(self) -> Optional[int]:
        """The size of which the peak must be known next, before the batch is run; or None."""
        if self._limit is None or (self._first is not None and self._failed is None):
            return None
        known = {size for size, _ in self._points()}
        largest = max(known, default=0)
        larger = [size for size in self._candidates() if size > largest]
        if len(known) < 2:  # which is no line yet
            return next(iter(larger), None)
        most = largest * GROWTH
        return max((size for size in larger if size <= most and self.fits(size)), default=None)

    def rehearsed(self, size: int, peak: int) -> None:
        """Hears what a rehearsal of a size took."""
        self._peaks[size] = Peak(self._extent, peak)

    def only_fits(self) -> None:
        """Looks no more for the fastest size, but for one that fits."""
        self.looks = False
        if self.times:
            self._start("settled")
            self.size = max(self._allowed())

    def largest(self) -> int:
        """The largest size that fits, as far as is known."""
        return max(self._allowed())

    def takes_beyond(self, more: int) -> None:
        """Hears how many bytes an update takes beyond its rehearsal."""
        self._beyond = max(self._beyond, more)

    def next(self) -> int:
        """The size for the batch."""
        self.size = self._next()
        return self.size

    def next_is(self, size: int) -> int:
        """Takes a size for the batch that was not asked for: one that is to be rehearsed."""
        self.size = size
        return size

    @property
    def has_peaks(self) -> bool:
        """Whether any size has been rehearsed."""
        return bool(self._peaks)

    def expects(self, size: int) -> int:
        """The bytes that an update with a size is expected to take."""
        return int(self.expected(size)) + self._beyond

    def ran(self, batch: int, seconds: Optional[float] = None) -> None:
        """Hears that a batch has been run with the size that was next.

        Args:
            batch: the size that takes all of it at once.
            seconds: how long it took, if that is known.
        """
        if self._phase == "fitting":
            done = self._first is not None or not self.looks
            self._start("settled" if done else "ranging")
            self._warm = [self.size]
        elif self.times and seconds is not None and batch >= 0.9 * self._batch:
            if self.size not in self._warm:  # It may have been traced, compiled and planned.
                self._warm.append(self.size)
            else:
                self._seconds.setdefault(self.size, []).append(seconds / batch)
                self._judge()

    def settle(self) -> None:
        """Looks no further: stays with the fastest of the sizes that were timed, if there are."""
        if self._seconds:
            fits = [size for size in self._seconds if self.fits(size)] or [self.size]
            self.size = min(fits, key=lambda size: min(self._seconds.get(size, [0.0])))
        self._phase = "settled"

    def ran_out(self) -> bool:
        """Hears that the size that was next ran out of memory. Whether there is a smaller one."""
        self._failed = min(self.size, self._most)
        self._contenders = [size for size in self._contenders if size < self._failed]
        self._seconds = {s: each for s, each in self._seconds.items() if s < self._failed}
        if self._phase == "timing" and not self._contenders:
            self._start("settled")
        if self._failed > 1:
            return True
        # A smaller batch may fit.
        self._failed, self._batch, self._most, self._extent = None, 0, 0, 0.0
        self._start("fitting")
        return False

    def fits(self, size: int) -> bool:
        """Whether a size is known, or expected, to fit."""
        if self._failed is not None and size >= self._failed:
            return False
        if self._limit is None or size == 1 or not self._peaks:
            return True
        return line_through(self._points(), 0).fits(size, self._limit - self._beyond)

    def expected(self, size: int) -> float:
        """The bytes that a rehearsal of a size is expected to take: the line through the peaks."""
        return line_through(self._points(), 0).at(size)

    def _points(self) -> List[Tuple[int, int]]:
        """Sizes and peaks. Of shorter examples, a size was only as much as a smaller one."""
        found = []
        for size, peak in self._peaks.items():
            shorter = min(1.0, peak.extent / self._extent) if self._extent else 1.0
            found.append((max(1, int(size * shorter**self._power)), peak.bytes))
        return found

    def _candidates(self) -> List[int]:
        """All sizes, the smallest first."""
        powers = [2**power for power in range(max(0, self._most - 1).bit_length())]
        sizes = [*powers, self._most]
        return [size for size in sizes if self._failed is None or size < self._failed] or [1]

    def _allowed(self) -> List[int]:
        return [size for size in self._candidates() if self.fits(size)] or [1]

    def _next(self) -> int:
        allowed = self._allowed()
        if self._first is not None:
            return min(self._first, max(allowed))
        if self._phase == "fitting":
            return max(allowed)
        if self._phase == "ranging":
            if len(self._seconds.get(self.size, ())) == 1 and self._is_enough(self.size):
                return self.size
            untimed = [size for size in allowed if size not in self._seconds]
            return max(untimed, default=max(allowed))
        if self._phase == "timing":
            least = min(len(self._seconds[size]) for size in self._contenders)
            return next(s for s in self._contenders if len(self._seconds[s]) == least)
        return max([size for size in allowed if size <= self.size], default=1)

    def _judge(self) -> None:
        if self._phase == "ranging":
            twice = len(self._seconds[self.size]) > 1
            if self.size == 1 or (twice and self._is_enough(self.size)):
                kept = [size for size in self._seconds if not self._is_far_slower(size)]
                self._phase, self._contenders = "timing", sorted(kept)
        if self._phase != "timing":
            return
        counts = {len(self._seconds[size]) for size in self._contenders}
        if len(self._contenders) > 1 and (len(counts) > 1 or min(counts) < ROUNDS[0]):
            return
        medians = {size: statistics.median(self._seconds[size]) for size in self._contenders}
        best = min(medians.values())
        self._contenders = [size for size in self._contenders if medians[size] <= SLOWER * best]
        if len(self._contenders) == 1 or min(counts) >= ROUNDS[1]:
            self.size = min(size for size in self._contenders if medians[size] <= AS_FAST * best)
            self._phase = "settled"

    def _is_enough(self, size: int) -> bool:
        """Whether a size that was timed shows that smaller ones need not be looked at."""
        if not self._is_compiled:
            return self._is_far_slower(size)
        larger = [min(each) for other, each in self._seconds.items() if other > size]
        return bool(larger) and SLOWER * min(self._seconds[size]) > min(larger)

    def _is_far_slower(self, size: int) -> bool:
        best = min(map(min, self._seconds.values()))
        return min(self._seconds[size]) > FAR_SLOWER * best

    def found(self) -> str:
        """What was looked at, for the line that says what was found."""
        if self._first is not None:
            return "found before"
        if len(self._seconds) < 2:
            return "the largest that fits" if self.size < self._most else "all at once"
        others = ", ".join(str(size) for size in sorted(self._seconds))
        return f"the fastest of {others}"

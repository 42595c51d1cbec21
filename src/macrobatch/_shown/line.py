"""How far an update is, behind Keras' own progress line, where batches take long.

A thread looks a few times in a second. The update itself only leaves numbers behind.
"""

import contextlib
import math
import os
import sys
import threading
import time
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Tuple

AFTER = 2.0  # seconds before anything is shown: shorter batches have Keras' line alone
EVERY = 0.25  # seconds


class Place(NamedTuple):
    """How far an update is.

    Attributes:
        done: micro-batches that are done.
        total: micro-batches of the batch; 0 outside of the loop over them.
        number: in which loop over the micro-batches this is, from 1 on.
        loops: how many loops there are: two for a loss of the whole batch.
    """

    done: int
    total: int
    number: int = 1
    loops: int = 1

    @property
    def order(self) -> Tuple[int, int]:
        """Greater for what comes later in an update."""
        return self.number, self.done

    @property
    def fraction(self) -> float:
        """The part of the update that is done."""
        return (self.number - 1 + self.done / self.total) / self.loops


class Here:
    """The place of a loop in Python: it says where it is, and a thread may read that."""

    def __init__(self) -> None:
        self._place = Place(0, 0)

    def at(self, done: int, count: int) -> None:
        """So many micro-batches are done."""
        self._place = Place(done, count)

    def read(self) -> Place:
        """The latest place."""
        return self._place


HERE = Here()


def can_show(stream: Any = None) -> bool:
    """Whether there is a terminal on which a line can be written over."""
    stream = sys.stdout if stream is None else stream
    is_terminal = getattr(stream, "isatty", lambda: False)()
    return bool(is_terminal) and os.environ.get("TERM") != "dumb"


def text(place: Place, seconds: float) -> str:
    """What is shown of an update that needs so many seconds more; nan if that is not known."""
    shown = f" - micro-batch {min(place.done + 1, place.total)}/{place.total}"
    if place.loops > 1:
        shown += f", pass {place.number} of {place.loops}"
    return shown if math.isnan(seconds) else f"{shown}, {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    """As Keras writes the time that an epoch needs."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{whole}s"


class Clock:
    """Tells how long an update takes, from places that are seen now and then."""

    def __init__(self) -> None:
        self._latest = Place(0, 0)
        self._started = self._changed = 0.0

    def left(self, place: Place, now: float) -> float:
        """The seconds that an update needs, if it goes on as it did; nan if that is not known."""
        # Of several updates in one execution, this may be the next one. The first update of all is
        # traced before its loop begins.
        if not place.total or place.order < self._latest.order:
            self._started = self._changed = now
        elif place.order > self._latest.order:
            self._changed = now
        self._latest = place
        if not place.total or not place.fraction:
            return math.nan
        # A micro-batch takes its time: meanwhile nothing is learned, and time passes.
        whole = (self._changed - self._started) / place.fraction
        return max(0.0, whole - (now - self._started))


class Line:
    """Shows updates of one fit, from `start` to `stop`."""

    def __init__(self, read: Callable[[], Place], after: float = AFTER, every: float = EVERY):
        """Prepares a line.

        Args:
            read: tells how far an update is. Another thread calls it.
            after: seconds of an update before anything is shown.
            every: seconds between two looks.
        """
        self._read, self._after, self._every = read, after, every
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread: Optional[threading.Thread] = None
        self._began: List[float] = []  # when the update that runs now has begun
        self._is_shown = False

    def start(self) -> None:
        """Shows updates from now on."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="macrobatch")
        self._thread.start()

    def stop(self) -> None:
        """Shows nothing more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """A context in which an update is made. At its end the line is as Keras left it."""
        if self._thread is None:
            yield
            return
        self._began = [time.perf_counter()]
        try:
            yield
        finally:
            with self._lock:
                self._began = []
                if self._is_shown:
                    self._is_shown = False
                    _write("\x1b[K")  # which erases what is behind the cursor

    def _watch(self) -> None:
        clock = Clock()
        while not self._ended.wait(self._every):
            began, now = self._began, time.perf_counter()
            if began:
                place = self._read()
                left = clock.left(place, now)
                if place.total > 1 and now - began[0] >= self._after:
                    self._show(began, text(place, left))

    def _show(self, began: Any, shown: str) -> None:
        with self._lock:
            if self._began is began:  # otherwise the update is over
                self._is_shown = True
                # The cursor stays where Keras left it, and what is too long is cut off.
                _write(f"\x1b7\x1b[?7l{shown}\x1b[K\x1b[?7h\x1b8")


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # Nobody may read any more.
        sys.stdout.write(text)
        sys.stdout.flush()

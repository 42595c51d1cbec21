"""Sizes that are found while training: a batch is run with the size that the search says, and with
a smaller one if it runs out of memory. No backend here: an engine says how its steps run.
"""

import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from macrobatch import _checks
from macrobatch._sizes import cache, checks, watch
from macrobatch._sizes import limit as limits
from macrobatch._sizes.peaks import give_back, peak_of
from macrobatch._sizes.search import Search
from macrobatch._types import Batch

# Runs a function of a batch, and returns what the function returns.
Run = Callable[[Batch], Any]


class Engine:
    """What a backend tells of the steps of one model, whose sizes are to be found."""

    # Whether the backend raises an error where the kernel gives it no memory (`ulimit -v`).
    host_raises = True

    def device(self) -> watch.DeviceMemory:
        """What the backend tells of the memory of GPUs."""
        raise NotImplementedError

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether an error says that there is no memory."""
        raise NotImplementedError

    def exhausted(self, message: str) -> Exception:
        """An error of the backend's that says that there is no memory."""
        raise NotImplementedError

    def compiles_each_size(self) -> bool:
        """Whether another size is another function to compile, so that there should be few."""
        return False

    def set(self, size: int) -> None:
        """Lets the next batch be cut by a size."""
        raise NotImplementedError

    def measured(self, batch: Batch) -> Tuple[int, float]:
        """The size that takes all of a batch at once, and how much one example is."""
        raise NotImplementedError

    def can_rehearse(self) -> bool:
        """Whether a train step can be run up to where it would write. If not, sizes grow."""
        return True

    def rehearse(self, batch: Batch, size: int) -> Callable[[], Any]:
        """What runs two micro-batches of a size, of a batch, up to where a step would write."""
        raise NotImplementedError

    def of_update(self) -> int:
        """About the bytes that an optimizer takes beyond gradients, while it writes."""
        raise NotImplementedError

    def wait(self, result: Any) -> None:
        """Waits until what a run returned is there, and all else that the run was to do."""
        raise NotImplementedError

    def key(self, batch: Batch, whole: int, memory: Optional[int]) -> Dict[str, Any]:
        """What a size is found for: see _keras.size_key."""
        raise NotImplementedError

    def shows_size(self) -> bool:
        """Whether the size shows in the update."""
        raise NotImplementedError

    def has_begun(self) -> bool:
        """Whether a batch that failed had begun to write."""
        raise NotImplementedError

    def why_not_again(self, message: str) -> str:
        """What to say of a batch that failed and had begun to write."""
        return checks.ran_out_while_writing(message)

    def ran(self) -> None:
        """Hears that a batch has been run."""

    def is_typical(self) -> bool:
        """Whether the latest run did what all runs do, so that its time counts."""
        return True

    def pays(self, is_new: bool, seconds: float) -> bool:
        """Whether it pays to look for a faster size still.

        Args:
            is_new: whether the latest batch was the first one of its size.
            seconds: how long it took.
        """
        return True

    def agreed(self, search: Search, size: int, batch: Batch) -> int:
        """The size on which all workers agree."""
        return size

    def check_workers(self, message: str) -> None:
        """Raises, if other workers wait for a batch that ran out of memory."""


class Finder:
    """The sizes of one model, in training and in testing.

    Attributes:
        unit: what the size is called.
        memory_limit: what the user gave.
    """

    def __init__(self, engine: Engine, in_tokens: bool, memory_limit: Any):
        self._engine, self._in_tokens, self.memory_limit = engine, in_tokens, memory_limit
        self.unit = "micro_batch_tokens" if in_tokens else "micro_batch_size"
        self._watch: Optional[watch.Watch] = None
        self._searches: List[Optional[Search]] = [None, None]  # of testing and of training
        self._key: Optional[Dict[str, Any]] = None
        self._takes = 0  # bytes of an update with the size that was found before
        self._ran: List[int] = []  # sizes with which a batch was trained

    def forget(self) -> None:
        """Looks again: the model may have been compiled anew."""
        self._searches, self._ran = [None, None], []

    @property
    def size(self) -> Optional[int]:
        """The size of the latest batch that was trained with; None if there was none."""
        trained = self._searches[True]
        return None if trained is None else trained.size or None

    @property
    def is_settled(self) -> bool:
        """Whether a size for training has been found."""
        found = self._searches[True]
        return found is not None and found.is_settled

    def attempt(self, training: bool, run: Run, batch: Batch) -> Any:
        """Runs a batch as often as it takes, and returns what the last run returned."""
        whole, extent = self._engine.measured(batch)
        search = self._search(training, batch, whole)
        search.meet(whole, extent)
        rehearses = training and self._engine.can_rehearse()
        if rehearses and search.to_rehearse() is not None:
            self._rehearse(search, batch)
        elif training and not rehearses:
            self._check_room(search)
        was_settled, tried = search.is_settled, []
        while True:
            size = self._engine.agreed(search, self._next(search, rehearses), batch)
            self._engine.set(size)
            tried.append(size)
            found = self._once(search, training, run, batch, whole)
            if found is not None:
                break
            give_back()  # The error had all that the batch had made.
        if len(tried) > 1:
            _checks.LOG.warning(checks.shrunk(self.unit, tried, whole))
        if training and search.is_settled and (not was_settled or len(tried) > 1):
            self._keep(search, whole, not was_settled)
        return found

    def _next(self, search: Search, rehearses: bool) -> int:
        """The size for a batch. Where there are no rehearsals, sizes grow from batch to batch."""
        size = None if rehearses else search.to_rehearse()
        return search.next() if size is None else search.next_is(size)

    def _search(self, training: bool, batch: Batch, whole: int) -> Search:
        found = self._searches[training]
        if found is None:
            engine = self._engine
            self._watch = watch.needed(self.memory_limit, engine.device(), engine.host_raises)
            limit = None if self._watch is None else self._watch.limit.bytes
            power = 1 if self._in_tokens else 2
            first = self._cached(batch, whole) if training else self.size
            found = self._searches[training] = Search(
                limit, training, first, power, engine.compiles_each_size()
            )
        return found

    def _cached(self, batch: Batch, whole: int) -> Optional[int]:
        """The size that was found before, if it still fits."""
        watched = self._watch
        on_gpu = bool(self._engine.device().gpus())
        in_all = limits.in_all(self.memory_limit, on_gpu=on_gpu)
        self._key = self._engine.key(batch, whole, in_all)
        found = cache.read(self._key)
        if found is None or (watched and watched.before + found.bytes > watched.limit.bytes):
            return None
        self._takes = found.bytes
        return found.size

    def _keep(self, search: Search, whole: int, is_new: bool) -> None:
        """Says what was found, and keeps it for other runs."""
        if is_new:
            line = checks.settled(self.unit, search.size, whole, search.found())
            _checks.LOG.warning(line)
        takes = self._takes
        if self._watch is not None and search.has_peaks:
            takes = max(0, search.expects(search.size) - self._watch.before)
        if self._key is not None:
            cache.write(self._key, cache.Found(search.size, takes))

    def _once(self, search: Search, training: bool, run: Run, batch: Batch, whole: int) -> Any:
        """Runs a batch. Returns None if memory ran out before anything was written."""
        engine = self._engine
        is_measured = not search.is_settled and not search.times
        found: List[Any] = []

        def work() -> None:
            found.append(run(batch))
            if not search.is_settled:  # A device may still be at work.
                engine.wait(found[0])

        try:
            start = time.perf_counter()
            peak = None
            if self._watch is not None and is_measured:
                peak = peak_of(work, self._watch.counter).bytes
            else:
                work()
            seconds = time.perf_counter() - start
        except Exception as error:
            if not engine.is_out_of_memory(error):
                raise
            message = str(error)
            engine.check_workers(message)
            if engine.has_begun():
                raise engine.exhausted(engine.why_not_again(message)) from error
            if not search.ran_out():
                raise engine.exhausted(checks.ran_out_at_one(self.unit, message)) from error
            return None
        engine.ran()
        if training and engine.shows_size():
            search.only_fits()
        rehearses = training and engine.can_rehearse()
        if peak is not None and rehearses:
            search.takes_beyond(int(peak - search.expected(search.size)))
        elif peak is not None:
            search.rehearsed(search.size, peak)
        grows = not rehearses and search.to_rehearse() is not None
        if engine.is_typical() and not grows:
            search.ran(whole, seconds)
        if training and not search.is_settled:
            is_new = search.size not in self._ran
            self._ran += [search.size] if is_new else []
            if not engine.pays(is_new, seconds):
                search.settle()
        return found[0]

    def _rehearse(self, search: Search, batch: Batch) -> None:
        """Finds what sizes take, by steps that write nothing, on few examples of a batch."""
        assert self._watch is not None
        engine, limit = self._engine, self._watch.limit
        size = search.to_rehearse()
        while size is not None:
            engine.set(size)
            try:
                work = engine.rehearse(batch, size)
                if not search.has_peaks:
                    work()  # which traces, and plans
                    search.takes_beyond(engine.of_update())
                peak = peak_of(work, self._watch.counter)
            except Exception as error:
                if not engine.is_out_of_memory(error):
                    raise
                search.next_is(size)
                if not search.ran_out():
                    raise
            else:
                search.rehearsed(size, peak.bytes)
            size = search.to_rehearse()
        if self.memory_limit is not None and search.expects(1) > limit.bytes:
            least = limits.shown(search.expects(1))
            raise checks.too_little(limit, least, self.unit)

    def _check_room(self, search: Search) -> None:
        """Raises for a limit that an update alone exceeds, where nothing has been rehearsed."""
        if self._watch is None or self.memory_limit is None or search.has_peaks:
            return
        least = self._watch.before + self._engine.of_update()
        if least > self._watch.limit.bytes:
            raise checks.too_little(self._watch.limit, limits.shown(least), self.unit)

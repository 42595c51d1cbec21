"""Sizes that are found while training: a batch is run with the size that the search says, and with
a smaller one if it runs out of memory.
"""

import functools
import time
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import tensorflow as tf

from macrobatch._fit.agreed import Agreed
from macrobatch._fit.attempts import Attempt
from macrobatch._fit.rehearsal import Rehearsal
from macrobatch._fit.size_key import key_of
from macrobatch._fit.size_logged import SizeLogged, with_size
from macrobatch._fit.steps import Steps
from macrobatch._sizes import cache, watch
from macrobatch._sizes import limit as limits
from macrobatch._sizes.peaks import peak_of
from macrobatch._sizes.search import Search
from macrobatch._tensorflow import replicas
from macrobatch._tensorflow import size_checks as checks
from macrobatch._tensorflow.chosen import ChosenSize
from macrobatch._tensorflow.extents import Batches
from macrobatch._tensorflow.size_checks import is_out_of_memory
from macrobatch._types import Batch, Logs

# What a worker keeps free when it rehearses a size: the train step is traced later, and the step
# itself must not run out, because other workers would wait for it.
RESERVE = 2**26  # bytes


class Auto:
    """The sizes of one model, in training and in testing.

    Attributes:
        memory_limit: what the user gave.
        compiles: whether functions are compiled for one size each.
    """

    def __init__(self, steps: Steps, memory_limit: Any):
        chosen = steps.cut.chosen
        assert isinstance(chosen, ChosenSize)
        self._steps, self._chosen, self.memory_limit = steps, chosen, memory_limit
        self._unit = "micro_batch_tokens" if chosen.in_tokens else "micro_batch_size"
        self._watch: Optional[watch.Watch] = None
        self._searches: List[Optional[Search]] = [None, None]  # of testing and of training
        self._begun = 0
        self._key: Optional[Dict[str, Any]] = None
        self.compiles = False
        self._rehearsal = Rehearsal(steps)
        self._agreed: Optional[Agreed] = None
        if replicas.has_several_workers(steps.strategy):
            self._agreed = Agreed(steps.strategy, self._fits_here, self._unit)
        self._batches = Batches(steps.strategy, steps.cut.axis, chosen.in_tokens)

    def forget(self) -> None:
        """Looks again: the model may have been compiled anew."""
        self._searches, self._rehearsal = [None, None], Rehearsal(self._steps)

    @property
    def has_size(self) -> bool:
        """Whether any batch has been trained with."""
        return self._trained_size() is not None

    @property
    def is_settled(self) -> bool:
        """Whether a size for training has been found."""
        found = self._searches[True]
        return found is not None and found.is_settled

    def callbacks(self, callbacks: Any) -> Any:
        """The callbacks of a fit, and before them one that logs the size of each epoch."""
        own = SizeLogged(self._unit, self._trained_size)
        return with_size(callbacks, self._steps.model, own)

    def attempt(self, training: bool) -> Attempt:
        """A function that runs batches, each as often as it takes."""

        def attempt(run: Callable[[Batch], Logs], batch: Batch) -> Logs:
            whole, extent = self._batches.measured(batch)
            search = self._search(training, batch, whole)
            search.meet(whole, extent)
            rehearses = training and self._steps.can_rehearse
            if rehearses and search.to_rehearse() is not None:
                self._rehearse(search, batch)
            elif training and not rehearses:
                self._check_room(search)
            was_settled, tried = search.is_settled, []
            while True:
                size = self._next(search, rehearses)
                if self._agreed is not None:
                    size = self._agreed(search, size, batch)
                self._chosen.set(size)
                tried.append(size)
                logs = self._once(search, training, run, batch, whole)
                if logs is not None:
                    break
            if len(tried) > 1:
                checks.LOG.warning(checks.shrunk(self._unit, tried, whole))
            if training and search.is_settled and (not was_settled or len(tried) > 1):
                self._keep(search, whole, not was_settled)
            return logs

        return attempt

    def once(self, run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a batch that may write at any time, and so cannot be run again."""
        return run(batch)

    def variant(self) -> Optional[int]:
        """What a graph is made for, beside its batches."""
        return self._chosen.current if self.compiles else None

    def _next(self, search: Search, rehearses: bool) -> int:
        """The size for a batch. Where there are no rehearsals, sizes grow from batch to batch."""
        size = None if rehearses else search.to_rehearse()
        return search.next() if size is None else search.next_is(size)

    def _search(self, training: bool, batch: Batch, whole: int) -> Search:
        found = self._searches[training]
        if found is None:
            self._watch = watch.needed(self.memory_limit)
            limit = None if self._watch is None else self._watch.limit.bytes
            power = 1 if self._chosen.in_tokens else 2
            first = self._cached(batch, whole) if training else self._trained_size()
            found = self._searches[training] = Search(limit, training, first, power)
        return found

    def _trained_size(self) -> Optional[int]:
        trained = self._searches[True]
        return None if trained is None else trained.size or None

    def _cached(self, batch: Batch, whole: int) -> Optional[int]:
        """The size that was found before, if it still fits."""
        steps, watched = self._steps, self._watch
        limit = None if watched is None else watched.limit.bytes
        how = {
            "unit": self._unit,
            "kind": type(steps).__name__ + steps.own_code,
            "axis": steps.cut.axis,
            "compiled": steps.model.jit_compile,
            "eager": steps.model.run_eagerly,
            "replicas": 1 if self._strategy is None else self._strategy.num_replicas_in_sync,
        }
        self._key = key_of(steps.model, self._batches.parts(batch)[0], whole, how, limit)
        found = cache.read(self._key)
        if found is None or (watched and watched.before + found.bytes > watched.limit.bytes):
            return None
        return found.size

    def _keep(self, search: Search, whole: int, is_new: bool) -> None:
        """Says what was found, and keeps it for other runs."""
        if is_new:
            line = checks.settled(self._unit, search.size, whole, search.found())
            checks.LOG.warning(line)
        takes = 0
        if self._watch is not None and search.has_peaks:
            takes = max(0, search.expects(search.size) - self._watch.before)
        if self._key is not None:
            cache.write(self._key, cache.Found(search.size, takes))

    def _once(
        self,
        search: Search,
        training: bool,
        run: Callable[[Batch], Logs],
        batch: Batch,
        whole: int,
    ) -> Optional[Logs]:
        """Runs a batch. Returns None if memory ran out before anything was written."""
        is_measured = not search.is_settled and not search.times
        found: List[Logs] = []

        def work() -> None:
            found.append(run(batch))
            if search.times:  # A device may still be at work.
                tf.nest.map_structure(np.asarray, found[0])

        try:
            start = time.perf_counter()
            peak = None
            if self._watch is not None and is_measured:
                peak = peak_of(work, self._watch.counter).bytes
            else:
                work()
            seconds = time.perf_counter() - start
        except (tf.errors.OpError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            message = str(error)
            if self._agreed is not None:
                raise checks.only_here(message) from error
            if self._has_begun():
                raise checks.ran_out_while_writing(message) from error
            if not search.ran_out():
                raise checks.ran_out_at_one(self._unit, message) from error
            return None
        self._begun += 1
        if training and (self._steps.shows_size or self._steps.meets):
            search.only_fits()
        rehearses = training and self._steps.can_rehearse
        if peak is not None and rehearses:
            search.takes_beyond(int(peak - search.expected(search.size)))
        elif peak is not None:
            search.rehearsed(search.size, peak)
        grows = not rehearses and search.to_rehearse() is not None
        # A guard looks at parts of a batch, for numbers that are not finite.
        if not self._steps.guard.looks and not grows:
            search.ran(whole, seconds)
        return found[0]

    def _fits_here(self, size: int, batch: Batch) -> bool:
        """Whether a rehearsal of a size fits in the memory of this worker, and a little more."""
        size += 1 + size // 8
        self._chosen.set(size)
        try:
            reserve = tf.zeros([RESERVE + self._rehearsal.of_update()], tf.int8)
            self._rehearsal(self._batches.rows(batch, size))
            del reserve
        except (tf.errors.OpError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    def _has_begun(self) -> bool:
        """Whether a batch that failed had begun to write."""
        begun = [int(part.read_value()) for part in replicas.parts(self._strategy, self._variable)]
        before, self._begun = self._begun, max(begun)
        return max(begun) > before

    @property
    def _strategy(self) -> Any:
        return self._steps.strategy

    @property
    def _variable(self) -> Any:
        return self._steps.begun

    def _rehearse(self, search: Search, batch: Batch) -> None:
        """Finds what sizes take, by steps that write nothing, on few examples of a batch."""
        assert self._watch is not None
        limit = self._watch.limit
        size = search.to_rehearse()
        while size is not None:
            rows = self._batches.rows(batch, size)
            self._chosen.set(size)
            try:
                if not search.has_peaks:
                    self._rehearsal(rows)  # which traces, and plans
                    search.takes_beyond(self._rehearsal.of_update())
                work = functools.partial(self._rehearsal, rows)
                peak = peak_of(work, self._watch.counter)
            except (tf.errors.OpError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                search.next_is(size)
                if not search.ran_out():
                    raise
            else:
                search.rehearsed(size, peak.bytes)
            size = search.to_rehearse()
        if self.memory_limit is not None and search.expects(1) > limit.bytes:
            least = limits.shown(search.expects(1))
            raise checks.too_little(limit, least, self._unit)

    def _check_room(self, search: Search) -> None:
        """Raises for a limit that an update alone exceeds, where nothing has been rehearsed."""
        if self._watch is None or self.memory_limit is None or search.has_peaks:
            return
        least = self._watch.before + self._rehearsal.of_update()
        if least > self._watch.limit.bytes:
            raise checks.too_little(self._watch.limit, limits.shown(least), self._unit)

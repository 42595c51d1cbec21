"""Sizes that are found while training: a batch is run with the size that the search says, and with
a smaller one if it runs out of memory.
"""

import time
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from macrobatch._fit.attempts import Attempt
from macrobatch._fit.steps import Steps
from macrobatch._sizes import checks
from macrobatch._sizes import limit as limits
from macrobatch._sizes.peaks import Counter, ProcessCounter, peak_of
from macrobatch._sizes.search import Search
from macrobatch._tensorflow import device_memory, graph, leaves, replicas
from macrobatch._tensorflow.chosen import ChosenSize
from macrobatch._types import Batch, Logs

# What a compiler raises besides where there is no memory on a device.
_NO_MEMORY = ("out of memory", "OUT_OF_MEMORY", "failed to allocate", "Failed to allocate")


class Auto:
    """The sizes of one model, in training and in testing."""

    def __init__(self, steps: Steps, chosen: ChosenSize, memory_limit: Any):
        self._steps, self._chosen, self.memory_limit = steps, chosen, memory_limit
        self._unit = "micro_batch_tokens" if chosen.in_tokens else "micro_batch_size"
        self._limit: Optional[limits.Limit] = None
        self._counter: Optional[Counter] = None
        self._searches: List[Optional[Search]] = [None, None]  # of testing and of training
        self._begun = 0
        self._compiles = False
        self._rehearsal: Optional[Callable[[Batch], Any]] = None

    def forget(self) -> None:
        """Looks again: the model may have been compiled anew."""
        self._searches, self._rehearsal = [None, None], None

    @property
    def latest(self) -> int:
        """The size of the latest batch."""
        return self._chosen.current

    def attempt(self, training: bool) -> Attempt:
        """A function that runs batches, each as often as it takes."""

        def attempt(run: Callable[[Batch], Logs], batch: Batch) -> Logs:
            search = self._search(training)
            whole, extent = self._measured(batch)
            search.meet(whole, extent)
            if training and search.to_rehearse() is not None:
                self._rehearse(search, batch)
            was_settled, tried = search.is_settled, []
            while True:
                self._chosen.set(self._next(search, training))
                tried.append(self._chosen.current)
                logs = self._once(search, training, run, batch, whole)
                if logs is not None:
                    break
            if len(tried) > 1:
                checks.LOG.warning(checks.shrunk(self._unit, tried, whole))
            if training and search.is_settled and not was_settled:
                line = checks.settled(self._unit, search.size, whole, search.found())
                checks.LOG.warning(line)
            return logs

        return attempt

    def once(self, run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a batch that may write at any time, and so cannot be run again."""
        return run(batch)

    def variant(self) -> Optional[int]:
        """What a graph is made for, beside its batches."""
        return self._chosen.current if self._compiles else None

    def for_each_size(self, first: Any, make: Callable[[], Any]) -> Callable[[Any], Logs]:
        """A function of which there is one for each size, compiled for that size.

        Args:
            first: the function for the first size.
            make: makes another one.
        """
        functions: Dict[int, Any] = {}
        self._compiles = True

        def function(iterator: Any) -> Logs:
            size = self._chosen.current
            if size not in functions:
                functions[size] = make() if functions else first
            return functions[size](iterator)

        return function

    def _next(self, search: Search, training: bool) -> int:
        """The size for a batch. Testing needs no rehearsals: its batches grow."""
        size = None if training else search.to_rehearse()
        return search.next() if size is None else search.next_is(size)

    def _search(self, training: bool) -> Search:
        found = self._searches[training]
        if found is None:
            self._find_limit()
            limit = None if self._limit is None else self._limit.bytes
            power = 1 if self._chosen.in_tokens else 2
            trained = self._searches[True]
            first = None if training or trained is None else trained.size or None
            found = self._searches[training] = Search(limit, training, first, power)
        return found

    def _find_limit(self) -> None:
        """How much memory there may be, if it has to be watched."""
        on_gpu = bool(device_memory.gpus())
        if self.memory_limit is None and limits.running_out_is_an_error(on_gpu):
            return
        of_device = device_memory.size() if on_gpu else None
        self._limit = limits.memory_limit(self.memory_limit, of_device=of_device)
        self._counter = device_memory.GpuCounter() if on_gpu else ProcessCounter()
        limits.check_room(self._limit, self._counter.now(), "the program and its data")

    def _once(
        self,
        search: Search,
        training: bool,
        run: Callable[[Batch], Logs],
        batch: Batch,
        whole: int,
    ) -> Optional[Logs]:
        """Runs a batch. Returns None if memory ran out before anything was written."""
        is_measured = self._counter is not None and not search.is_settled and not search.times
        found: List[Logs] = []

        def work() -> None:
            found.append(run(batch))
            if search.times:  # A device may still be at work.
                tf.nest.map_structure(np.asarray, found[0])

        try:
            start = time.perf_counter()
            peak = None
            if is_measured:
                assert self._counter is not None
                peak = peak_of(work, self._counter).bytes
            else:
                work()
            seconds = time.perf_counter() - start
        except (tf.errors.OpError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = str(error)
            if self._has_begun():
                raise tf.errors.ResourceExhaustedError(
                    None, None, checks.ran_out_while_writing(message)
                ) from error
            if not search.ran_out():
                raise tf.errors.ResourceExhaustedError(
                    None, None, checks.ran_out_at_one(self._unit, message)
                ) from error
            return None
        self._begun += 1
        if training and self._steps.shows_size:
            search.looks = False
        if peak is not None and training:
            search.takes_beyond(int(peak - search.expected(search.size)))
        elif peak is not None:
            search.rehearsed(search.size, peak)
        search.ran(whole, seconds)
        return found[0]

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
        assert self._counter is not None and self._limit is not None
        part = self._parts(batch)[0]
        size = search.to_rehearse()
        while size is not None:
            rows = self._rows(part, size)
            self._chosen.set(size)
            try:
                if not search.has_peaks:
                    self._run_rehearsal(rows)  # which traces, and plans
                    search.takes_beyond(self._of_update())
                peak = peak_of(lambda: self._run_rehearsal(rows), self._counter)
            except (tf.errors.OpError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                search.next_is(size)
                if not search.ran_out():
                    raise
            else:
                search.rehearsed(size, peak.bytes)
            size = search.to_rehearse()
        if self.memory_limit is not None and search.least() > self._limit.bytes:
            least = limits.shown(search.least())
            raise checks.too_little(self._limit, least, self._unit)

    def _rows(self, part: Batch, size: int) -> Batch:
        """Two micro-batches of a size, so that sums are in memory beside gradients."""
        if self._chosen.in_tokens:
            size = max(1, size // self._length(part))

        def rows(leaf: Any) -> Any:
            return None if leaf is None else leaves.slice_of(leaf, 0, 2 * size, static=False)

        return tf.nest.map_structure(rows, part)

    def _run_rehearsal(self, rows: Batch) -> None:
        if self._rehearsal is None:
            rehearse = self._steps.rehearse
            if not self._steps.model.run_eagerly:
                specs = graph.specs_of(rows, any_size=True)
                rehearse = tf.function(rehearse, input_signature=[specs], autograph=False)
            self._rehearsal = rehearse
        self._rehearsal(rows)

    def _of_update(self) -> int:
        """About what an optimizer takes beyond the gradients, while it writes."""
        weights = [variable.value for variable in self._steps.model.trainable_weights]
        sizes = [weight.shape.num_elements() * weight.dtype.size for weight in weights]
        return 2 * sum(sizes)

    def _measured(self, batch: Batch) -> Tuple[int, float]:
        """The size that takes all of a batch, on the replica with the most; and one example's."""
        found = [self._measured_part(part) for part in self._parts(batch)]
        return max(whole for whole, _ in found), max(extent for _, extent in found)

    def _parts(self, batch: Batch) -> List[Batch]:
        """The parts of a batch that the replicas of this process have."""
        kind = tf.experimental.Optional  # which stands for None in batches of datasets
        there = tf.nest.map_structure(lambda x: None if isinstance(x, kind) else x, batch)
        return [graph.to_tensors(part) for part in replicas.parts_of_batch(self._strategy, there)]

    def _measured_part(self, part: Batch) -> Tuple[int, float]:
        there = [leaf for leaf in tf.nest.flatten(part) if leaf is not None]
        examples = max(1, *(int(leaves.examples_of(leaf)) for leaf in there))
        if self._chosen.in_tokens:
            length = self._length(part)
            return examples * length, length
        dense = tf.nest.flatten(part, expand_composites=True)
        elements = sum(int(tf.size(leaf)) for leaf in dense if leaf is not None)
        return examples, elements / examples

    def _length(self, part: Batch) -> int:
        axis = self._steps.cut.axis
        assert axis is not None
        there = [leaf for leaf in tf.nest.flatten(part) if leaf is not None]
        return max([1, *(leaves.length_of(leaf, axis) for leaf in there if len(leaf.shape) > axis)])


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    kinds = (tf.errors.InternalError, tf.errors.UnknownError)
    return isinstance(error, kinds) and any(text in str(error) for text in _NO_MEMORY)

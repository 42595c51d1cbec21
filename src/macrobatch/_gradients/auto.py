"""Sizes of micro-batches for functions of the user's: the largest that fits, or the fastest.

Outside of graphs, a batch that runs out of memory is run again with a smaller size, and calls are
timed. A graph can do neither: its error goes to whoever called it, and the next call has half the
size.
"""

import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence

import numpy as np
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches.cut import Cut
from macrobatch._sizes import checks, watch
from macrobatch._sizes.peaks import peak_of
from macrobatch._sizes.search import Search
from macrobatch._tensorflow import device_memory, graph, leaves, replicas, size_checks, trace
from macrobatch._tensorflow.chosen import ChosenSize
from macrobatch._tensorflow.extents import Batches
from macrobatch._types import Batch, Size

Compute = Callable[[Cut], Any]


def unit_of(in_tokens: bool) -> str:
    """What the size is called in the arguments of the user's."""
    return "micro_batch_tokens" if in_tokens else "micro_batch_size"


class Given:
    """A size for one call: see _batches.cut.Chosen."""

    def __init__(self, size: Size, in_tokens: bool):
        self.current, self.in_tokens = size, in_tokens

    def now(self) -> Size:
        """The size of the call."""
        return self.current


class AutoSize:
    """The size for one function of the user's, from one call to the next."""

    def __init__(self, strategy: Any, in_tokens: bool, axis: Optional[int], memory_limit: Any):
        self._in_tokens, self._axis, self._memory_limit = in_tokens, axis, memory_limit
        self._unit = unit_of(in_tokens)
        self._watch = watch.needed(memory_limit, device_memory)
        limit = None if self._watch is None else self._watch.limit.bytes
        self._search = Search(limit, power=1 if in_tokens else 2)
        self._batches = Batches(None, axis, in_tokens)
        self._chosen = ChosenSize(strategy, in_tokens)
        # Of graphs: how many calls have been started and finished, and the size after a failure.
        self._started, self._finished, self._size = (
            replicas.variable(strategy, [], tf.int32, name, summed=False)
            for name in ("started", "finished", "size")
        )

    def only_fits(self) -> None:
        """Looks for the largest size, because the size shows in what the function comes to."""
        self._search.only_fits()

    def run(self, compute: Compute, cut: Cut, batch: Batch, examples: Size) -> Any:
        """What a computation on a batch comes to.

        Args:
            compute: a function of how to cut.
            cut: how to cut, but for the size.
            batch: the batch.
            examples: the number of its examples.
        """
        if tf.executing_eagerly():
            return self._run_eagerly(compute, cut, batch)
        size = self._begin(batch, examples)
        result = compute(cut._replace(chosen=Given(size, self._in_tokens)))
        with tf.control_dependencies(trace.tensors_of(result)):
            self._finished.assign(replicas.read(self._started))
        return result

    def _begin(self, batch: Batch, examples: Size) -> Size:
        """The size for a call of a graph: after one that did not finish, half of it."""
        if self._watch is not None and not self._search.has_fitted:
            raise size_checks.not_in_a_graph(self._unit)
        started, finished = replicas.read(self._started), replicas.read(self._finished)
        before, whole = replicas.read(self._size), self._whole(batch, examples)
        if self._search.has_fitted:
            whole = tf.minimum(whole, self._search.best())
        size = tf.where(before > 0, tf.minimum(before, whole), whole)
        half = tf.maximum((size + 1) // 2, 1)
        failed = started > finished
        # What has not failed does not bind larger batches.
        kept = tf.where(failed, half, before)
        written = [self._size.assign(kept), self._started.assign(finished + 1)]
        with tf.control_dependencies(written):
            return tf.where(failed, half, size)

    def _whole(self, batch: Batch, examples: Size) -> Any:
        whole = tf.maximum(tf.cast(examples, tf.int32), 1)
        if not self._in_tokens:
            return whole
        assert self._axis is not None
        there = [leaf for leaf in trace.tensors_of(batch) if len(leaf.shape) > self._axis]
        return whole * tf.reduce_max([1, *(leaves.size_along(self._axis, leaf) for leaf in there)])

    def _run_eagerly(self, compute: Compute, cut: Cut, batch: Batch) -> Any:
        search, tried = self._search, []
        whole, extent = self._batches.measured(batch)
        search.meet(whole, extent)
        was_settled = search.is_settled
        found: List[Any] = []

        def work() -> None:
            found.append(compute(cut._replace(chosen=self._chosen)))
            if search.times:  # A device may still be at work.
                tf.nest.map_structure(np.asarray, found[0], expand_composites=True)

        while True:
            # Where memory is watched, sizes grow from call to call.
            size = search.to_rehearse()
            is_measured = self._watch is not None and size is not None
            size = search.next() if size is None else search.next_is(size)
            tried.append(size)
            self._chosen.set(size)
            try:
                if self._watch is not None and is_measured:
                    search.rehearsed(size, peak_of(work, self._watch.counter).bytes)
                else:
                    start = time.perf_counter()
                    work()
                    search.ran(whole, time.perf_counter() - start)
            except (tf.errors.OpError, MemoryError) as error:
                if not size_checks.is_out_of_memory(error):
                    raise
                if not search.ran_out():
                    message = checks.ran_out_at_one(self._unit, str(error))
                    raise size_checks.exhausted(message) from error
                continue
            if len(tried) > 1:
                _checks.LOG.warning(checks.shrunk(self._unit, tried, whole))
            if search.is_settled and not was_settled:
                line = checks.settled(self._unit, search.size, whole, search.found())
                _checks.LOG.warning(line)
            return found[0]


_sizes: "weakref.WeakKeyDictionary[Any, Dict[Any, AutoSize]]" = weakref.WeakKeyDictionary()


def auto_size(
    function: Any,
    variables: Sequence[Any],
    in_tokens: bool,
    axis: Optional[int],
    memory_limit: Any,
) -> AutoSize:
    """The size for a function of the user's. A lambda may be made anew for each call."""
    several, unit = replicas.in_several(), unit_of(in_tokens)
    strategy = tf.distribute.get_strategy() if several else None
    if several and (tf.executing_eagerly() or replicas.has_several_workers(strategy)):
        raise size_checks.not_in_strategy(unit, replicas.has_several_workers(strategy))
    if graph.in_xla():
        raise size_checks.not_compiled(unit)
    of_function = _sizes.setdefault(getattr(function, "__code__", function), {})
    key = id(strategy), tuple(map(id, variables)), in_tokens, axis, memory_limit
    if key not in of_function:
        of_function[key] = AutoSize(strategy, in_tokens, axis, memory_limit)
    return of_function[key]

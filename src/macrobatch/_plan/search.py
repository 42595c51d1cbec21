"""The search: sizes from 1 on, as long as the line through their peaks says that they fit."""

import math
import statistics
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

import tensorflow as tf

from macrobatch._no_trace.twin import twin
from macrobatch._no_trace.unchanged import Values
from macrobatch._plan.report import NothingFits, Plan, Row
from macrobatch._plan.trial import EXAMPLES, Trial, Unit, sizes_between, sizes_to_try
from macrobatch._sizes import limit as limits
from macrobatch._sizes.limit import Limit, shown
from macrobatch._sizes.peaks import (
    MARGIN,
    ONCE,
    Counter,
    Line,
    average_line,
    give_back,
    line_through,
    peak_of,
)
from macrobatch._types import Batch

ROUNDS = 7  # in which sizes are timed one after the other
LEAST_ROUNDS, SECONDS = 2, 20.0  # but fewer, if they take longer
# Sizes that are slower than the fastest by more are not timed again.
SLOW = 2.0
# How far beyond the largest size that was tried the line still tells something.
FAR = 4

NOT_NEW = (
    "This system does not tell the peak of each size by itself: sizes may take less than is shown."
)

# What is going on: rows so far, what comes next, steps done and steps in all.
Tell = Callable[[List[Row], str, int, int], None]


class Memory(NamedTuple):
    """The memory that there is.

    Attributes:
        counter: counts peaks.
        limit: what may be used; None where there is no limit but the device's own.
        room: what the machine has, if that is to be watched: beyond it the kernel may kill.
        device: "CPU" or "GPU".
    """

    counter: Counter
    limit: Optional[Limit]
    room: Optional[int]
    device: str


class Search:
    """The trials of one model and one batch."""

    def __init__(
        self,
        model: Any,
        batch: Batch,
        examples: int,
        settings: Dict[str, Any],
        memory: Memory,
        kept: Values,
        tell: Tell,
        unit: Unit = EXAMPLES,
    ):
        """Prepares a search.

        Args:
            model: a compiled model that is built.
            batch: x, y and sample_weight.
            examples: in the batch.
            settings: further arguments of `accumulate`.
            memory: the memory that there is.
            kept: values that are put back. They are no part of what training takes.
            tell: is told what is going on.
            unit: in which `accumulate` is told sizes. Here, sizes are of the longest examples.
        """
        self._name, self._batch, self._examples = model.name, batch, examples
        self._settings, self._memory, self._tell = settings, memory, tell
        self._kept, self._unit = kept, unit
        self._extra = kept.bytes if memory.device == "CPU" else 0
        # Its optimizer is built, so that all trials share its slots.
        self._model, self._notes = twin(model, as_it_trains=True)
        self._base = 0
        # What was there once the first trial was over, which a training has as well; and what later
        # trials have left since, in graphs and in the allocator, which it has not.
        self._settled: Optional[int] = None
        self._left = 0
        self._trials: List[Trial] = []
        # By size, and None for the plain batch.
        self._peaks: Dict[Optional[int], int] = {}
        self._seconds: Dict[Optional[int], List[float]] = {}
        self._failed: Dict[Optional[int], str] = {}
        self._done, self._steps = 0, len(sizes_to_try(examples)) + 2 + ROUNDS

    def plan(self, objective: str) -> Plan:
        """Tries sizes, and returns the choice."""
        self._check_room()
        for size in sizes_to_try(self._examples):
            if not self._try(size):
                break
        sizes = [size for size in self._sizes() if self._fits(size)]
        if not sizes:
            raise self._nothing_fits()
        self._try_between(sizes[-1])
        self._try(None)
        self._time()
        return self._found(objective)

    def _check_room(self) -> None:
        """Raises if there is less memory than weights need, before any example."""
        give_back()
        self._base = self._memory.counter.now() - self._extra + self._bytes_of_gradients()
        if self._memory.limit is not None:
            limits.check_room(
                self._memory.limit, self._base, "TensorFlow, the weights, their gradients and data"
            )

    def _bytes_of_gradients(self) -> int:
        trained = self._model.trainable_variables
        return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in trained)

    def _line(self) -> Line:
        points = [(size, peak) for size, peak in self._peaks.items() if size is not None]
        return line_through(points, self._base, ONCE if self._memory.device == "CPU" else 0)

    def _sizes(self) -> List[int]:
        return sorted(size for size in self._peaks if size is not None)

    def _fits(self, size: Optional[int]) -> bool:
        """Whether a size that was tried is below the limit."""
        if size not in self._peaks:
            return False
        limit = self._memory.limit
        return limit is None or self._peaks[size] <= limit.bytes * (1 - MARGIN)

    def _may_try(self, size: int) -> bool:
        """Whether the line through the peaks so far says that a size fits."""
        line, limit, room = self._line(), self._memory.limit, self._memory.room
        most = [] if limit is None else [limit.bytes]
        # What is kept for later has to be there as well.
        most += [] if room is None else [room - self._extra - self._left]
        return not most or not self._peaks or line.fits(size, min(most))

    def _try(self, size: Optional[int]) -> bool:
        """Runs a size, if it can be run, and says whether it fits."""
        is_expected_to_fit = self._may_try(size or self._examples)
        self._say(Row(self._shown(size), unit=self._unit.name).name)
        if not is_expected_to_fit:
            self._failed[size] = "not tried"
        else:
            self._run(size)
        self._done += 1
        return self._fits(size)

    def _run(self, size: Optional[int]) -> None:
        self._kept.put_back()
        trial = Trial(self._model, self._batch, self._examples, size, self._settings, self._unit)
        try:
            found = peak_of(trial.start, self._memory.counter)
        except tf.errors.ResourceExhaustedError:
            self._failed[size] = "ran out of memory"
            return
        self._trials.append(trial)
        self._seconds[size] = trial.seconds
        if self._settled is None and self._peaks:
            self._settled = found.before
        self._left = found.before - (self._settled or found.before)
        self._peaks[size] = found.bytes - self._extra - self._left
        self._base = max(self._base, found.before - self._extra - self._left)
        if not found.is_new and NOT_NEW not in self._notes:
            self._notes = (*self._notes, NOT_NEW)

    def _try_between(self, largest: int) -> None:
        """Tries a size between the largest that fits and the next one that was looked at."""
        above = min((s for s in sizes_to_try(self._examples) if s > largest), default=largest)
        between = [size for size in sizes_between(largest, above) if self._may_try(size)]
        if between:
            self._steps += 1
            self._try(max(between))

    def _time(self) -> None:
        """Times the sizes that may be the fastest, one after the other, several times."""
        fitting = [trial for trial in self._trials if self._fits(trial.size)]
        best = min(min(trial.seconds) for trial in fitting)
        self._trials = [
            trial for trial in fitting if trial.size is None or min(trial.seconds) <= SLOW * best
        ]
        start = time.perf_counter()
        for count in range(ROUNDS):
            if count >= LEAST_ROUNDS and time.perf_counter() - start > SECONDS:
                break
            self._say(f"timing, round {count + 1} of {ROUNDS}")
            for trial in self._trials[:: -1 if count % 2 else 1]:
                trial.update()
            self._kept.put_back()
            self._done += 1

    def _say(self, what: str) -> None:
        rows = [self._row(size) for size in [*sorted(self._looked_at()), None]]
        known = [row for row in rows if row.size is not None or row.note or row.peak]
        self._tell(known, what, self._done, self._steps)

    def _looked_at(self) -> Set[int]:
        return {size for size in (*self._peaks, *self._failed) if size is not None}

    def _row(self, size: Optional[int]) -> Row:
        seconds, note = self._seconds.get(size), self._failed.get(size, "")
        speed = self._examples / statistics.median(seconds) if seconds else None
        expected = self._expected(size or self._examples) if note else None
        peak, fits = self._peaks.get(size), self._fits(size)
        return Row(self._shown(size), peak, speed, fits, note, expected, self._unit.name)

    def _shown(self, size: Optional[int]) -> Optional[int]:
        """A size as it is given to `accumulate`."""
        return None if size is None else size * self._unit.of_example

    def _expected(self, size: int) -> Optional[int]:
        """About what a size takes, if that can be told."""
        sizes = self._sizes()
        if len(sizes) < 2 or size > FAR * sizes[-1]:
            return None
        base, slope = average_line([(known, self._peaks[known]) for known in sizes])
        return round(max(base + slope * size, self._peaks[sizes[-1]]))

    def _found(self, objective: str) -> Plan:
        rows = [self._row(size) for size in sorted(self._looked_at())]
        base, slope = average_line([(row.size or 0, row.peak) for row in rows if row.peak])
        self._tell([*rows, self._row(None)], "done", self._steps, self._steps)
        fitting = [row for row in rows if row.fits]
        fastest = max(fitting, key=lambda row: row.examples_per_second or 0.0).size or 0
        largest = fitting[-1].size or 0
        limit = self._memory.limit
        choice = fastest if objective == "fastest" else largest
        in_tokens = self._unit.name != EXAMPLES.name
        return Plan(
            micro_batch_size=None if in_tokens else choice,
            objective=objective,
            fastest=fastest,
            largest=largest,
            rows=rows,
            plain=self._row(None),
            model=self._name,
            examples=self._examples,
            device=self._memory.device,
            limit=None if limit is None else limit.bytes,
            limit_source="" if limit is None else limit.source,
            base=base,
            slope=slope,
            notes=list(self._notes),
            micro_batch_tokens=choice if in_tokens else None,
            whole=self._examples * self._unit.of_example,
        )

    def _nothing_fits(self) -> NothingFits:
        took = f"took {shown(self._peaks[1])}" if 1 in self._peaks else self._failed[1]
        limit = "" if self._memory.limit is None else f" Received: {self._memory.limit}."
        return NothingFits(
            f"Not even a micro-batch of one example fits: it {took}.{limit} Pass a larger "
            "memory_limit, or make the model need less: with a smaller optimizer or model, mixed "
            "precision, rematerialisation (keras.RematScope), or smaller examples."
        )

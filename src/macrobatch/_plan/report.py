"""What `find_micro_batch_size` returns: the choice, and the table that it rests on."""

import dataclasses
import json
from typing import Any, Dict, List, Optional, Tuple

from macrobatch._sizes.limit import shown


class NothingFits(ValueError):
    """Not even micro-batches of one example fit."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A size, and what is known of it.

    Attributes:
        size: examples in a micro-batch, or tokens; None for plain Keras on the whole batch.
        peak: the peak memory in bytes; None if the size was not tried, or ran out of memory.
        examples_per_second: None if the size was not tried.
        fits: whether the peak is below the limit, with a twentieth of the limit to spare.
        note: why there are no numbers: "not tried", or "ran out of memory".
        expected: about what the peak is where it was not measured, in bytes; None if no size near
            it was tried.
        unit: "micro_batch_size" or "micro_batch_tokens".
    """

    size: Optional[int]
    peak: Optional[int] = None
    examples_per_second: Optional[float] = None
    fits: bool = False
    note: str = ""
    expected: Optional[int] = None
    unit: str = "micro_batch_size"

    @property
    def name(self) -> str:
        """What was tried."""
        return "the plain batch" if self.size is None else f"{self.unit}={self.size}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The micro-batch size to take, and why.

    Attributes:
        micro_batch_size: the choice; None if it is of tokens.
        objective: "fastest" or "largest".
        fastest: the fastest size that fits.
        largest: the largest size that fits, of those that were tried.
        rows: the sizes, each with `size`, `peak`, `examples_per_second`, `fits` and `note`.
        plain: the same of plain Keras on the whole batch.
        model: the name of the model.
        examples: in the batch.
        device: "CPU" or "GPU".
        limit: in bytes; None where there is none, and running out of memory is an error.
        limit_source: where the limit comes from.
        base, slope: the line through the peaks: a size takes about `base + slope * size` bytes.
        notes: how it was measured, where it is not as usual.
        micro_batch_tokens: the choice, if it is of tokens.
        whole: the size that takes the whole batch at once, in examples or tokens.
    """

    micro_batch_size: Optional[int]
    objective: str
    fastest: int
    largest: int
    rows: List[Row]
    plain: Row
    model: str
    examples: int
    device: str
    limit: Optional[int]
    limit_source: str
    base: float
    slope: float
    notes: List[str]
    micro_batch_tokens: Optional[int]
    whole: int

    @property
    def choice(self) -> Row:
        """The row of the choice."""
        return self.row_of(self.micro_batch_size or self.micro_batch_tokens or 0)

    @property
    def whole_batch_peak(self) -> Optional[int]:
        """Bytes that the plain batch takes: measured, or by the line; None if nobody knows."""
        return self.plain.peak or self.plain.expected

    @property
    def advice(self) -> str:
        """The finding, in one sentence."""
        there = "memory" if self.limit is None else shown(self.limit)
        whole = self.largest >= self.whole
        size = "as a whole" if whole else f"with {self.row_of(self.largest).name}"
        return f"Batch {self.examples} fits in {there} {size}; {self._of_fastest()}."

    def _of_fastest(self) -> str:
        found, speed = f"{self.fastest} is fastest", self.row_of(self.fastest).examples_per_second
        if speed and self.plain.examples_per_second:
            ratio = self.plain.examples_per_second / speed
            return f"{found}: {ratio:.2f} x the time of the plain batch"
        peak = self.whole_batch_peak
        about = "" if peak is None else f" (about {shown(peak)})"
        return f"{found}: {_speed(speed)} examples/s; the plain batch would not fit{about}"

    def row_of(self, size: int) -> Row:
        """The row of a size."""
        return next(row for row in self.rows if row.size == size)

    def to_json(self) -> str:
        """All of it as JSON."""
        found: Dict[str, Any] = dataclasses.asdict(self)
        found.update(advice=self.advice, whole_batch_peak=self.whole_batch_peak)
        return json.dumps(found, indent=2)

    def __str__(self) -> str:
        limit = "none" if self.limit is None else f"{shown(self.limit)}: {self.limit_source}"
        head = [
            f"{self.model}, a batch of {self.examples} examples, on a {self.device}.",
            f"Memory limit: {limit}.",
            *self.notes,
        ]
        size = "size" if self.micro_batch_tokens is None else "tokens"
        line = f"A micro-batch takes about {shown(self.base)} + {size} x {shown(self.slope)}."
        is_known = sum(row.peak is not None for row in self.rows) > 1
        end = [line, self.advice] if is_known else [self.advice]
        return "\n".join([*head, "", *self._table(), "", *end])

    def _table(self) -> List[str]:
        rows = [*self.rows, self.plain]
        title = "size" if self.micro_batch_tokens is None else "tokens"
        lines = [(title, "peak memory", "examples/s", "fits", "")]
        lines += [(*cells(row), self._remark(row)) for row in rows]
        widths = [max(len(line[place]) for line in lines) for place in range(4)]
        texts = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(line, widths)), line[4]]).rstrip()
            for line in lines
        ]
        return [texts[0], "-" * max(map(len, texts)), *texts[1:]]

    def _remark(self, row: Row) -> str:
        about = "" if row.expected is None else f": about {shown(row.expected)}"
        return "chosen" if row == self.choice else row.note + about


def cells(row: Row) -> Tuple[str, str, str, str]:
    """A row as a table shows it."""
    fits = "yes" if row.fits else "no"
    peak = "" if row.peak is None else shown(row.peak)
    size = "plain batch" if row.size is None else str(row.size)
    return size, peak, _speed(row.examples_per_second), fits


def _speed(speed: Optional[float]) -> str:
    return "" if speed is None else f"{speed:.3g}" if speed < 1000 else f"{speed:.0f}"

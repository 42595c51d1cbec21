"""What a train step tells of the gradient noise scale, and which updates are measured.

Measuring takes time in each micro-batch, even if a condition in the graph leaves it out. So updates
that are not measured run another function, which only counts them.
"""

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Sequence

from macrobatch._noise.meter import Meter
from macrobatch._tensorflow import replicas, sums
from macrobatch._types import Gradient, Logs, Size, Tensor

Look = Callable[[List[Gradient]], None]


class Nothing:
    """A step of which nothing is measured."""

    def of_micro_batch(self, gradients: List[List[Gradient]], examples: Size) -> List[Tensor]:
        """What to sum over micro-batches, beside gradients."""
        return []

    def looking(self, penalties: Sequence[Gradient]) -> Optional[Look]:
        """What sees the gradient of the whole batch. A replica has its part of the penalties."""
        return None

    def finish(self, summed: Sequence[Tensor], factors: List[Tensor], scale: Tensor) -> None:
        """Remembers what was measured, among the sums over this replica's micro-batches."""

    def logs(self) -> Logs:
        """What to add to the logs."""
        return {}


class Counted(Nothing):
    """A step of which only the logs are those of a fit that measures."""

    def __init__(self, meter: Meter, examples: Size):
        self._meter, self._examples = meter, examples

    def finish(self, summed: Sequence[Tensor], factors: List[Tensor], scale: Tensor) -> None:
        """Counts the update."""
        self._meter.count(self._examples)

    def logs(self) -> Logs:
        """What was measured before."""
        return self._meter.logs()


class Measured(Counted):
    """A step that is measured, if it is its turn."""

    def __init__(self, meter: Meter, examples: Size, trained: int):
        super().__init__(meter, examples)
        self._update, self._trained = meter.start(examples), trained

    def of_micro_batch(self, gradients: List[List[Gradient]], examples: Size) -> List[Tensor]:
        """Weighted squared norms, and the number of micro-batches."""
        return self._update.of_micro_batch(gradients, examples)

    def looking(self, penalties: Sequence[Gradient]) -> Optional[Look]:
        """Measures the gradient of the whole batch."""
        of_all = [sums.scaled(each, float(replicas.count())) for each in penalties]
        return lambda gradients: self._update.look(gradients, of_all)

    def finish(self, summed: Sequence[Tensor], factors: List[Tensor], scale: Tensor) -> None:
        """Remembers what was measured. In the sums, it comes after the gradients."""
        place = self._trained * (1 + len(factors))
        self._update.finish(summed[place : place + 2], [1.0, *factors], scale)


class Turns:
    """Which function is next: the one that measures, or the one that only counts.

    What tells whether an update is measured is on the device, where it must not be waited for. Here
    updates are counted that may have been made. There may have been fewer: at the end of an epoch,
    or if one was refused. So the function that measures comes too early, never too late. It looks
    at the true count, and then that count is taken over.

    Attributes:
        measures: whether steps are made, and run, that measure.
    """

    def __init__(self) -> None:
        self.measures = True
        self._meter: Optional[Meter] = None
        self._left = 0  # updates before the next one that is measured

    def start(self, meter: Optional[Meter]) -> None:
        """Begins with an update that is measured."""
        self._meter, self._left, self.measures = meter, 0, True

    def variables(self) -> List[Any]:
        """What steps write, to remember what was measured."""
        return [] if self._meter is None else [self._meter.state]

    def of_step(self, examples: Size, trained: int) -> Nothing:
        """What a step tells, of a batch of so many examples, with so many trained variables."""
        if self._meter is None:
            return Nothing()
        if self.measures:
            return Measured(self._meter, examples, trained)
        return Counted(self._meter, examples)

    @contextlib.contextmanager
    def taking(self, steps: int, always: bool) -> Iterator[None]:
        """A context in which up to so many updates are made.

        Args:
            steps: how many.
            always: whether to take the function that measures, whichever updates come.
        """
        if self._meter is None:
            yield
            return
        self.measures = always or self._left < steps
        try:
            yield
        finally:
            self._left -= steps
        if self.measures:
            self._left = -self._meter.updates() % self._meter.every

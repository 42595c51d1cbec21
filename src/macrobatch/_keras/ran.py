"""How many batches and micro-batches a model was trained with, where steps run in Python."""

from typing import Tuple


class Ran:
    """Counts of one model."""

    def __init__(self) -> None:
        self._batches = self._micro_batches = 0

    def add(self, micro_batches: int) -> None:
        """Counts a batch."""
        self._batches += 1
        self._micro_batches += micro_batches

    def totals(self) -> Tuple[int, int]:
        """Batches and micro-batches so far."""
        return self._batches, self._micro_batches

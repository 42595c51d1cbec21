"""Whether it pays to look for a faster size, where each size is compiled anew."""

import math
from typing import Optional

# A faster size counts as one that saves so much of the time that is left. It has to save more than
# compiling takes.
SAVES = 0.1


class Paying:
    """Hears of updates, and says whether a further size is worth its compilation."""

    def __init__(self) -> None:
        self._left: Optional[int] = None
        self._compiling, self._update = 0.0, math.inf  # seconds

    def expect(self, updates: Optional[int]) -> None:
        """Hears how many updates are to come; None if nobody knows."""
        self._left = updates

    def __call__(self, is_new: bool, seconds: float) -> bool:
        """Whether it pays to look on.

        Args:
            is_new: whether the latest update was the first one of its size, which compiles.
            seconds: how long it took.
        """
        if self._left is not None:
            self._left = max(0, self._left - 1)
        if is_new:  # The next update of the size shows how long one takes.
            self._compiling = seconds
            return self._left is not None
        self._update = min(self._update, seconds)
        return self._left is not None and SAVES * self._left * self._update > self._compiling

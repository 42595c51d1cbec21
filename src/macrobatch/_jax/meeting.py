"""The trial of fit() whether examples meet, on JAX."""

from typing import Any

from macrobatch._batches.cut import Cut
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.state import State, StateScope
from macrobatch._keras import comparison, meeting
from macrobatch._keras.first_batch import FirstBatch
from macrobatch._keras.tried import Tried


class Meeting(FirstBatch):
    """The trial of one model. In a fit its variables have no values: the state has them."""

    def __init__(self, model: Any, cut: Cut, with_losses: bool):
        super().__init__(model, cut, with_losses, ENGINE)
        self.state: Any = None

    def verdict(self, tried: Tried, groups: comparison.Groups, is_coarse: bool) -> meeting.Verdict:
        with StateScope(self._model, State(*self.state)):
            return super().verdict(tried, groups, is_coarse)

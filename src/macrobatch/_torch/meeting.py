"""The trial of fit() whether examples meet, on torch."""

from typing import Any, Sequence

import torch

from macrobatch._batches.cut import Cut
from macrobatch._keras import comparison, meeting
from macrobatch._keras.first_batch import FirstBatch
from macrobatch._keras.pieces import Pieces
from macrobatch._keras.tried import Tried
from macrobatch._torch import loop
from macrobatch._torch.engine import ENGINE, Draws, on_device, same_draws
from macrobatch._torch.modules import Modules
from macrobatch._types import Batch


class Meeting(FirstBatch):
    """The trial of one model, whose torch modules may draw numbers and keep statistics."""

    def __init__(self, model: Any, cut: Cut, with_losses: bool, modules: Modules):
        super().__init__(model, cut, with_losses, ENGINE)
        self._modules = modules

    def rows(self, batch: Batch) -> Batch:
        return on_device(batch)

    def verdict(self, tried: Tried, groups: comparison.Groups, is_coarse: bool) -> meeting.Verdict:
        buffers = self._modules.buffers()
        try:
            with torch.no_grad(), same_draws():
                again = _Again(tried, self._modules.may_draw)
                return meeting.find(again, groups, ENGINE, is_coarse)
        finally:
            buffers.put_back()


class _Again(meeting.Tried):
    """What is tried, with the same draws of torch's generators in each run."""

    def __init__(self, tried: Tried, may_draw: bool):
        self._tried, self._may_draw, self._draws = tried, may_draw, Draws()
        self.alone_of = tried.alone_of

    def _start(self) -> None:
        self._draws.put_back()
        loop.free_outputs()

    def found(self, micro_batch: Batch) -> comparison.Found:
        self._start()
        return self._tried.found(micro_batch)

    def alone(self, micro_batch: Batch) -> comparison.Found:
        self._start()
        return {} if self._may_draw else self._tried.alone(micro_batch)

    def apart(self, made: Pieces) -> Sequence[comparison.Found]:
        self._start()
        return self._tried.apart(made)

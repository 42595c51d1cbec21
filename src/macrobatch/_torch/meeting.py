"""The trial of fit() whether examples meet, on torch."""

from typing import Any

import torch

from macrobatch._batches.cut import Cut
from macrobatch._keras import comparison, meeting
from macrobatch._keras.first_batch import FirstBatch
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
        draws, buffers = Draws(), self._modules.buffers()

        def found(micro_batch: Batch) -> comparison.Found:
            draws.put_back()
            loop.free_outputs()
            return tried.found(micro_batch)

        try:
            with torch.no_grad(), same_draws():
                return meeting.find(found, groups, ENGINE, is_coarse)
        finally:
            buffers.put_back()

"""Sizes that are found while training, on torch."""

from typing import Any, Callable

import torch
from keras import tree

from macrobatch._batches import in_order
from macrobatch._found_sizes import Backend, FoundSizes
from macrobatch._sizes import watch
from macrobatch._torch import device_memory, memory
from macrobatch._torch.engine import ENGINE
from macrobatch._torch.steps import Rehearsed, Steps
from macrobatch._types import Batch, Logs


class Auto(FoundSizes):
    """The sizes of one model. A step that fails before it begins to write has changed nothing."""

    def __init__(self, steps: Steps, memory_limit: Any):
        super().__init__(steps, memory_limit, Backend(torch.__version__, device_memory.names()))

    def train_step(self, data: Any) -> Logs:
        """The train step, as often as it takes."""
        return self.finder.attempt(True, self._steps.train_step, self._steps.batch_of(data))

    def test_step(self, data: Any) -> Logs:
        """The test step, as often as it takes."""
        return self.finder.attempt(False, self._steps.test_step, self._steps.batch_of(data))

    def device(self) -> watch.DeviceMemory:
        return device_memory

    def is_out_of_memory(self, error: Exception) -> bool:
        found = memory.is_out_of_memory(error)
        if found:
            device_memory.give_back()
        return found

    def exhausted(self, message: str) -> Exception:
        return torch.OutOfMemoryError(message)

    def set(self, size: int) -> None:
        super().set(size)
        self._steps.has_begun = False

    def has_begun(self) -> bool:
        return bool(self._steps.has_begun)

    def compiles(self) -> bool:
        return bool(self._steps.model.jit_compile)

    def rehearse(self, batch: Batch, size: int) -> Callable[[], Any]:
        in_order.checked(batch, ENGINE)
        rows = self.rows_of(batch, size)
        few = tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], batch)

        def work() -> None:
            self._steps.is_rehearsal = True
            try:
                self._steps.train_step(few)
            except Rehearsed:
                pass
            finally:
                self._steps.is_rehearsal = False

        return work

    def wait(self, result: Any) -> None:
        device_memory.wait()

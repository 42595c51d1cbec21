"""What torch offers to work on a user's model that leaves no trace: see _keras.trials."""

import contextlib
from typing import Any, ContextManager, Iterator

import keras
import torch

from macrobatch import _internals
from macrobatch._keras import trials
from macrobatch._torch.engine import ENGINE, on_device, same_draws, to_tensors
from macrobatch._torch.memory import is_out_of_memory
from macrobatch._torch.modules import Modules
from macrobatch._types import Batch


class _Trials(trials.Trials):
    failures = (RuntimeError,)  # which torch raises for most of what goes wrong

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)

    @contextlib.contextmanager
    def same_generators(self, model: Any) -> Iterator[None]:
        buffers = Modules(model).buffers()
        gradients = [(variable.value, variable.value.grad) for variable in model.variables]
        with same_draws():
            try:
                yield
            finally:
                buffers.put_back()
                for parameter, gradient in gradients:
                    parameter.grad = gradient

    def in_float64(self) -> ContextManager[Any]:
        return _internals.with_float64()

    def looking(self) -> ContextManager[Any]:
        return torch.no_grad()

    def batch_of(self, data: Any) -> Batch:
        return on_device(to_tensors(keras.utils.unpack_x_y_sample_weight(data)))


TRIALS = _Trials(ENGINE)

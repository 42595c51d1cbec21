"""Batches with examples whose loss or gradient is not finite, on torch.

A step that may write nothing stops before it would write: see `Unwritten`.
"""

import contextlib
from typing import Any, Callable, Iterator, List, Sequence

import torch
from keras import tree

from macrobatch._batches.examples import Examples
from macrobatch._keras import finite, guard
from macrobatch._keras.model import ModelStep
from macrobatch._keras.skipping import NOT_FINITE, Skipping
from macrobatch._keras.tried import Tried
from macrobatch._torch.engine import ENGINE, on_device, same_draws
from macrobatch._torch.modules import Modules
from macrobatch._types import Batch, Gradient, Logs, Tensor


class Unwritten(Exception):
    """A step that was stopped before it wrote anything. What it had changed is put back.

    Attributes:
        logs: those that the step would have returned.
        is_bad: whether numbers were not finite.
    """

    def __init__(self, logs: Logs, is_bad: bool):
        super().__init__("This step must not write anything.")
        self.logs, self.is_bad = logs, is_bad


class Guard(guard.Guard):
    """What a train step writes, with numbers that are not finite kept out."""

    def check(self, gradients: Sequence[Gradient], losses: Any, logs: Logs) -> None:
        """Raises Unwritten if a step must not write.

        Args:
            gradients: of the whole batch.
            losses: a nest of the reported values.
            logs: those of the step.
        """
        if not self.is_wanted:
            return
        numbers = self.numbers(gradients, tree.flatten(losses))
        is_bad = not bool(finite.all_finite(numbers))  # waits for the device, once
        if is_bad or self.looks:
            raise Unwritten(logs, is_bad)


class Finite(Skipping):
    """Runs batches without the examples that are not finite.

    Attributes:
        latest: what was trained on of the latest batch; None if nothing was.
    """

    def __init__(
        self,
        model: Any,
        guard: Guard,
        modules: Modules,
        size: Callable[[], int],
        tried: Callable[[], Tried],
        before_again: Callable[[int], None],
    ):
        super().__init__(model, guard, ENGINE, size, tried, before_again)
        self._modules = modules
        self.latest: Batch = None

    def train_step(self, step: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a train step on a batch of x, y and sample_weight, again if need be."""
        self._guard.start(self._model.optimizer)
        self.latest = None

        def run(batch: Batch) -> Logs:
            try:
                logs = step(batch)
            except Unwritten as found:
                return {**found.logs, NOT_FINITE: int(found.is_bad)}
            self.latest = batch
            return {**logs, NOT_FINITE: 0}

        return self(run, batch)

    def examples_of(self, batch: Batch) -> Examples:
        return Examples(batch, ENGINE)

    def micro_batch_of(self, batch: Batch) -> Batch:
        return on_device(batch)

    def trained(self) -> List[Tensor]:
        return [ENGINE.read(variable.value) for variable in self._model.trainable_weights]

    def not_trained(self) -> List[Tensor]:
        return [ENGINE.read(each.value) for each in self._model.non_trainable_variables]

    def regularizers_are_finite(self) -> bool:
        weights = [variable.value for variable in self._model.trainable_weights]
        penalty = ModelStep(self._model, True, ENGINE).regularization()
        gradients: Sequence[Gradient] = []
        if penalty.requires_grad:
            gradients = torch.autograd.grad(penalty, weights, allow_unused=True)
        return bool(finite.all_finite([penalty, *gradients]))

    def parts_are_as_large(self) -> bool:
        return bool(self._model.jit_compile)

    @contextlib.contextmanager
    def trying(self) -> Iterator[None]:
        buffers = self._modules.buffers()
        try:
            with torch.no_grad(), same_draws():
                yield
        finally:
            buffers.put_back()

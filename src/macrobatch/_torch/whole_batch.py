"""A train step and a test step whose loss and metrics see the predictions of the whole batch."""

from typing import Any, List

import torch

from macrobatch._keras.whole_batch import Found, WholeBatchStep
from macrobatch._torch import checks
from macrobatch._torch.engine import ENGINE, on_device
from macrobatch._torch.steps import Steps
from macrobatch._torch.two_passes import TwoPasses
from macrobatch._types import Batch, Forward, Logs, MicroBatches, Tensor, Whole


class WholeBatchSteps(Steps):
    """The steps of one model, in two passes: see two_passes.py."""

    def train_step(self, data: Any) -> Logs:
        """Makes the update of the loss of the whole batch."""
        micro_batches, whole = self._prepare(data, training=True)
        model = WholeBatchStep(self.model, True, ENGINE)
        weights = [variable.value for variable in model.trained]
        scale = self._loss_scale(model.trained)
        with self._nothing_changed_if_failing(weights) as gradients:
            passes = self._first_pass(model, micro_batches, whole)
            found = self._loss(model, micro_batches, passes)
            gradients.add([found.loss * scale.to(found.loss.dtype)], also=passes.watched)
            passes.run_again(gradients)
            total = gradients.total([])
            self._end_of_rehearsal()
            self.guard.check(total, found.loss, found.logs)
            self.has_begun = True
        with torch.no_grad():
            self._update(model.trained, total)
            model.write(passes.part.written, passes.part.moments, found)
        return found.logs

    def test_step(self, data: Any) -> Logs:
        """Reports the loss and the metrics of the whole batch: one pass is enough."""
        micro_batches, whole = self._prepare(data, training=False)
        model = WholeBatchStep(self.model, False, ENGINE)
        with torch.no_grad(), self._nothing_changed_if_failing([]):
            passes = self._first_pass(model, micro_batches, whole)
            found = self._loss(model, micro_batches, passes)
            self._end_of_rehearsal()
            self.has_begun = True
            model.write(passes.part.written, passes.part.moments, found)
        return found.logs

    def _step_to_build_with(self, training: bool) -> Any:
        return WholeBatchStep(self.model, training, ENGINE)

    def _first_pass(
        self, model: WholeBatchStep, micro_batches: MicroBatches, whole: Whole
    ) -> TwoPasses:
        """The first pass, which has run."""

        def forward(micro_batch: Batch, values: List[Tensor]) -> Forward:
            return model.forward(micro_batch, values, whole.examples)

        with self.padding.explaining(model, micro_batches):
            self.padding.check_whole_batch(model, micro_batches)
            passes = TwoPasses(forward, micro_batches, model.values)
        self.compiled.look(False, checks.RUNS_TWICE)
        self._warn(model, passes.part)
        return passes

    def _loss(self, model: WholeBatchStep, micro_batches: MicroBatches, passes: TwoPasses) -> Found:
        """What the loss and the metrics make of the whole batch. No variable is written."""
        x, y, sample_weight = micro_batches.whole
        # Inputs may be large, and Keras' own code does not look at them.
        batch = on_device((x if model.needs_inputs else None, y, sample_weight))
        values = model.values_for_loss(passes.part.written)
        found = model.loss(batch, passes.outputs, passes.totals, values, micro_batches.examples)
        logs = {name: value.detach() for name, value in found.logs.items()}
        written = [None if value is None else value.detach() for value in found.run.written]
        return Found(found.loss, logs, found.run._replace(written=written))

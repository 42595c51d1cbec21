"""A train step and a test step that cut their batch into micro-batches. No arithmetic of their own:
the loop and the sums are beside this file, the loss and the metrics are in _keras.
"""

import contextlib
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import keras
import torch

from macrobatch import _checks, _internals, _optimizer_checks
from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import model_checks, probes, report
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import without
from macrobatch._noise.host import HostMeter
from macrobatch._torch import checks, loop, sums
from macrobatch._torch.compiled import CompiledCall
from macrobatch._torch.engine import ENGINE, Draws, on_device, same_draws, to_tensors
from macrobatch._torch.finite import Guard
from macrobatch._torch.modules import Modules
from macrobatch._torch.noise import MeasuredGradients
from macrobatch._torch.padding import Padding
from macrobatch._types import Batch, Gradient, Logs, MicroBatches, Part, Tensor, Whole


class Rehearsed(Exception):
    """Ends a rehearsal where a step would begin to write. All is put back then."""


class Steps:
    """The steps of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        padding: what is known of padding, in testing and in training.
        modules: the torch modules inside the model.
        guard: what keeps numbers that are not finite from being written, if asked for.
        meter: measures the gradient noise scale, if asked for.
        examples, micro_batches: their numbers in the latest batch.
        shows_size: whether the size of micro-batches shows in the update; None if not yet known.
        is_rehearsal: whether steps end where they would begin to write.
        has_begun: whether a step has begun to write since this was set to False.
    """

    def __init__(self, model: Any, cut: Cut, micro_batch_weight: Optional[Callable[..., Any]]):
        probes.probe()
        self.model, self.cut, self.micro_batch_weight = model, cut, micro_batch_weight
        self.padding = Padding(cut)
        self.modules = Modules(model)
        self.compiled = CompiledCall(model)
        self.guard = Guard()
        self.meter: Optional[HostMeter] = None
        self.examples = self.micro_batches = 0
        self.shows_size: Optional[bool] = None
        self.is_rehearsal = self.has_begun = False

    def forget(self, training: bool) -> None:
        """Forgets what is known of a model that may be compiled anew."""
        self.padding.done[training] = False
        self.compiled.forget()
        self.modules.forget()

    def batch_of(self, data: Any) -> Batch:
        """x, y and sample_weight as tensors. Arrays stay on the host, tensors where they are."""
        return to_tensors(keras.utils.unpack_x_y_sample_weight(data))

    def train_step(self, data: Any) -> Logs:
        """Makes the update that the whole batch would have made."""
        micro_batches, whole = self._prepare(data, training=True)
        model = self._model_step(True, micro_batches)
        weights = [variable.value for variable in model.trained]
        scale = self._loss_scale(model.trained)
        with self._nothing_changed_if_failing(weights) as gradients:
            penalty = model.regularization()
            gradients.add([penalty * scale])

            def step(micro_batch: Batch, values: List[Tensor]) -> Part:
                outcome = model(micro_batch, values, whole)
                # Where a micro-batch counts nothing, its gradient may be 0 / 0.
                counts = outcome.is_there is None or outcome.is_there
                losses = [loss * scale.to(loss.dtype) for loss in outcome.losses if counts]
                gradients.add(losses, examples=ENGINE.examples(micro_batch))
                return Part(
                    list(outcome.reported),
                    outcome.counts,
                    outcome.written,
                    outcome.moments,
                    outcome.logs,
                )

            part = self._run(step, model, micro_batches)
            paddings = [count.padding for count in model.counts]
            factors = sums.factors_of(part.counts, whole.guesses, paddings)
            total = gradients.total(factors)
            told = self._told(model, part, penalty.detach(), micro_batches)
            self._end_of_rehearsal()
            self.guard.check(total, told.values, told.logs)
            squares = gradients.squares(factors, total, scale)
            self.has_begun = True
        with torch.no_grad():
            self._update(model.trained, total)
            told.write()
            model.written.write(part.written[1:], part.moments)
        if self.meter is not None:
            self.meter.add(self.examples, squares)
        return told.logs

    def test_step(self, data: Any) -> Logs:
        """Reports the loss and the metrics of the whole batch."""
        micro_batches, whole = self._prepare(data, training=False)
        model = self._model_step(False, micro_batches)

        def step(micro_batch: Batch, values: List[Tensor]) -> Part:
            found = model(micro_batch, values, whole)
            return Part(
                list(found.reported), found.counts, found.written, found.moments, found.logs
            )

        with torch.no_grad(), self._nothing_changed_if_failing([]):
            penalty = model.regularization()
            part = self._run(step, model, micro_batches)
            told = self._told(model, part, penalty, micro_batches)
            self._end_of_rehearsal()
            self.has_begun = True
            told.write()
            model.written.write(part.written[1:], part.moments)
        return told.logs

    @contextlib.contextmanager
    def _nothing_changed_if_failing(self, weights: List[Tensor]) -> Iterator[sums.Gradients]:
        """Lets everything be as before if the code inside fails. It writes no variable."""
        gradients, draws, buffers = self._sums_of(weights), Draws(), self.modules.buffers()
        try:
            yield gradients
        except BaseException:
            for each in (gradients, draws, buffers):
                each.put_back()
            raise

    def _end_of_rehearsal(self) -> None:
        if self.is_rehearsal:
            raise Rehearsed

    def _sums_of(self, weights: List[Tensor]) -> sums.Gradients:
        is_measured = weights and self.meter is not None and self.meter.is_turn
        return MeasuredGradients(weights, self.examples) if is_measured else sums.Gradients(weights)

    def _prepare(self, data: Any, training: bool) -> Tuple[MicroBatches, Whole]:
        """The micro-batches, and what is known of the whole batch."""
        model = self.model
        _optimizer_checks.optimizer(model.optimizer)
        model_checks.splittable_layers(_internals.layers_of(model))
        model_checks.no_overwriting_variables(model.trainable_weights)
        batch, examples = in_order.checked(self.batch_of(data), ENGINE)
        self.examples = int(examples)
        micro_batches = self.padding.cut(model, batch, examples)
        self.micro_batches = sum(int(run.count) for run in micro_batches.runs)
        whole = Whole(examples, guesses=[])
        if not models.is_built(model):
            # `fit` builds a model before. Whoever calls the step does not.
            first, step = on_device(micro_batches.first()), self._step_to_build_with(training)
            with torch.no_grad(), same_draws():
                step(first, step.values(), whole._replace(guesses=[]))
        return micro_batches, whole

    def _model_step(self, training: bool, micro_batches: MicroBatches) -> ModelStep:
        uncut = micro_batches.uncut_fraction
        return ModelStep(self.model, training, ENGINE, self.micro_batch_weight, uncut)

    def _step_to_build_with(self, training: bool) -> Any:
        """What can run a micro-batch, where only what the run makes is needed."""
        return ModelStep(self.model, training, ENGINE, self.micro_batch_weight)

    def _run(self, step: loop.Step, model: ModelStep, micro_batches: MicroBatches) -> Part:
        """The part of the whole batch, once it is known that the batch may be cut."""
        with self.padding.explaining(model, micro_batches):
            self.padding.check(model, micro_batches)
            with self.compiled():
                part = loop.run(step, micro_batches, model.values)
        added = any(term.is_added for term in model.terms)
        leaves_nothing = not added and self._writes_nothing(model, part.written[1:])
        self.compiled.look(leaves_nothing, checks.LEAVES_MORE)
        self._warn(model, part)
        return part

    def _writes_nothing(self, model: Any, written: Sequence[Any]) -> bool:
        """Whether calls of the model have left nothing in variables, nor masks on outputs."""
        pairs = zip(model.written.variables, written)
        changed = without(
            [v for v, value in pairs if value is not None], self.model.metrics_variables
        )
        return not changed and not model.written.normalizing and not model.reaches_loss

    def _warn(self, model: Any, part: Part) -> None:
        written = keras_checks.written_by_layers(model.unexplained(part.written))
        messages = [*model.inexact, *written, *self.modules.inexact(model.training)]
        for message in messages:
            _checks.warn_once(self.model, message)
        if model.training:
            self.shows_size = bool(messages) or model.written.drew or model.written.dropped

    def _told(
        self, model: ModelStep, part: Part, penalty: Tensor, micro_batches: MicroBatches
    ) -> report.Told:
        """What Keras is told of the batch."""
        with torch.no_grad():
            return report.told(
                model,
                penalty,
                part.sums,
                part.counts,
                part.written[1:],
                part.latest,
                micro_batches.examples,
                ENGINE,
            )

    def _loss_scale(self, trained: List[Any]) -> Tensor:
        optimizer = self.model.optimizer
        if trained and not optimizer.built:
            optimizer.build(trained)
            _optimizer_checks.optimizer(optimizer)  # a MultiOptimizer knows its parts only now
        one = keras.ops.ones([], keras.config.floatx())
        return one if optimizer is None else optimizer.scale_loss(one).detach()

    def _update(self, variables: List[Any], gradients: List[Gradient]) -> None:
        if not variables:
            _checks.warn("The model does not have any trainable weights.")
            return
        self.model.optimizer.apply(gradients, variables)

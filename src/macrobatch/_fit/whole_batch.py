"""A train step and a test step whose loss and metrics see the predictions of the whole batch."""

from typing import Any, Dict, List, Tuple

import tensorflow as tf

from macrobatch import _internals
from macrobatch._fit import padding
from macrobatch._fit.install import Accumulation
from macrobatch._fit.steps import Steps
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import report
from macrobatch._keras.scope import without
from macrobatch._keras.sequences import low_precision
from macrobatch._keras.whole_batch import Found, WholeBatchStep
from macrobatch._tensorflow import replicas, sums, trial, two_passes
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.gather import Gathered
from macrobatch._tensorflow.two_passes import Loss, TwoPasses
from macrobatch._types import Batch, Forward, How, Logs, MicroBatches, Tensor, Whole


class WholeBatchSteps(Steps):
    """The steps of one model, in two passes: see _tensorflow/two_passes.py."""

    def train_step(self, data: Any) -> Logs:
        """Makes the update of the loss of the whole batch; a replica has a part of it."""
        micro_batches, whole = self._prepare(data, training=True)
        model = WholeBatchStep(self.model, True, ENGINE)
        weights = [variable.value for variable in model.trained]
        scale = self._loss_scale(model.trained)
        passes = self._first_pass(model, micro_batches, whole)
        loss, gathered = self._loss(model, micro_batches, passes)

        def scaled(outputs: Any, totals: List[Tensor]) -> Loss:
            found = loss(outputs, totals).result
            return Loss(found.loss * tf.cast(scale, found.loss.dtype), found)

        found, gradients = passes.loss_and_gradients(scaled, gathered, weights)
        gradients = [sums.merge_rows(gradient) for gradient in gradients]
        if self.is_rehearsal:
            return self._rehearsed((gradients, passes.part, found))

        def write() -> None:
            model.write(passes.part.written, passes.part.moments, found.result)
            self._remember(whole.examples)
            self._update(model.trained, gradients)

        with self._writing((gradients, passes.part, found)):
            outcome = self.guard.write(gradients, [found.result.loss], write)
        return replicas.for_reduction({**found.result.logs, **outcome})

    def test_step(self, data: Any) -> Logs:
        """Reports the loss and the metrics of the whole batch: one pass is enough."""
        micro_batches, whole = self._prepare(data, training=False)
        model = WholeBatchStep(self.model, False, ENGINE)
        passes = self._first_pass(model, micro_batches, whole)
        found: Found = passes.loss(*self._loss(model, micro_batches, passes)).result
        with self._writing((passes.part, found)):
            model.write(passes.part.written, passes.part.moments, found)
        return replicas.for_reduction(found.logs)

    def _step_to_build_with(self, training: bool) -> Any:
        return WholeBatchStep(self.model, training, ENGINE)

    def _first_pass(
        self, model: WholeBatchStep, micro_batches: MicroBatches, whole: Whole
    ) -> TwoPasses:
        """The first pass, which has run."""

        def forward(micro_batch: Batch, values: Any, how: How) -> Forward:
            return model.forward(micro_batch, values, whole.examples, *how)

        with self.padding.explaining(model, micro_batches):
            passes = TwoPasses(
                "The predictions of a model",
                forward,
                micro_batches,
                model.values,
                model.fits,
                self.compiles_steps(),
            )
            self._check_padding(model, micro_batches)
            passes.run(self._synchronized(model))
        self._warn(model, passes.part)
        return passes

    def _loss(
        self, model: WholeBatchStep, micro_batches: MicroBatches, passes: TwoPasses
    ) -> Tuple[two_passes.LossOfBatch, Gathered]:
        """The loss of the whole batch, of all replicas, as a function of their predictions."""
        gathered = Gathered(micro_batches.examples)
        x, y, sample_weight = micro_batches.whole
        # Inputs may be large, and Keras' own code does not look at them.
        x = gathered.whole(x) if model.needs_inputs else None
        batch = (x, *gathered.whole((y, sample_weight)))
        values = model.values_for_loss(passes.part.written)

        def loss(outputs: Any, totals: List[Tensor]) -> Loss:
            found = model.loss(batch, outputs, totals, values, gathered.examples)
            return Loss(found.loss, found)

        return loss, gathered

    def _check_padding(self, model: WholeBatchStep, micro_batches: MicroBatches) -> None:
        """Tries, once, whether anything depends on padding that is cut off."""

        def run(moves: bool) -> Any:
            def found(cut: Batch, uncut: Batch) -> trial.Found:
                return _outcome(model, cut, uncut, moves)

            return two_passes.outcome(found, micro_batches)

        trial.check(
            micro_batches,
            trial.Trial(
                [run(moves) for moves in ([False, True] if model.trained else [False])],
                lambda: model.written.drew,
                model.model,
                low_precision(_internals.layers_of(model.model)),
                lambda: False,  # The loss may compare examples with each other.
                lambda: (
                    "" if model.reaches_loss else keras_checks.no_mask(models.unmasked(model.model))
                ),
                beside_whole=True,
            ),
            self.padding.done[model.training],
        )


class WholeBatchAccumulation(WholeBatchSteps, Accumulation):
    """What Keras calls of a model whose loss sees the whole batch."""

    tries_losses = False


def _outcome(model: WholeBatchStep, cut: Batch, uncut: Batch, moves: bool) -> trial.Found:
    """What a micro-batch comes to if its forward pass is cut: the loss, gradients and metrics.

    Args:
        model: the step.
        cut: a micro-batch, cut.
        uncut: the same one whole, as the loss sees it.
        moves: whether the weights are some way off, and gradients are left out.
    """
    values, examples = model.values(), ENGINE.examples(uncut)
    weights = [variable.value for variable in model.trained]
    moved = padding.moved(weights) if moves else []

    def forward(micro_batch: Batch) -> Forward:
        return model.forward(micro_batch, values, examples, True, False, moved)

    of_whole = forward(uncut).outputs
    with tf.GradientTape() as tape:
        passed = forward(cut)
        outputs = two_passes.at_whole_length(passed.outputs, of_whole)
        found = model.loss(uncut, outputs, list(passed.totals), values, examples, moved)
    gradients = [] if moves else tape.gradient(found.loss, weights)
    results: Dict[str, List[Tensor]] = {"loss": [found.loss, *trial.comparable(gradients)]}
    after = found.state_of(model.written_by_loss.variables)
    for metric in without(models.metrics_of(model.model), report.trackers_of(model.model)):
        states = [after.get(id(variable)) for variable in metric.variables]
        results.setdefault(metric.name, []).extend(v for v in states if v is not None)
    return results

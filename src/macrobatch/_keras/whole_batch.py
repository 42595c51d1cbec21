"""A Keras model whose loss sees the whole batch: the forward pass of a micro-batch, and the loss
and the metrics of all predictions, each from values to values.
"""

import functools
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._keras import checks, stateless
from macrobatch._keras.added import AddedLosses
from macrobatch._keras.losses import share_of
from macrobatch._keras.model import unexplained, variables_of
from macrobatch._keras.report import overrides
from macrobatch._keras.scope import without
from macrobatch._keras.two_stages import TwoStages
from macrobatch._types import Batch, Forward, Logs, Size, Tensor, Variable, Whole, names


class Outputs(NamedTuple):
    """What of a forward pass the loss sees, with the examples first.

    Attributes:
        y_pred: the predictions.
        masks: for each prediction, its Keras mask or None.
        added: vectors that layers gave to `add_loss`, with a value for each example.
    """

    y_pred: Any
    masks: List[Optional[Tensor]]
    added: List[Tensor]


class Found(NamedTuple):
    """What the loss and the metrics have made of the whole batch.

    Attributes:
        loss: the loss.
        logs: what compute_metrics returned.
        run: what their run has left in variables.
    """

    loss: Tensor
    logs: Logs
    run: stateless.Result

    def state_of(self, variables: List[Variable]) -> Dict[int, Tensor]:
        """The values of those of the variables that changed, by id."""
        pairs = zip(variables, self.run.written)
        return {id(variable): value for variable, value in pairs if value is not None}


class WholeBatchStep:
    """A compiled model, in training or in testing, whose loss sees the whole batch.

    Attributes:
        trained: the variables to be trained.
        written: the other variables, and what is known of how the forward pass writes them.
        written_by_loss: likewise, of the loss and the metrics.
        needs_inputs: whether code of the user's may ask for the inputs of the whole batch.
    """

    def __init__(self, model: Any, training: bool, engine: Engine):
        self.model, self.training, self._engine = model, training, engine
        self.trained = list(model.trainable_weights) if training else []
        variables = without(variables_of(model), model.trainable_weights)
        self._stages = TwoStages(variables, self.trained, engine)
        self.written, self.written_by_loss = self._stages.forward, self._stages.loss
        self.fits = self._stages.fits
        layers = functools.partial(_internals.layers_of, model)
        self._added = AddedLosses(layers, self._predict, self.written, engine)
        # Of each value that was given to `add_loss`: the layer, and the kind.
        self._owners: List[Tuple[Any, str]] = []
        self.reaches_loss = False  # whether a mask does
        self.needs_inputs = any(overrides(model, n) for n in ("compute_loss", "compute_metrics"))

    def values(self) -> List[Tensor]:
        """What goes into the first forward pass: the values of all variables but the trained."""
        return self.written.values()

    def _predict(self, micro_batch: Batch) -> Any:
        return _internals.predictions(self.model, micro_batch[0], self.training)

    def forward(
        self,
        micro_batch: Batch,
        values: List[Tensor],
        examples: Size,
        alone: bool = False,
        drops: bool = True,
        weights: Sequence[Tensor] = (),
    ) -> Forward:
        """The forward pass of a micro-batch. Its totals are what layers gave to `add_loss`.

        Args:
            micro_batch: x, y and sample_weight, of which x is used.
            values: the values of the variables after the micro-batch before.
            examples: the number of examples of the whole batch.
            alone: whether layers must not meet those of other replicas.
            drops: whether dropout drops anything.
            weights: values for the trained variables, if not their own.
        """

        def code() -> Tuple[Outputs, List[Tensor]]:
            y_pred = self._predict(micro_batch)
            masks = [_internals.mask_of(leaf) for leaf in tree.flatten(y_pred)]
            self.reaches_loss = any(mask is not None for mask in masks)
            own = self._engine.examples(micro_batch)
            added = self._added.of(micro_batch, own)
            self._owners = [(layer, kind) for layer, _, kind in added]
            share = share_of(own, examples, keras.config.floatx())
            totals = [
                value if kind == "sum" else value * _of_dtype(share, value.dtype)
                for _, value, kind in added
                if kind != "values"
            ]
            vectors = [value for _, value, kind in added if kind == "values"]
            return Outputs(y_pred, masks, vectors), totals

        result = stateless.run(code, self.written, values, alone, drops, weights)
        outputs, totals = result.value
        return Forward(outputs, totals, result.written, result.moments)

    def loss(
        self,
        batch: Batch,
        outputs: Outputs,
        totals: List[Tensor],
        values: List[Tensor],
        examples: Size,
        weights: Sequence[Tensor] = (),
    ) -> Found:
        """The loss and the metrics of the whole batch, as Keras computes them.

        Args:
            batch: x (None if it is not needed), y and sample_weight.
            outputs: those of all micro-batches.
            totals: likewise, summed.
            values: the values of the variables after the last forward pass.
            examples: the number of examples.
            weights: values for the trained variables, if not their own.
        """
        (x, y, sample_weight), model = batch, self.model

        def code() -> Tuple[Tensor, Logs]:
            y_pred = self._with_losses_and_masks(outputs, totals)
            # Metrics get the weights too, before the gradient of the loss is taken.
            own = tree.map_structure(self._engine.copied, sample_weight)
            with _internals.without_replica_scaling(), _internals.without_replica_unscaling():
                loss = _internals.compute_loss(model, x, y, y_pred, own, self.training)
                loss = ops.convert_to_tensor(loss)
                tracked = ops.stop_gradient(loss)
                _internals.loss_tracker(model).update_state(tracked, sample_weight=examples)
                return loss, model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        run = self._stages.run_loss(code, values, weights)
        loss, logs = run.value
        return Found(loss, tree.map_structure(ops.convert_to_tensor, logs), run)

    def _with_losses_and_masks(self, outputs: Outputs, totals: List[Tensor]) -> Any:
        """The predictions, in a scope in which layers have given their values to `add_loss`."""
        for leaf, mask in zip(tree.flatten(outputs.y_pred), outputs.masks):
            if mask is not None:
                _internals.set_mask(leaf, mask)
        _internals.clear_losses(self.model)
        vectors, means = iter(outputs.added), iter(totals)
        for layer, kind in self._owners:
            layer.add_loss(next(vectors if kind == "values" else means))
        return outputs.y_pred

    def values_for_loss(self, written: Sequence[Optional[Tensor]]) -> List[Tensor]:
        """The values of all variables after the forward passes, which have left these."""
        return self._stages.between(written)

    def write(
        self, written: Sequence[Optional[Tensor]], moments: Sequence[Any], found: Found
    ) -> None:
        """Writes what the forward passes have left, and what the loss has."""
        self._stages.write(written, moments, found.run)

    def __call__(
        self,
        micro_batch: Batch,
        values: List[Tensor],
        whole: Whole,
        alone: bool = False,
        drops: bool = True,
        weights: Sequence[Tensor] = (),
    ) -> Tuple[Forward, Found]:
        """A micro-batch that is taken for the whole batch."""
        examples = self._engine.examples(micro_batch)
        passed = self.forward(micro_batch, values, examples, alone, drops, weights)
        return passed, self.loss(
            micro_batch, passed.outputs, list(passed.totals), self.values(), examples, weights
        )

    @property
    def inexact(self) -> List[str]:
        """What cannot equal the whole batch, and the way out, after a run."""
        return checks.inexact(
            normalizing=names(self.written.normalizing),
            decaying=names(self.written.decaying),
            added=[layer.name for layer, kind in self._owners if kind == "scalar"],
            whole_batch_loss=True,
        )

    def unexplained(self, written: Sequence[Optional[Tensor]]) -> List[str]:
        """The paths of variables that layers write once per micro-batch, for no known reason."""
        return unexplained(self.model, self.written, written)


def _of_dtype(share: Any, dtype: Any) -> Any:
    # A number stays one: to cast it, TensorFlow would round it to float32 first.
    return share if isinstance(share, float) else ops.cast(share, dtype)

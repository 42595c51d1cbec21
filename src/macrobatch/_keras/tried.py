"""A Keras model in the trial whether examples meet: the terms of its loss, and its predictions."""

from typing import Any, Callable, List, NamedTuple, Optional

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._keras import batch_norm, meeting_checks, report
from macrobatch._keras.comparison import Found, Groups
from macrobatch._keras.meeting import Verdict
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import Scope, unique
from macrobatch._types import Batch, BatchEngine, Whole

PREDICTIONS, LOSS = "predictions", "loss"


class Causes(NamedTuple):
    """The names of the layers, and of the losses, in which examples meet."""

    layers: List[str]
    losses: List[str]


class Tried(ModelStep):
    """A compiled model as a function of a micro-batch that leaves everything as it was.

    Metrics are not run. On several workers, to read them would be to wait for the others.
    """

    def __init__(
        self,
        model: Any,
        engine: BatchEngine,
        micro_batch_weight: Optional[Callable[..., Any]] = None,
        with_losses: bool = True,
    ):
        super().__init__(model, True, engine, micro_batch_weight)
        self._with_losses = with_losses
        trackers = [v for metric in report.trackers_of(model) for v in metric.variables]
        self._states = unique([*model.metrics_variables, *trackers])

    def found(self, micro_batch: Batch) -> Found:
        """The predictions, and the numerator of each term of the loss."""
        # An own compute_loss may ask a metric. Seeds have the same values again, in each scope.
        scope = Scope(self._states, [ops.zeros(v.shape, v.dtype) for v in self._states])
        alone = batch_norm.recorded(alone=True)
        with alone, scope, _internals.without_replica_scaling():
            y_pred = self._forward(micro_batch)
            if self._with_losses:
                self._collect(micro_batch, y_pred, Whole(self._engine.examples(micro_batch)))
        found: Found = {}
        for index, leaf in enumerate(tree.flatten(y_pred)):
            if ops.is_tensor(leaf) and len(leaf.shape):
                found[f"{PREDICTIONS} {index}"] = leaf
        for index, term in enumerate(self.terms):
            # Of some losses that are given for a single output, Keras uses none.
            if not (isinstance(term.weight, float) and term.weight == 0):
                found[f"{LOSS} {index}"] = term.numerator
        return found

    def normalizing(self) -> List[Any]:
        """The layers that may normalise by the moments of a micro-batch."""
        kind = keras.layers.BatchNormalization
        return [layer for layer in _internals.layers_of(self.model) if isinstance(layer, kind)]

    def messages(self, groups: Groups, verdict: Verdict) -> List[str]:
        """What to say of a trial."""
        found = meeting_checks.messages(*self.causes(verdict), verdict.is_random)
        return [*found, meeting_checks.NOT_FINITE] if verdict.unknown else found

    def causes(self, verdict: Verdict) -> Causes:
        """Where examples meet, in the words of the model."""
        layers: List[str] = list(verdict.layers)
        losses: List[str] = []
        kinds = [value.split() for value in verdict.values]
        if any(kind == PREDICTIONS for kind, _ in kinds):  # Losses have it from them.
            return Causes(layers or [self.model.name], [])
        for _, index in kinds:
            term = self.terms[int(index)]
            (layers if term.is_added else losses).append(term.name)
        return Causes(list(dict.fromkeys(layers)), list(dict.fromkeys(losses)))

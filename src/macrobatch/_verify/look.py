"""A look into the model, outside of any graph: what its layers, the terms of its loss and its
metrics make of the batch, whole and in micro-batches.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import keras
import numpy as np
from keras import ops

from macrobatch import _backends, _internals
from macrobatch._batches.in_order import InOrder
from macrobatch._keras import batch_norm, meeting, report
from macrobatch._keras import model as models
from macrobatch._keras.model import ModelStep, Outcome
from macrobatch._keras.scope import Scope, without
from macrobatch._keras.sequences import low_precision
from macrobatch._keras.tried import Causes, Tried
from macrobatch._types import Batch, MicroBatches, Whole, names

# Values that differ by less, over the larger one, are the same but for rounding.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}
COARSE = 5e-2


class Term(NamedTuple):
    """A term of the loss, and whether the micro-batches come to another value than the batch."""

    name: str
    is_scalar: bool
    is_added: bool
    differs: bool


class Look:
    """What is seen of a model and a batch. Each method runs the model.

    Attributes:
        examples: in the batch.
        size: examples in a micro-batch.
    """

    def __init__(
        self,
        model: Any,
        batch: Batch,
        size: int,
        weight: Optional[Callable[..., Any]],
        dtype: str,
    ):
        self._model, self._batch, self._weight = model, batch, weight
        self._trials = _backends.trials()
        self._engine = self._trials.engine
        self.examples = int(self._engine.examples(batch))
        self.size = min(size, self.examples)
        self._tolerance = TOLERANCES.get(dtype, COARSE)

    def micro_batches(self) -> List[Batch]:
        """The micro-batches, in order."""
        cut: MicroBatches = InOrder(self._batch, self.examples, self.size, self._engine)
        return [cut.get(run, i) for run in cut.runs for i in range(int(run.count))]

    def normalizing(self) -> List[str]:
        """The BatchNormalization layers that normalise by other statistics in micro-batches."""
        step = self._step(self._weight)
        outcomes = [self._outcome(step, each) for each in [self._batch, *self.micro_batches()]]
        found = list(step.written.decaying)
        for place, layer in enumerate(step.written.pooled):
            whole, *others = [outcome.moments[place] for outcome in outcomes]
            if any(self._differ(_flat(whole), _flat(other)) for other in others):
                found.append(layer)
        return names(found)

    def terms(self, weight: Optional[Callable[..., Any]] = None) -> List[Term]:
        """The terms of the loss, with another weight of micro-batches if there is one."""
        step = self._step(weight or self._weight)
        of_whole = self._values(step, [self._batch])
        of_parts = self._values(step, self.micro_batches())
        return [
            Term(
                term.name,
                term.is_scalar or (step.is_overridden and not term.rank),
                term.is_added,
                self._differ(one, other),
            )
            for term, one, other in zip(step.terms, of_parts, of_whole)
        ]

    def meeting(self) -> Causes:
        """The layers and losses that make of an example what others have a part in."""
        groups = meeting.groups(
            self._batch, self.examples, meeting.size_of(self.size), self._engine
        )
        if groups is None:
            return Causes()
        tried = Tried(self._model, self._engine, self._weight)
        coarse = low_precision(_internals.layers_of(self._model))
        return tried.causes(self._trials.verdict(tried, groups, coarse))

    def metrics_of_the_step(self) -> List[str]:
        """The metrics that the forward pass or the loss updates, so once per micro-batch."""
        x, y, sample_weight = self._batch
        with Scope() as scope, batch_norm.recorded(alone=True):
            y_pred = _internals.predictions(self._model, x, True)
            _internals.compute_loss(self._model, x, y, y_pred, sample_weight, True)
        own = without(models.metrics_of(self._model), report.trackers_of(self._model))
        return [m.name for m in own if any(id(v) in scope.written for v in m.variables)]

    def _step(self, weight: Optional[Callable[..., Any]]) -> ModelStep:
        return ModelStep(self._model, True, self._engine, weight)

    def _outcome(self, step: ModelStep, micro_batch: Batch) -> Outcome:
        return step(micro_batch, step.values(), Whole(self.examples, guesses=[]))

    def _values(self, step: ModelStep, micro_batches: List[Batch]) -> List[Any]:
        """The value of each term, from sums over micro-batches."""
        outcomes = [self._outcome(step, each) for each in micro_batches]
        reported, counts = (
            [sum(each) for each in zip(*(getattr(outcome, name) for outcome in outcomes))]
            for name in ("reported", "counts")
        )
        none = ops.zeros([], keras.config.floatx())
        found = report.values_of(step.terms, step.counts, reported, counts, none).terms
        return [np.asarray(ops.convert_to_numpy(value), "float64") for value in found]

    def _differ(self, one: Any, other: Any) -> bool:
        size = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
        return not bool(np.abs(one - other).max(initial=0.0) <= self._tolerance * size)


def _flat(moments: batch_norm.Moments) -> Any:
    return np.concatenate(
        [np.ravel(ops.convert_to_numpy(each)) for each in (moments.mean, moments.variance)]
    )


def candidates(batch: Batch) -> Dict[str, Callable[..., Any]]:
    """Weights of micro-batches that a loss may be a mean over, as code and as functions."""
    x, y, sample_weight = batch
    found: Dict[str, Callable[..., Any]] = {}
    if ops.is_tensor(sample_weight):
        found["keras.ops.sum(sample_weight)"] = lambda x, y, sample_weight: ops.sum(sample_weight)
    if ops.is_tensor(y):
        found["keras.ops.count_nonzero(y)"] = lambda x, y, sample_weight: ops.count_nonzero(y)
        found["keras.ops.sum(y)"] = lambda x, y, sample_weight: ops.sum(y)
    if ops.is_tensor(x):
        found["keras.ops.count_nonzero(x)"] = lambda x, y, sample_weight: ops.count_nonzero(x)
    return found

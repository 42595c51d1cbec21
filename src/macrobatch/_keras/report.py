"""What Keras is told of a batch: reported losses, metrics and logs, over all replicas."""

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import keras
from keras import ops

from macrobatch import _internals
from macrobatch._checks import warn_once
from macrobatch._engine import Engine
from macrobatch._keras import checks
from macrobatch._keras.losses import Count, Term
from macrobatch._keras.scope import Scope, shared
from macrobatch._types import Logs, Size, Tensor, Variable


class Reported(NamedTuple):
    """The reported values of a batch: the loss, and each term."""

    loss: Tensor
    terms: List[Tensor]


class Told(NamedTuple):
    """What Keras is told of a batch.

    Attributes:
        logs: those of the whole batch.
        values: the reported values.
        states: the variables of the metrics of losses, and what they are after the batch.
    """

    logs: Logs
    values: Reported
    states: List[Tuple[Variable, Tensor]]

    def write(self) -> None:
        """Updates the metrics of the losses."""
        for variable, value in self.states:
            variable.assign(value)


def values_of(
    terms: List[Term],
    counts: List[Count],
    numerators: Sequence[Tensor],
    denominators: Sequence[Tensor],
    penalty: Tensor,
) -> Reported:
    """The reported values, from sums over micro-batches.

    Args:
        terms: of any micro-batch; only what all micro-batches have in common counts.
        counts: likewise.
        numerators: of the reported values of the terms.
        denominators: those that are counted.
        penalty: what weight regularisers add.
    """
    loss, values = penalty, []
    for term, value in zip(terms, numerators):
        if term.counted is not None:
            total = denominators[term.counted] + counts[term.counted].padding
            value = ops.divide_no_nan(value, total)
        loss = loss + value * term.weight
        values.append(value)
    return Reported(loss, values)


def update_trackers(step: Any, values: Reported, examples: Size) -> None:
    """Tells Keras the reported values, as its own step tells those of the batch."""
    tracker, *trackers = trackers_of(step.model)
    tracker.update_state(values.loss, sample_weight=examples)
    for metric, value, term in zip(trackers, values.terms, step.terms):
        if term.is_tracked:
            # Keras weights a scalar by the batch size only where the graph knows it.
            known = isinstance(examples, int) or term.rank > 0
            metric.update_state(value, sample_weight=examples if known else None)


def told(
    step: Any,
    penalty: Tensor,
    numerators: Sequence[Tensor],
    denominators: Sequence[Tensor],
    written: Sequence[Optional[Tensor]],
    logs: Logs,
    examples: Size,
    engine: Engine,
) -> Told:
    """What to tell Keras of the whole batch. No variable is written.

    Args:
        step: the step of the model, after its last run.
        penalty: what weight regularisers add to the loss.
        numerators: of the reported values, summed over this replica's micro-batches.
        denominators: those that are counted, likewise.
        written: what the step's variables are after the last micro-batch, where they changed.
        logs: those of the last micro-batch, if the model brings its own compute_metrics.
        examples: the number of examples; in a replica, of its own.
        engine: the backend.
    """
    model, dtype = step.model, keras.config.floatx()
    sums = [ops.cast(value, dtype) for value in [*numerators, *denominators]]
    sums = engine.sum_over_replicas(sums) if sums else []
    count = len(numerators)
    values = values_of(step.terms, step.counts, sums[:count], sums[count:], penalty)
    changed = [(v, new) for v, new in zip(step.written.variables, written) if new is not None]
    with Scope([v for v, _ in changed], [new for _, new in changed]) as scope:
        update_trackers(step, values, examples)
        if engine.replicas() == 1:
            results = model.get_metrics_result()
    of_trackers = [v for metric in trackers_of(model) for v in metric.variables]
    found = [scope.get_current_value(variable) for variable in of_trackers]
    if engine.replicas() > 1:
        metrics = list(model.metrics_variables)
        own = [engine.read(scope.get_current_value(variable)) for variable in metrics]
        with Scope(metrics, shared(metrics, own, engine, whole=True)):
            results = model.get_metrics_result()
        for message in checks.logs_of_one_replica(set(logs) - set(results)):
            warn_once(model, message)
    if step.brings_logs:
        results = {name: results.get(name, value) for name, value in logs.items()}
    return Told(results, values, list(zip(of_trackers, found)))


def overrides(model: Any, method: str) -> bool:
    """Whether the model, or its class, brings its own version of a method of keras.Model."""
    own_class = getattr(type(model), method) is not getattr(keras.Model, method)
    return own_class or method in vars(model)


def trackers_of(model: Any) -> List[Any]:
    """The metrics of reported losses: updated once per batch, with the value of the whole."""
    compiled = None if overrides(model, "compute_loss") else _internals.compiled_loss(model)
    return [_internals.loss_tracker(model), *(compiled.metrics if compiled else [])]

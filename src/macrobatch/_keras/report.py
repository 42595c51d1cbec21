"""What Keras is told of a batch: reported losses, metrics and logs, over all replicas."""

from typing import List, Optional

import keras
from keras import ops

from macrobatch._checks import warn_once
from macrobatch._keras import checks
from macrobatch._keras import model as model_room
from macrobatch._keras.losses import Count, Term
from macrobatch._keras.scope import Scope, read, shared
from macrobatch._types import Engine, Logs, Size, Tensor


class Reported:
    """The reported values of a batch: the loss, and the terms that Keras tracks by themselves."""

    def __init__(self, loss: Tensor, terms: List[Tensor]):
        self.loss, self.terms = loss, terms


def reported(
    terms: List[Term],
    counts: List[Count],
    numerators: List[Tensor],
    denominators: List[Tensor],
    penalty: Tensor,
    engine: Engine,
) -> Reported:
    """The reported values of the whole batch, from the sums over this replica's micro-batches.

    Args:
        terms: of any micro-batch; only what all micro-batches have in common counts.
        counts: likewise.
        numerators: of the reported values of the terms.
        denominators: those that are counted.
        penalty: what weight regularisers add.
        engine: the backend.
    """
    dtype = keras.config.floatx()
    sums = [ops.cast(value, dtype) for value in [*numerators, *denominators]]
    sums = engine.sum_over_replicas(sums) if sums else []
    numerators, denominators = sums[: len(terms)], sums[len(terms) :]
    loss, tracked = penalty, []
    for term, value in zip(terms, numerators):
        if term.count is not None:
            value = ops.divide_no_nan(value, denominators[term.count] + counts[term.count].padding)
        loss = loss + value * term.weight
        tracked.append(value)
    return Reported(loss, tracked)


def finish(
    step: "model_room.ModelStep",
    values: Reported,
    written: List[Optional[Tensor]],
    logs: Logs,
    examples: Size,
    engine: Engine,
) -> Logs:
    """Updates the metrics of the losses, and returns the logs of the whole batch.

    Args:
        step: the step, after its last run.
        values: the reported values.
        written: what the step's variables are after the last micro-batch, where they changed.
        logs: those of the last micro-batch.
        examples: the number of examples; in a replica, of its own.
        engine: the backend.
    """
    model, variables = step.model, step.written.variables
    changed = [(v, value) for v, value in zip(variables, written) if value is not None]
    tracker, *trackers = model_room.trackers_of(model)
    with Scope([v for v, _ in changed], [value for _, value in changed]) as scope:
        tracker.update_state(values.loss, sample_weight=examples)
        for metric, value, term in zip(trackers, values.terms, step.terms):
            if term.is_tracked:
                # Keras weights a scalar by the batch size only where the graph knows it.
                known = isinstance(examples, int) or term.rank > 0
                metric.update_state(value, sample_weight=examples if known else None)
        if engine.replicas() == 1:
            results = model.get_metrics_result()
    of_trackers = [v for metric in (tracker, *trackers) for v in metric.variables]
    found = [scope.get_current_value(variable) for variable in of_trackers]
    if engine.replicas() > 1:
        metrics = list(model.metrics_variables)
        own = [read(scope.get_current_value(variable)) for variable in metrics]
        with Scope(metrics, shared(metrics, own, engine, whole=True)):
            results = model.get_metrics_result()
        for message in checks.logs_of_one_replica(set(logs) - set(results)):
            warn_once(model, message)
    for variable, value in zip(of_trackers, found):
        variable.assign(value)
    return {name: results.get(name, value) for name, value in logs.items()}

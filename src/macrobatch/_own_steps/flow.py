"""What a step does, from what depends on what in its trace, and what cannot be right when the batch
is cut.
"""

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from macrobatch._keras import batch_norm
from macrobatch._keras.scope import Written, is_seed, unique
from macrobatch._own_steps import checks
from macrobatch._own_steps.early import early_of
from macrobatch._own_steps.marks import EXAMPLES, Flow, Marks
from macrobatch._own_steps.plan import Asked, Plan
from macrobatch._types import Tensor, Variable


class Write(NamedTuple):
    """A value that a step assigns to a variable.

    Attributes:
        variable, value: these.
        after: how many gradients had been asked for.
        update: the place of the call of `update_state` in which it is; None if it is in none.
    """

    variable: Variable
    value: Tensor
    after: int
    update: Optional[int]


class Noted(NamedTuple):
    """What a trace has seen of a step.

    Attributes:
        asked: of each gradient of variables, its targets, and which have a value for each example.
        inner: of each gradient of tensors, likewise; and its sources.
        writes: all values that were assigned.
        updates: of each call of `update_state` of a Mean or Sum: the metric, how it counts if it
            depends on examples, and its values and weights.
        applied: optimizers, and the variables that they update.
        given: of each call of an optimizer, the gradients that it got.
        metrics: by the identities of their variables.
        logs: what the step returned.
        counts: denominators that are counted.
    """

    asked: List[Tuple[Any, List[bool]]]
    inner: List[Tuple[Any, List[bool], Any]]
    writes: List[Write]
    updates: List[Tuple[Any, str, Any]]
    applied: List[Tuple[Any, List[Variable]]]
    given: List[Any]
    metrics: Dict[int, Any]
    logs: Any
    counts: List[Tensor]


def plan(noted: Noted, flow: Flow, written: Written, trains: bool) -> Plan:
    """What a step does. Raises for what cannot be right."""
    checks.writes_no_variable_of_tensorflow(flow.writes_variables())
    gradients = _grouped(
        [(flow.of(targets), _summed(targets, each, flow)) for targets, each in noted.asked]
    )
    last = max((each.group for each in gradients if each.of_examples), default=-1)
    if trains:
        checks.asks_for_gradients(len(gradients), last)
    else:
        checks.asks_for_nothing(len(gradients))

    def is_late(marks: Marks) -> bool:
        """Whether anything depends on what is known only after the last loop."""
        return _is_after(marks, last)

    updates = []
    for metric, kind, values in noted.updates:
        marks = flow.of(values)
        checks.metric_is_in_time(metric.name, EXAMPLES in marks and is_late(marks))
        if kind == "share" and values[1] is not None:
            # A weight that depends on examples is their number.
            kind = "own" if EXAMPLES in flow.of(values[1]) else "scaled"
        elif kind == "share" and flow.is_sum(values[0]):
            kind = "sum"
        updates.append(kind if EXAMPLES in marks else "once")
    chained = _chained(noted, flow, updates, is_late)
    moving = [v for layer in written.normalizing for v in batch_norm.statistics(layer)]
    known = {id(v) for v in moving} | set(noted.metrics)
    chained_ids = {id(variable) for variable in chained}
    decaying = [v for layer in written.decaying for v in layer.non_trainable_variables]

    def early(marks: Marks) -> bool:
        """Whether anything depends on a metric that not all micro-batches have gone into yet."""
        metrics = [mark for mark in marks if mark[0] == "metric" and mark[2] in chained_ids]
        return trains and any(mark[1] <= last for mark in metrics)

    for write in noted.writes:
        if id(write.variable) not in known and not is_seed(write.variable):
            marks = flow.of(write.value)
            checks.written_once(write.variable.path, EXAMPLES in marks, is_late(marks))
            checks.result_in_time(write.variable.path, early(marks))
    for (targets, _), each in zip(noted.asked, gradients):
        checks.loss_without_metrics(each.of_examples and early(flow.of(targets)))
    for grads in noted.given:
        checks.gradients_of_the_batch(EXAMPLES in flow.of(grads))
    for targets, _, sources in noted.inner:
        of_examples = EXAMPLES in flow.of(targets)
        checks.of_examples(of_examples and any(EXAMPLES not in flow.of(s) for s in sources))
    checks.counts_of_the_batch(any(is_late(flow.of(count)) for count in noted.counts))
    end = max((i for i, each in enumerate(gradients) if each.group == last), default=-1)
    undone = early_of(
        [(write.variable, flow.of(write.value)) for write in noted.writes],
        [optimizer for optimizer, _ in noted.applied],
        written.variables,
        end,
    )
    after: Dict[int, int] = {}
    for write in noted.writes:
        after.setdefault(id(write.variable), write.after)
    return Plan(
        gradients=gradients,
        inner=[
            Asked(_summed(targets, each, flow), EXAMPLES in flow.of(targets))
            for targets, each, _ in noted.inner
        ],
        last=last,
        updates=updates,
        variables=list(written.variables),
        written_after=after,
        chained=unique([*chained, *decaying]),
        pooled=dict(written.pooled),
        decaying=list(written.decaying),
        logs=[_kind_of_log(name, log, flow, is_late, early) for name, log in _named(noted.logs)],
        applied=noted.applied,
        counts=len(noted.counts),
        draws_anew=flow.draws_anew(),
        early=undone,
    )


def _summed(targets: List[Any], per_example: List[bool], flow: Flow) -> List[bool]:
    """Which targets have a value for each example, or are the sum of such values."""
    return [each or flow.is_sum(target) for target, each in zip(targets, per_example)]


def _grouped(asked: List[Tuple[Marks, List[bool]]]) -> List[Asked]:
    """The gradients, in groups that do not depend on what the step makes of each other."""
    found: List[Asked] = []
    for place, (marks, per_example) in enumerate(asked):
        group = found[-1].group if found else 0
        if _is_after(marks, group):
            group = place
        found.append(Asked(per_example, EXAMPLES in marks, group))
    return found


def _is_after(marks: Marks, place: int) -> bool:
    """Whether anything depends on the gradient at this place, or on later gradients or updates."""
    return any(
        (kind == "gradient" and where >= place) or (kind == "applied" and where > place)
        for kind, where in (mark[:2] for mark in marks if mark != EXAMPLES)
    )


def _chained(noted: Noted, flow: Flow, updates: List[str], is_late: Any) -> List[Variable]:
    """The variables of metrics into which all micro-batches go."""
    chained: List[Variable] = []
    for metric in {id(metric): metric for metric in noted.metrics.values()}.values():
        own = {id(variable) for variable in metric.variables}
        writes = [write for write in noted.writes if id(write.variable) in own]
        direct = [flow.of(write.value) for write in writes if write.update is None]
        through = [updates[write.update] for write in writes if write.update is not None]
        if any(EXAMPLES in marks for marks in direct) or any(kind != "once" for kind in through):
            for marks in direct:
                checks.metric_is_in_time(metric.name, EXAMPLES in marks and is_late(marks))
            checks.counts_examples(metric.name, all(EXAMPLES in marks for marks in direct))
            chained += metric.variables
    return chained


def _named(logs: Any) -> List[Tuple[str, Any]]:
    """The logs, each with its name."""
    checks.logs_by_name(logs)
    return [(name, log) for name, log in sorted(logs.items())]


def _kind_of_log(name: str, log: Tensor, flow: Flow, is_late: Any, early: Any) -> str:
    """How a log counts. What depends on no examples is what the real run comes to."""
    marks = flow.of(log)
    checks.result_in_time(name, early(marks))
    if EXAMPLES not in marks:
        return "once"
    checks.log_is_in_time(name, is_late(marks))
    checks.log_of_one_kind(name, any(mark[0] in ("metric", "state") for mark in marks))
    checks.log_is_a_number(name, log.shape)
    return "sum" if flow.is_sum(log) else "share"

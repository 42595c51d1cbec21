"""What depends on what in the trace of a step, and what cannot be right when the batch is cut."""

from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Tuple

import tensorflow as tf

from macrobatch._keras import batch_norm
from macrobatch._keras.scope import Written, is_seed, unique
from macrobatch._own_steps import checks
from macrobatch._own_steps.early import early_of
from macrobatch._own_steps.plan import Asked, Plan
from macrobatch._types import Tensor, Variable

# What a tensor may depend on: the examples, and these tuples:
# ("gradient", place): a gradient; ("applied", n): weights updated after n gradients;
# ("state", id): what a metric's variable holds before the step;
# ("metric", n, id): what it holds after n gradients.
Marks = FrozenSet[Any]
NONE: Marks = frozenset()
EXAMPLES = "examples"

# Operations that write a variable of TensorFlow, and that draw random numbers anew each time.
WRITING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
SCALING = ("Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan", "Xdivy")
# Operations that know of a tensor how large it is, and that put examples together.
SIZES = ("Shape", "ShapeN", "Size", "Rank")
REDUCING = ("Sum", "Mean", "Prod", "Max", "Min", "EuclideanNorm")
MIXING = ("Segment", "UnsortedSegment", "SparseSegment")
DRAWING = ("RandomStandardNormal", "RandomUniform", "TruncatedNormal", "Multinomial", "Stateful")


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


class Flow:
    """What each tensor of a graph depends on."""

    def __init__(self, graph: Any, marks: Dict[str, Marks]):
        self.graph = graph
        self._of: Dict[str, Marks] = {}
        self._by_value: Dict[str, bool] = {}  # whether it depends on more than their number
        for operation in graph.get_operations():  # in an order in which inputs come first
            found = marks.get(operation.name, NONE)
            for each in operation.inputs:
                found = found | self._of[each.op.name]
            if _is_another_size(operation, marks):
                found = found - {EXAMPLES}
            self._of[operation.name] = found
            self._by_value[operation.name] = operation.type not in SIZES and (
                EXAMPLES in marks.get(operation.name, NONE)
                or any(self._by_value[each.op.name] for each in operation.inputs)
            )

    def of(self, nest: Any) -> Marks:
        """The marks that some tensors of a nest depend on. Others than of the graph have none."""
        flat = tf.nest.flatten(nest, expand_composites=True)
        here = [t for t in flat if tf.is_tensor(t) and getattr(t, "graph", None) is self.graph]
        return NONE.union(*(self._of[tensor.op.name] for tensor in here))

    def writes_variables(self) -> List[str]:
        """The names of TensorFlow variables that operations of the graph write."""
        names = {id(v.handle): v.name for v in self.graph.variables}
        outside = {id(inner): names.get(id(outer)) for outer, inner in self.graph.captures}
        found = [o for o in self.graph.get_operations() if o.type.startswith(WRITING)]
        return [str(outside.get(id(o.inputs[0])) or o.name) for o in found if len(o.inputs) > 1]

    def is_sum(self, target: Any) -> bool:
        """Whether a number is the sum of values of the examples, maybe times a constant.

        The gradient of such a number is that of the values, which the tape sums. A division by the
        number of examples makes a mean of it.
        """
        operation = getattr(target, "op", None) if EXAMPLES in self.of(target) else None
        while operation is not None and operation.type in (*SCALING, "Neg", "Cast", "Identity"):
            of_examples = [each for each in operation.inputs if EXAMPLES in self.of(each)]
            operation = of_examples[0].op if len(of_examples) == 1 else None
        if operation is None or operation.type != "Sum":
            return False
        values, axes = operation.inputs
        axes, rank = tf.get_static_value(axes), values.shape.rank
        if axes is None or not rank or values.shape[0] is not None:
            return False
        return 0 in axes % rank and not self._mixes_examples(values)

    def _mixes_examples(self, tensor: Tensor) -> bool:
        """Whether examples come together in a tensor, or their number scales it, or any number that
        depends on them.
        """
        seen, ahead = set(), [tensor.op]
        while ahead:
            operation = ahead.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            of_examples = [each for each in operation.inputs if EXAMPLES in self.of(each)]
            if operation.type in SCALING and any(
                each.shape.rank == 0 or not self._by_value[each.op.name] for each in of_examples
            ):
                return True
            if not self._by_value[operation.name]:
                continue
            if operation.type.startswith(MIXING) or _is_along_examples(operation):
                return True
            # With two sizes that are not known, nobody can tell which is that of the examples.
            if any(
                each.shape.rank is None or list(each.shape).count(None) > 1
                for each in operation.outputs
            ):
                return True
            ahead += [each.op for each in operation.inputs]
        return False

    def draws_anew(self) -> bool:
        """Whether tf.random is used, which draws other numbers whenever it runs."""
        kinds = {operation.type for operation in self.graph.get_operations()}
        return any(kind.startswith(DRAWING) and "Stateless" not in kind for kind in kinds)


def _is_another_size(operation: Any, marks: Dict[str, Marks]) -> bool:
    """Whether an operation takes a size of what the step is given that is no number of examples."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    # Of anything else, examples may lie along another axis.
    if EXAMPLES not in marks.get(operation.inputs[0].op.inputs[0].op.name, NONE):
        return False
    begin, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape[0]
    return begin is not None and rank is not None and bool((begin % rank != 0).all())


def _is_along_examples(operation: Any) -> bool:
    """Whether an operation reduces along the first axis, or nobody knows along which."""
    if operation.type not in REDUCING:
        return False
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    return axes is None or not rank or bool((axes % rank == 0).any())


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

"""Traces a step into a graph that is thrown away, to see what it does.

Gradients, updated weights and the state of metrics are placeholders there, so that the graph shows
what depends on the examples of a micro-batch directly, and what only through them.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras import model as models
from macrobatch._keras import stateless
from macrobatch._keras.scope import Written
from macrobatch._own_steps import checks, losses, modes
from macrobatch._own_steps.flow import Noted, Write, plan
from macrobatch._own_steps.marks import EXAMPLES, Flow, Marks
from macrobatch._own_steps.modes import Mode
from macrobatch._own_steps.plan import Plan
from macrobatch._own_steps.scope import StepScope
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.trace import tensors_of
from macrobatch._types import Batch, Tensor, Variable


class Tracing(Mode):
    """The mode of the trace: it notes what the step does."""

    def __init__(self, metrics: Dict[int, Any], by_examples: bool):
        super().__init__()
        self.graph = tf.compat.v1.get_default_graph()
        self.marks: Dict[str, Marks] = {}
        self.asked: List[Tuple[Any, List[bool]]] = []
        self.inner: List[Tuple[Any, List[bool], List[Tensor]]] = []
        self.writes: List[Write] = []
        self.updates: List[Tuple[Any, str, Any]] = []
        self.applied: List[Tuple[Any, List[Variable]]] = []
        self.given: List[Any] = []
        self.counts: List[Tensor] = []
        self._by_examples = by_examples
        self.metrics = metrics
        self.scope: Any = None  # in which the step runs
        self._updating: Optional[int] = None

    def marked(self, like: Any, mark: Any) -> Tensor:
        """A placeholder for what has another value when the step runs."""
        placeholder = tf.compat.v1.placeholder(like.dtype, like.shape)
        self.marks[placeholder.op.name] = frozenset([mark])
        return placeholder

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        checks.in_the_step_itself(self.graph, "tape.gradient")
        place = len(self.asked)
        targets = tf.nest.flatten(target)
        self.asked.append((targets, per_example(targets)))
        flat = tf.nest.flatten(sources)
        tensors = [source for source in flat if not modes.is_variable(source)]
        own = iter(plain(tape, target, tensors, output_gradients) if tensors else [])
        found = [
            self.marked(each, ("gradient", place)) if modes.is_variable(each) else next(own)
            for each in flat
        ]
        # From here on, what metrics hold is something else.
        self._mark_metrics(lambda variable: ("metric", len(self.asked), id(variable)))
        return tf.nest.pack_sequence_as(sources, found)

    def gradient_of_tensors(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        targets = tf.nest.flatten(target)
        self.inner.append((targets, per_example(targets), tf.nest.flatten(sources)))
        return plain(tape, target, sources, output_gradients)

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        checks.in_the_step_itself(self.graph, "optimizer.apply")
        variables = modes.variables_of(optimizer, trainable_variables)
        self.given.append(list(grads))
        self.applied.append((optimizer, variables))
        for variable in modes.updated_by(optimizer, variables):
            value = self.marked(variable, ("applied", len(self.asked)))
            self.scope.add_update((variable, value))

    def update_state(self, plain: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        values = _tensor(values)
        kind = "own" if per_example([values])[0] else "share"
        self._updating = len(self.updates)
        for variable in metric.variables:
            if id(variable) not in self.metrics:  # a metric that the model does not know
                self.metrics[id(variable)] = metric
                state = self.marked(variable, ("state", id(variable)))
                self.scope.state_mapping.setdefault(id(variable), state)
        self.updates.append((metric, kind, [values, sample_weight]))
        try:
            return plain(metric, values, sample_weight)
        finally:
            self._updating = None

    def loss(
        self, plain: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        checks.weights_of_examples(getattr(sample_weight, "shape", None))
        with modes.plainly():
            part = losses.part_of(loss, y_true, y_pred, sample_weight, 1, 1, self._by_examples)
        if part is None:
            return plain(loss, y_true, y_pred, sample_weight)
        count = part.counted
        if count is not None:
            self.counts.append(count.own)
        # What the loss is divided by is known of each micro-batch, as its number of examples is.
        share = self.marked(tf.ones([], tf.float64), EXAMPLES)
        return part.value(None if count is None else count.own, share)

    def wrote(self, variable: Any, value: Tensor) -> Tensor:
        checks.in_the_step_itself(self.graph, f"{variable.path}.assign")
        self.writes.append(Write(variable, value, len(self.asked), self._updating))
        if id(variable) in self.metrics:
            return self.marked(value, ("metric", len(self.asked), id(variable)))
        return value

    def noted(self, logs: Any) -> Noted:
        """What was seen."""
        return Noted(
            self.asked,
            self.inner,
            self.writes,
            self.updates,
            self.applied,
            self.given,
            self.metrics,
            logs,
            self.counts,
        )

    def start(self) -> None:
        """Marks what metrics hold before the step."""
        self._mark_metrics(lambda variable: ("state", id(variable)))

    def _mark_metrics(self, mark: Callable[[Any], Any]) -> None:
        for metric in {id(metric): metric for metric in self.metrics.values()}.values():
            for variable in metric.variables:
                self.scope.state_mapping[id(variable)] = self.marked(variable, mark(variable))


def per_example(targets: List[Any]) -> List[bool]:
    """Whether tensors of a trace have a value for each example: their number is not known."""
    shapes = [tf.TensorShape(getattr(target, "shape", ())) for target in targets]
    return [shape.rank is None or (shape.rank > 0 and shape[0] is None) for shape in shapes]


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else keras.ops.convert_to_tensor(value)


def plan_of(
    model: Any,
    step: Callable[[Batch], Any],
    specs: Any,
    trains: bool,
    by_examples: bool = True,
) -> Plan:
    """Traces a step and throws the trace away.

    Raises a ValueError for what cannot be what the whole batch would have made of it.

    Args:
        model: the model.
        step: its train step or test step.
        specs: the types and shapes of a micro-batch, of any number of examples.
        trains: whether it is a train step.
        by_examples: whether micro-batches count by their examples.
    """
    modes_used: List[Tracing] = []
    logs: List[Any] = []

    def scope(*given: Any) -> StepScope:
        mode = Tracing(metrics_by_variable(model), by_examples)
        modes_used.append(mode)
        mode.scope = StepScope(mode, *given)
        return mode.scope

    def traced(micro_batch: Batch) -> None:
        def code() -> Any:
            mode = modes_used[-1]
            mode.start()
            with modes.running(mode):
                return step(micro_batch)

        logs.append(stateless.run(code, written, written.values(), alone=True).value)

    written = Written([], [], ENGINE, scope)
    function = tf.function(traced, autograph=False).get_concrete_function(specs)
    mode = modes_used[-1]
    inputs = function.graph.inputs[: len(tensors_of(specs))]
    mode.marks.update((tensor.op.name, frozenset([EXAMPLES])) for tensor in inputs)
    flow = Flow(function.graph, mode.marks)
    return plan(mode.noted(logs[-1]), flow, written, trains)


def metrics_by_variable(model: Any) -> Dict[int, Any]:
    """The metrics of a model, by the identities of their variables."""
    compiled = [_internals.compiled_loss(model), _internals.compiled_metrics(model)]
    found = [*models.metrics_of(model), _internals.loss_tracker(model)]
    found += [metric for each in compiled if each is not None for metric in each.metrics]
    return {id(v): metric for metric in found if metric is not None for v in metric.variables}

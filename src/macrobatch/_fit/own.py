"""Steps that a model brings itself, on whole batches."""

import hashlib
from typing import Any, Dict, List

import tensorflow as tf

from macrobatch import _checks, _internals
from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._keras import finite_checks, meeting, model_checks
from macrobatch._keras.report import overrides
from macrobatch._meeting import verdict_of
from macrobatch._own_steps import checks as step_checks
from macrobatch._own_steps import tracing
from macrobatch._own_steps.plan import Early, Plan
from macrobatch._own_steps.step import BatchStep
from macrobatch._own_steps.trial import MADE_UP, TriedStep, made_up
from macrobatch._tensorflow import graph, replicas
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch, Logs, Size


class OwnStep:
    """A train step or a test step of a model's own.

    Attributes:
        examples: the number of examples in the latest batch, over all replicas.
        shows_size: whether the size of micro-batches shows in what the latest batch came to.
    """

    def __init__(self, model: Any, name: str, cut: Cut, weight: Any = None, begun: Any = None):
        """Takes a step from a model.

        Args:
            model: the model.
            name: "train_step" or "test_step".
            cut: how batches are to be cut.
            weight: a function that gives the weight of a micro-batch, or None.
            begun: a variable that counts batches that can no longer be taken back, or None.
        """
        self._model, self._name, self._cut, self._weight = model, name, cut, weight
        self._begun = begun
        self._own = vars(model).get(name) or getattr(type(model), name).__get__(model, type(model))
        self.examples: Size = 0
        self.shows_size = False
        self._plans: Dict[Any, Plan] = {}
        self._reports_means: Dict[str, bool] = {}

    def forget(self) -> None:
        """Forgets what is known of the step: it may be compiled anew."""
        self._plans.clear()
        self._reports_means.clear()

    def __call__(self, data: Any) -> Logs:
        """What the step makes of a whole batch."""
        model = self._model
        layers = _internals.layers_of(model)
        model_checks.splittable_layers(layers)
        model_checks.no_overwriting_variables(model.trainable_weights)
        batch, examples = in_order.checked(graph.to_tensors(data), ENGINE)
        micro_batches = self._cut.apply(batch, examples, ENGINE)
        (self.examples,) = replicas.total_counts([examples])
        plan = self.plan(batch)
        for message in plan.inexact():
            _checks.warn_once(model, message)
        self.shows_size = plan.shows_size()
        step = BatchStep(
            model, self._run, plan, micro_batches, self.examples, self._weight, self._begun
        )
        return step.run()

    def micro_batches(self) -> Size:
        """How many there are of the latest batch."""
        size = self._cut.size if self._cut.chosen is None else self._cut.chosen.now()
        assert size is not None
        return -(-self.examples // size)

    def early(self, batch: Batch) -> List[Early]:
        """What the step may write before its last gradient, for all kinds of batches so far."""
        if not self._plans:
            self.plan(batch)
        return [plan.early for plan in self._plans.values()]

    def code(self) -> str:
        """What tells this step from others."""
        function = getattr(self._own, "python_function", self._own)
        code = getattr(function, "__code__", None)
        text = repr((getattr(code, "co_code", b""), getattr(code, "co_names", ())))
        return f"{type(self._model).__qualname__} {hashlib.sha256(text.encode()).hexdigest()}"

    def tried(self, batch: Batch) -> TriedStep:
        """The step in the trial whether examples meet."""
        return TriedStep(self._run, self.plan(batch), self._weight)

    def whole(self, data: Any) -> Logs:
        """What the step makes of a whole batch at once, as in plain Keras."""
        return self._own(data)

    def can_be_cut(self, data: Any) -> bool:
        """Whether micro-batches come to what the whole batch would have come to."""
        if self._cut.axis is not None or replicas.in_several():
            return False
        batch = graph.to_tensors(data)
        try:
            plan = self.plan(batch)
        except ValueError:
            return False
        specs = graph.specs_of(batch, any_size=True)
        if repr(specs) not in self._reports_means:
            self._reports_means[repr(specs)] = self._is_of_means(plan, specs)
        return self._reports_means[repr(specs)]

    def _is_of_means(self, plan: Plan, specs: Any) -> bool:
        """Whether all that a test step reports adds up, as far as examples show that are made up.

        What a step makes of a batch cannot be looked at in a graph.
        """
        tried = TriedStep(self._run, plan, self._weight)
        try:
            with tf.init_scope():
                groups = meeting.groups(made_up(specs), MADE_UP, meeting.FEWEST, ENGINE)
                assert groups is not None
                return not tried.messages(groups, verdict_of(tried, groups, is_coarse=False))
        except Exception:  # The step may need other examples than these.
            return all(kind == "once" for kind in plan.logs)  # What metrics come to adds up.

    def plan(self, batch: Batch) -> Plan:
        """What the step does. All that it lacks is made.

        Args:
            batch: a batch, or its types and shapes.
        """
        model = self._model
        specs = graph.specs_of(batch, any_size=True)
        key = repr(specs), tuple(map(id, model.trainable_weights))
        if key not in self._plans:
            trains = self._name == "train_step"
            try:
                plan = tracing.plan_of(model, self._run, specs, trains, self._weight is None)
            except _checks.Refused:
                raise
            except Exception as error:
                raise step_checks.not_traced(error) from error
            for optimizer, variables in plan.applied:
                if not optimizer.built:
                    with tf.init_scope():
                        optimizer.build(variables)
            # What was just built has weights to be trained.
            key = repr(specs), tuple(map(id, model.trainable_weights))
            self._plans[key] = plan
        return self._plans[key]

    def _run(self, micro_batch: Batch) -> Any:
        """The step, with what a tf.function around it would keep from running again."""
        function = getattr(self._own, "python_function", None)
        if function is None:
            return self._own(micro_batch)
        if not tf.executing_eagerly():
            function = tf.autograph.to_graph(function)
        return function(micro_batch)


def check(model: Any, cut: Cut, of_whole_batch: bool, nonfinite: str) -> None:
    """Raises for settings that a train step of a model's own does not go with."""
    if overrides(model, "train_step"):
        if nonfinite != "propagate":
            raise ValueError(finite_checks.own_train_step(nonfinite))
        step_checks.no_whole_batch_loss(of_whole_batch)
        strategy = _internals.strategy_of(model)
        step_checks.one_device(1 if strategy is None else strategy.num_replicas_in_sync)
        step_checks.no_lengths(cut.axis)


def own_steps(model: Any, cut: Cut, weight: Any = None, begun: Any = None) -> Dict[str, OwnStep]:
    """The steps that a model brings itself, by name."""
    names = [name for name in ("train_step", "test_step") if overrides(model, name)]
    return {name: OwnStep(model, name, cut, weight, begun) for name in names}

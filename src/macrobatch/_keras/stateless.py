"""Keras variables as values. A function runs in a scope where what it writes (seeds, moving
statistics, metrics) becomes state that goes from micro-batch to micro-batch, and is written to the
variables once, when the batch is through. So whatever fails before has changed nothing.
"""

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Tuple

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._keras import batch_norm as _batch_norm
from macrobatch._tensorflow import replicas as _replicas


class Scope(keras.StatelessScope):
    """A stateless scope that also tells which variables were written, and whether any was made."""

    def __init__(self, values: Iterable[Any] = ()):
        # Without collect_losses, what layers add with `add_loss` would vanish.
        super().__init__(state_mapping=list(values), collect_losses=True)
        self.written: Dict[int, Any] = {}
        self.made_variables = False

    def add_update(self, update: Any) -> None:
        self.written[id(update[0])] = update[0]
        super().add_update(update)

    def __exit__(self, *error: Any) -> None:
        def creator(next_creator: Any, **arguments: Any) -> Any:
            self.made_variables = True
            return next_creator(**arguments)

        # Variables that are made in a stateless scope have no value before its end.
        with tf.variable_creator_scope(creator):
            super().__exit__(*error)

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        # Keras asks the scope for the weights that it regularises, and takes no answer for None.
        # `_value` is private: within a scope, `value` asks the scope.
        return variable._value if value is None else value

    def values_of(self, variables: List[Any]) -> List[Any]:
        """The values that these variables have now, with the shapes of the variables."""
        return [tf.ensure_shape(self.get_current_value(v), v.shape) for v in variables]


class State(NamedTuple):
    """What goes from one micro-batch to the next.

    Attributes:
        carried: the values of variables that are written, such as seeds.
        moments: of the BatchNormalization layers whose moments are pooled.
    """

    carried: List[Any]
    moments: List[_batch_norm.Moments]


class Written:
    """The variables that a function writes, as far as its runs have shown.

    Attributes:
        carried: variables whose values go from micro-batch to micro-batch.
        pooled: BatchNormalization layers whose moving statistics move once per batch, by the
            moments of the whole batch; and whether their inputs have a mask.
        decaying: those whose moving statistics are carried, and so move once per micro-batch.
    """

    def __init__(self) -> None:
        self.carried: List[Any] = []
        self.pooled: Dict[Any, bool] = {}
        self.decaying: List[Any] = []

    def learn(self, scope: Scope, calls_of: _batch_norm.Calls, but: Iterable[Any] = ()) -> None:
        """Adds what was written in a scope, except to some variables, and was not known before."""
        for layer, calls in calls_of.items():
            if layer in self.pooled or layer in self.decaying:
                continue
            if _batch_norm.can_pool(layer, calls):
                self.pooled[layer] = calls[0].masked
            else:
                self.decaying.append(layer)
        moving = [v for layer in self.pooled for v in _batch_norm.statistics(layer)]
        self.carried += without(scope.written.values(), [*moving, *but, *self.carried])

    @property
    def normalizing(self) -> List[Any]:
        """All BatchNormalization layers that were called in training."""
        return [*self.pooled, *self.decaying]

    @property
    def synchronized(self) -> List[str]:
        """The names of those among them in which replicas meet."""
        meeting = _replicas.in_several()
        return [layer.name for layer in self.normalizing if meeting and layer.synchronized]

    def start(self) -> State:
        """The state before the first micro-batch."""
        moments = [_batch_norm.nothing(layer) for layer in self.pooled]
        return State(read(self.carried), moments)

    def scope(self, state: State) -> Scope:
        """A scope in which the carried variables have these values."""
        return Scope(zip(self.carried, state.carried))

    def after(self, state: State, scope: Scope, calls_of: _batch_norm.Calls) -> State:
        """The state after a run in a scope."""
        moments = list(state.moments)
        # In eager mode a layer may be seen for the first time in a later micro-batch.
        moments += [_batch_norm.nothing(layer) for layer in list(self.pooled)[len(moments) :]]
        return State(
            carried=scope.values_of(self.carried),
            moments=[
                _batch_norm.pooled(before, calls_of[layer][0].moments)
                if layer in calls_of
                else before
                for layer, before in zip(self.pooled, moments)
            ],
        )

    def write(self, state: State) -> None:
        """Writes the state after the last micro-batch to the variables.

        Replicas then have the same, except where each holds a part, as those of metrics.
        """
        for variable, value in zip(self.carried, shared(self.carried, state.carried)):
            variable.assign(value)
        moments_of_all = _batch_norm.over_replicas(state.moments)
        for (layer, masked), moments in zip(self.pooled.items(), moments_of_all):
            _batch_norm.update(layer, moments, masked)


class Function:
    """A function of a micro-batch, whose writes to Keras variables are state.

    Attributes:
        written: what it writes.
        drew: whether random numbers were drawn from Keras' seeds in the last call.
    """

    def __init__(self, function: Callable[[Any], Any], trained: Iterable[Any]):
        self.written = Written()
        self.drew = False
        self._trained = list(trained)
        self._function = function

    def dry_run(self, micro_batch: Any) -> None:
        """Finds out what the function writes, by tracing it into a graph that is thrown away.

        The loop in a graph must know it beforehand. It also makes what variables are missing.
        """
        traced = tf.function(self._function, autograph=False)
        _, scope, calls_of = _run(lambda: traced.get_concrete_function(micro_batch), Scope, True)
        self._learn(scope, calls_of)

    def __call__(self, micro_batch: Any, state: State) -> Tuple[Any, State]:
        """What the function returns, and the state after it."""
        result, scope, calls_of = _run(
            lambda: self._function(micro_batch), lambda: self.written.scope(state)
        )
        self.drew = any(map(is_seed, scope.written.values()))
        if tf.executing_eagerly():
            self._learn(scope, calls_of)
        return result, self.written.after(state, scope, calls_of)

    def _learn(self, scope: Scope, calls_of: _batch_norm.Calls) -> None:
        _checks.writes_no_trained_variable(scope.written.values(), self._trained)
        self.written.learn(scope, calls_of)
        normalizing = [layer.name for layer in self.written.normalizing]
        decaying = [layer.name for layer in self.written.decaying]
        for message in _checks.inexact(normalizing, decaying):
            _checks.warn_once(self.written.normalizing[0], message)


def _run(function: Callable[[], Any], make_scope: Callable[[], Scope], alone: bool = False) -> Any:
    """Runs a function in a scope. Returns its result, the scope, and what was recorded in it."""
    scope = make_scope()
    try:
        with scope, _batch_norm.recorded(alone) as calls_of:
            result = function()
    except Exception:
        if not scope.made_variables:
            raise
    if scope.made_variables:
        # They had no value in there: now they have. What makes new ones each time gets on without.
        scope = make_scope()
        with scope, _batch_norm.recorded(alone) as calls_of:
            result = function()
    return result, scope, calls_of


def conversion() -> Any:
    """What tf.function does here to `if` and `for` on tensors: by default, make operations."""
    return tf.__internal__.autograph.control_status_ctx()  # TensorFlow's name for what Keras needs


def converted(function: Callable[[Any], Any], conversion: Any) -> Callable[[Any], Any]:
    """A user's function as a tf.function would trace it."""
    if tf.executing_eagerly():
        return function

    # A function that was made inside a tf.function is converted already, but what it calls is only
    # converted where converted code calls it, as this will be.
    def call(micro_batch: Any) -> Any:
        return function(micro_batch)

    return tf.__internal__.autograph.tf_convert(call, conversion)


def read(variables: Iterable[Any]) -> List[Any]:
    """The values of variables."""
    return [tf.convert_to_tensor(variable.value) for variable in variables]


def shared(variables: List[Any], values: List[Any], whole: bool = False) -> List[Any]:
    """The values that variables get when each replica has come to its own.

    Those of the first replica; of integers, the largest, since seeds must not be drawn from again;
    and of variables of which each replica holds a part, as those of metrics are, its own, or their
    sum if `whole`.
    """
    if not _replicas.in_several():
        return values

    def of_parts(parts: List[Any]) -> List[Any]:
        return _replicas.total(parts) if whole else parts

    def rule(variable: Any, value: Any) -> Callable[[List[Any]], List[Any]]:
        if variable.synchronization == "on_read":
            return of_parts
        return _replicas.of_first if value.dtype.is_floating else _replicas.largest

    rules = [rule(*pair) for pair in zip(variables, values)]
    results: Dict[Any, Any] = {}
    for each in (of_parts, _replicas.of_first, _replicas.largest):  # in one order on all replicas
        results[each] = iter(each([v for v, rule in zip(values, rules) if rule is each]))
    return [next(results[rule]) for rule in rules]


def is_seed(variable: Any) -> bool:
    """Whether a variable is what random numbers are drawn from."""
    return bool(variable.name == "seed_generator_state")


def without(variables: Iterable[Any], others: Iterable[Any]) -> List[Any]:
    """The variables that are not among the others."""
    unwanted = {id(variable) for variable in others}
    return [variable for variable in variables if id(variable) not in unwanted]

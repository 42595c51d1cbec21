"""Keras variables as values. In a scope, what layers and metrics write to variables (seeds, moving
statistics, counts) becomes values. They go from micro-batch to micro-batch, and are written to the
variables once, when the batch is through. So whatever fails before has changed nothing.
"""

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import keras

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._keras import batch_norm, checks
from macrobatch._types import Tensor, Variable


class Scope(keras.StatelessScope):
    """A stateless scope that also tells which variables were written, and whether any was made."""

    def __init__(self, variables: Iterable[Variable] = (), values: Iterable[Tensor] = ()):
        # Without collect_losses, what layers add with `add_loss` would vanish.
        super().__init__(collect_losses=True)
        self.state_mapping = {id(v): value for v, value in zip(variables, values)}
        self.written: Dict[int, Variable] = {}
        self.made_variables = False
        self.drew = False  # whether random numbers were drawn that dropout does not draw
        self.dropped = False  # whether dropout was called
        self._is_dropping = False
        self.assigned: Callable[[Tensor], Tensor] = lambda value: value  # see Engine.assigned

    @contextlib.contextmanager
    def dropping(self, drops: bool) -> Iterator[None]:
        """Sees whether anything is dropped by dropout, and keeps everything unless it `drops`."""

        def instead(
            drop: Any, inputs: Tensor, rate: Any, noise_shape: Any = None, seed: Any = None
        ) -> Tensor:
            if isinstance(seed, int):  # The same places are dropped each time.
                return drop(inputs, rate, noise_shape, seed)
            self.dropped = True
            if not drops:
                return inputs
            self._is_dropping = True
            try:
                return drop(inputs, rate, noise_shape, seed)
            finally:
                self._is_dropping = False

        with _internals.with_dropout(instead):
            yield

    def add_update(self, update: Tuple[Variable, Tensor]) -> None:
        self.written[id(update[0])] = update[0]
        self.drew = self.drew or (is_seed(update[0]) and not self._is_dropping)
        super().add_update((update[0], self.assigned(update[1])))

    def __exit__(self, *error: Any) -> None:
        # Variables that are made in a stateless scope have no value before its end.
        self.made_variables = bool(_internals.variables_without_value())
        super().__exit__(*error)

    def get_current_value(self, variable: Variable) -> Tensor:
        value = super().get_current_value(variable)
        around = getattr(self, "original_scope", None)
        if value is None and around is not None:
            value = around.get_current_value(variable)  # where the state of a batch may be
        # Keras asks the scope for the weights that it regularises, and fails on None.
        return _internals.raw_value(variable) if value is None else value


class Written:
    """The variables that a function writes, learned from its runs.

    Attributes:
        variables: all variables whose values go into a run.
        pooled: BatchNormalization layers whose moving statistics move once per batch, by the
            moments of the whole batch; and whether their inputs have a mask.
        decaying: those whose moving statistics move once per micro-batch.
        passing: variables whose values after a run are of no use.
        drew: whether the last run drew random numbers that dropout does not draw.
        dropped: whether the last run called dropout.
    """

    def __init__(
        self,
        variables: Iterable[Variable],
        trained: Iterable[Variable],
        engine: Engine,
        kind: Callable[..., Scope] = Scope,
    ):
        """Starts with what is known.

        Args:
            variables: those whose values go into the first run.
            trained: those that are not to be written.
            engine: the backend.
            kind: what makes a scope of variables and their values.
        """
        self._trained, self._engine, self._kind = list(trained), engine, kind
        self.variables = unique(without(variables, self._trained))
        self.pooled: Dict[Any, bool] = {}
        self.decaying: List[Any] = []
        self.passing: List[Variable] = []
        self.drew = self.dropped = False

    def values(self) -> List[Tensor]:
        """The values of the variables before a batch."""
        return [self._engine.read(variable.value) for variable in self.variables]

    def scope(self, values: List[Tensor], weights: Sequence[Tensor] = ()) -> Scope:
        """A scope in which the variables have these values, and the trained ones these weights."""
        scope = self._kind(self.variables, values)
        scope.assigned = self._engine.assigned
        scope.state_mapping.update(zip(map(id, self._trained), weights))
        return scope

    def after(
        self, scope: Scope, calls_of: batch_norm.Calls
    ) -> Tuple[List[Optional[Tensor]], List[batch_norm.Moments]]:
        """What a run in a scope has written, and the moments that are pooled."""
        checks.writes_no_trained_variable(scope.written.values(), self._trained)
        self.drew, self.dropped = scope.drew, scope.dropped
        for layer, calls in calls_of.items():
            if layer not in self.pooled and layer not in self.decaying:
                if batch_norm.can_pool(layer, calls):
                    self.pooled[layer] = calls[0].masked
                else:
                    self.decaying.append(layer)
        unseen = without(scope.written.values(), self.variables)
        self.variables += unseen
        moving = [v for layer in self.pooled for v in batch_norm.statistics(layer)]
        kept = {id(v) for v in without(scope.written.values(), [*moving, *self.passing])}
        written = [scope.get_current_value(v) if id(v) in kept else None for v in self.variables]
        moments = [
            calls_of[layer][0].moments if layer in calls_of else batch_norm.nothing(layer)
            for layer in self.pooled
        ]
        return written, moments

    @property
    def normalizing(self) -> List[Any]:
        """All BatchNormalization layers that were called in training."""
        return [*self.pooled, *self.decaying]

    def write(
        self,
        written: Sequence[Optional[Tensor]],
        moments: Sequence[batch_norm.Moments],
    ) -> None:
        """Writes what the last micro-batch has left, and moves the pooled statistics.

        Replicas then have the same, except where each holds a part, as those of metrics.
        """
        pairs = [(v, value) for v, value in zip(self.variables, written) if value is not None]
        variables, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        for variable, value in zip(variables, shared(variables, values, self._engine)):
            variable.assign(value)
        moments_of_all = batch_norm.over_replicas(moments, self._engine)
        for (layer, masked), each in zip(self.pooled.items(), moments_of_all):
            batch_norm.update(layer, each, masked)


def shared(
    variables: List[Variable], values: List[Tensor], engine: Engine, whole: bool = False
) -> List[Tensor]:
    """The values that variables get when each replica has come to its own.

    Those of the first replica; of integers, the largest, since seeds must not be drawn from again;
    and of variables of which each replica holds a part, as those of metrics are, its own, or their
    sum if `whole`.
    """
    if engine.replicas() == 1:
        return values

    def of_parts(parts: List[Tensor]) -> List[Tensor]:
        return engine.sum_over_replicas(parts) if whole else parts

    def rule(variable: Variable) -> str:
        if is_part(variable):
            return "parts"
        return "first" if keras.backend.is_float_dtype(variable.dtype) else "largest"

    rules = {
        "parts": of_parts,
        "first": engine.from_first_replica,
        "largest": engine.max_over_replicas,
    }
    results: Dict[str, Any] = {}
    for name, function in rules.items():  # in one order on all replicas
        own = [value for v, value in zip(variables, values) if rule(v) == name]
        results[name] = iter(function(own) if own else [])
    return [next(results[rule(variable)]) for variable in variables]


def is_part(variable: Variable) -> bool:
    """Whether each replica holds a part of a variable, as it does of those of metrics."""
    return bool(getattr(variable, "synchronization", "auto") == "on_read")


def is_seed(variable: Variable) -> bool:
    """Whether a variable is what random numbers are drawn from."""
    return bool(variable.name == "seed_generator_state")


def unique(variables: Iterable[Variable]) -> List[Variable]:
    """The variables, each once."""
    return list({id(variable): variable for variable in variables}.values())


def without(variables: Iterable[Variable], others: Iterable[Variable]) -> List[Variable]:
    """The variables that are not among the others."""
    unwanted = {id(variable) for variable in others}
    return [variable for variable in variables if id(variable) not in unwanted]

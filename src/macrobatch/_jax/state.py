"""The state of a step: the values of all variables, which go in and come out.

In a fit, Keras takes the values out of its variables. In this scope they have them, and what is
assigned to them is a value again.
"""

from typing import Any, Iterable, List, NamedTuple

from macrobatch._jax.engine import ENGINE, own_seeds
from macrobatch._keras.scope import Scope, is_part, is_seed
from macrobatch._types import Tensor, Variable


class State(NamedTuple):
    """The values of a model's variables, as Keras passes them to steps on JAX."""

    trained: List[Tensor]
    others: List[Tensor]
    optimizer: List[Tensor]
    metrics: List[Tensor]


class StateScope(Scope):
    """A scope in which the variables of a model have the values of a state."""

    def __init__(self, model: Any, state: State):
        of_optimizer = [] if model.optimizer is None else model.optimizer.variables
        self._model = model
        variables = [
            *model.trainable_variables,
            *model.non_trainable_variables,
            *model.metrics_variables,
            *(of_optimizer if state.optimizer else ()),
        ]
        values = [*state.trained, *state.others, *state.metrics, *state.optimizer]
        super().__init__(variables, values)
        if ENGINE.replicas() > 1:
            self._take_apart(variables)

    def _take_apart(self, variables: Iterable[Variable]) -> None:
        """Gives each device what is its own: seeds, and its part of metrics."""
        for variable in variables:
            value = self.state_mapping[id(variable)]
            if is_seed(variable):
                (value,) = own_seeds([value])
            elif is_part(variable):
                value = ENGINE.on_first_replica(value)
            self.state_mapping[id(variable)] = value

    def others(self) -> List[Tensor]:
        """The values of the variables that are not trained."""
        return self._of(self._model.non_trainable_variables)

    def metrics(self) -> List[Tensor]:
        """The values of the metrics' variables."""
        return self._of(self._model.metrics_variables)

    def _of(self, variables: List[Variable]) -> List[Tensor]:
        values = [self.get_current_value(variable) for variable in variables]
        if ENGINE.replicas() == 1:
            return values
        parts = [i for i, variable in enumerate(variables) if is_part(variable)]
        for i, whole in zip(parts, ENGINE.sum_over_replicas([values[i] for i in parts])):
            values[i] = whole
        for i, variable in enumerate(variables):
            if is_seed(variable):
                (values[i],) = own_seeds([values[i]], backwards=True)
        return values

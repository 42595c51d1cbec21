"""Variables in a step that is run again: they read as they did at that point of the real run, and
nothing is written.
"""

from typing import Any, Iterable, Tuple

import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras.scope import Scope
from macrobatch._own_steps.modes import Mode
from macrobatch._types import Tensor, Variable


class StepScope(Scope):
    """A scope in which tapes see variables, whatever value stands for them."""

    def __init__(self, mode: Mode, variables: Iterable[Variable], values: Iterable[Tensor]):
        super().__init__(variables, values)
        self._mode = mode

    def add_update(self, update: Tuple[Variable, Tensor]) -> None:
        variable, value = update
        # What is assigned to a variable has no gradient, as it has none in plain TensorFlow.
        value = self._mode.wrote(variable, tf.stop_gradient(value))
        super().add_update((variable, value))

    def get_current_value(self, variable: Variable) -> Any:
        value, raw = self.state_mapping.get(id(variable)), _internals.raw_value(variable)
        if value is None:
            return raw
        return _read_as(raw, value) if getattr(raw, "trainable", False) else value


def _read_as(variable: tf.Variable, value: Tensor) -> Tensor:
    """A value, whose gradient is that of the variable: tapes watch variables and know no value."""

    @tf.custom_gradient
    def read(plain: Tensor) -> Any:
        return tf.identity(value), lambda gradient: gradient

    return read(tf.convert_to_tensor(variable))

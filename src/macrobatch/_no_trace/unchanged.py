"""Everything that a trial may touch is put back: variables, seeds, names, Keras' settings."""

import contextlib
import random
from typing import Any, Iterator, List, Sequence

import keras
import numpy as np

from macrobatch import _backends, _internals
from macrobatch._keras.scope import unique
from macrobatch._keras.written import variables_of
from macrobatch._types import Variable


@contextlib.contextmanager
def unchanged(model: Any) -> Iterator["Values"]:
    """A context after which a model, and what is global, is as it was before. Has the values."""
    kept = Values(variables_of(model), rarely_written=model.non_trainable_variables)
    numbers, old_numbers = random.getstate(), np.random.get_state()  # noqa: NPY002
    settings = keras.config.floatx(), keras.config.dtype_policy()
    generators = _backends.trials().same_generators(model)
    with _internals.same_global_state(), generators:
        try:
            yield kept
        finally:
            kept.put_back()
            random.setstate(numbers)
            np.random.set_state(old_numbers)  # noqa: NPY002
            keras.config.set_floatx(settings[0])
            keras.config.set_dtype_policy(settings[1])


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """A context in which new layers, losses and metrics compute in float64."""
    settings = keras.config.floatx(), keras.config.dtype_policy()
    with _backends.trials().in_float64():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            yield
        finally:
            keras.config.set_floatx(settings[0])
            keras.config.set_dtype_policy(settings[1])


class Values:
    """The values of variables, to be put back.

    Attributes:
        bytes: what they take, in the memory of the machine.
    """

    def __init__(self, variables: List[Variable], rarely_written: Sequence[Variable] = ()):
        """Keeps values.

        Args:
            variables: whose values.
            rarely_written: those of them that take memory only once they are written, such as the
                weights of frozen layers: a tensor shares the memory of its variable until then.
        """
        self._variables = unique(variables)
        self._values: List[Any] = []
        lazily = {id(variable) for variable in rarely_written}
        self.bytes = 0
        for variable in self._variables:
            value = _internals.raw_value(variable)
            if id(variable) in lazily:
                self._values.append(_backends.trials().kept(value))
            else:
                self._values.append(np.array(_backends.trials().array(value)))
                self.bytes += self._values[-1].nbytes

    def put_back(self) -> None:
        """Gives the variables these values again."""
        for variable, value in zip(self._variables, self._values):
            variable.assign(value)

"""What JAX offers to work on a user's model that leaves no trace: see _keras.trials."""

import contextlib
import functools
from typing import Any, Iterator, List

import jax
import keras
import numpy as np
from jax import lax

from macrobatch import _internals
from macrobatch._jax.auto import is_out_of_memory
from macrobatch._jax.engine import ENGINE
from macrobatch._keras import trials
from macrobatch._keras.trials import Seen
from macrobatch._types import Tensor, Variable


class _Gradients(trials.Gradients):
    """Gradients that a compiled step tells when it runs.

    On JAX, steps call `stateless_apply`. Some optimizers do not call `apply` in it.
    """

    def of(self, variable: Variable) -> Any:
        jax.effects_barrier()  # Callbacks run while Python goes on.
        return super().of(variable)

    @contextlib.contextmanager
    def recorded(self, optimizer: Any, seen: Seen, as_they_are: bool) -> Iterator[None]:
        plain = optimizer.stateless_apply

        def stateless_apply(optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
            seen.extend((id(variable), False) for variable in self._variables)
            jax.debug.callback(self._told, [_as_bits(gradient) for gradient in grads])
            return plain(optimizer_variables, grads, trainable_variables)

        optimizer.stateless_apply = stateless_apply
        try:
            yield
        finally:
            del optimizer.stateless_apply

    def _told(self, gradients: List[Any]) -> None:
        values = [
            np.asarray(bits) if len(bits.shape) == len(variable.shape) else _from_bits(bits)
            for variable, bits in zip(self._variables, gradients)
        ]
        self._kept = dict(zip(map(id, self._variables), values))


def _as_bits(gradient: Tensor) -> Tensor:
    """A gradient as callbacks get it whole: on their thread, JAX makes float32 of float64."""
    is_wide = gradient.dtype == "float64"
    return lax.bitcast_convert_type(gradient, "uint32") if is_wide else gradient


def _from_bits(bits: Any) -> Any:
    return np.ascontiguousarray(bits).view("float64")[..., 0]


class _Trials(trials.Trials):
    failures = (jax.errors.JaxRuntimeError,)
    compiles = True  # One by one, JAX compiles each operation by itself, which takes longer.

    def check(self) -> None:
        if keras.distribution.distribution() is not None:
            raise ValueError(
                "verify compares on one device. Received: a distribution of Keras. Call verify "
                "before keras.distribution.set_distribution(...), or after "
                "keras.distribution.set_distribution(None)."
            )

    def is_out_of_memory(self, error: BaseException) -> bool:
        return is_out_of_memory(error)

    @contextlib.contextmanager
    def in_float64(self) -> Iterator[None]:
        enable = getattr(jax, "enable_x64", None)
        if enable is None:  # before JAX 0.8
            enable = jax.experimental.enable_x64
        with enable(True), _internals.with_float64():
            yield

    @contextlib.contextmanager
    def afresh(self, model: Any) -> Iterator[None]:
        # JAX knows traces by their function, and takes a method of the same model for the same.
        model.train_step = functools.partial(type(model).train_step, model)
        try:
            yield
        finally:
            del model.train_step

    def can_draw_float64(self) -> bool:
        return bool(jax.config.jax_enable_x64)

    def gradients(self, variables: List[Variable]) -> trials.Gradients:
        return _Gradients(variables)


TRIALS = _Trials(ENGINE)

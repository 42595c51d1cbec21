"""What a step of a user's own calls that another answers: there is no way in from outside. Each
context is entered with the one who answers (modes.Mode).
"""

import functools
from typing import Any, Callable

import keras
import tensorflow as tf

from macrobatch._internals.patch import Patch


def _class(name: str) -> Callable[[], Any]:
    return lambda: functools.reduce(getattr, name.split("."), keras)


def _base_of_optimizers() -> Any:
    return next(c for c in keras.Optimizer.__mro__ if "apply" in vars(c))


def _asked(method: str) -> Callable[..., Any]:
    def instead(plain: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(mode, method)(plain, *args, **kwargs)

    return instead


gradients = Patch(lambda: tf.GradientTape, "gradient", _asked("gradient"))

ALL = (
    gradients,
    Patch(lambda: tf.GradientTape, "jacobian", _asked("jacobian")),
    Patch(_base_of_optimizers, "apply", _asked("apply")),
    Patch(_class("optimizers.LossScaleOptimizer"), "apply", _asked("apply")),
    Patch(_class("metrics.Mean"), "update_state", _asked("update_state")),
    Patch(_class("metrics.Sum"), "update_state", _asked("update_state")),
    Patch(_class("losses.Loss"), "__call__", _asked("loss")),
)

"""The backends that Keras may run on, and the room of each: the one table. Says what to install.

Imports no backend by itself. Runs on TensorFlow 1.14 too.
"""

import importlib
import importlib.util
import sys
from typing import Any, Optional

TENSORFLOW = "tensorflow"
# Each room has a class (or a function in its place) `Accumulation`, of a model, how to cut batches,
# micro_batch_weight=, nonfinite=, memory_limit= and whole_batch_loss=, which is a
# `_keras.installed.Installed`. A file beside it, `no_trace`, has TRIALS.
ROOMS = {
    TENSORFLOW: "macrobatch._fit.fit",
    "jax": "macrobatch._jax.fit",
    "torch": "macrobatch._torch.fit",
}
# What TensorFlow alone has, and what others have in its place.
_ELSEWHERE = {
    "jax": {
        "value_and_gradients": "jax.value_and_grad for each micro-batch, weighted by its share of "
        "the examples and summed (optax.MultiSteps is right for micro-batches of one size)",
        "GradientAccumulator": "optax.MultiSteps",
        "wait_for_workers": "jax.distributed.initialize(initialization_timeout=...), which waits "
        "for all processes",
    },
    "torch": {
        "value_and_gradients": "(loss * share).backward() per micro-batch, which adds to .grad",
        "GradientAccumulator": "(loss * share).backward() per micro-batch, which adds to .grad",
        "wait_for_workers": "torch.distributed.init_process_group(timeout=...), which waits for "
        "all processes",
    },
}
_FIT = "macrobatch.accumulate(model, micro_batch_size=8) with fit()"
_FINDS = 'macrobatch.accumulate(model, "auto") with fit(), which finds a size while it trains'
_ON_ANY = ("accumulate", "release", "settings_of", "verify", "GradientNoiseScale")
INSTALL = (
    "Install one of them: pip install 'macrobatch[cpu]' (TensorFlow; for a GPU 'macrobatch[gpu]'), "
    "'macrobatch[jax]' or 'macrobatch[torch]'. On JAX and torch, set the environment variable "
    'KERAS_BACKEND="jax" or KERAS_BACKEND="torch" before Keras is imported.'
)


def room(name: str) -> Any:
    """The module that puts steps into models of a backend."""
    return importlib.import_module(ROOMS[name])


def trials() -> Any:
    """What the backend of Keras offers to work that leaves no trace: a `_keras.trials.Trials`."""
    name = _of_keras() or TENSORFLOW
    check(name)
    return importlib.import_module(ROOMS[name].rpartition(".")[0] + ".no_trace").TRIALS


def check(name: str) -> None:
    """Raises for a backend that has no room here."""
    if name not in ROOMS:
        raise ValueError(
            "macrobatch needs Keras to run on TensorFlow, JAX or torch. "
            f"Received: a model on the {name!r} backend. Set the environment variable "
            'KERAS_BACKEND="tensorflow" (or "jax", or "torch") before Keras is imported.'
        )


def of_own_loop(name: str) -> str:
    """What to say to whoever has no Keras 3 model with a fit()."""
    way_out = _ELSEWHERE.get(name, {}).get("value_and_gradients")
    if way_out is None:
        return "For tf_keras models and loops of your own, use macrobatch.value_and_gradients."
    return f"In a loop of your own, use {way_out}."


def check_available(name: str) -> None:
    """Raises for a name of the package that the backend that is installed cannot have."""
    if name == "ExactnessWarning":
        return
    backend = _of_keras()
    if backend in (None, TENSORFLOW) or (name == "GradientAccumulator" and _is_there(TENSORFLOW)):
        _check_tensorflow(name)
    elif name not in _ON_ANY:
        way_out = _ELSEWHERE.get(backend, {}).get(name)
        instead = f"{_FIT}, or in a loop of your own {way_out}" if way_out else _FIT
        if name == "find_micro_batch_size":
            instead = _FINDS
        elif name == "wait_for_workers":
            instead = way_out or "what the backend offers to several processes"
        raise ImportError(
            f"macrobatch.{name} is available on TensorFlow only so far. Received: Keras on "
            f"the {backend!r} backend. Use {instead}."
        )


def _of_keras() -> Optional[str]:
    """The backend of Keras 3; None without Keras 3."""
    if sys.version_info < (3, 10) or not _is_there("keras"):
        return None
    try:
        from keras import backend
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ROOMS:
            raise
        raise ImportError(
            f"Keras is to run on {error.name}, which is not installed. {INSTALL}"
        ) from error
    return str(backend.backend())


def _check_tensorflow(name: str) -> None:
    if not _is_there(TENSORFLOW):
        raise ImportError(
            "macrobatch needs Keras 3 with TensorFlow, JAX or torch. Received: an environment "
            f"without Keras or without any of them. {INSTALL}"
        )
    import tensorflow as tf

    if name != "GradientAccumulator" and not _has_keras_3(tf.__version__):
        raise ImportError(
            f"macrobatch.{name} needs TensorFlow 2.16 or newer, with Keras 3.12 or newer. "
            f"Received: TensorFlow {tf.__version__}, on which macrobatch offers "
            "GradientAccumulator. Update with: pip install 'macrobatch[cpu]' on Python 3.10 or "
            "newer."
        )


def _is_there(module: str) -> bool:
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _has_keras_3(version: str) -> bool:
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) >= (2, 16)

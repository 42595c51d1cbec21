"""Exact gradient accumulation for Keras 3 on TensorFlow, JAX and torch.

It trains on a large batch in the memory of a small one, and makes exactly the update of the large
batch.

    macrobatch.accumulate(model, micro_batch_size=32)  # 32 examples in memory at a time
    model.fit(x, y, batch_size=1024)  # the update of 1024 examples

On TensorFlow, JAX and torch:

    accumulate, release      the fit, evaluate and predict of a Keras model
    settings_of              what a model accumulates with
    verify                   is the update exact for this model and this batch, and if not, why
    GradientNoiseScale       is a larger batch worth it
    ExactnessWarning         an update that cannot be exactly that of the large batch, and why

On TensorFlow:

    value_and_gradients      a training loop or train_step of your own, with the large batch in hand
    GradientAccumulator      a loop whose micro-batches arrive one by one, from TensorFlow 1.14 on
    find_micro_batch_size    which size fits, and which is fastest
    wait_for_workers         an error that names the workers that did not come

On the command line, for scripts that stay as they are: macrobatch run, macrobatch verify and
macrobatch plan. In notebooks: %load_ext macrobatch.

Documentation: https://github.com/macrobatch/macrobatch/blob/main/docs/index.md
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from macrobatch._accumulate import accumulate, release
    from macrobatch._checks import ExactnessWarning
    from macrobatch._gradient_accumulator import GradientAccumulator
    from macrobatch._gradient_noise_scale import GradientNoiseScale
    from macrobatch._plan.find import find_micro_batch_size
    from macrobatch._settings import settings_of
    from macrobatch._value_and_gradients import value_and_gradients
    from macrobatch._verify.verify import verify
    from macrobatch._workers.wait import wait_for_workers

__version__ = "0.2.0"

__all__ = [
    "ExactnessWarning",
    "GradientAccumulator",
    "GradientNoiseScale",
    "accumulate",
    "find_micro_batch_size",
    "release",
    "settings_of",
    "value_and_gradients",
    "verify",
    "wait_for_workers",
]

_ROOMS = {
    "ExactnessWarning": "_checks",
    "GradientAccumulator": "_gradient_accumulator",
    "GradientNoiseScale": "_gradient_noise_scale",
    "accumulate": "_accumulate",
    "find_micro_batch_size": "_plan.find",
    "release": "_accumulate",
    "settings_of": "_settings",
    "value_and_gradients": "_value_and_gradients",
    "verify": "_verify.verify",
    "wait_for_workers": "_workers.wait",
}


# TensorFlow takes seconds to import: the command `macrobatch` can do without it. A type checker
# would believe that any name is there.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> _typing.Any:
        if name not in _ROOMS:
            raise AttributeError(f"module 'macrobatch' has no attribute {name!r}")
        backends = _importlib.import_module("macrobatch._backends")
        backends.check_available(name)
        value = getattr(_importlib.import_module(f"macrobatch.{_ROOMS[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> "list[str]":
    return sorted([*__all__, "__version__"])


def load_ipython_extension(ipython: _typing.Any) -> None:
    """`%load_ext macrobatch`: gives a notebook the magic `%macrobatch`."""
    _importlib.import_module("macrobatch._run.notebook").load(ipython)


def unload_ipython_extension(ipython: _typing.Any) -> None:
    """`%unload_ext macrobatch`: new models are plain ones again."""
    _importlib.import_module("macrobatch._run.notebook").unload()

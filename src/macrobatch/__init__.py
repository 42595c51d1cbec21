"""macrobatch: the update of a large batch, in the memory of a micro-batch.

    batch -> micro-batches -> loss terms (N, D) -> gradients -> weighted sum
          -> one reduction over replicas -> one update

The ways in, one file each:

    _accumulate                  accumulate, release: Keras' fit() and evaluate()
    _value_and_gradients         value_and_gradients: a step of your own, the whole batch in hand
    _gradient_accumulator        GradientAccumulator: micro-batches that arrive one by one
    _verify                      verify: is it exact for this model and this batch, and if not, why
    _plan                        find_micro_batch_size: which size fits, and which is fastest
    _gradient_noise_scale        GradientNoiseScale: is a larger batch worth it
    _settings                    settings_of: what a model accumulates with

The rooms, in the order of the data flow. A room imports only from those above it:

    _types, _checks, _internals  names of what passes; messages; private names of Keras, TensorFlow
    _engine                      what a backend offers to the arithmetic
    _optimizer_checks, _loop_checks  what is checked of optimizers and of loops, on any backend
    _backends                    the backends of Keras, and the room of each: the one table
    _batches                     batch -> micro-batches, in order or by length
    _keras                       model, loss and metrics of a micro-batch, from values to values
    _sizes                       sizes that are found: limits, peaks, the search, files
    _found_sizes                 what JAX and torch share of them
    _shown                       what a long run shows, on a terminal and in TensorBoard
    _tensorflow                  the engine: graph, sums, the loop, replicas, the update
    _noise                       the gradient noise scale: what is measured of an update
    _jax, _torch                 the engines and the way into fit() on JAX and on torch
    _meeting                     whether examples meet, tried with some of a batch
    _own_steps                   a step that a model brings itself, on gradients of the whole batch
    _workers                     several processes: wait for each other, launch them
    _gradients                   functions of the user's: how they run, in one pass or two
    _fit                         puts it all into a Keras model on TensorFlow
    _no_trace                    work on a user's model that leaves no trace
    _run                         scripts and notebooks, each fit() of which is accumulated

_batches and _keras import no engine: one is passed in (_engine.Engine).
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
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


# TensorFlow takes seconds to import: the command `macrobatch` can do without it.
def __getattr__(name: str) -> _Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'macrobatch' has no attribute {name!r}")
    backends = _importlib.import_module("macrobatch._backends")
    backends.check_available(name)
    value = getattr(_importlib.import_module(f"macrobatch.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    return sorted([*__all__, "__version__"])


def load_ipython_extension(ipython: _Any) -> None:
    """`%load_ext macrobatch`: gives a notebook the magic `%macrobatch`."""
    _importlib.import_module("macrobatch._run.notebook").load(ipython)


def unload_ipython_extension(ipython: _Any) -> None:
    """`%unload_ext macrobatch`: new models are plain ones again."""
    _importlib.import_module("macrobatch._run.notebook").unload()

"""macrobatch: the update of a large batch, in the memory of a micro-batch.

The data flow, and the order in which the package reads:

    batch -> micro-batches            _split; by length: _sequences, _lengths, _padding
    -> loss terms                     _losses
    -> Keras variables as values      _stateless, _batch_norm
    -> model and loss as a function   _model
    -> gradients, weighted sum        _loop, _sums
    -> one reduction over replicas    _replicas
    -> one update                     _update

    accumulate:                       _steps, _keras
    value_and_gradients:              _gradients, and the update is yours
    GradientAccumulator:              _window, _accumulator

What users pass is checked in _checks, for sequences in _length_checks, for replicas in
_replica_checks, and for GradientAccumulator in _window_checks. Private functions of Keras are
replaced for a while with _patch. What several workers need besides is in _cluster; cli starts them
on one machine, each of them in _worker.
"""

import importlib
from typing import TYPE_CHECKING, Any, List

if TYPE_CHECKING:
    from macrobatch._accumulate import accumulate, release
    from macrobatch._checks import ExactnessWarning
    from macrobatch._gradient_accumulator import GradientAccumulator
    from macrobatch._value_and_gradients import value_and_gradients
    from macrobatch._workers.wait import wait_for_workers

__version__ = "0.1.0"

__all__ = [
    "ExactnessWarning",
    "GradientAccumulator",
    "accumulate",
    "release",
    "value_and_gradients",
    "wait_for_workers",
]

_ROOMS = {
    "ExactnessWarning": "_checks",
    "GradientAccumulator": "_gradient_accumulator",
    "accumulate": "_accumulate",
    "release": "_accumulate",
    "value_and_gradients": "_value_and_gradients",
    "wait_for_workers": "_workers.wait",
}


# TensorFlow takes seconds to import: the command `macrobatch` can do without it.
def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'macrobatch' has no attribute {name!r}")
    checks = importlib.import_module("macrobatch._checks")
    checks.check_available(name)
    value = getattr(importlib.import_module(f"macrobatch.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> List[str]:
    return sorted([*globals(), *__all__])

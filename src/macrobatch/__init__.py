"""macrobatch: the update of a large batch, in the memory of a micro-batch.

The data flow, and the order in which the package reads:

    batch -> micro-batches            _split
    -> loss terms                     _losses
    -> Keras variables as values      _stateless, _batch_norm
    -> model and loss as a function   _model
    -> gradients, weighted sum        _loop, _sums
    -> one reduction over replicas    _replicas
    -> one update                     accumulate:          _keras
                                      value_and_gradients: _gradients, and the update is yours
                                      GradientAccumulator: _window, _accumulator

What users pass is checked in _checks, and for GradientAccumulator in _window_checks.
"""

from macrobatch import _checks
from macrobatch._accumulator import GradientAccumulator
from macrobatch._checks import ExactnessWarning

__version__ = "0.1.0"

__all__ = ["ExactnessWarning", "GradientAccumulator"]

if _checks.has_keras_3():
    from macrobatch._gradients import value_and_gradients
    from macrobatch._keras import accumulate, release

    __all__ += ["accumulate", "release", "value_and_gradients"]
else:

    def __getattr__(name: str) -> None:
        _checks.known_here(name)

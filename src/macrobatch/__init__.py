"""macrobatch: the update of a large batch, in the memory of a micro-batch.

The data flow, and the order in which the package reads:

    batch -> micro-batches            _split
    -> loss terms                     _losses
    -> model, loss and statistics     _model, _batch_norm
    -> gradients                      _gradients
    -> weighted sum                   _sums
    -> one update                     _keras
"""

from macrobatch._checks import ExactnessWarning
from macrobatch._gradients import value_and_gradients
from macrobatch._keras import accumulate, release

__version__ = "0.1.0"

__all__ = ["ExactnessWarning", "accumulate", "release", "value_and_gradients"]

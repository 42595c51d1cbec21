"""What is checked of a model that is to be accumulated on TensorFlow."""

from typing import Any

import tensorflow as tf

from macrobatch import _internals
from macrobatch._tensorflow import checks as replica_checks


def can_be_accumulated(model: Any) -> None:
    """Raises if the workers of a model do not train together."""
    strategy = _internals.strategy_of(model)
    replica_checks.parameter_servers(isinstance(strategy, tf.distribute.ParameterServerStrategy))

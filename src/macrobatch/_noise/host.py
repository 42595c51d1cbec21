"""What measures updates on the host, for engines that run batches one by one in Python."""

import math
from typing import Any, Dict, List, Optional

import keras
from keras import ops

from macrobatch._engine import BatchEngine
from macrobatch._keras import noise
from macrobatch._keras.noise import Squares
from macrobatch._types import Tensor


class HostMeter:
    """Measures updates of one model. What is known is numbers of Python.

    Attributes:
        every: how many updates there are for each that is measured.
        decay: what of an average is left when something is measured.
    """

    def __init__(self, engine: BatchEngine, every: int, decay: float):
        self.every, self.decay = every, decay
        self._engine = engine
        self._known: List[float] = [0.0] * noise.SIZE
        self._counted, self._most = 0, 0  # updates that are not in `_known` yet, and their examples
        self._logs: Dict[str, float] = {"noise_scale": math.nan, "gradient_norm": 0.0}

    @property
    def is_turn(self) -> bool:
        """Whether the next update is to be measured."""
        return (int(noise.updates_of(self._known)) + self._counted) % self.every == 0

    @property
    def state(self) -> Tensor:
        """What is known, as in _keras/noise.py."""
        with self._engine.on_host():
            state = ops.convert_to_tensor(self._known, _dtype())
            most = ops.cast(self._most, _dtype())
            return noise.counted(state, most, self._counted) if self._counted else state

    def add(self, examples: int, found: Optional[Squares]) -> None:
        """Remembers an update.

        Args:
            examples: of its batch.
            found: what was measured; None if nothing was.
        """
        if found is None:
            self._counted, self._most = self._counted + 1, max(self._most, examples)
            return
        with self._engine.on_host():
            numbers = Squares(*(ops.cast(float(each), _dtype()) for each in found))
            state = noise.advanced(self.state, ops.convert_to_tensor(True), numbers, self.decay)
            self._known = [float(each) for each in ops.convert_to_numpy(state)]
            logs: Dict[str, Any] = noise.logs_of(state)
        self._counted, self._most = 0, 0
        self._logs = {name: float(value) for name, value in logs.items()}

    def logs(self) -> Dict[str, float]:
        """What is logged of the updates so far."""
        return self._logs


def _dtype() -> str:
    """That of the numbers: JAX may have no float64."""
    return "float64" if keras.config.floatx() == "float64" else "float32"

"""GradientNoiseScale without what makes it a callback: what was measured, and the advice."""

from typing import Any, Callable, Dict

from keras import ops

from macrobatch._keras import noise
from macrobatch._noise import checks
from macrobatch._types import Tensor


class NoiseScale:
    """What a loop of one's own needs of a GradientNoiseScale."""

    def __init__(self, every: int, decay: float):
        self.every, self.decay = checks.positive_integer(every), checks.fraction(decay)
        self._meter: Any = None

    def meter(self, make: Callable[[int, float], Any] = lambda every, decay: None) -> Any:
        """What measures, made when it is first needed.

        Args:
            make: makes it, of `every` and `decay`.
        """
        if self._meter is None:
            self._meter = make(self.every, self.decay)
        return self._meter

    def restart(self) -> None:
        """Forgets what was measured."""
        self._meter = None

    def result(self) -> Dict[str, float]:
        """The latest `noise_scale` and `gradient_norm`.

        `noise_scale` is nan before anything was measured, and infinity if the gradient is lost in
        its noise. `gradient_norm` is the norm of the gradient of the latest batch that was
        measured, before clipping.
        """
        logs = noise.logs_of(self._state())
        return {name: float(value) for name, value in logs.items()}

    def advice(self) -> str:
        """Whether a larger or a smaller batch would use the data better, in one sentence."""
        return checks.sentence(self.result()["noise_scale"], int(noise.examples_of(self._state())))

    def _state(self) -> Tensor:
        return ops.zeros([noise.SIZE], "float32") if self._meter is None else self._meter.state


def checked(value: Any) -> NoiseScale:
    """Returns `value`, if it is a GradientNoiseScale."""
    if not isinstance(value, NoiseScale):
        raise ValueError(
            "noise_scale must be a macrobatch.GradientNoiseScale, made once before the loop. "
            f"Received: noise_scale={value!r}."
        )
    return value

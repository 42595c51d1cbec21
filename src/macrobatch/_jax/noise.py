"""What a train step on JAX tells of the gradient noise scale, and which updates are measured.

Updates that are not measured run a function without anything of it.
"""

from typing import Any, Callable, Optional

from macrobatch._jax.engine import ENGINE
from macrobatch._jax.halves import Halves
from macrobatch._keras.noise import Squares
from macrobatch._noise.host import HostMeter
from macrobatch._types import Batch, Logs


class NoiseWatch:
    """Measures the updates of a model whose turn it is.

    Attributes:
        meter: what measures; None while nothing does.
    """

    def __init__(self) -> None:
        self.meter: Optional[HostMeter] = None

    def watching(self, halves: Halves, measured: Callable[..., Any]) -> Halves:
        """The halves of a train step, with `measured` for the first one where that is its turn."""
        examples = 0

        def found(state: Any, batch: Batch) -> Any:
            nonlocal examples
            if self.meter is None:
                return halves.found(state, batch)
            examples = int(ENGINE.examples(batch))
            is_turn = self.meter.is_turn and len(state[0])
            return (measured if is_turn else halves.found)(state, batch)

        def updated(trained: Any, of_optimizer: Any, found: Any) -> Any:
            squares, after = found.squares, halves.updated(trained, of_optimizer, found)
            if self.meter is not None:
                self.meter.add(examples, Squares(*squares) if squares else None)
            return after

        return Halves(found, updated)

    def logs(self) -> Logs:
        """What to add to the logs."""
        return {} if self.meter is None else self.meter.logs()

"""The variables that forward passes write, and after them the loss of the whole batch: on several
replicas the loss is computed on each, of the same values.
"""

from typing import Any, Callable, Iterable, List, Optional, Sequence

from macrobatch._engine import Engine
from macrobatch._keras import stateless
from macrobatch._keras.scope import Written, is_part, shared
from macrobatch._types import Tensor, Variable


class TwoStages:
    """Variables as values, through the forward passes of a batch and then through its loss.

    Attributes:
        forward: what is known of how forward passes write them.
        loss: likewise, of the loss.
    """

    def __init__(self, variables: Iterable[Variable], trained: Iterable[Variable], engine: Engine):
        self._engine = engine
        variables, trained = list(variables), list(trained)
        self.forward = Written(variables, trained, engine)
        self.loss = Written(variables, trained, engine)

    def fits(self, values: List[Tensor]) -> bool:
        """Whether a forward pass has found nothing more that must go into it."""
        return len(values) == len(self.forward.variables)

    def between(self, written: Sequence[Optional[Tensor]]) -> List[Tensor]:
        """The values of all variables after the forward passes: on all replicas the same.

        Args:
            written: what the forward passes have left, on this replica.
        """
        variables, values = self.forward.variables, self.forward.values()
        for i, value in enumerate(written):
            values[i] = values[i] if value is None else value
        if self._engine.replicas() == 1:
            return values
        changed = [*(value is not None for value in written), *[False] * len(variables)]
        # Of all other variables, which may be large frozen weights, replicas have the same anyway.
        places = [i for i, v in enumerate(variables) if changed[i] or is_part(v)]
        chosen, own = [variables[i] for i in places], [values[i] for i in places]
        for i, value in zip(places, shared(chosen, own, self._engine, whole=True)):
            values[i] = value
        return values

    def run_loss(
        self, code: Callable[[], Any], values: List[Tensor], weights: Sequence[Tensor] = ()
    ) -> stateless.Result:
        """Runs the loss from values that the forward passes have left."""
        self.loss.variables = list(self.forward.variables)
        return stateless.run(code, self.loss, values, weights=weights)

    def write(
        self,
        written: Sequence[Optional[Tensor]],
        moments: Sequence[Any],
        result: stateless.Result,
    ) -> None:
        """Writes what both stages have left.

        Of metrics each replica holds a part. Here the first one holds all: each replica has come
        to the same, of the whole batch.

        Args:
            written: what the forward passes have left.
            moments: of the inputs of BatchNormalization layers in the forward passes.
            result: that of the loss.
        """
        of_loss = [
            self._engine.on_first_replica(value)
            if value is not None and is_part(variable)
            else value
            for variable, value in zip(self.loss.variables, result.written)
        ]
        of_forward = [*written, *[None] * len(of_loss)]
        last = [old if new is None else new for new, old in zip(of_loss, of_forward)]
        self.forward.write([], moments)
        self.loss.write(last, result.moments)

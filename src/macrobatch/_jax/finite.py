"""Batches with examples whose loss or gradient is not finite, on JAX.

A step goes from values to values. So a batch that must not be written leaves the state as it was.
"""

from typing import Any, Callable, ContextManager, List, Tuple

import jax
from jax import numpy as jnp

from macrobatch._batches.examples import Examples
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.halves import Halves, Run
from macrobatch._jax.state import State, StateScope
from macrobatch._jax.steps import batch_of
from macrobatch._keras import finite
from macrobatch._keras.guard import Guard
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import Scope
from macrobatch._keras.skipping import NOT_FINITE, Skipping
from macrobatch._keras.tried import Tried
from macrobatch._types import Batch, Logs, Tensor


class Finite(Skipping):
    """Runs batches without the examples that are not finite.

    Attributes:
        state: the state before the batch that is run. In a fit, variables have no values.
        latest: what was trained on of the latest batch; None if nothing was.
    """

    def __init__(
        self,
        model: Any,
        guard: Guard,
        tried: Callable[[], Tried],
        remember: Callable[[], Callable[[int], None]],
    ):
        """Prepares for batches.

        Args:
            model: the model.
            guard: what must be finite.
            tried: gives what is tried to name a layer.
            remember: gives a function that forgets what was learnt since of a batch.
        """
        super().__init__(model, guard, ENGINE, lambda: 0, tried, lambda count: self._forget(count))
        self._remember = remember
        self._forget: Callable[[int], None] = lambda examples: None
        self.state: Any = None
        self.latest: Batch = None

    def train_step(self, halves: Halves, run: Run, state: Any, data: Batch) -> Tuple[Logs, Any]:
        """Runs a train step on a batch, again if need be."""
        self._guard.start(self._model.optimizer)
        self.state, self.latest = State(*state), None
        self._forget = self._remember()
        after = state

        def both(batch: Batch) -> Logs:
            nonlocal after
            found = jax.block_until_ready(halves.found(state, batch))
            is_bad = not bool(found.is_finite)
            if not is_bad and not self._guard.looks:
                # This may give the memory of the state away: no other run follows.
                after = halves.updated(state[0], state[2], found)
                self.latest = batch
            return {**found.logs, NOT_FINITE: int(is_bad)}

        try:
            return self(lambda batch: run(state, both, batch), data), after
        finally:
            self.state = None

    def examples_of(self, batch: Batch) -> Examples:
        return Examples(batch, ENGINE)

    def micro_batch_of(self, batch: Batch) -> Batch:
        return batch_of(batch)

    def trained(self) -> List[Tensor]:
        return list(self.state.trained)

    def not_trained(self) -> List[Tensor]:
        return list(self.state.others)

    def regularizers_are_finite(self) -> bool:
        with self.trying():
            model = ModelStep(self._model, True, ENGINE)

            def penalty(weights: List[Tensor]) -> Tensor:
                with Scope(model.trained, weights):
                    return jnp.asarray(model.regularization())

            value, gradients = jax.value_and_grad(penalty)(self.trained())
        return bool(finite.all_finite([value, *gradients]))

    def parts_are_as_large(self) -> bool:
        return True  # JAX compiles for each shape, operations one by one too.

    def trying(self) -> ContextManager[Any]:
        return StateScope(self._model, self.state)

    def metrics(self) -> Logs:
        with self.trying():
            return super().metrics()

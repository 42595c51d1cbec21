"""The halves of a train step: what a batch comes to, and the update. Only the update writes."""

from typing import Any, Callable, List, NamedTuple, Tuple

import jax

from macrobatch._types import Batch, Logs, Tensor


class Found(NamedTuple):
    """What a batch comes to, before the update.

    Attributes:
        gradients: those of the whole batch; none in testing.
        others: the values after the batch of the variables that are not trained.
        metrics: likewise, of the metrics.
        logs: those of the whole batch.
        is_finite: whether all numbers are that must be; nothing if nobody asks.
        squares: what was measured for the gradient noise scale; nothing if nothing was.
    """

    gradients: List[Tensor]
    others: List[Tensor]
    metrics: List[Tensor]
    logs: Logs
    is_finite: Any = ()
    squares: Any = ()


class Halves(NamedTuple):
    """The halves of a train step, compiled or not.

    Attributes:
        found: what a batch comes to, of a state and a batch.
        updated: the state after the update, of weights, the optimizer's variables and `found`.
    """

    found: Callable[[Any, Batch], Found]
    updated: Callable[[Any, Any, Found], Any]


# Runs a function of a batch that makes an update, again if need be. It also gets the state before.
Run = Callable[[Any, Callable[[Batch], Any], Batch], Any]


def once(state: Any, function: Callable[[Batch], Any], batch: Batch) -> Any:
    """Runs a function of a batch, once."""
    return function(batch)


def train_step(halves: Halves, run: Run, state: Any, data: Batch) -> Tuple[Logs, Any]:
    """The logs of a train step, and the state after it."""

    def both(batch: Batch) -> Tuple[Logs, Any]:
        # JAX computes while Python goes on, and raises later.
        found = jax.block_until_ready(halves.found(state, batch))
        return found.logs, halves.updated(state[0], state[2], found)

    return run(state, both, data)

"""Squared norms of gradients, for the gradient noise scale: those of micro-batches, and of sums."""

from typing import Any, List, Sequence

from jax import numpy as jnp

from macrobatch._keras.noise import Squares
from macrobatch._types import Tensor

# How many sums over micro-batches there are.
SIZE = 2


def of_micro_batch(gradients: Sequence[Tensor], weight: float) -> List[Tensor]:
    """What to sum over micro-batches: the weighted squared norm, and the number of micro-batches.

    Args:
        gradients: what the micro-batch adds to those of the batch.
        weight: the examples of the batch, over those of the micro-batch.
    """
    return [_norm(gradients) * weight, jnp.ones([])]


def of_batch(
    sums: Sequence[Tensor], penalties: Sequence[Tensor], examples: int, scale: Any
) -> Squares:
    """What was measured of a batch, over all devices.

    Args:
        sums: of gradients over micro-batches, and then what `of_micro_batch` gave.
        penalties: the gradients of weight regularisers.
        examples: the number of examples.
        scale: the loss scale that is in all gradients.
    """
    *gradients, apart, count = sums
    whole = [one + other for one, other in zip(gradients, penalties)]
    square = jnp.square(scale)
    return Squares(
        micro_batches=count,
        examples=jnp.asarray(examples),
        apart=apart / square,
        together=_norm(gradients) / square,
        whole=_norm(whole) / square,
    )


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    return sum((jnp.vdot(each, each) for each in gradients), jnp.zeros([]))

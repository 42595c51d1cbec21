"""Gradients whose noise is measured: `backward` must not add those of a micro-batch to the others
before they are looked at. So an update that is measured has a second set of gradients in memory.
"""

from typing import Any, Dict, List, Sequence, Tuple

import torch

from macrobatch._keras.noise import Squares
from macrobatch._torch.sums import NARROW, Gradients
from macrobatch._types import Gradient, Tensor


class MeasuredGradients(Gradients):
    """Gradients, summed over micro-batches, and the squared norms of each of them."""

    def __init__(self, weights: Sequence[Any], examples: int):
        """Prepares sums.

        Args:
            weights: the trained variables.
            examples: the number of examples in the whole batch.
        """
        super().__init__(weights)
        self._examples, self._count = examples, 0
        self._products: Dict[Tuple[int, int], Tensor] = {}  # of the gradients of two losses
        self._penalties: List[Gradient] = [None] * len(self._weights)

    def add(self, losses: Sequence[Tensor], also: Sequence[Tensor] = (), examples: int = 0) -> None:
        alone = Gradients(self._weights)
        alone.add(losses, also)
        found = [alone.of(place) for place in range(len(losses))]
        alone.put_back()
        if examples:
            self._count += 1
            self._measure(found, self._examples / examples)
        else:  # They belong to no example: those of weight regularisers.
            self._penalties = [_copied(each) for each in found[0]]
        for place, own in enumerate(found):
            self._wide[place] = _added(self._wide.get(place, [None] * len(own)), own)

    def _measure(self, found: List[List[Gradient]], weight: float) -> None:
        for i, left in enumerate(found):
            for j, right in enumerate(found[: i + 1]):
                products = [_product(*each) for each in zip(left, right) if None not in each]
                if products:
                    # The matrix is symmetric: what is beside its diagonal is there twice.
                    own = sum(products) * weight * (1 if i == j else 2)
                    self._products[i, j] = self._products.get((i, j), 0.0) + own

    def squares(
        self, factors: Sequence[float], total: Sequence[Gradient], scale: Tensor
    ) -> Squares:
        numbers = [1.0, *factors]
        pairs = [(numbers[i] * numbers[j], own) for (i, j), own in self._products.items()]
        # Times 0 it is 0, even where a gradient is not finite: a mean over nothing.
        apart = sum(float(own) * factor for factor, own in pairs if factor)
        together = [_less(*each) for each in zip(total, self._penalties)]
        square = float(scale) ** 2
        return Squares(
            micro_batches=self._count,
            examples=self._examples,
            apart=apart / square,
            together=_norm(together) / square,
            whole=_norm(total) / square,
        )


def _wide(gradient: Tensor) -> Tensor:
    return gradient.float() if gradient.dtype in NARROW else gradient


def _product(left: Tensor, right: Tensor) -> Tensor:
    return torch.dot(_wide(left).reshape(-1), _wide(right).reshape(-1))


def _norm(gradients: Sequence[Gradient]) -> float:
    """The squared norm."""
    return float(sum(_product(each, each) for each in gradients if each is not None))


def _less(gradient: Gradient, penalty: Gradient) -> Gradient:
    return gradient if gradient is None or penalty is None else gradient - penalty


def _copied(gradient: Gradient) -> Gradient:
    return None if gradient is None else gradient.clone()


def _added(sums: List[Gradient], own: List[Gradient]) -> List[Gradient]:
    """Sums, of which those of few bits are in 32."""
    pairs = zip(sums, own)
    return [
        so_far if each is None else _wide(each) if so_far is None else so_far.add_(each)
        for so_far, each in pairs
    ]

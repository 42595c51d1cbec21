"""Sums of gradients over micro-batches, as torch makes them: `backward` adds to `.grad`, one
variable after the other, so that no second set of gradients is in memory.
"""

from typing import Any, Dict, List, Optional, Sequence

import torch

from macrobatch._keras.noise import Squares
from macrobatch._types import Gradient, Tensor

NARROW = (torch.float16, torch.bfloat16)


class Gradients:
    """The gradients of several losses, each summed over micro-batches.

    The first loss is all that counts as it is. The others belong to counts that are known at the
    end only (see _keras.model.Outcome), so their gradients are summed apart.
    """

    def __init__(self, weights: Sequence[Any]):
        self._weights = list(weights)
        self._narrow = [i for i, weight in enumerate(self._weights) if weight.dtype in NARROW]
        self._before = [weight.grad for weight in self._weights]
        self._apart: Dict[int, List[Gradient]] = {}
        self._wide: Dict[int, List[Gradient]] = {}  # of narrow weights, by loss
        self._place = 0  # the loss whose gradients are in `.grad`
        self._set([None] * len(self._weights))

    def add(self, losses: Sequence[Tensor], also: Sequence[Tensor] = (), examples: int = 0) -> None:
        """Adds the gradients of the losses of a micro-batch, whose activations are then free.

        Args:
            losses: the losses.
            also: other tensors that get a `.grad`, of all losses together.
            examples: the number of examples in the micro-batch; 0 for what belongs to none.
        """
        there = [place for place, loss in enumerate(losses) if loss.requires_grad]
        inputs = [*self._weights, *also]
        for place in there if inputs else []:
            self._switch_to(place)
            losses[place].backward(retain_graph=place != there[-1], inputs=inputs)
            self._widen()

    def _set(self, gradients: Sequence[Gradient]) -> None:
        for weight, gradient in zip(self._weights, gradients):
            weight.grad = gradient

    def _switch_to(self, place: int) -> None:
        if place != self._place:
            self._apart[self._place] = [weight.grad for weight in self._weights]
            self._set(self._apart.pop(place, [None] * len(self._weights)))
            self._place = place

    def _widen(self) -> None:
        """Moves gradients of weights of few bits to sums of 32 bits."""
        if not self._narrow:
            return
        sums = self._wide.setdefault(self._place, [None] * len(self._weights))
        for i in self._narrow:
            gradient = self._weights[i].grad
            if gradient is not None:
                so_far = sums[i]
                sums[i] = gradient.float() if so_far is None else so_far.add_(gradient)
                self._weights[i].grad = None

    def total(self, factors: Sequence[float]) -> List[Gradient]:
        """The gradients of the whole batch. They are in `.grad` too, as after Keras' own step.

        Args:
            factors: how much the gradients count that are summed apart, one for each count.
        """
        self._switch_to(0)
        totals = self.of(0)
        for place, factor in enumerate(factors, 1):
            for i, own in enumerate(self.of(place)):
                if own is None:
                    continue
                # Times 0 it is 0, even where the gradient is not finite: a mean over nothing.
                own = own.mul_(factor) if factor else torch.zeros_like(own)
                so_far = totals[i]
                totals[i] = own if so_far is None else so_far.add_(own)
        totals = [None if t is None else t.to(w.dtype) for t, w in zip(totals, self._weights)]
        self._apart.clear()
        self._wide.clear()
        self._set(totals)
        return totals

    def of(self, place: int) -> List[Gradient]:
        """The gradients of a loss, so far."""
        none: List[Gradient] = [None] * len(self._weights)
        own = [w.grad for w in self._weights] if place == self._place else none
        own, wide = self._apart.get(place, own), self._wide.get(place, none)
        return [narrow if each is None else each for each, narrow in zip(wide, own)]

    def squares(
        self, factors: Sequence[float], total: Sequence[Gradient], scale: Tensor
    ) -> Optional[Squares]:
        """What was measured of the gradients, for the gradient noise scale; None if nothing was.

        Args:
            factors: as for `total`.
            total: the gradients of the whole batch.
            scale: the loss scale that is in them.
        """
        return None

    def put_back(self) -> None:
        """Lets `.grad` be as it was."""
        self._set(self._before)


def factors_of(
    counts: Sequence[Tensor], guesses: Optional[Sequence[Tensor]], paddings: Sequence[float]
) -> List[float]:
    """How much the gradients count that belong to counts: guess / count, 0 for a count of 0.

    Args:
        counts: of the whole batch.
        guesses: what the losses of micro-batches were divided by.
        paddings: what Keras adds to the counts.
    """
    totals = [float(count) + padding for count, padding in zip(counts, paddings)]
    return [float(guess) / total if total else 0.0 for guess, total in zip(guesses or [], totals)]

"""Whether what comes of a micro-batch depends on its padding. Then it must not be cut shorter.

Nobody can see it from a model or a loss, so one micro-batch is run cut and whole, once, before
anything is trained on. Nothing is changed by it, random numbers included.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import torch

from macrobatch import _loop_checks
from macrobatch._checks import warn_once
from macrobatch._torch.engine import ENGINE, same_draws
from macrobatch._types import Batch, MicroBatches, Tensor

# What rounding may bring, over the largest number; padding brings more, since the shortest
# examples are compared.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
COARSE = 5e-2

# What comes of a micro-batch, by name: the loss, and metrics.
Found = Dict[str, List[Tensor]]


class Trial(NamedTuple):
    """What to compare.

    Attributes:
        outcomes: functions of a micro-batch.
        drew: whether, in the last of them, random numbers were drawn that dropout does not draw.
        owner: the model that this is about, for warnings.
        is_coarse: whether numbers are of less than 32 bits somewhere.
        is_additive: whether, in the last of them, no example should depend on other ones.
        hint: what is known after them of why a loss might depend on padding.
        beside_whole: whether they are functions of a micro-batch that is cut and the same whole.
    """

    outcomes: Sequence[Callable[[Any], Found]]
    drew: Callable[[], bool]
    owner: Any
    is_coarse: bool
    is_additive: Callable[[], bool]
    hint: Callable[[], str] = str
    beside_whole: bool = False


def check(micro_batches: MicroBatches, trial: Trial) -> bool:
    """Raises if a micro-batch comes to something else when it is cut.

    Returns:
        whether there was any padding to try with.
    """
    comparison = micro_batches.comparison()
    if comparison is None or not bool(comparison.is_padded):
        return False
    equal: Dict[str, bool] = {}
    with same_draws():
        for outcome in trial.outcomes:
            of_whole, others = comparison.run(outcome, trial.is_additive, trial.beside_whole)
            for other in others:
                for name, values in other.items():
                    close = _close(of_whole[name], values, trial.is_coarse)
                    equal[name] = equal.get(name, True) and close
    unknown = _loop_checks.not_compared(trial.drew(), False)
    if unknown is not None:
        warn_once(trial.owner, unknown)
        return True
    for name, is_equal in equal.items():
        if not is_equal:
            hint = trial.hint() if name == "loss" else ""
            given = micro_batches.lengths_are_given
            raise ValueError(_loop_checks.depends_on_padding(name, hint, given))
    return True


def _close(some: List[Tensor], others: List[Tensor], is_coarse: bool) -> bool:
    """Whether values are the same but for rounding."""
    return all(_are_close(one, other, is_coarse) for one, other in zip(some, others))


def _are_close(one: Tensor, other: Tensor, is_coarse: bool) -> bool:
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    tolerance = COARSE if is_coarse else TOLERANCES.get(one.dtype, COARSE)
    finite = torch.isfinite(one)
    # Where it is not finite with padding, of which there may be none without, nothing is known.
    if not bool((~finite | torch.isfinite(other)).all()):
        return False
    one, other = (torch.where(finite, value, torch.zeros_like(value)) for value in (one, other))
    if not one.numel():
        return True
    size = torch.maximum(one.abs(), other.abs()).max() + 0.01
    return bool(((one - other).abs() <= tolerance * size).all())


def moved(weights: List[Tensor]) -> List[Tensor]:
    """The values of weights, and as much again in random directions; large ones as they are.

    At the start of training much is the same for all inputs.
    """
    found = []
    for weight in weights:
        value = weight.detach()
        if 1 < value.numel() <= 2**20:
            size = value.float().std().clamp(min=0.05).to(value.dtype)
            value = value + size * torch.randn_like(value)
        found.append(value)
    return found


def sized_like(leaf: Tensor, other: Tensor) -> Tensor:
    """The leaf as long as another tensor along each axis but the first, cut or with zeros."""
    for axis in range(1, other.ndim):
        leaf = ENGINE.shortened(leaf, axis, other.shape[axis], exactly=False)
        leaf = ENGINE.lengthened(leaf, axis, other.shape[axis])
    return leaf


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether outputs of one pass are not those of another, but for rounding."""
    one, other = one.detach(), other.detach()
    difference, size = (one - other).abs().sum(), one.abs().sum()
    return bool(difference > TOLERANCES.get(one.dtype, COARSE) * size)


def gradients_of(losses: Sequence[Tensor], weights: List[Tensor]) -> List[Tensor]:
    """All gradients that there are, of each of the losses."""
    there = [loss for loss in losses if loss.requires_grad] if weights else []
    found = [
        torch.autograd.grad(loss, weights, retain_graph=loss is not there[-1], allow_unused=True)
        for loss in there
    ]
    return [gradient for each in found for gradient in each if gradient is not None]


def of_batch(run: Callable[[Batch], Found], training: bool) -> Callable[[Batch], Found]:
    """A function of a micro-batch whose results keep no activations in memory."""

    def found(micro_batch: Batch) -> Found:
        with torch.set_grad_enabled(training):
            results = run(micro_batch)
        return {name: [value.detach() for value in each] for name, each in results.items()}

    return found

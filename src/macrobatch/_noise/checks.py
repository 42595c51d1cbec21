"""What a noise scale says of a batch size, and what is checked of where it is measured."""

import math
from typing import Any, Optional


def sentence(scale: float, batch: int) -> str:
    """What a noise scale says of a batch size.

    A batch of B takes 1 + B / scale times as many examples as the smallest batches, and 1 + scale /
    B times as many updates as the largest, to get equally far: McCandlish et al. 2018, section 2.3.
    """
    if math.isnan(scale):
        return (
            "The gradient noise scale is not known: no batch was cut into several micro-batches "
            "with finite gradients. Pass a micro_batch_size that is smaller than the batch."
        )
    size = f"a batch of {batch}"
    if math.isinf(scale):
        return (
            f"The gradient noise scale is far above {size}, too far to be measured: a larger batch "
            "would use the data as well and take fewer updates."
        )
    start = f"Gradient noise scale {_rounded(scale)}: {size}"
    examples, updates = 1 + batch / max(scale, 1e-9), 1 + scale / batch
    if batch < scale / 2:
        return (
            f"{start} is below it, so a larger batch, up to about {_rounded(scale)}, would use the "
            "data nearly as well and take fewer updates (now about "
            f"{updates:.2g} times the fewest)."
        )
    if batch > scale * 2:
        return (
            f"{start} is above it, so a smaller batch, down to about {_rounded(max(scale, 1))}, "
            "would use the data better and take hardly more updates (now about "
            f"{examples:.2g} times the fewest examples)."
        )
    return (
        f"{start} is close to it: a larger batch would use the data worse, and a smaller one would "
        "take many more updates."
    )


def _rounded(number: float) -> str:
    """Two digits of a large number: it is an estimate."""
    if number < 10:
        return f"{number:.2g}"
    digits = max(0, int(math.log10(number)) - 1)
    return str(round(number / 10**digits) * 10**digits)


def in_any_order(sequence_axis: Optional[int]) -> None:
    """Raises if micro-batches are no random samples of their batch."""
    if sequence_axis is not None:
        raise ValueError(
            "The gradient noise scale is measured from micro-batches of random examples. "
            f"Received: sequence_axis={sequence_axis}, with which a micro-batch has examples of "
            "similar length: what lengths change in the gradient would count as noise. Leave "
            "sequence_axis out for the epochs in which you measure."
        )


def whole_gradient(has_forward: bool, on_replicas: bool) -> None:
    """Raises for a call of value_and_gradients that cannot be measured."""
    if has_forward:
        raise ValueError(
            "The gradient noise scale is that of a loss that is a mean over examples. Received: "
            "noise_scale= and forward=, with which a loss may compare examples with each other. "
            "Leave one of them out."
        )
    if on_replicas:
        raise ValueError(
            "noise_scale= needs the gradient of the whole batch. Received: a call inside "
            "strategy.run, where each replica has a part of it. Use macrobatch.accumulate with "
            "fit(), which measures on replicas, or leave noise_scale= out."
        )


def positive_integer(every: Any) -> int:
    """Returns `every`, if it is a positive integer."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            "every must be a positive integer: 10 measures every tenth update. "
            f"Received: every={every!r}."
        )
    return every


def fraction(decay: Any) -> float:
    """Returns `decay`, if it is a number from 0 to below 1."""
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(
            "decay must be a number from 0 to below 1: what is left of an average when an update "
            f"is measured. Received: decay={decay!r}."
        )
    return float(decay)

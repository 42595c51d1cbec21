"""Keras losses that a step calls itself, over the denominators of the whole batch."""

from typing import Any, List, NamedTuple, Optional

import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras import losses
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Size, Tensor


class _Entry(NamedTuple):
    """A loss, as it is in the losses that are compiled."""

    loss: Any
    name: str = "loss"
    loss_weights: Optional[float] = None


class Part(NamedTuple):
    """What a micro-batch brings to a loss of the whole batch.

    Attributes:
        numerator: of the loss.
        counted: the denominator, if it is counted: that of the micro-batch.
    """

    numerator: Tensor
    counted: Optional[losses.Count]

    def value(self, whole: Optional[Tensor], share: Tensor) -> Tensor:
        """The loss, such that the mean of all micro-batches, by share, is that of the batch."""
        value = self.numerator
        if self.counted is not None:
            total = tf.cast(whole, value.dtype) + tf.cast(self.counted.padding, value.dtype)
            value = tf.math.divide_no_nan(value, total)
        return tf.math.divide_no_nan(value, tf.cast(share, value.dtype))


def part_of(
    loss: Any,
    y_true: Any,
    y_pred: Any,
    sample_weight: Any,
    examples: Size,
    whole: Size,
    by_examples: bool,
) -> Optional[Part]:
    """The part of a micro-batch; None if the loss is right as it is: a mean over the examples.

    Args:
        loss: a loss.
        y_true: what it is called with.
        y_pred: likewise.
        sample_weight: likewise.
        examples: the number of examples in the micro-batch.
        whole: that of the whole batch.
        by_examples: whether micro-batches count by their examples.
    """
    reduction = getattr(loss, "reduction", None)
    if reduction not in (*losses.MEANS, "sum"):  # values, which the step reduces itself
        return None
    weighs = sample_weight is not None and reduction not in (*losses.COUNTING, "sum")
    is_masked = _internals.mask_of(y_pred) is not None
    if by_examples and reduction != "sum" and not weighs and not is_masked:
        return None
    micro_batch = losses.MicroBatch(examples, whole, None, lambda weights: 1.0, is_whole=False)
    counts: List[losses.Count] = []
    terms = losses.Terms(micro_batch, counts, ENGINE, set())
    terms.add_loss(_Entry(loss), y_true, y_pred, sample_weight)
    (term,) = terms.terms
    return Part(term.numerator, None if term.counted is None else terms.counts[term.counted])

"""The parts of micro-batches: how they are put together one by one, and what waits for them."""

from typing import Any, List, Optional, Sequence

import tensorflow as tf

from macrobatch._tensorflow import sums
from macrobatch._types import Gradient, Part, Tensor


def items_of(part: Part) -> List[Any]:
    """What folds take of a part, in their order."""
    present = [each for each in (*part.sums, *part.counts) if each is not None]
    changed = [value for value in part.written if value is not None]
    return [*present, *changed, *part.moments, part.latest]


def rebuilt(like: Part, items: List[Any]) -> Part:
    """A part like another one, with these items."""
    remaining = iter(items)

    def filled(values: Sequence[Any]) -> List[Any]:
        return [None if value is None else next(remaining) for value in values]

    return Part(
        filled(like.sums),
        filled(like.counts),
        filled(like.written),
        filled(like.moments),
        next(remaining),
    )


def nothing_like(part: Part, values: List[Tensor]) -> Part:
    """The part of no micro-batches at all: zeros, and values as they were."""

    def zeros(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            rows = value.values[:0], value.indices[:0]
            return tf.IndexedSlices(*rows, value.dense_shape)
        return None if value is None else tf.nest.map_structure(tf.zeros_like, value)

    return Part(
        sums=[zeros(value) for value in part.sums],
        counts=[zeros(value) for value in part.counts],
        written=[None if new is None else old for new, old in zip(part.written, values)],
        moments=[zeros(value) for value in part.moments],
        latest=zeros(part.latest),
    )


def added(total: Optional[Part], part: Part) -> Part:
    """The part of all micro-batches so far."""
    wide = [sums.merge_rows(sums.widened(each)) for each in part.sums]
    if total is None:
        return part._replace(sums=wide)
    if len(part.sums) != len(total.sums):
        raise ValueError(
            "Every micro-batch must have a loss of the same terms. Received: a micro-batch with "
            f"{len(part.sums)} values to be summed, after one with {len(total.sums)}. Look for "
            "masks or sample weights that only some batches have."
        )
    written = [
        old if new is None else new
        for new, old in zip(part.written, [*total.written, *[None] * len(part.written)])
    ]
    known = len(total.moments)
    moments = [before.merged(now) for before, now in zip(total.moments, part.moments)]
    return Part(
        sums=[sums.merge_rows(sums.add(*pair)) for pair in zip(total.sums, wide)],
        counts=[before + now for before, now in zip(total.counts, part.counts)],
        written=written,
        moments=[*moments, *part.moments[known:]],
        latest=part.latest,
    )


def gradients_of(
    tape: tf.GradientTape, loss: Any, weights: List[Any], of_loss: Any = None
) -> List[Gradient]:
    """The gradients of a loss, with the shapes of the variables, which the tape may not know.

    Of several values, `of_loss` are the gradients for them of what is wanted.
    """
    found = tape.gradient(loss, weights, of_loss)
    return [shaped(gradient, v.shape) for gradient, v in zip(found, weights)]


def shaped(gradient: Gradient, shape: tf.TensorShape) -> Gradient:
    """A gradient with the shape of its variable."""
    if isinstance(gradient, tf.IndexedSlices):
        dense_shape = tf.constant(shape.as_list(), gradient.indices.dtype)
        return tf.IndexedSlices(gradient.values, gradient.indices, dense_shape)
    if gradient is not None:
        gradient.set_shape(shape)
    return gradient


def after(values: Any) -> Any:
    """A context whose operations run once all of these values are there.

    Without it a variable could change, or the optimizer count an update, although another
    micro-batch is about to fail.
    """
    everything = tf.nest.flatten(values, expand_composites=True)
    with tf.control_dependencies([tensor for tensor in everything if tensor is not None]):
        ready = tf.no_op()
    return tf.control_dependencies([] if tf.executing_eagerly() else [ready])


def factors_of(counts: List[Tensor], guesses: List[Tensor], paddings: List[float]) -> List[Tensor]:
    """How much the gradients count that belong to counts, if they were not known before.

    Args:
        counts: those of the whole batch.
        guesses: what stood for them.
        paddings: what Keras adds to each of them, if anything.
    """
    factors = []
    for place, whole in enumerate(counts):
        padding = tf.cast(paddings[place] if paddings else 0.0, whole.dtype)
        guess = tf.cast(guesses[place], whole.dtype)
        factors.append(tf.math.divide_no_nan(guess, whole + padding))
    return factors


def whole_gradients(part: Part, factors: List[Tensor], count: int) -> List[Gradient]:
    """The gradients of the whole batch with respect to `count` weights, or this replica's part."""
    gradients = list(part.sums[:count])
    # Counts that were not known before have gradients of their own.
    for place, factor in enumerate(factors, 1):
        own = part.sums[count * place : count * (place + 1)]
        own = [sums.scaled(gradient, factor) for gradient in own]
        gradients = [sums.add(*pair) for pair in zip(gradients, own)]
    return gradients

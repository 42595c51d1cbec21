"""What a user's `loss_fn` returned, as a mean of numerator and denominator, and its checks."""

import inspect
from typing import Any, NamedTuple, Tuple

import tensorflow as tf

from macrobatch._checks import shown
from macrobatch._tensorflow import graph, leaves, sums
from macrobatch._types import Tensor


class Mean(NamedTuple):
    """The loss of a micro-batch, numerator / denominator."""

    numerator: Any
    denominator: Any
    elements_per_example: Any
    may_be_empty: bool  # Then its value, and gradients, may be 0 / 0.

    def scale(self, examples: Any) -> Any:
        """The denominator of the whole batch, if the rest is like this micro-batch."""
        examples = tf.cast(examples, tf.float32)
        scale = examples * tf.cast(self.elements_per_example, tf.float32)
        good = tf.logical_and(scale > 0, tf.math.is_finite(scale))
        return tf.where(good, scale, examples)


def mean_of(result: Any, examples: Any) -> Mean:
    """What `loss_fn` returned, as a mean."""
    losses, weights = losses_and_weights(result)
    losses = sums.widened(losses)
    count = tf.cast(examples, losses.dtype)
    if len(losses.shape) == 0:
        if weights is None:
            return Mean(losses * count, count, 1.0, may_be_empty=False)
        weight = tf.cast(weights, losses.dtype)
        good = tf.logical_and(tf.math.is_finite(weight), weight >= 0)
        weight = graph.checked(weight, (good, SCALAR_WEIGHT))
        numerator = tf.math.multiply_no_nan(losses, weight)
        return Mean(numerator, weight, weight / count, may_be_empty=True)
    losses = _of_examples(losses, examples)
    elements = tf.cast(tf.size(losses), losses.dtype)
    if weights is None:
        return Mean(tf.reduce_sum(losses), elements, elements / count, may_be_empty=False)
    weights = tf.cast(_of_shape_of(losses, weights), losses.dtype)
    numerator, denominator = tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
    denominator = graph.checked(denominator, (tf.math.is_finite(denominator), FINITE_WEIGHTS))
    return Mean(numerator, denominator, elements / count, may_be_empty=False)


def _of_examples(losses: Any, examples: Any) -> Any:
    """The losses, once it is known that their first dimension is the examples."""
    message = LOSSES_PER_EXAMPLE
    if losses.shape[0] is not None:
        values_per_example(losses.shape[0], examples, message)
        return losses
    if graph.in_xla():  # It drops assertions, but gives no tensor a shape of another size.
        rest = tf.shape(losses)[1:]
        return tf.reshape(losses, tf.concat([[examples], rest], 0), name="losses_per_example")
    return graph.checked(losses, (tf.equal(leaves.examples_of(losses), examples), message))


def _of_shape_of(losses: Any, weights: Any) -> Any:
    """The weights, once it is known that they have the shape of the losses."""
    message = WEIGHTS_LIKE_LOSSES
    if isinstance(losses, tf.RaggedTensor):
        ragged_weights(weights)
        lengths = zip(weights.nested_row_lengths(), losses.nested_row_lengths())
        flat = weights.flat_values
        for actual, expected in lengths:
            flat = graph.checked(flat, (tf.reduce_all(tf.equal(actual, expected)), message))
        return weights.with_flat_values(flat)
    weights_like_losses(weights, losses)
    if weights.shape.is_fully_defined() and losses.shape.is_fully_defined():
        return weights
    if graph.in_xla():
        return tf.reshape(weights, tf.shape(losses), name="weights_like_losses")
    return graph.checked(
        weights, (tf.reduce_all(tf.equal(tf.shape(weights), tf.shape(losses))), message)
    )


SCALAR_WEIGHT = (
    "The weight of a scalar must be a finite number, 0 or more: what the scalar is a mean over. "
    "Received: (scalar, weight) with a weight that is negative, infinite or not a number."
)

FINITE_WEIGHTS = (
    "The weights of losses must be finite. Received: (losses, weights) with a sum of weights that "
    "is infinite or not a number."
)

LOSSES_PER_EXAMPLE = (
    "loss_fn must return losses with the examples of the micro-batch as first dimension, or one "
    "scalar. Received: losses for another number than that of the examples. Instead of selecting "
    "or flattening losses, weight them: return (losses, weights) of one shape."
)


def values_per_example(values: int, examples: Any, message: str) -> None:
    """Raises if there are another number of values than there are examples."""
    # A size that is known although the number of examples is not, is not that number.
    known = examples if isinstance(examples, int) else None
    if values != known:
        of = "an unknown number of" if known is None else known
        raise ValueError(f"{message} (Here: {values} values for {of} examples.)")


def ragged_weights(weights: Any) -> None:
    """Raises unless the weights of ragged losses are ragged too."""
    if not isinstance(weights, tf.RaggedTensor):
        raise ValueError(
            f"{WEIGHTS_LIKE_LOSSES} Received: ragged losses, and weights of type "
            f"{type(weights).__name__}. Make the weights ragged, with the same rows."
        )


WEIGHTS_LIKE_LOSSES = "loss_fn must return losses and weights of the same shape."


def weights_like_losses(weights: Any, losses: Any) -> None:
    """Raises if weights are known to have another shape than the losses."""
    if not losses.shape.is_compatible_with(weights.shape):
        raise ValueError(
            f"{WEIGHTS_LIKE_LOSSES} Received: losses of shape {tuple(losses.shape)}, weights of "
            f"shape {tuple(weights.shape)}. Repeat the weights for each loss (tf.broadcast_to), "
            "or return (scalar, weight). If the second value is no weight, pass has_aux=True."
        )


_ARGUMENT = (
    "one argument, the micro-batch, which has the structure of the batch: `x, y = micro_batch`"
)


def checked(value: Any, beside_forward: bool = False) -> Any:
    """Returns `value`, if it can be called as a `loss_fn` is; with `forward=`, for a batch."""
    if beside_forward:
        taken = "two arguments with forward=: the outputs of the whole batch, and the batch"
        return _callable("loss_fn", value, "a batch", "losses", taken, 2)
    return _callable("loss_fn", value, "a micro-batch", "losses", _ARGUMENT, 1)


def checked_forward(value: Any) -> Any:
    """Returns `value`, if it can be called as a `forward` is."""
    return _callable("forward", value, "a micro-batch", "outputs", _ARGUMENT, 1)


def _callable(name: str, value: Any, of: str, results: str, taken: str, count: int) -> Any:
    if not callable(value):
        raise ValueError(
            f"{name} must be a function of {of} that returns its {results}. "
            f"Received: {name}={shown(value)}."
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of builtins, for one, nothing is known
        return value
    try:
        signature.bind(*[None] * count)
    except TypeError:
        raise ValueError(
            f"{name} must take {taken}. Received: a function of {signature}."
        ) from None
    return value


def with_aux(result: Any) -> Tuple[Any, Any]:
    """The losses and aux that `loss_fn` returned."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise ValueError(
            "With has_aux=True, loss_fn must return a pair: (what it returns without, aux). "
            f"Received: {shown(result)}."
        )
    return result[0], result[1]


def losses_and_weights(result: Any) -> Tuple[Any, Any]:
    """The losses that `loss_fn` returned, and their weights or None."""
    pair = result if isinstance(result, (tuple, list)) else (result, None)
    error = ValueError(
        "loss_fn must return losses with the examples first, (losses, weights), a scalar, or "
        f"(scalar, weight). Received: {shown(result)}. If it also returns other values, pass "
        "has_aux=True."
    )
    if len(pair) != 2 or pair[0] is None:
        raise error
    try:
        losses = _tensor(pair[0])
        # A Python number would be rounded to float32.
        is_number = isinstance(pair[1], (int, float)) and losses.dtype.is_floating
        weights = None if pair[1] is None else _tensor(pair[1], losses.dtype if is_number else None)
    except (TypeError, ValueError):
        raise error from None
    if losses.shape.rank is None or (weights is not None and weights.shape.rank is None):
        raise ValueError(
            "loss_fn must return losses of a known rank. Received: losses or weights of unknown "
            "rank, as tf.py_function returns them. Set it with losses.set_shape([None])."
        )
    if not losses.dtype.is_floating:
        raise ValueError(
            "loss_fn must return losses of a floating-point dtype. "
            f"Received: losses of dtype {losses.dtype.name}."
        )
    if weights is not None and 0 in (len(losses.shape), len(weights.shape)):
        weights_like_losses(weights, losses)
    return losses, weights


def _tensor(value: Any, dtype: Any = None) -> Tensor:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value, dtype)


def is_one_batch(batch: Any) -> None:
    """Raises for a dataset in place of one of its elements."""
    if any(isinstance(leaf, tf.data.Dataset) for leaf in tf.nest.flatten(batch)):
        raise ValueError(
            "batch must be a nest of tensors. Received: a tf.data.Dataset. Pass one of its "
            "elements at a time: for batch in dataset.batch(512): ..."
        )

"""Every validation and its message: what was received, what is expected, what to do."""

import inspect
import numbers
import warnings
import weakref
from typing import Any, Iterable, List, Optional, Sequence, Set, Tuple

import tensorflow as tf


class ExactnessWarning(UserWarning):
    """A part of the model whose update cannot equal that of the whole batch.

    Given once per model, at its first step. It names the layer or the loss and the way out.

    Example:

    >>> import warnings, macrobatch
    >>> warnings.simplefilter("error", macrobatch.ExactnessWarning)  # refuse inexact training
    """


def has_keras_3() -> bool:
    """Whether this TensorFlow is one that Keras 3 runs on."""
    major, minor = tf.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 16)


def known_here(name: str) -> None:
    """Raises for a name of the package that this TensorFlow is too old for."""
    if name not in ("ExactnessWarning", "GradientAccumulator") and not has_keras_3():
        raise ImportError(
            f"macrobatch.{name} needs TensorFlow 2.16 or newer, with Keras 3.12 or newer. "
            f"Received: TensorFlow {tf.__version__}, on which macrobatch offers "
            "GradientAccumulator. Update with: pip install 'macrobatch[cpu]' on Python 3.10 or "
            "newer."
        )


def micro_batch_size(value: Any) -> int:
    """Returns `value` as an int, if it is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            "micro_batch_size must be a positive integer: the number of examples whose "
            "activations are in memory at one time, 8 for instance. "
            f"Received: micro_batch_size={value!r} (of type {type(value).__name__})."
        )
    return int(value)


def micro_batch_weight(value: Any) -> Any:
    """Returns `value`, if it can be called."""
    if value is not None and not callable(value):
        raise ValueError(
            "micro_batch_weight must be a function of (x, y, sample_weight) that returns the "
            "weight of a micro-batch as a scalar, or None. "
            f"Received: micro_batch_weight={value!r}."
        )
    return value


def keras_model(model: Any) -> None:
    """Raises unless `model` is a Keras 3 model on the TensorFlow backend."""
    import keras

    if not isinstance(model, keras.Model):
        raise ValueError(
            "model must be a Keras 3 model (keras.Model). "
            f"Received: {model!r} (of type {type(model).__module__}.{type(model).__name__}). "
            "For tf_keras models and loops of your own, use macrobatch.value_and_gradients."
        )
    if keras.backend.backend() != "tensorflow":
        raise ValueError(
            "macrobatch needs Keras to run on TensorFlow. "
            f"Received: a model on the {keras.backend.backend()!r} backend. "
            'Set the environment variable KERAS_BACKEND="tensorflow" before Keras is imported.'
        )


def plain_train_step(model: Any) -> None:
    """Raises if the model brings a train step of its own."""
    import keras

    own_class = type(model).train_step is not keras.Model.train_step
    if own_class or "train_step" in vars(model):
        raise ValueError(
            f"The model {model.name!r} ({type(model).__name__}) overrides train_step, which "
            "cannot be cut into micro-batches from outside. Move the loss into compute_loss, "
            "or cut the batch inside your train_step with macrobatch.value_and_gradients."
        )


def optimizer(value: Any) -> None:
    """Raises if the optimizer, or one inside it, accumulates by itself."""
    for each in with_inner_optimizers(value):
        if getattr(each, "gradient_accumulation_steps", None):
            raise ValueError(
                "The optimizer accumulates gradients by itself, over several steps. "
                f"Received: gradient_accumulation_steps={each.gradient_accumulation_steps} on "
                f"{type(each).__name__}. Leave it out: macrobatch itself makes one update of them "
                "all."
            )


def with_inner_optimizers(value: Any) -> List[Any]:
    """An optimizer, and all optimizers inside it, each once: those inside inner ones too."""
    found: List[Any] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        # None of these names is public in all versions. LossScaleOptimizer has an inner optimizer
        # (_optimizer in older versions, and in many wrappers), MultiOptimizer has several.
        if hasattr(each, "apply_gradients") and all(each is not other for other in found):
            found.append(each)
            names = ("inner_optimizer", "_optimizer")
            waiting += [getattr(each, name, None) for name in names]
            waiting += getattr(each, "_inner_optimizers", ())
    return found


def splittable_layers(layers: Iterable[Any]) -> None:
    """Raises for layers that carry something from one batch to the next, example by example."""
    for layer in layers:
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"The layer {layer.name!r} is stateful: it carries a state for each position of "
                "the batch, which has no meaning when the batch is cut into micro-batches. "
                "Received: stateful=True. Expected: stateful=False."
            )


def no_overwriting_variables(variables: Iterable[Any]) -> None:
    """Raises for variables whose "gradient" is a value to assign, such as float8 scales."""
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"The layer of the variable {variable.path!r} overwrites it with its gradient "
                "(overwrite_with_gradient=True, as float8 scales do). Such values cannot be "
                "summed over micro-batches. Train this model without float8 quantization."
            )


def writes_no_trained_variable(written: Iterable[Any], trained: Iterable[Any]) -> None:
    """Raises if the forward pass assigns a variable that is also trained."""
    trained_ids = {id(variable) for variable in trained}
    for variable in written:
        if id(variable) in trained_ids:
            raise ValueError(
                "A forward pass must not write a trained variable: every micro-batch would write "
                f"it again. Received: the layer of {variable.path!r} assigns it in its call (as "
                "SpectralNormalization does). Freeze that layer, or leave it out of the model."
            )


def weights_fit_losses(weights: Any, losses: Any, what: str) -> None:
    """Raises where Keras would multiply losses by weights of another rank.

    It does so by broadcasting from the right, so that weights of shape (B,) on losses of shape
    (B, T) are refused for most B, but would pass unnoticed in a micro-batch of 1 or T examples.
    """
    ranks = len(losses.shape), len(weights.shape)
    if ranks[0] in (0, ranks[1]):
        return
    wider = losses if ranks[0] > ranks[1] else weights
    if abs(ranks[0] - ranks[1]) == 1 and wider.shape[-1] == 1:
        return
    raise ValueError(
        f"The {what} must have one value for each value of the loss. "
        f"Received: {what} of shape {tuple(weights.shape)} for losses of shape "
        f"{tuple(losses.shape)}. Expected: the shape of the losses, or 1 in place of any "
        "dimension but the first (add axes with `[:, None]`)."
    )


VALUES_PER_EXAMPLE = (
    "A mean loss must return its values with the examples as first dimension, or one scalar. "
    "Received: values for another number than that of the examples. Instead of selecting values "
    '(boolean_mask), weight them: sample_weight and reduction="mean_with_sample_weight". Instead '
    "of flattening them, keep the examples first."
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


def is_one_batch(batch: Any) -> None:
    """Raises for a dataset in place of one of its elements."""
    if any(isinstance(leaf, tf.data.Dataset) for leaf in tf.nest.flatten(batch)):
        raise ValueError(
            "batch must be a nest of tensors. Received: a tf.data.Dataset. Pass one of its "
            "elements at a time: for batch in dataset.batch(512): ..."
        )


def aux_has_rank(leaf: Any) -> None:
    """Raises for auxiliary values of which a graph cannot know how to join them."""
    if leaf.shape.rank is None:
        raise ValueError(
            "In a graph, aux must have known ranks. Received: a tensor of unknown rank, as "
            "tf.py_function returns it. Set it with tensor.set_shape(...)."
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


def loss_fn(value: Any) -> Any:
    """Returns `value`, if it can be called with one argument."""
    if not callable(value):
        raise ValueError(
            "loss_fn must be a function of a micro-batch that returns its losses. "
            f"Received: loss_fn={shown(value)}."
        )
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # of builtins, for one, nothing is known
        return value
    try:
        signature.bind(None)
    except TypeError:
        raise ValueError(
            "loss_fn must take one argument, the micro-batch, which has the structure of the "
            f"batch: `x, y = micro_batch`. Received: a function of {signature}."
        ) from None
    return value


def shown(value: Any) -> str:
    """What a message shows of a value: the types and shapes in it, not the numbers."""

    def leaf(value: Any) -> str:
        shape = getattr(value, "shape", None)
        return type(value).__name__ if shape is None else f"{type(value).__name__} {shape}"

    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    text = str(tf.nest.map_structure(leaf, value)).replace("'", "")
    return text if len(text) < 300 else text[:300] + "..."


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
        losses, weights = (
            v if v is None or tf.is_tensor(v) else tf.convert_to_tensor(v) for v in pair
        )
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


def variable(value: Any) -> Any:
    """Returns `value`, if it is a variable."""
    if not hasattr(value, "assign") or not hasattr(value, "value"):
        raise ValueError(
            "variables must be a nest of variables, model.trainable_variables for instance. "
            f"Received: {shown(value)}."
        )
    return value


def no_variables(variables: Sequence[Any]) -> None:
    """Raises if there is nothing to train."""
    if not variables:
        raise ValueError(
            "There must be at least one variable. Received: variables is empty. If they are those "
            "of a model, build it first: model.build(...), or call it once."
        )


def scalar_weight(weight: Any) -> None:
    """Raises unless what `micro_batch_weight` returned is a scalar."""
    if len(weight.shape) != 0:
        raise ValueError(
            "micro_batch_weight must return one scalar for a micro-batch. "
            f"Received: a value of shape {tuple(weight.shape)}. Sum it."
        )


def batch_shapes(
    leaves: Sequence[Tuple[Optional[int], ...]], shapes: Any, may_be_empty: bool
) -> None:
    """Raises unless all parts of a batch have the examples as their first dimension."""
    if not leaves:
        raise ValueError(f"A batch must hold at least one tensor. Received: {shapes}.")
    if () in leaves:
        raise ValueError(
            "Every part of a batch must have the examples as its first dimension. "
            f"Received: a scalar, in shapes {shapes}. Repeat it for every example, or make it a "
            "constant of the model."
        )
    sizes = {shape[0] for shape in leaves if shape[0] is not None}
    if len(sizes) > 1:
        raise ValueError(uneven_batch(shapes))
    if sizes == {0} and not may_be_empty:
        raise ValueError(empty_batch(shapes))


def uneven_batch(shapes: Any) -> str:
    """What to say of a batch whose parts have different numbers of examples."""
    return (
        "All parts of a batch must have the same number of examples as their first dimension. "
        f"Received: shapes {shapes}. Make the dataset yield examples and labels together."
    )


def empty_batch(shapes: Any) -> str:
    """What to say of a batch without examples."""
    return (
        f"A batch must have at least one example. Received: shapes {shapes}. "
        "Filter empty batches out of the dataset."
    )


def inexact(
    normalizing: List[str],
    decaying: List[str],
    writing: Sequence[str] = (),
    scalars: Sequence[str] = (),
    overridden: bool = False,
) -> List[str]:
    """What to say of the parts of a model that cannot equal the whole batch."""
    messages = []
    if normalizing:
        messages.append(
            f"BatchNormalization normalises by the statistics of each micro-batch, not of the "
            f"batch: the update is not exactly that of the whole batch. Layers: {normalizing}. "
            "Use a larger micro_batch_size, freeze these layers (trainable=False), or normalise "
            "by example (LayerNormalization, GroupNormalization)."
        )
    if decaying:
        messages.append(
            "The moving statistics of these BatchNormalization layers change once per micro-batch, "
            f"because they use renorm or are called more than once: {decaying}. "
            "Give each call a layer of its own, without renorm."
        )
    if writing:
        messages.append(
            "These variables are written by the forward pass, once per micro-batch and not once "
            f"per batch: {writing}. Make sure that their layers allow for it."
        )
    if scalars:
        messages.append(
            "These losses are one scalar for the batch. They count as means over the examples, "
            f"and are exact only if they are: {scalars}. Return one value per example (for Dice "
            "and Tversky: axis=...), or pass micro_batch_weight=."
        )
    if overridden:
        messages.append(
            "The model overrides compute_loss. Its scalar counts as a mean over the examples, and "
            "is exact only if it is one. If it is a mean over something else (tokens, weights), "
            "pass micro_batch_weight=."
        )
    return messages


def logs_of_one_replica(logs: Iterable[str]) -> List[str]:
    """What to say of logs that are no metric's, and so cannot be put together over replicas."""
    if not logs:
        return []
    return [
        "These logs, which compute_metrics returns, are no metric's result. On several replicas "
        f"they are the mean of what each replica comes to: {sorted(logs)}. Make each the result "
        "of a keras.metrics.Metric."
    ]


def no_accumulation(examples: int, micro_batch_size: int, replicas: int) -> str:
    """What to say of a batch that is a single micro-batch on each replica."""
    of_each = "" if replicas == 1 else f" on {replicas} replicas"
    return (
        f"Nothing is being accumulated: the first batch has {examples} examples, and "
        f"micro_batch_size={micro_batch_size}{of_each} takes them all at once. The batch is what "
        "one update is made from: choose a larger one with fit(batch_size=...), or "
        "dataset.rebatch(n) if the dataset yields micro-batches."
    )


_warned: "weakref.WeakKeyDictionary[Any, Set[str]]" = weakref.WeakKeyDictionary()


def warn_once(model: Any, message: str) -> None:
    """Warns that the update is not exact, once per model and message."""
    messages = _warned.setdefault(model, set())
    if message not in messages:
        messages.add(message)
        warnings.warn(message, ExactnessWarning, stacklevel=2)

"""What is checked of a model, its loss and its metrics, and what is said of the parts that cannot
equal the whole batch.
"""

from typing import Any, Dict, Iterable, List, Sequence

import keras
from keras import ops

from macrobatch._checks import WEIGHTED_METRICS, shown
from macrobatch._types import Size, Tensor, Variable


def writes_no_trained_variable(written: Iterable[Variable], trained: Iterable[Variable]) -> None:
    """Raises if the forward pass assigns a variable that is also trained."""
    trained_ids = {id(variable) for variable in trained}
    for variable in written:
        if id(variable) in trained_ids:
            raise ValueError(
                "A forward pass must not write a trained variable: every micro-batch would write "
                f"it again. Received: the layer of {variable.path!r} assigns it in its call (as "
                "SpectralNormalization does). Freeze that layer, or leave it out of the model."
            )


def has_loss(terms: Sequence[Any], weights: Iterable[Variable]) -> None:
    """Raises if there is nothing to minimise."""
    if not terms and not any(variable.regularizer for variable in weights):
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")


def weights_fit_losses(weights: Tensor, losses: Tensor, what: str) -> None:
    """Raises where Keras would multiply losses by weights of another rank.

    Keras broadcasts from the right. Weights of shape (B,) on losses of shape (B, T) are refused
    for most B, but would pass unnoticed in a micro-batch of 1 or T examples.
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
    "There must be as many values of a mean loss as examples, with the examples as first "
    "dimension, or one scalar. Received: another number of values than there are examples. Either "
    "a layer has a fixed batch size, as in keras.ops.reshape(x, (64, -1)): use -1 or "
    "keras.ops.shape(x)[0] for the examples. Or the loss selects values (boolean_mask): weight "
    'them instead, with sample_weight and reduction="mean_with_sample_weight". Or the loss '
    "flattens values: keep the examples first."
)


def values_per_example(values: int, examples: Size) -> None:
    """Raises if there are another number of values than there are examples."""
    # A size that is known although the number of examples is not, is not that number.
    known = examples if isinstance(examples, int) else None
    if values != known:
        of = "an unknown number of" if known is None else known
        raise ValueError(f"{VALUES_PER_EXAMPLE} (Here: {values} values for {of} examples.)")


def vectors_beside_scalars(ranks: Dict[str, int]) -> None:
    """Raises for losses of which Keras adds values that do not belong together."""
    if set(ranks.values()) - {0, 1}:
        raise ValueError(
            "Losses with reduction=None must return one value for each example if other losses are "
            "added to them: Keras adds the values of all losses by broadcasting. Received: losses "
            f"with values of these ranks: {ranks}. Give each loss a reduction, for instance "
            'reduction="sum".'
        )


MICRO_BATCH_WEIGHT = (
    "micro_batch_weight must return a finite number, 0 or more, for each micro-batch. Received: "
    "a number that is negative, infinite or not a number."
)


def scalar_weight(weight: Any) -> Tensor:
    """Returns what `micro_batch_weight` returned as a tensor, if it is a scalar."""
    try:
        if weight is None or isinstance(weight, str):
            raise ValueError
        # Without a dtype, TensorFlow would round a number of Python to float32.
        dtype = keras.config.floatx() if isinstance(weight, float) else None
        tensor = ops.convert_to_tensor(weight, dtype)
    except Exception:
        raise ValueError(
            "micro_batch_weight must return one number for a micro-batch. "
            f"Received: {shown(weight)}."
        ) from None
    if len(tensor.shape) != 0:
        raise ValueError(
            "micro_batch_weight must return one scalar for a micro-batch. "
            f"Received: a value of shape {tuple(tensor.shape)}. Sum it."
        )
    return tensor


def metric_has_weights(is_whole: bool) -> None:
    """Raises for a metric that takes a mean over all positions, of which some were cut off."""
    if not is_whole:
        raise ValueError(
            "A metric takes means over all positions, so that it depends on padding, and cutting "
            f"padding off would change it. {WEIGHTED_METRICS}"
        )


def no_mask(operations: Sequence[str]) -> str:
    """What to say of a loss that knows nothing of padding."""
    lost = f" These pass none on: {', '.join(operations)}." if operations else ""
    return f"No mask reaches the loss, and there are no sample weights.{lost} "


def inexact(
    normalizing: Sequence[str],
    decaying: Sequence[str] = (),
    scalars: Sequence[str] = (),
    added: Sequence[str] = (),
    overridden: bool = False,
    whole_batch_loss: bool = False,
) -> List[str]:
    """What to say of the parts of a model that cannot equal the whole batch."""
    weight = "." if whole_batch_loss else ", or pass micro_batch_weight=."
    messages = []
    if normalizing:
        messages.append(
            "BatchNormalization normalises by the statistics of each micro-batch, not of the "
            f"batch: the update is not exactly that of the whole batch. {_some(normalizing)}. A "
            "last micro-batch of a single example is the worst case: its own mean is taken away. "
            "Use a larger micro_batch_size that divides the batch, freeze these layers "
            "(trainable=False), or normalise by example (LayerNormalization, GroupNormalization)."
        )
    if decaying:
        messages.append(
            "The moving statistics of these BatchNormalization layers change once per micro-batch, "
            f"because they use renorm or are called more than once. {_some(decaying)}. "
            "Give each call a layer of its own, without renorm."
        )
    if scalars:
        messages.append(
            "These losses are one scalar for the batch. They count as means over the examples, "
            f"and are exact only if they are: {list(scalars)}. Pass whole_batch_loss=True, with "
            "which every loss is exact; or return one value per example (for Dice and Tversky: "
            "axis=...), or pass micro_batch_weight=."
        )
    if added:
        messages.append(
            "These layers give a scalar to add_loss. It counts as a mean over the examples, and is "
            f"exact only if it is one: {list(added)}. Give a vector with one value per example"
            f"{weight} A scalar in which examples meet, such as the balance of a router (Mixture "
            "of Experts), is that of each micro-batch: a larger micro_batch_size brings it closer "
            "to that of the batch. Or return what the scalar is computed from as an output of the "
            "model, compute the scalar in compute_loss, and pass whole_batch_loss=True."
        )
    if overridden:
        messages.append(
            "The model overrides compute_loss. Its scalar counts as a mean over the examples, and "
            "is exact only if it is one. Pass whole_batch_loss=True, with which every scalar is "
            "exact; or, if it is a mean over something else (tokens, weights), "
            "micro_batch_weight=."
        )
    return messages


def written_by_layers(paths: Sequence[str]) -> List[str]:
    """What to say of variables that layers write, for a reason that nobody knows."""
    if not paths:
        return []
    return [
        "These variables are written by the forward pass, once per micro-batch and not once per "
        f"batch: {list(paths)}. Make sure that their layers allow for it."
    ]


def _some(names: Sequence[str]) -> str:
    """Up to three names, and how many there are."""
    shown_names = ", ".join(names[:3])
    more = f", ... ({len(names)} layers)" if len(names) > 3 else ""
    return f"Layers: {shown_names}{more}"


def logs_of_one_replica(logs: Iterable[str]) -> List[str]:
    """What to say of logs that are no metric's, and so cannot be put together over replicas."""
    if not logs:
        return []
    return [
        "These logs, which compute_metrics returns, are no metric's result. On several replicas "
        f"they are the mean of what each replica comes to: {sorted(logs)}. Make each the result "
        "of a keras.metrics.Metric."
    ]

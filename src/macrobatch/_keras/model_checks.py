"""What is checked of the arguments of `accumulate`, and of a model, on any backend."""

from typing import Any, Iterable

import keras

from macrobatch import _backends


def micro_batch_weight(value: Any) -> Any:
    """Returns `value`, if it can be called."""
    if value is not None and not callable(value):
        raise ValueError(
            "micro_batch_weight must be a function of (x, y, sample_weight) that returns the "
            "weight of a micro-batch as a scalar, or None. "
            f"Received: micro_batch_weight={value!r}."
        )
    return value


def whole_batch_loss(value: Any, micro_batch_weight: Any) -> bool:
    """Returns `value`, if it is True or False and goes with the other argument."""
    if not isinstance(value, bool):
        raise ValueError(
            "whole_batch_loss must be True or False: whether the loss sees the predictions of the "
            f"whole batch. Received: whole_batch_loss={value!r}."
        )
    if value and micro_batch_weight is not None:
        raise ValueError(
            "micro_batch_weight= says how losses of micro-batches are put together. With "
            "whole_batch_loss=True there is one loss, of the whole batch. Received: both. Leave "
            "micro_batch_weight= out."
        )
    return value


def keras_model(model: Any) -> None:
    """Raises unless `model` is a Keras 3 model on a backend that macrobatch knows."""
    kind = type(model).__name__
    if not isinstance(model, keras.Model) and isinstance(
        getattr(model, "module", None), keras.Model
    ):
        raise ValueError(
            f"{kind} exchanges gradients in each backward pass, so once per micro-batch, and takes "
            "the mean over processes, which is not the mean over the examples of all of them. "
            f"Received: a Keras model inside of {kind}. Pass the model itself, without the "
            "wrapper, and train in one process."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            "model must be a Keras 3 model (keras.Model). "
            f"Received: {model!r} (of type {type(model).__module__}.{kind}). "
            f"{_backends.of_own_loop(keras.backend.backend())}"
        )
    _backends.check(keras.backend.backend())


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


def can_be_measured(has_own_step: bool, sees_whole_batch: bool) -> None:
    """Raises for a model of whose gradients the noise scale cannot be measured."""
    if has_own_step:
        raise ValueError(
            "GradientNoiseScale measures the steps of macrobatch. Received: a model with a "
            "train_step of its own. In that step, call macrobatch.value_and_gradients with "
            "noise_scale=, without macrobatch.accumulate, or leave the callback out."
        )
    if sees_whole_batch:
        raise ValueError(
            "The gradient noise scale is that of a loss that is a mean over examples. Received: a "
            "model with whole_batch_loss=True, whose loss may compare examples with each other, so "
            "that no example has a gradient of its own. Leave the callback out."
        )


def no_accumulation(examples: int, micro_batch_size: int, replicas: int) -> str:
    """What to say of a batch that is a single micro-batch on each replica."""
    of_each = "" if replicas == 1 else f" on {replicas} replicas"
    return (
        f"Nothing is being accumulated: the first batch has {examples} examples, and "
        f"micro_batch_size={micro_batch_size}{of_each} takes them all at once. The batch is what "
        "one update is made from: choose a larger one with fit(batch_size=...), or "
        "dataset.rebatch(n) if the dataset yields micro-batches."
    )


def accumulation(examples: int, cut: Any, replicas: int) -> str:
    """What to log of the first batch that is accumulated, in the way that a `Cut` says."""
    unit, size = cut.named()
    up_to = "" if examples % (size * replicas) == 0 else "up to "
    sizes = f"micro-batches of {up_to}{size}"
    if cut.axis is not None:
        kind = "tokens" if unit == "micro_batch_tokens" else "examples"
        sizes = f"micro-batches of up to {size} {kind} of similar length"
    elif cut.chosen is None:
        sizes = f"{-(-examples // (size * replicas))} {sizes}"
    if replicas > 1:
        sizes += f" on each of {replicas} replicas"
    if cut.chosen is not None:
        sizes += f" at first; the fastest {unit} is being looked for"
    return f"macrobatch: batches of {examples} in {sizes}"


def only_a_part(model: Any, part: Any) -> str:
    """What to say of a model that trains as a whole, although a part of it is accumulated."""
    return (
        f"The model {model.name!r} is not accumulated: its part {part.name!r} is, which has no "
        f"effect here, because the train step of {model.name!r} runs. Call "
        "macrobatch.accumulate on the model whose fit() is called."
    )

"""accumulate and release: fit() on whole batches, in the memory of micro-batches."""

from typing import Any, Callable, Optional, TypeVar

from macrobatch._batches import checks as batch_checks
from macrobatch._batches.cut import Cut
from macrobatch._fit import checks, install
from macrobatch._keras.model import inputs_of

Model = TypeVar("Model")


def accumulate(
    model: Model,
    micro_batch_size: Optional[int] = None,
    *,
    micro_batch_tokens: Optional[int] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None,
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None,
) -> Model:
    """Makes a Keras model train on whole batches in the memory of micro-batches.

    From the next `fit` on, each batch is cut into micro-batches inside the train step, their
    gradients are summed, and the optimizer is called once, with the gradient of the whole batch.
    `batch_size`, callbacks, schedules and metrics keep their meaning: one step is one update.
    `evaluate` and `validation_data` are cut in the same way; `predict` is left alone.

    Args:
        model: a Keras 3 model on the TensorFlow backend, compiled or not. It is changed in place.
        micro_batch_size: how many examples are in memory at one time. Batches need not be a
            multiple of it.
        micro_batch_tokens: in place of it, what the number of examples times the longest of them
            may be: few long ones, many short ones, and at least one. Needs `sequence_axis`.
        sequence_axis: the axis along which sequences are padded, 1 for tokens of shape (examples,
            positions). Micro-batches are then made of examples of similar length, and everything
            in them that has that axis is cut to their longest: the same update, for less work. An
            example ends where the last integer input that is not 0 is, or the last sample weight
            that is not 0, or the row of a ragged input. Refused if a loss, layer or metric
            depends on padding, which is tried once.
        lengths: a function of `x, y, sample_weight` that returns the length of each example, for
            batches that do not show it.
        micro_batch_weight: a function of `x, y, sample_weight` that returns the weight of a
            micro-batch, for losses that are one scalar per batch and not a mean over examples:
            an overridden `compute_loss`, a loss such as `Dice`, scalars given to `add_loss`. The
            number of tokens, for instance.

    Returns:
        The model.

    Raises:
        ValueError: if the model cannot be cut into micro-batches from outside. What is found only
            at the first step (a stateful layer, inputs of different lengths) is raised there,
            before any weight has changed.

    Example:

    >>> import keras, macrobatch, numpy as np
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> model = macrobatch.accumulate(model, micro_batch_size=8)
    >>> x, y = np.ones([128, 3]), np.ones([128, 1])
    >>> history = model.fit(x, y, batch_size=64, verbose=0)  # the updates of batches of 64
    >>> int(model.optimizer.iterations)
    2
    """
    arguments = ["x", "y", "sample_weight"]
    cut = Cut(
        *batch_checks.sizes(
            micro_batch_size, micro_batch_tokens, sequence_axis, lengths, of=arguments
        )
    )
    weight = checks.micro_batch_weight(micro_batch_weight)
    checks.keras_model(model)
    if cut.axis is not None:
        batch_checks.free_lengths(inputs_of(model), cut.axis)
    release(model)
    checks.can_be_accumulated(model)
    install.Accumulation(model, cut, weight).install()
    return model


def release(model: Model) -> Model:
    """Gives a model its plain train step back. On a plain model it does nothing.

    Args:
        model: a Keras model.

    Returns:
        The model.

    Example:

    >>> import keras, macrobatch
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model = macrobatch.release(macrobatch.accumulate(model, micro_batch_size=8))
    """
    checks.keras_model(model)
    accumulation = install.accumulation_of(model)
    if accumulation is not None:
        accumulation.uninstall()
    return model

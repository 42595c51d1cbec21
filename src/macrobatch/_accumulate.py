"""accumulate and release: fit() on whole batches, in the memory of micro-batches."""

import contextlib
from typing import Any, Callable, ContextManager, Literal, Optional, TypeVar, Union

import keras

from macrobatch import _backends, _optimizer_checks
from macrobatch._batches import checks as batch_checks
from macrobatch._batches.cut import Cut
from macrobatch._checks import NONFINITE, one_of
from macrobatch._keras import model_checks as checks
from macrobatch._keras.installed import accumulation_of
from macrobatch._keras.model import inputs_of
from macrobatch._settings import Settings
from macrobatch._sizes import limit as limits

Model = TypeVar("Model")


def accumulate(
    model: Model,
    micro_batch_size: Union[int, Literal["auto"], None] = None,
    *,
    micro_batch_tokens: Union[int, Literal["auto"], None] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None,
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None,
    whole_batch_loss: bool = False,
    memory_limit: Union[int, float, str, None] = None,
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate",
) -> Model:
    """Makes a Keras model train on whole batches in the memory of micro-batches.

    From the next batch on, the train step cuts each batch into micro-batches and sums their
    gradients. It calls the optimizer once, with the gradient of the whole batch. One step is one
    update, so `batch_size`, callbacks, schedules and metrics keep their meaning. `evaluate`,
    `validation_data` and `predict` are cut in the same way.

    After the first batch, the model is run on a few examples of it, to find out whether examples
    meet in a layer or in a loss. An `ExactnessWarning` names the place.

    A model may bring its own `train_step`. The step then runs once, on the first micro-batch, and
    `tape.gradient` returns the gradient of the whole batch. What of a step cannot be right is
    refused by `fit`, before anything changes: docs/train-steps.md has the list. A `test_step` of
    its own is cut too, if it only evaluates losses and metrics. A `predict_step` of its own is left
    alone.

    Only the model whose `fit` is called counts, not a model inside it. Clones, copies and loaded
    models are plain models.

    Args:
        model: a Keras 3 model on TensorFlow, JAX or torch, compiled or not. It is changed in place.
        micro_batch_size: the number of examples in memory at one time. Batches need not be a
            multiple of it. "auto", the default, finds a size while it trains: one that fits, and of
            those the fastest. A batch that runs out of memory is run again with a smaller size.
            `History` has the size of each epoch, as `micro_batch_size`. docs/sizes.md has more.
        micro_batch_tokens: instead of `micro_batch_size`, the most that the number of examples
            times the longest of them may be: few long examples, many short ones, and at least one.
            Needs `sequence_axis`. "auto" finds it, as for `micro_batch_size`.
        sequence_axis: the axis along which sequences are padded, 1 for tokens of shape (examples,
            positions). A micro-batch then has examples of similar length, and all of its sequences
            are cut to the longest: the same update, for less work. An example ends at its last
            integer input that is not 0, at its last sample weight that is not 0, or at the end of
            its ragged row, whichever comes last. A part of the batch that had another size along
            the axis in any batch is never cut. Refused if a loss, a layer or a metric depends on
            padding, which is tried once.
        lengths: a function of `x, y, sample_weight` that returns the length of each example, as
            integers, for batches that do not show it.
        micro_batch_weight: a function of `x, y, sample_weight` that returns the weight of a
            micro-batch: a finite number, 0 or more, the number of tokens for instance. For losses
            that are one scalar per batch and not a mean over examples: an overridden
            `compute_loss`, a loss such as `Dice`, scalars given to `add_loss`.
        whole_batch_loss: whether losses, `compute_loss` and metrics see the predictions of the
            whole batch. So a loss may compare examples with each other (contrastive losses), or be
            any scalar of the batch (`Dice`): the update is that of the whole batch. Each
            micro-batch runs forward twice, so that a step takes about a third longer, and the
            predictions of the whole batch are in memory.
        memory_limit: with "auto", how much memory the process may take: "6GiB", bytes, or a
            fraction of what is there. On a GPU it is the memory of the device. By default all
            memory that others do not use.
        nonfinite: what to do with examples whose loss or gradient is infinite or not a number.
            `"propagate"` adds them, as Keras does. `"skip"` makes exactly the update of the other
            examples of the batch. The log `skipped_examples` counts those that are left out, and a
            warning names the first ones. `"raise"` is a ValueError that names the examples and the
            first layer whose output is not finite. Nothing has changed then. docs/not-finite.md
            says more.

    Returns:
        The model.

    Raises:
        ValueError: if batches of the model cannot be cut from outside. `fit` raises a ValueError
            for faults that only a batch can show (a stateful layer, inputs of different lengths,
            a weight that is not finite), before any weight has changed. XLA drops checks of
            numbers: with `jit_compile=True`, weights of micro-batches are not checked.

    Examples:
        >>> import keras, macrobatch, numpy as np
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> model = macrobatch.accumulate(model, micro_batch_size=8)
        >>> x, y = np.ones([128, 3]), np.ones([128, 1])
        >>> history = model.fit(x, y, batch_size=64, verbose=0)  # 2 updates
        >>> int(model.optimizer.iterations)
        2
    """
    arguments = ["x", "y", "sample_weight"]
    cut = Cut(
        *batch_checks.sizes(
            micro_batch_size, micro_batch_tokens, sequence_axis, lengths, of=arguments
        )
    )
    limits.parsed(memory_limit)
    sizes: Any = (cut.size, cut.tokens)
    if batch_checks.AUTO not in sizes:
        limits.no_limit_with_size(memory_limit, cut.size or cut.tokens)
    weight = checks.micro_batch_weight(micro_batch_weight)
    of_whole_batch = checks.whole_batch_loss(whole_batch_loss, weight)
    one_of("nonfinite", nonfinite, NONFINITE)
    checks.keras_model(model)
    if cut.axis is not None:
        batch_checks.free_lengths(inputs_of(model), cut.axis)
    optimizer = getattr(model, "optimizer", None)
    _optimizer_checks.sees_overflows(optimizer, nonfinite, "update")
    # The constructor may refuse the model for its own methods. It must not see ours in their
    # place, and a model that is refused stays as it was.
    with _own_methods(model):
        accumulation = _room().Accumulation(
            model, cut, weight, nonfinite, memory_limit, of_whole_batch
        )
    release(model)
    accumulation.settings = Settings(
        *(cut.size, cut.tokens, cut.axis, cut.lengths),
        micro_batch_weight=weight,
        whole_batch_loss=of_whole_batch,
        memory_limit=memory_limit,
        nonfinite=nonfinite,
    )
    accumulation.install()
    return model


def release(model: Model) -> Model:
    """Gives a model its plain train step back. A plain model stays as it is.

    A call from a callback, in the middle of `fit`, takes effect at the next batch.

    Args:
        model: a Keras model.

    Returns:
        The model.

    Examples:
        >>> import keras, macrobatch
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model = macrobatch.release(macrobatch.accumulate(model, micro_batch_size=8))
    """
    checks.keras_model(model)
    accumulation = accumulation_of(model)
    if accumulation is not None:
        accumulation.uninstall()
    return model


def _own_methods(model: Any) -> ContextManager[None]:
    """A context in which a model has its own methods, accumulated or not."""
    accumulation = accumulation_of(model)
    return contextlib.nullcontext() if accumulation is None else accumulation.taken_off()


def _room() -> Any:
    """The room of the backend that Keras runs on. It is imported only now."""
    return _backends.room(keras.backend.backend())

"""What is checked of models on JAX, and what is said of them."""

from typing import Any


def no_own_train_step(is_own: bool) -> None:
    """Raises for a model with a train step of its own."""
    if is_own:
        raise ValueError(
            "On JAX, a train_step of the model's own cannot be cut into micro-batches: it goes "
            "from one state to the next, and each micro-batch would make an update. Received: a "
            "model that overrides train_step. Override compute_loss instead, which fit() calls "
            "for each micro-batch, and pass whole_batch_loss=True if it compares examples. Or sum "
            "gradients in the step itself, with jax.lax.scan over micro-batches, each weighted by "
            "its part of the examples; then one optimizer.stateless_apply."
        )


def by_length(axis: Any, distribution: Any, whole_batch_loss: bool) -> None:
    """Raises where micro-batches are to be made by length, and cannot be."""
    if axis is None:
        return
    if distribution is not None:
        raise ValueError(
            "On JAX, sequences are cut to their length on one device only. Received: "
            f"sequence_axis={axis} and a distribution of type {type(distribution).__name__}. Leave "
            "out one of them: padding that is masked, or has weight 0, counts nothing, and the "
            "update is the same."
        )
    if whole_batch_loss:
        raise ValueError(
            "On JAX, sequences cannot be cut to their length where the loss sees the whole batch. "
            f"Received: sequence_axis={axis} and whole_batch_loss=True. Leave out sequence_axis: "
            "the update is the same, and takes longer."
        )


def no_nnx(is_enabled: bool) -> None:
    """Raises if Keras runs on NNX, where a train step of the instance is never called."""
    if is_enabled:
        raise ValueError(
            "With NNX, Keras calls the train step of the model's class, so that macrobatch cannot "
            "set another one. Received: keras.config.is_nnx_enabled() is True. Set the environment "
            "variable KERAS_NNX_ENABLED=false before Keras is imported."
        )


def distribution(value: Any, is_data_parallel: bool, processes: int) -> None:
    """Raises for a distribution of Keras that is not known to be exact."""
    if value is None:
        return
    if not is_data_parallel:
        raise ValueError(
            "Where weights are spread over devices, a batch cannot be cut yet. Received: a "
            f"distribution of type {type(value).__name__}. Use keras.distribution.DataParallel, or "
            "no distribution."
        )
    if processes > 1:
        raise ValueError(
            "On JAX, batches of several processes cannot be cut yet. Received: "
            f"jax.process_count() is {processes}. Use the devices of one process."
        )

"""Checks of strategies, optimizers and variables. Runs on TensorFlow 1.14 too."""

from typing import Any, Sequence

import tensorflow as tf

from macrobatch import _internals
from macrobatch._checks import shown


def parameter_servers(is_used: bool) -> None:
    """Raises for variables of a strategy whose workers do not make an update together."""
    if is_used:
        raise ValueError(
            "Replicas must make each update together, from one batch. Received: variables of a "
            "ParameterServerStrategy, whose workers update them one by one. Use MirroredStrategy, "
            "or MultiWorkerMirroredStrategy for several machines."
        )


def fits_replicas(model: Any, strategy: Any) -> None:
    """Raises for settings of a model that several replicas cannot train with."""
    is_tpu_strategy = isinstance(strategy, tf.distribute.TPUStrategy)
    if strategy.num_replicas_in_sync == 1 or is_tpu_strategy:
        return
    settings = {"jit_compile": bool(model.jit_compile)}
    settings["steps_per_execution"] = getattr(model, "steps_per_execution", 1) > 1
    for name, is_set in settings.items():
        if is_set:
            raise ValueError(
                f"{name} cannot be used with several replicas: TensorFlow cannot put the exchange "
                f"between them there. Received: {name}={getattr(model, name)} on "
                f"{strategy.num_replicas_in_sync} replicas of {type(strategy).__name__}. "
                f"Leave {name} out of compile()."
            )


def optimizer_on_replicas(value: Any) -> None:
    """Raises for optimizers that several replicas cannot call together."""
    for each in _internals.with_inner_optimizers(value):
        frequency = getattr(each, "ema_overwrite_frequency", None)
        if getattr(each, "use_ema", False) and frequency:
            raise ValueError(
                "ema_overwrite_frequency cannot be used with several replicas: Keras' optimizers "
                f"overwrite in a branch, where replicas cannot meet. Received: {frequency} on "
                f"{type(each).__name__}. Leave it out, and take the averages at the end of each "
                "epoch with keras.callbacks.SwapEMAWeights."
            )


def one_strategy(strategies: Sequence[Any], variables: Sequence[Any]) -> None:
    """Raises if variables were made in the scopes of different strategies."""
    if any(each is not strategies[0] for each in strategies):
        found = {
            "none" if each is None else type(each).__name__: variable.name
            for each, variable in zip(strategies, variables)
        }
        examples = ", ".join(f"of {kind}, {name} for instance" for kind, name in found.items())
        raise ValueError(
            "All variables must be made in the scope of the same strategy. Received: variables "
            f"{examples}. Make the model, its optimizer and its metrics inside "
            "`with strategy.scope():`."
        )


def made_in_scope(strategy: Any, current: Any, in_several_replicas: bool) -> None:
    """Raises for variables that replicas do not share."""
    if in_several_replicas and strategy is not current:
        raise ValueError(
            "The variables must be made in the strategy's scope. Received: a call inside the run "
            f"of {type(current).__name__}, with variables made outside of its scope. Make the "
            "model and the optimizer inside `with strategy.scope():`."
        )


def static_batch(examples: Any, synchronized: Sequence[str]) -> None:
    """Raises where replicas must meet in each micro-batch, and cannot know how often."""
    if not isinstance(examples, int):
        raise ValueError(
            f"Layers with synchronized=True need batches of a fixed size. Received: {synchronized} "
            "and a batch of unknown size. Batch the dataset with "
            "dataset.batch(n, drop_remainder=True), and with several workers, where TensorFlow "
            "expects any dataset to end early, repeat() it first and pass steps_per_epoch=; or set "
            "synchronized=False."
        )


def even_replicas(examples: Sequence[int], synchronized: Sequence[str]) -> None:
    """Raises where replicas must meet in each micro-batch, and do not have equally many."""
    if len(set(examples)) > 1:
        raise ValueError(
            "Layers with synchronized=True need the same number of examples on each replica. "
            f"Received: {synchronized}, and replicas with {list(examples)} examples. Choose a "
            "batch size that the number of replicas divides, with drop_remainder=True."
        )


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

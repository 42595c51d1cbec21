"""Checks of what users do with strategies and workers. Runs on TensorFlow 1.14 too."""

import re
import warnings
from typing import Any, Dict, Sequence

import tensorflow as tf

from macrobatch import _checks


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
    for each in _checks.with_inner_optimizers(value):
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


def workers_missing(own: str, missing: Dict[str, str], timeout: float) -> str:
    """What to say of workers that did not come."""
    names = ", ".join(f"{name} ({address})" for name, address in missing.items())
    return (
        f"All workers must come within {timeout:g} seconds. As {own}, waited in vain for: {names}. "
        "Look there for why; or wait longer with wait_for_workers(timeout=...)."
    )


def port_in_use(own: str, address: str, error: OSError) -> str:
    """What to say of a worker that cannot listen at its address."""
    return (
        f"{own} must be able to listen at {address}. Received: {error}. Another process has that "
        "port: end it, or give this worker another one in TF_CONFIG. Call wait_for_workers once, "
        "before the strategy is made."
    )


def backup(folder: str, save_freq: Any) -> None:
    """Raises for backups that could not be restored, or in the middle of an epoch."""
    if re.search(r"[][*?]", folder):
        raise ValueError(
            "The path of a backup must not have any of []*? in it, which TensorFlow takes for "
            f"patterns when it restores. Received: backup_dir={folder!r}. Choose another one."
        )
    if save_freq != "epoch":
        raise ValueError(
            "With several workers, BackupAndRestore must back up whole epochs: Keras starts an "
            "epoch over after a restart, and would apply its first batches twice. "
            f'Received: save_freq={save_freq!r}. Expected: save_freq="epoch"; to lose less, make '
            "epochs shorter with steps_per_epoch."
        )


def same_backup(epochs: Sequence[int], folder: str) -> None:
    """Raises if workers have found different backups."""
    if len(set(epochs)) > 1:
        raise ValueError(
            "All workers must restore the same backup. Received: backups after "
            f"{list(epochs)} epochs, one for each replica, in backup_dir={folder!r}. "
            "Put backup_dir on a file system that all workers share."
        )


def length_of_dataset(batches: int, is_sharded: bool) -> None:
    """Raises for a dataset of known length that yields each batch in several steps."""
    if batches >= 0 and not is_sharded:
        raise ValueError(
            "With several workers, a dataset that is not sharded must not have a known length: "
            "TensorFlow divides each batch by the number of workers, and yields the parts one "
            "after the other, but Keras stops after as many steps as there are batches. "
            f"Received: {batches} batches, and AutoShardPolicy.OFF. Call dataset.repeat(), and "
            "pass steps_per_epoch= (validation_steps= for validation, steps= to evaluate)."
        )


def shuffles_alike(x: Any, shuffle: Any) -> None:
    """Warns if each worker is about to shuffle the same arrays in its own way."""
    is_array = hasattr(x, "__array__") or isinstance(x, (list, tuple, dict))
    # Public, and the one way to ask whether `keras.utils.set_random_seed` was called.
    if is_array and shuffle and tf.compat.v1.get_seed(None) == (None, None):
        warnings.warn(
            "Each worker shuffles the arrays on its own, so that examples are left out and others "
            "taken twice. Received: arrays, shuffle=True and no seed. Call "
            "keras.utils.set_random_seed(...) with the same number on all workers, or pass "
            "shuffle=False.",
            _checks.ExactnessWarning,
            stacklevel=2,
        )

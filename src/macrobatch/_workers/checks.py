"""Checks of what users do with several workers."""

import math
import numbers
import re
import warnings
from typing import Any, Dict, Optional, Sequence

import tensorflow as tf

from macrobatch import _checks


def timeout(value: Any) -> float:
    """Returns `value` as a float, if it is a number of seconds that pass some day."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise ValueError(
            "timeout must be a finite number of seconds, 0 or more, 300 for instance. "
            f"Received: timeout={value!r} (of type {type(value).__name__})."
        )
    return float(value)


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


def newest_backup(folder: str, epoch: int, unread: Sequence[int]) -> None:
    """Warns if training goes on from another backup than the newest."""
    if unread:
        warnings.warn(
            f"Training goes on after {epoch} epochs, from the backup before the newest one. "
            f"Received: a backup after {unread[0]} epochs in backup_dir={folder!r} that cannot be "
            "read, on this worker or on another.",
            stacklevel=2,
        )


def unreadable_backup(folder: str, error: Optional[Exception]) -> str:
    """What to say of backups of which none can be read."""
    return (
        f"A backup must be readable on all workers. Received: {error or 'an error elsewhere'}, in "
        f"backup_dir={folder!r}. Remove its files there to start over; with "
        "BackupAndRestore(double_checkpoint=True) the backup before it is kept too, and is used."
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

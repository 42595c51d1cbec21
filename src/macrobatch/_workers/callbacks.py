"""Callbacks of `fit` on several workers: files that only one of them may write, and backups."""

import os
import re
from typing import Any, List, Optional

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._tensorflow import replicas
from macrobatch._workers import checks

# What writes files, with nothing else to it.
_WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
)


def callbacks_of(strategy: Any, callbacks: Any) -> Any:
    """The callbacks for this worker, so that only the chief writes files."""
    if isinstance(callbacks, keras.callbacks.CallbackList) or callbacks is None:
        return callbacks
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    is_chief = strategy.extended.should_checkpoint
    kept: List[Any] = []
    for callback in callbacks:
        if type(callback) is keras.callbacks.BackupAndRestore:
            several = replicas.has_several_workers(strategy)
            by_epoch = several or callback.save_freq == "epoch"
            kept.append(_Backup(strategy, callback) if by_epoch else callback)
        elif is_chief or type(callback) not in _WRITERS:
            kept.append(callback)
    return kept


def check_length(dataset: Any) -> None:
    """Raises for a dataset of which Keras would leave most out."""
    if isinstance(dataset, tf.data.Dataset):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        is_sharded = policy != tf.data.experimental.AutoShardPolicy.OFF
        checks.length_of_dataset(int(dataset.cardinality()), is_sharded)


# What TensorFlow raises for a file that is gone, cut off or damaged. A model that does not fit the
# backup raises something else.
_UNREADABLE = (tf.errors.OpError, IndexError, OSError, RuntimeError)


class _Backup(keras.callbacks.Callback):
    """BackupAndRestore for several workers, of which any may be killed at any moment.

    Keras' own writes the weights and then, to another file, the epoch: whoever is killed in between
    repeats an epoch. And it leaves out seeds, so that dropout starts over. Here the epoch is in the
    name of a checkpoint of everything, which TensorFlow completes by writing its index.
    """

    def __init__(self, strategy: Any, callback: Any):
        super().__init__()
        self._strategy = strategy
        self._folder = os.fspath(callback.backup_dir)
        checks.backup(self._folder, callback.save_freq)
        self._kept = 2 if callback.double_checkpoint else 1
        self._deletes = callback.delete_checkpoint
        self._writes = strategy.extended.should_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        error: Optional[Exception] = None
        unread: List[int] = []
        # 0 stands for no backup: all workers look at the same number of them.
        for epoch in [*self._epochs(), 0, 0][: self._kept]:
            checks.same_backup(_values_of_all(self._strategy, epoch), self._folder)
            if epoch:
                error = self._restore(epoch)
            # If any worker cannot read a backup, all take the one before, or they would differ.
            if not any(_values_of_all(self._strategy, int(error is not None))):
                if epoch:
                    checks.newest_backup(self._folder, epoch, unread)
                    _internals.set_initial_epoch(self.model, epoch)
                return
            unread.append(epoch)
        raise OSError(checks.unreadable_backup(self._folder, error)) from error

    def _restore(self, epoch: int) -> Optional[Exception]:
        """Takes all values from a backup. Returns the error if the backup cannot be read."""
        try:
            self._checkpoint().read(self._path(epoch)).assert_consumed()
        except _UNREADABLE as error:
            return error
        return None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._writes:
            self._checkpoint().write(self._path(epoch + 1))
            kept = {f"epoch-{each}" for each in self._epochs()[: self._kept]}
            for name in tf.io.gfile.listdir(self._folder):
                stem = name.partition(".")[0]
                if re.fullmatch(r"epoch-\d+", stem) and stem not in kept:
                    tf.io.gfile.remove(tf.io.gfile.join(self._folder, name))

    def on_train_end(self, logs: Any = None) -> None:
        # Or the next `fit` would start from there too.
        _internals.set_initial_epoch(self.model, None)
        _values_of_all(self._strategy, 0)  # Before all are through, one may still fail.
        if self._writes and self._deletes and tf.io.gfile.exists(self._folder):
            tf.io.gfile.rmtree(self._folder)

    def _checkpoint(self) -> Any:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return tf.train.Checkpoint(variables=[variable.value for variable in variables])

    def _path(self, epoch: int) -> str:
        return str(tf.io.gfile.join(self._folder, f"epoch-{epoch}"))

    def _epochs(self) -> List[int]:
        """After how many epochs there are backups, the newest first."""
        names = tf.io.gfile.listdir(self._folder) if tf.io.gfile.exists(self._folder) else []
        found = [re.fullmatch(r"epoch-(\d+)\.index", name) for name in names]
        return sorted([int(each.group(1)) for each in found if each], reverse=True)


def _values_of_all(strategy: Any, value: int) -> List[int]:
    """A number as each worker has it. Workers wait here for each other."""

    @tf.function
    def gathered() -> Any:
        return strategy.gather(strategy.run(lambda: tf.identity([value])), axis=0)

    return [int(each) for each in gathered()]

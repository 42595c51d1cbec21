"""Several workers: waiting for each other, and files that only one of them may write."""

import re
import socket
import time
from typing import Any, Dict, List, Optional

import keras
import tensorflow as tf

from macrobatch import _checks


def wait_for_workers(timeout: float = 300, *, cluster_resolver: Optional[Any] = None) -> None:
    """Waits until all workers have come.

    `tf.distribute.MultiWorkerMirroredStrategy` itself waits for an hour. Call this before it is
    made, on every worker. Where there is only one, it returns at once.

    Args:
        timeout: how many seconds to wait.
        cluster_resolver: what tells who the workers are; by default the environment variable
            `TF_CONFIG`. The one that the strategy gets.

    Raises:
        TimeoutError: if a worker has not come by then. It names those that have not.

    Example:

    >>> import macrobatch, tensorflow as tf
    >>> macrobatch.wait_for_workers(timeout=60)
    >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
    """
    resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = {
        f"{job} {index}": address
        for job, addresses in resolver.cluster_spec().as_dict().items()
        if job in ("chief", "worker")
        for index, address in enumerate(addresses)
    }
    own = f"{resolver.task_type} {resolver.task_id}"
    missing = {name: address for name, address in tasks.items() if name != own}
    if own not in tasks or not missing:
        return
    deadline = time.monotonic() + timeout
    # Here the strategy's server will listen, which from then on answers those who come later.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", int(tasks[own].rpartition(":")[2])))
        listener.listen(len(tasks))
        while missing:
            missing = {name: at for name, at in missing.items() if not _answers(at)}
            if missing and time.monotonic() > deadline:
                raise TimeoutError(_checks.workers_missing(own, missing, timeout))
            time.sleep(0.1 if missing else 0)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


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
            kept.append(_Backup(strategy, callback))
        elif is_chief or type(callback) not in _WRITERS:
            kept.append(callback)
    return kept


class _Backup(keras.callbacks.Callback):
    """BackupAndRestore for several workers, of which any may be killed at any moment.

    Keras writes the weights and then, to another file, the epoch: whoever is killed in between
    repeats an epoch. Here the epoch is in the name of the file, which gets it when all is written.
    """

    def __init__(self, strategy: Any, callback: Any):
        super().__init__()
        _checks.backs_up_epochs(callback.save_freq)
        self._strategy = strategy
        self._folder = callback.backup_dir
        self._deletes = callback.delete_checkpoint
        self._writes = strategy.extended.should_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        epochs = self._epochs()
        epoch = max(epochs, default=0)
        _checks.same_backup(_values_of_all(self._strategy, epoch), self._folder)
        if epoch:
            self.model.load_weights(epochs[epoch])
            # Private: what BackupAndRestore sets, and `fit` starts from.
            self.model._initial_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._writes:
            before = self._epochs()
            tf.io.gfile.makedirs(self._folder)
            unfinished = tf.io.gfile.join(self._folder, "unfinished.weights.h5")
            self.model.save_weights(unfinished, overwrite=True)
            finished = tf.io.gfile.join(self._folder, f"epoch-{epoch + 1}.weights.h5")
            tf.io.gfile.rename(unfinished, finished, overwrite=True)
            for path in before.values():
                tf.io.gfile.remove(path)

    def on_train_end(self, logs: Any = None) -> None:
        # When one is through, the others may still be about to fail.
        _values_of_all(self._strategy, 0)
        if self._writes and self._deletes and tf.io.gfile.exists(self._folder):
            tf.io.gfile.rmtree(self._folder)

    def _epochs(self) -> Dict[int, str]:
        """The backups, by the number of epochs that are in them."""
        pattern = tf.io.gfile.join(self._folder, "epoch-*.weights.h5")
        found = tf.io.gfile.glob(pattern)
        return {int(re.findall(r"epoch-(\d+)", path)[-1]): path for path in found}


def _values_of_all(strategy: Any, value: int) -> List[int]:
    """A number as each worker has it. Workers wait here for each other."""

    @tf.function
    def gathered() -> Any:
        return strategy.gather(strategy.run(lambda: tf.identity([value])), axis=0)

    return [int(each) for each in gathered()]

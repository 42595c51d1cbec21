"""Several workers: waiting for each other, and files that only one of them may write."""

import contextlib
import re
import socket
import time
from typing import Any, List, Optional, Set

import keras
import tensorflow as tf

from macrobatch import _replica_checks


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
    others = {name: address for name, address in tasks.items() if name != own}
    if own not in tasks or not others:
        return
    deadline = time.monotonic() + timeout
    greeted: Set[str] = set()
    heard: Set[str] = set()
    # Here the strategy's server will listen later. Nobody goes on before all have been here.
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", int(tasks[own].rpartition(":")[2])))
        listener.listen(len(tasks))
        listener.settimeout(0.1)
        while not greeted & heard >= set(others):
            greeted |= {name for name in set(others) - greeted if _greet(others[name], own)}
            heard |= _greetings(listener)
            if time.monotonic() > deadline and not greeted & heard >= set(others):
                missing = {name: others[name] for name in others if name not in greeted & heard}
                raise TimeoutError(_replica_checks.workers_missing(own, missing, timeout))


def _greet(address: str, own: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=2) as connection:
            connection.sendall(own.encode())
    except OSError:
        return False
    return True


def _greetings(listener: socket.socket) -> Set[str]:
    """The names of those who have come here since the last time."""
    names: Set[str] = set()
    while True:
        try:
            connection, _ = listener.accept()
        except socket.timeout:
            return names
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2)
            names.add(connection.recv(100).decode(errors="replace"))


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


def check_length(dataset: Any) -> None:
    """Raises for a dataset of which Keras would leave most out."""
    if isinstance(dataset, tf.data.Dataset):
        policy = dataset.options().experimental_distribute.auto_shard_policy
        is_sharded = policy != tf.data.experimental.AutoShardPolicy.OFF
        _replica_checks.length_of_dataset(int(dataset.cardinality()), is_sharded)


class _Backup(keras.callbacks.Callback):
    """BackupAndRestore for several workers, of which any may be killed at any moment.

    Keras' own writes the weights and then, to another file, the epoch: whoever is killed in between
    repeats an epoch. And it leaves out seeds, so that dropout starts over. Here the epoch is in the
    name of a checkpoint of everything, which TensorFlow completes by writing its index.
    """

    def __init__(self, strategy: Any, callback: Any):
        super().__init__()
        _replica_checks.backs_up_epochs(callback.save_freq)
        self._strategy = strategy
        self._folder = callback.backup_dir
        self._deletes = callback.delete_checkpoint
        self._writes = strategy.extended.should_checkpoint

    def on_train_begin(self, logs: Any = None) -> None:
        epoch = max(self._epochs(), default=0)
        _replica_checks.same_backup(_values_of_all(self._strategy, epoch), self._folder)
        if epoch:
            self._checkpoint().read(self._path(epoch)).assert_consumed()
            # Private: what BackupAndRestore sets, and `fit` starts from.
            self.model._initial_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._writes:
            before = self._epochs()
            self._checkpoint().write(self._path(epoch + 1))
            for older in before:
                for path in tf.io.gfile.glob(f"{self._path(older)}.*"):
                    tf.io.gfile.remove(path)

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None  # or the next `fit` would start from there too
        _values_of_all(self._strategy, 0)  # Before all are through, one may still fail.
        if self._writes and self._deletes and tf.io.gfile.exists(self._folder):
            tf.io.gfile.rmtree(self._folder)

    def _checkpoint(self) -> Any:
        variables = [*self.model.variables, *self.model.optimizer.variables]
        return tf.train.Checkpoint(variables=[variable.value for variable in variables])

    def _path(self, epoch: int) -> str:
        return str(tf.io.gfile.join(self._folder, f"epoch-{epoch}"))

    def _epochs(self) -> List[int]:
        """After how many epochs there are backups."""
        found = tf.io.gfile.glob(f"{tf.io.gfile.join(self._folder, 'epoch-*')}.index")
        return [int(re.findall(r"epoch-(\d+)", path)[-1]) for path in found]


def _values_of_all(strategy: Any, value: int) -> List[int]:
    """A number as each worker has it. Workers wait here for each other."""

    @tf.function
    def gathered() -> Any:
        return strategy.gather(strategy.run(lambda: tf.identity([value])), axis=0)

    return [int(each) for each in gathered()]

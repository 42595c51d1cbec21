"""Several workers: waiting for each other, and files that only one of them may write."""

import contextlib
import re
import socket
import threading
import time
from typing import Any, List, Optional, Set

import keras
import tensorflow as tf

from macrobatch._tensorflow import checks as _replica_checks
from macrobatch._tensorflow import replicas as _replicas


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
    # Here the strategy's server will listen later. Nobody goes on before all have been here.
    with _Listener(own, tasks[own], deadline) as listener:
        while not greeted & listener.heard >= set(others):
            missing = {name: others[name] for name in others if name not in greeted}
            patience = min(max(deadline - time.monotonic(), 1.0), 10.0)
            greeted |= {n for n, at in missing.items() if _greets_back(n, at, own, patience)}
            time.sleep(0.05)
            if time.monotonic() > deadline and not greeted & listener.heard >= set(others):
                missing = {n: others[n] for n in others if n not in greeted & listener.heard}
                raise TimeoutError(_replica_checks.workers_missing(own, missing, timeout))


def _greets_back(name: str, address: str, own: str, patience: float) -> bool:
    """Whether a worker is there: not just somebody who listens, such as one that is ending."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1) as connection:
            connection.settimeout(patience)
            connection.sendall(own.encode() + b"\n")
            return connection.makefile().readline() == name + "\n"
    except (OSError, UnicodeDecodeError):
        return False


class _Listener:
    """Greets back, in a thread, those who greet this worker.

    Attributes:
        heard: the names of those who have.
    """

    def __init__(self, own: str, address: str, deadline: float):
        self.heard: Set[str] = set()
        self._own = own
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            try:  # A worker of an earlier run may be about to end.
                self._socket.bind(("", int(address.rpartition(":")[2])))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    self._socket.close()
                    raise OSError(_replica_checks.port_in_use(own, address, error)) from None
                time.sleep(0.1)
        self._socket.listen(128)
        self._socket.settimeout(0.1)
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> "_Listener":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_done.set()
        self._thread.join()
        self._socket.close()

    def _listen(self) -> None:
        while not self._is_done.is_set():
            with contextlib.suppress(OSError, UnicodeDecodeError):
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(1)
                    name = connection.makefile().readline().strip()
                    connection.sendall(self._own.encode() + b"\n")
                    self.heard.add(name)


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
            several = _replicas.has_several_workers(strategy)
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
        _replica_checks.length_of_dataset(int(dataset.cardinality()), is_sharded)


class _Backup(keras.callbacks.Callback):
    """BackupAndRestore for several workers, of which any may be killed at any moment.

    Keras' own writes the weights and then, to another file, the epoch: whoever is killed in between
    repeats an epoch. And it leaves out seeds, so that dropout starts over. Here the epoch is in the
    name of a checkpoint of everything, which TensorFlow completes by writing its index.
    """

    def __init__(self, strategy: Any, callback: Any):
        super().__init__()
        _replica_checks.backup(callback.backup_dir, callback.save_freq)
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
            for name in tf.io.gfile.listdir(self._folder):
                if name.partition(".")[0] in {f"epoch-{older}" for older in before}:
                    tf.io.gfile.remove(tf.io.gfile.join(self._folder, name))

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
        names = tf.io.gfile.listdir(self._folder) if tf.io.gfile.exists(self._folder) else []
        found = [re.fullmatch(r"epoch-(\d+)\.index", name) for name in names]
        return [int(each.group(1)) for each in found if each]


def _values_of_all(strategy: Any, value: int) -> List[int]:
    """A number as each worker has it. Workers wait here for each other."""

    @tf.function
    def gathered() -> Any:
        return strategy.gather(strategy.run(lambda: tf.identity([value])), axis=0)

    return [int(each) for each in gathered()]

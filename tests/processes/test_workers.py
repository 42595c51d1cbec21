"""Several workers, each a process, end where plain Keras ends on one device with whole batches."""

import os
import pickle
import socket
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from worker_cases import CASES, WORKERS

import macrobatch
from macrobatch._workers import checks

HERE = os.path.dirname(os.path.abspath(__file__))
# The number of devices of each worker, and the cases. All of them in one run, and so in one test:
# starting workers takes a while.
LAYOUTS = [
    (1, list(CASES)),
    (2, ["arrays_with_validation", "masked_tokens_and_rows_of_a_table", "accumulator"]),
]


def environment():
    """That of a process which has the package as it is tested here."""
    source = os.path.dirname(os.path.dirname(macrobatch.__file__))
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return {**inherited, "PYTHONPATH": os.pathsep.join([source, HERE])}


def run_workers(script, *arguments, devices):
    """Runs a script with `macrobatch run`."""
    command = [sys.executable, "-m", "macrobatch", "run", "--workers", WORKERS]
    command += ["--devices-per-worker", devices, os.path.join(HERE, script), *arguments]
    return subprocess.run(
        [str(part) for part in command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(("devices", "names"), LAYOUTS)
def test_workers_end_where_one_device_ends(devices, names, tmp_path):
    run = run_workers("worker_cases.py", tmp_path, *names, devices=devices)
    assert run.returncode == 0, run.stdout[-5000:]
    results = [pickle.loads((tmp_path / f"{i}.pickle").read_bytes()) for i in range(WORKERS)]
    assert [each["replicas"] for each in results] == [WORKERS * devices] * WORKERS
    for name in names:
        expected = tf.nest.flatten(CASES[name](None))
        for result in results:
            actual = tf.nest.flatten(result[name])
            assert len(actual) == len(expected), name
            for ours, whole in zip(actual, expected):
                np.testing.assert_allclose(ours, whole, rtol=1e-10, atol=1e-10, err_msg=name)
    check_files(results)


def check_files(results):
    (of_chief, chief_saw), (of_other, other_saw) = (result["files"] for result in results)
    assert of_chief == ["backup", "board", "log.csv", "model.keras"], "only the chief writes"
    assert of_other == []
    assert chief_saw == other_saw == [0, 1]
    for result in results:
        assert "Received: backups after" in result["another_backup"]


def test_backups_in_the_middle_of_an_epoch():
    with pytest.raises(ValueError, match=r'Received: save_freq=5\. Expected: save_freq="epoch"'):
        checks.backup("folder", 5)


def test_backups_that_could_not_be_restored():
    with pytest.raises(ValueError, match=r"Received: backup_dir='a\[1\]'"):
        checks.backup("a[1]", "epoch")


def test_datasets_of_which_keras_would_leave_out_a_part():
    checks.length_of_dataset(4, True)
    checks.length_of_dataset(tf.data.INFINITE_CARDINALITY, False)
    with pytest.raises(ValueError, match=r"Received: 4 batches.*steps_per_epoch="):
        checks.length_of_dataset(4, False)


def test_workers_must_shuffle_alike():
    x = np.zeros([4, 2])
    keras.utils.set_random_seed(1)
    checks.shuffles_alike(x, True)
    tf.random.set_seed(None)
    checks.shuffles_alike(x, False)
    checks.shuffles_alike(tf.data.Dataset.from_tensors(x), True)
    with pytest.warns(macrobatch.ExactnessWarning, match="set_random_seed"):
        checks.shuffles_alike({"a": x}, True)


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_backups_of_one_worker(save_freq, tmp_path):
    """In the middle of epochs it is Keras that backs up, and starts the epoch over."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    macrobatch.accumulate(model, 2)

    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "run"), save_freq=save_freq)
    options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
    x = np.ones([8, 2])
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, x[:, :1], callbacks=[backup, Stops()], **options)
    history = model.fit(x, x[:, :1], callbacks=[backup], **options)
    assert len(history.epoch) == (1 if save_freq == "epoch" else 2)


# Waiting for workers


def cluster():
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    spec = tf.train.ClusterSpec({"worker": addresses})
    return [
        tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=i)
        for i in range(2)
    ]


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_never_comes(index):
    resolver = cluster()[index]
    missing = 1 - index
    address = resolver.cluster_spec().as_dict()["worker"][missing]
    with pytest.raises(TimeoutError, match=f"within 0.3 seconds.*worker {missing} .{address}"):
        macrobatch.wait_for_workers(0.3, cluster_resolver=resolver)


def test_somebody_else_at_the_address():
    """A server that is about to end, for instance, which takes connections but no greeting."""
    resolver = cluster()[0]
    host, _, port = resolver.cluster_spec().as_dict()["worker"][1].partition(":")
    with socket.create_server((host, int(port))), pytest.raises(TimeoutError, match="worker 1"):
        macrobatch.wait_for_workers(0.1, cluster_resolver=resolver)


def test_a_worker_that_comes_after_somebody_else_at_its_address():
    resolvers = cluster()
    host, _, port = resolvers[0].cluster_spec().as_dict()["worker"][1].partition(":")
    failures = []

    def wait(resolver):
        try:
            macrobatch.wait_for_workers(20, cluster_resolver=resolver)
        except TimeoutError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait, args=[resolvers[0]])
    with socket.create_server((host, int(port))) as stale:
        waiting.start()
        stale.accept()[0].close()
    wait(resolvers[1])
    waiting.join()
    assert not failures


def test_an_address_that_is_taken():
    resolver = cluster()[0]
    _, _, port = resolver.cluster_spec().as_dict()["worker"][0].partition(":")
    with socket.create_server(("", int(port))), pytest.raises(
        OSError, match="must be able to listen"
    ):
        macrobatch.wait_for_workers(0.1, cluster_resolver=resolver)


def test_workers_that_come_late():
    resolvers = cluster()
    waiting = threading.Thread(
        target=macrobatch.wait_for_workers, args=[60], kwargs={"cluster_resolver": resolvers[0]}
    )
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    macrobatch.wait_for_workers(60, cluster_resolver=resolvers[1])
    waiting.join(60)
    assert not waiting.is_alive()


def test_one_worker_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    macrobatch.wait_for_workers(0)

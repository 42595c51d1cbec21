"""Several workers, each a process, end where plain Keras ends on one device with whole batches."""

import os
import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import thorough
from worker_cases import CASES, WORKERS

import macrobatch

HERE = os.path.dirname(os.path.abspath(__file__))
# Each case takes two workers seconds: what `make test` runs of them.
QUICK = [
    *("arrays_with_validation", "masked_tokens_and_rows_of_a_table", "accumulator"),
    *("a_worker_that_runs_out_of_data", "rows_of_which_nobody_has_any"),
    *("files", "what_is_refused"),
]
# The number of devices of each worker, and the cases. Many of them in one run, and so in one test:
# starting workers takes a while.
LAYOUTS = [
    pytest.param(1, QUICK, id="quick"),
    pytest.param(1, [name for name in CASES if name not in QUICK], marks=thorough, id="others"),
    pytest.param(2, QUICK[:3], marks=thorough, id="devices"),
]


def environment():
    """That of a process which has the package as it is tested here."""
    source = os.path.dirname(os.path.dirname(macrobatch.__file__))
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    settings = {"PYTHONPATH": os.pathsep.join([source, HERE])}
    # Where memory is limited, each thread's own heap would take 64 MiB of address space. oneDNN's
    # allocator would take all that there is: TensorFlow crashes then for want of a few bytes.
    settings |= {"MALLOC_ARENA_MAX": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    return {**inherited, **settings}


def run_workers(script, *arguments, devices=1, restarts=0):
    """What a script writes that `macrobatch run` runs."""
    command = [sys.executable, "-m", "macrobatch", "run", "--workers", WORKERS]
    command += ["--micro-batch-size", "off"]  # The script accumulates by itself.
    command += ["--devices-per-worker", devices, "--max-restarts", restarts]
    command += [os.path.join(HERE, script), *arguments]
    run = subprocess.run(
        [str(part) for part in command],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    return run.stdout


@pytest.mark.parametrize(("devices", "names"), LAYOUTS)
def test_workers_end_where_one_device_ends(devices, names, tmp_path):
    run_workers("worker_cases.py", tmp_path, *names, devices=devices)
    results = [pickle.loads((tmp_path / f"{i}.pickle").read_bytes()) for i in range(WORKERS)]
    assert [each["replicas"] for each in results] == [WORKERS * devices] * WORKERS
    for name in names:
        expected = tf.nest.flatten(CASES[name](None))
        for result in results:
            actual = tf.nest.flatten(result[name])
            assert len(actual) == len(expected), name
            for ours, whole in zip(actual, expected):
                np.testing.assert_allclose(ours, whole, rtol=1e-10, atol=1e-10, err_msg=name)


KILLS = 8  # of a worker and of the chief by turns


@thorough
def test_killed_workers_end_as_if_nothing_had_happened(tmp_path):
    ended = []
    for kills in (KILLS, 0):
        folder = tmp_path / str(kills)
        folder.mkdir()
        output = run_workers("faults.py", folder, kills, restarts=kills)
        assert output.count("was killed by SIGKILL") == kills
        assert ("epoch-" in output) == (kills > 0), "nothing was ever restored"
        ended.append(pickle.loads((folder / "end.pickle").read_bytes()))
    assert_same(*ended)


def fit_with_backups(folder, epochs, callbacks=(), **options):
    """A new model on one worker, trained with backups that stay. Returns the epochs too."""
    keras.utils.set_random_seed(7)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [keras.Input([2]), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(0.1), "mse")
    macrobatch.accumulate(model, 2)
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False, **options)
    x = np.random.default_rng(0).normal(size=[8, 2])
    fit = {"batch_size": 4, "epochs": epochs, "shuffle": False, "verbose": 0}
    history = model.fit(x, x[:, :1], callbacks=[backup, *callbacks], **fit)
    return history.epoch, [np.array(variable.value) for variable in model.variables]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize(("save_freq", "epochs"), [("epoch", [2]), (3, [1, 2])])
def test_backups_of_one_worker(save_freq, epochs, tmp_path):
    """In the middle of epochs it is Keras that backs up, and starts the epoch over."""
    with pytest.raises(KeyboardInterrupt):
        fit_with_backups(tmp_path, 3, [Stops()], save_freq=save_freq)
    assert fit_with_backups(tmp_path, 3, save_freq=save_freq)[0] == epochs


def test_a_backup_has_the_seeds_too(tmp_path):
    fit_with_backups(tmp_path / "run", 2)
    epochs, ours = fit_with_backups(tmp_path / "run", 3)
    assert epochs == [2]
    assert_same(ours, fit_with_backups(tmp_path / "other", 3)[1])


DAMAGES = {
    "index cut off": (".index", lambda data: data[:50]),
    "data cut off": (".data-00000-of-00001", lambda data: data[:50]),
    "a wrong bit": (".data-00000-of-00001", lambda data: bytes([data[0] ^ 1]) + data[1:]),
}


def indexes_in(folder):
    return sorted(path.name for path in folder.glob("*.index"))


@thorough
@pytest.mark.parametrize("damage", DAMAGES)
def test_the_backup_before_one_that_cannot_be_read(damage, tmp_path):
    folder, double = tmp_path / "double", {"double_checkpoint": True}
    fit_with_backups(folder, 3, **double)
    assert indexes_in(folder) == ["epoch-2.index", "epoch-3.index"]
    suffix, damaged = DAMAGES[damage]
    file = folder / f"epoch-3{suffix}"
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.warns(UserWarning, match="after 2 epochs.*Received: a backup after 3 epochs"):
        epochs, ours = fit_with_backups(folder, 4, **double)
    assert epochs == [2, 3]
    assert indexes_in(folder) == ["epoch-3.index", "epoch-4.index"]
    assert_same(ours, fit_with_backups(tmp_path / "undisturbed", 4)[1])
    # The one that could not be read has been written anew.
    epochs, _ = fit_with_backups(folder, 5, **double)
    assert epochs == [4]


@pytest.mark.parametrize("double", [False, True])
def test_no_backup_can_be_read(double, tmp_path):
    fit_with_backups(tmp_path, 3, double_checkpoint=double)
    indexes = indexes_in(tmp_path)
    assert len(indexes) == 1 + double
    for index in indexes:
        (tmp_path / index).write_bytes(b"")
    with pytest.raises(OSError, match=r"must be readable on all workers. Received: "):
        fit_with_backups(tmp_path, 4, double_checkpoint=double)

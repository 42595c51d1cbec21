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
from worker_cases import CASES, RECORDS, WORKERS

import macrobatch
from macrobatch._workers import checks

HERE = os.path.dirname(os.path.abspath(__file__))
# Each case takes two workers seconds: what `make test` runs of them.
QUICK = [
    *("arrays_with_validation", "masked_tokens_and_rows_of_a_table", "accumulator"),
    *("a_worker_that_runs_out_of_data", "rows_of_which_nobody_has_any"),
    *("files", "another_backup"),
]
# The number of devices of each worker, and the cases. Many of them in one run, and so in one test:
# starting workers takes a while.
LAYOUTS = [
    pytest.param(1, QUICK, id="quick"),
    pytest.param(
        1, [name for name in [*CASES, *RECORDS] if name not in QUICK], marks=thorough, id="others"
    ),
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


def run_workers(script, *arguments, devices):
    """Runs a script with `macrobatch run`."""
    command = [sys.executable, "-m", "macrobatch", "run", "--workers", WORKERS]
    command += ["--micro-batch-size", "off"]  # The script accumulates by itself.
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
    for name in set(names) & set(CASES):
        expected = tf.nest.flatten(CASES[name](None))
        for result in results:
            actual = tf.nest.flatten(result[name])
            assert len(actual) == len(expected), name
            for ours, whole in zip(actual, expected):
                np.testing.assert_allclose(ours, whole, rtol=1e-10, atol=1e-10, err_msg=name)
    if "files" in names:
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


def fit_with_backups(folder, epochs, **options):
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
    history = model.fit(x, x[:, :1], callbacks=[backup], **fit)
    return history.epoch, [np.array(variable.value) for variable in model.variables]


def test_a_backup_has_the_seeds_too(tmp_path):
    fit_with_backups(str(tmp_path / "run"), 2)
    epochs, ours = fit_with_backups(str(tmp_path / "run"), 3)
    assert epochs == [2]
    _, undisturbed = fit_with_backups(str(tmp_path / "other"), 3)
    for a, b in zip(ours, undisturbed):
        np.testing.assert_allclose(a, b, rtol=1e-10)


DAMAGES = {
    "index cut off": (".index", lambda data: data[:50]),
    "data cut off": (".data-00000-of-00001", lambda data: data[:50]),
    "a wrong bit": (".data-00000-of-00001", lambda data: bytes([data[0] ^ 1]) + data[1:]),
}


@thorough
@pytest.mark.parametrize(
    "damage",
    ["a wrong bit", *(pytest.param(d, marks=pytest.mark.thorough) for d in list(DAMAGES)[:2])],
)
def test_the_backup_before_one_that_cannot_be_read(damage, tmp_path):
    folder, double = tmp_path / "double", {"double_checkpoint": True}
    fit_with_backups(folder, 3, **double)
    assert sorted(path.name for path in folder.glob("*.index")) == [
        "epoch-2.index",
        "epoch-3.index",
    ]
    suffix, damaged = DAMAGES[damage]
    file = folder / f"epoch-3{suffix}"
    file.write_bytes(damaged(file.read_bytes()))
    with pytest.warns(UserWarning, match="after 2 epochs.*Received: a backup after 3 epochs"):
        epochs, ours = fit_with_backups(folder, 4, **double)
    assert epochs == [2, 3]
    assert sorted(path.name for path in folder.glob("*.index")) == [
        "epoch-3.index",
        "epoch-4.index",
    ]
    _, undisturbed = fit_with_backups(tmp_path / "undisturbed", 4)
    for a, b in zip(ours, undisturbed):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    # The one that could not be read has been written anew.
    epochs, _ = fit_with_backups(folder, 5, **double)
    assert epochs == [4]


@pytest.mark.parametrize("double", [False, True])
def test_no_backup_can_be_read(double, tmp_path):
    fit_with_backups(tmp_path, 3, double_checkpoint=double)
    indexes = list(tmp_path.glob("*.index"))
    assert len(indexes) == 1 + double
    for index in indexes:
        index.write_bytes(b"")
    with pytest.raises(OSError, match=r"must be readable on all workers. Received: "):
        fit_with_backups(tmp_path, 4, double_checkpoint=double)

"""What the package offers without TensorFlow, and what it says of the rest."""

import subprocess
import sys

import keras
import pytest
from builders import X, Y, dense
from support import BACKEND

import macrobatch
from macrobatch import cli, settings_of
from macrobatch._run.hook import Hook


def test_tensorflow_is_not_needed():
    model = dense()
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]


def test_settings_are_known_until_release():
    model = macrobatch.accumulate(dense(), 3, whole_batch_loss=True)
    assert settings_of(model).arguments() == {"micro_batch_size": 3, "whole_batch_loss": True}
    assert settings_of(macrobatch.release(model)) is None


@pytest.mark.skipif(BACKEND == "torch", reason="no setting that is refused as late")
def test_a_refusal_leaves_a_model_as_it_is():
    model = keras.Sequential([keras.Input([None, 4]), keras.layers.Dense(1)])
    step = macrobatch.accumulate(model, 3).train_step
    with pytest.raises(ValueError, match=r"sequence_axis=1 and whole_batch_loss=True"):
        macrobatch.accumulate(model, 3, sequence_axis=1, whole_batch_loss=True)
    assert model.train_step == step


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("find_micro_batch_size", "accumulate"),
        ("value_and_gradients", "accumulate"),
        ("GradientAccumulator", "accumulate"),
        ("wait_for_workers", rf"{BACKEND}\.distributed"),
    ],
)
def test_what_only_tensorflow_has(name, instead):
    with pytest.raises(
        ImportError, match=rf"{name} is .* TensorFlow only.*{BACKEND}.*Use .*{instead}"
    ):
        getattr(macrobatch, name)


@pytest.mark.parametrize("name", ["value_and_gradients", "GradientAccumulator"])
def test_what_to_use_in_a_loop_of_ones_own(name):
    expected = {"jax": r"optax\.MultiSteps", "torch": r"\.grad"}[BACKEND]
    with pytest.raises(ImportError, match=expected):
        getattr(macrobatch, name)


def test_no_keras_model():
    expected = {"jax": r"optax\.MultiSteps", "torch": r"\.grad"}[BACKEND]
    with pytest.raises(ValueError, match=rf"model must be a Keras 3 model.*{expected}"):
        macrobatch.accumulate(len, 3)


def test_a_plan_is_refused(tmp_path, monkeypatch, capsys):
    """The command says so as the function does, without a traceback."""
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        "import keras\n"
        "model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\n"
        "model.fit(keras.ops.ones([4, 3]), keras.ops.ones([4, 1]))\n"
    )
    assert cli.main(["plan", "script.py"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    said = output.err.splitlines()[-1]
    assert said.startswith("macrobatch plan: macrobatch.find_micro_batch_size is available on Tens")
    assert 'accumulate(model, "auto")' in said


def test_workers_are_refused(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    with pytest.raises(SystemExit):
        cli.main(["run", "--workers", "2", str(script)])
    assert f"Received: KERAS_BACKEND={BACKEND}. Leave out --workers." in capsys.readouterr().err


def test_a_backend_that_cannot_train(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(ValueError, match=r"JAX or torch.*'openvino' backend.*KERAS_BACKEND"):
        macrobatch.accumulate(dense(), 3)


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    ran = subprocess.run(
        [sys.executable, "-c", "import macrobatch; macrobatch.accumulate"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode
    assert "which is not installed" in ran.stderr
    assert "macrobatch[jax]" in ran.stderr


def test_a_script_that_knows_nothing_of_it():
    hook = Hook({"micro_batch_size": 3})
    hook.install()
    try:
        model = dense()
        model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=8, verbose=0)
    finally:
        hook.uninstall()
    assert settings_of(model).arguments() == {"micro_batch_size": 3}
    # 19 examples, by 8 and by 3
    assert hook.fits.summary().startswith("3 batches, 7 micro-batches, peak memory ")
    assert not [name for name in sys.modules if name.split(".")[0] == "tensorflow"]

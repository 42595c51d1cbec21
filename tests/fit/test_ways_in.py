"""What the package offers without TensorFlow, and what it says of the rest."""

import subprocess
import sys

import pytest
from support import BACKEND, only_on

import macrobatch
from macrobatch import cli

pytestmark = only_on("jax", "torch")
OF_OWN_LOOPS = {"jax": r"optax\.MultiSteps", "torch": r"\.grad"}.get(BACKEND)
ONLY_ON_TENSORFLOW = {
    "find_micro_batch_size": "accumulate",
    "wait_for_workers": "",
    "value_and_gradients": OF_OWN_LOOPS,
    "GradientAccumulator": OF_OWN_LOOPS,
}


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("name", ONLY_ON_TENSORFLOW)
def test_what_only_tensorflow_has(name):
    match = rf"{name} is .* TensorFlow only.*{BACKEND}.*{ONLY_ON_TENSORFLOW[name]}"
    with pytest.raises(ImportError, match=match):
        getattr(macrobatch, name)


def test_no_keras_model():
    with pytest.raises(ValueError, match=rf"must be a Keras 3 model.*{OF_OWN_LOOPS}"):
        macrobatch.accumulate(len, 3)


SCRIPT = """
import sys, keras
model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(keras.ops.ones([19, 3]), keras.ops.ones([19, 1]), batch_size=8, verbose=0)
assert "tensorflow" not in sys.modules
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", BACKEND)
    (tmp_path / "script.py").write_text(SCRIPT)


@pytest.mark.usefixtures("script")
def test_a_plan_is_refused(capsys):
    """The command says so as the function does, without a traceback."""
    assert cli.main(["plan", "script.py"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    said = output.err.splitlines()[-1]
    assert said.startswith("macrobatch plan: macrobatch.find_micro_batch_size is available on Tens")
    assert 'accumulate(model, "auto")' in said


@pytest.mark.usefixtures("script")
def test_workers_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--workers", "2", "script.py"])
    assert f"Received: KERAS_BACKEND={BACKEND}. Leave out --workers." in capsys.readouterr().err


@pytest.mark.usefixtures("script")
def test_a_script_that_knows_nothing_of_it_and_needs_no_tensorflow():
    ran = python("-m", "macrobatch", "run", "--micro-batch-size", "3", "script.py")
    assert ran.returncode == 0, ran.stderr
    assert "3 batches, 7 micro-batches, peak memory " in ran.stderr


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    ran = python("-c", "import macrobatch; macrobatch.accumulate")
    assert ran.returncode
    assert "which is not installed" in ran.stderr
    assert "macrobatch[jax]" in ran.stderr

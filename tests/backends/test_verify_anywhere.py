"""verify on the backend of this environment: the models of tests/fit/test_verify.py."""

import json
import random
import subprocess
import sys

import keras
import numpy as np
import pytest
import verify_models as models
from keras import layers, ops
from support import BACKEND, thorough
from verify_models import EXACT, INEXACT, SIZE, X, Y, compiled, mlp

import macrobatch
from macrobatch._verify.compare import Runs

# Each takes some seconds on JAX, which compiles each step: one of each kind is for every day.
EVERY_DAY = {
    "jax": ["graph", "own-loss"],
    "torch": [
        *("dense", "random-layers", "sampling", "masked-text", "weights", "attention", "mixed"),
        *("two-outputs", "not-copied", "rows-with-sgd", "contrastive-of-the-whole-batch"),
        *("batch-norm", "layer", "contrastive", "dice", "own-loss", "added", "two-causes"),
        *("by-length", "state", "softmax-bias"),
    ],
}[BACKEND]

slow_on_jax = thorough if BACKEND == "jax" else lambda test: test


def parameters(names):
    return [pytest.param(n, marks=[] if n in EVERY_DAY else [thorough]) for n in names]


@pytest.mark.parametrize("name", parameters(EXACT))
def test_exact_models(name):
    model, batch, *settings = EXACT[name]()
    report = macrobatch.verify(model, *batch, **(settings or [SIZE])[0])
    assert report.exact is True, str(report)
    assert report.causes == []
    assert report.dtype == ("float32" if name == "not-copied" else "float64")
    assert bool(report.notes) == (name == "not-copied")


@pytest.mark.parametrize("name", parameters(INEXACT))
def test_inexact_models(name):
    make, expected, *advice = INEXACT[name]
    model, batch = make()
    report = macrobatch.verify(model, *batch, **SIZE)
    assert report.exact is False
    assert {cause.kind: cause.names for cause in report.causes} == expected, str(report)
    assert report.causes[-1].advice == (advice or [report.causes[-1].advice])[0]
    assert ("was tried" in report.causes[-1].advice) == (name in models.REPAIRED)


def values(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [(v.path, ops.convert_to_numpy(v.value).tolist()) for v in variables]


def drawn():
    """What is drawn, and named, next."""
    numbers = ops.convert_to_numpy(keras.random.uniform([2])).tolist()
    old = np.random.rand()  # noqa: NPY002
    return random.random(), old, numbers, layers.Dense(1).name


def with_statistics():
    return mlp(layers.BatchNormalization(), layers.Dropout(0.5), metrics=["mae"])


def not_copied():
    norm = layers.BatchNormalization()
    return compiled(models.NotCopied(lambda t: norm(t, training=True)), metrics=["mae"])


@pytest.mark.parametrize("build", [with_statistics, pytest.param(not_copied, marks=thorough)])
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_nothing_changes(build):
    """Of an accumulated model that has trained, in the middle of its metrics."""
    ends = []
    for verifies in (False, True):
        keras.utils.set_random_seed(5)
        keras.backend.clear_session()
        model = macrobatch.accumulate(build(), **SIZE)
        model.fit(X, Y, batch_size=7, verbose=0)
        before = values(model), {name: id(value) for name, value in vars(model).items()}
        settings = keras.config.floatx(), keras.config.dtype_policy().name
        if verifies:
            report = macrobatch.verify(model, X, Y)
            assert report.exact is False
            assert report.causes[0].kind == "batch_normalization"
            assert report.settings == SIZE
        assert (values(model), {name: id(value) for name, value in vars(model).items()}) == before
        assert (keras.config.floatx(), keras.config.dtype_policy().name) == settings
        next_drawn = drawn()
        history = model.fit(X, Y, batch_size=7, verbose=0, shuffle=False).history
        ends.append((next_drawn, history, values(model)))
    assert ends[0] == ends[1]


@slow_on_jax
def test_a_difference_that_nothing_explains(monkeypatch):
    """As if the package had a fault: the verdict does not depend on knowing why."""
    plain = Runs.accumulated

    def accumulated(self, *args):
        outcome = plain(self, *args)
        wrong = {path: value * (1 + 1e-6) for path, value in outcome.gradients.items()}
        return outcome._replace(gradients=wrong)

    monkeypatch.setattr(Runs, "accumulated", accumulated)
    report = macrobatch.verify(mlp(optimizer="sgd"), X, Y, **SIZE)
    assert report.exact is False
    assert [cause.kind for cause in report.causes] == ["unknown"]
    assert all(abs(d.gradient - 1e-6) < 1e-9 for d in report.differences.values())


@thorough
def test_a_batch_that_is_not_finite():
    report = macrobatch.verify(mlp(), X, Y * np.inf, **SIZE)
    assert report.exact is None
    assert [cause.kind for cause in report.causes] == ["not_finite"]


SCRIPT = """
import keras, numpy as np
from keras import layers

model = keras.Sequential([keras.Input([5]), layers.Dense(1)])
model.compile("sgd", "mse")
random = np.random.default_rng(0)
model.fit(random.normal(size=[14, 5]), random.normal(size=[14, 1]), batch_size=7, epochs=3)
"""


@slow_on_jax
def test_the_command(tmp_path, monkeypatch):
    """As a user has it: float32, and no TensorFlow. float64 is switched on for the comparison."""
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "macrobatch", "verify", "--micro-batch-size=3", "--json"]
    ran = subprocess.run([*command, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["exact"] is True
    assert report["dtype"] == "float64"
    assert 0 < max(d["gradient"] for d in report["differences"].values()) < 1e-12

"""What users write goes on working: names, signatures, commands, exit codes, variables, logs.

`surface.json` has it as it is. Whatever goes or changes fails here; what is new is taken down.
"""

import importlib.resources
import json
import os
import pathlib
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import surface
from support import BACKEND, code_of, only_on, thorough

import macrobatch

PROMISED = json.loads((pathlib.Path(__file__).parent / "surface.json").read_text())
# What JAX and torch do not have, and the results of that.
ON_TENSORFLOW = ("GradientAccumulator", "Plan", "Row", "find_", "value_and_", "wait_for_")


@pytest.fixture(scope="module")
def found():
    return surface.surface()


@pytest.mark.parametrize("part", PROMISED)
def test_nothing_public_has_changed(part, found):
    promised = PROMISED[part]
    if BACKEND != "tensorflow" and part in ("signatures", "values"):
        promised = {k: v for k, v in promised.items() if not k.startswith(ON_TENSORFLOW)}
    assert found[part] == promised


def test_the_package_is_typed():
    assert importlib.resources.files("macrobatch").joinpath("py.typed").is_file()


MISTAKES = """
import macrobatch

model: object = None
macrobatch.accumulate(model, "auto", nonfinite="skip")
macrobatch.acumulate(model, 8)
macrobatch.accumulate(model, "largest")
macrobatch.accumulate(model, 8, nonfinite="ignore")
macrobatch.find_micro_batch_size(model, model, objective="smallest")
macrobatch.GradientAccumulator(model, [model], reduction="max")
"""


@only_on("tensorflow")
def test_a_type_checker_sees_slips(tmp_path):
    script, settings = tmp_path / "script.py", pathlib.Path(__file__).parents[2] / "pyproject.toml"
    script.write_text(MISTAKES)
    command = [sys.executable, "-m", "mypy", "--config-file", settings, "--cache-dir", tmp_path]
    sources = str(pathlib.Path(macrobatch.__file__).parents[1])
    environment = {**os.environ, "MYPYPATH": sources}
    found = subprocess.run([*command, script], env=environment, capture_output=True, text=True)
    lines = [int(each) for each in re.findall(r"script\.py:(\d+): error:", found.stdout)]
    assert lines == [6, 7, 8, 9, 10], found


def test_help_is_for_users():
    assert not re.search(r"\b_[a-z]", macrobatch.__doc__)
    assert [name for name in macrobatch.__all__ if name not in macrobatch.__doc__] == []


# Exit codes


@pytest.mark.skipif(BACKEND != "tensorflow", reason="commands are the same on all backends")
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--version", 0),
        ("", 2),
        ("run --help", 0),
        ("run missing.py", 2),
        ("run --verify=warn --nonfinite skip --sequence-axis 1 missing.py", 2),
        ("verify missing.py", 2),
        ("verify script:exact", 0),
        ("verify --whole-batch-loss script:exact", 0),
        ("verify --micro-batch-size 4 script:interacting", 1),
        ("verify --micro-batch-size 4 script:not_finite", 2),
        ("plan missing.py", 2),
    ],
)
def test_exit_codes(line, code, tmp_path, monkeypatch, capsys):
    """0 is yes, 1 is no, 2 is neither. Codes of scripts, and plan's, have tests of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    assert code_of(line) == code


SCRIPT = """
import keras, macrobatch, numpy as np

x = np.random.default_rng(0).normal(size=[8, 3])

def model(loss="mse"):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", loss, run_eagerly=True)
    return macrobatch.accumulate(model, micro_batch_size=3)

def exact():
    return model(), x, x[:, :1]

def interacting():
    return model(lambda y, p: keras.ops.square(y - p + keras.ops.mean(p))), x, x[:, :1]

def not_finite():
    return model(), x * np.nan, x[:, :1]
"""


# Logs


@pytest.mark.parametrize(
    ("settings", "callbacks", "logs"),
    [
        ({"micro_batch_size": 3}, [], ""),
        ({}, [], "micro_batch_size"),
        pytest.param(
            *({"micro_batch_tokens": "auto", "sequence_axis": 1}, [], "micro_batch_tokens"),
            marks=[thorough] if BACKEND == "jax" else [],
        ),
        ({"micro_batch_size": 3, "nonfinite": "skip"}, [], "skipped_examples"),
        (
            {"micro_batch_size": 3},
            [macrobatch.GradientNoiseScale(every=1)],
            "gradient_norm noise_scale",
        ),
    ],
)
def test_logs_of_each_setting(settings, callbacks, logs):
    model = keras.Sequential([keras.layers.Embedding(9, 1, mask_zero=True)])
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=BACKEND != "jax")
    macrobatch.accumulate(model, **settings)
    x, y = np.ones([8, 3], "int32"), np.ones([8, 3, 1])
    history = model.fit(x, y, callbacks=callbacks, validation_data=(x, y), verbose=0).history
    assert sorted(history) == sorted(["loss", "mae", "val_loss", "val_mae", *logs.split()])

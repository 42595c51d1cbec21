"""Keras' own tests of fit, evaluate and predict on this backend: none is worse than plain Keras."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import BACKEND, thorough

PLUGIN = pathlib.Path(__file__).parents[1] / "fit"
TESTS = importlib.util.find_spec("keras.src.trainers.trainer_test")
# What differs most from the models of our own tests.
QUICK = "loss_weights or on_batch_methods or nested_inputs"


def run(tmp_path, *options, **environment):
    """Runs Keras' tests. Returns what they print, and the names of those that fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rf",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
    ]
    alone = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "keras_trainer"]
    found = [os.fspath(PLUGIN), *filter(None, sys.path)]
    ran = subprocess.run(
        [*command, *alone, *options, TESTS.origin],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(found), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ran.stdout, set(re.findall(r"^FAILED \S*::(\w+)", ran.stdout, re.MULTILINE))


@pytest.mark.skipif(TESTS is None, reason="this Keras comes without its tests")
@pytest.mark.parametrize(
    ("which", "passed"),
    [
        pytest.param(QUICK, 6, marks=thorough if BACKEND == "jax" else ()),  # It compiles them all.
        pytest.param(f"not ({QUICK})", {"torch": 86, "jax": 118}.get(BACKEND), marks=thorough),
    ],
    ids=["quick", "others"],
)
def test_trainer(which, passed, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)  # Keras' tests are of float32.
    output, failed = run(tmp_path, "-k", which)
    assert int(re.search(r"(\d+) passed", output).group(1)) >= passed, output[-5000:]
    assert int(re.search(r"(\d+) models accumulated", output).group(1)) >= passed
    if failed:
        names = " or ".join(sorted(failed))
        _, plainly = run(tmp_path, "-k", names, MACROBATCH_PLAIN="1")
        assert failed <= plainly, output[-10000:]

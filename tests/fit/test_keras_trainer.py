"""Keras' own tests of fit, evaluate and predict pass with accumulated models, or plainly fail."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
from support import BACKEND, slow_on, thorough

HERE = pathlib.Path(__file__).parent
TESTS = importlib.util.find_spec("keras.src.trainers.trainer_test")
# What differs most from the models of our own tests; and how many of these, and of the others,
# pass with Keras 3.15.1. Other versions have some fewer.
QUICK, PASS = {
    "tensorflow": ("raggeds_model or internal_only or partial or loss_weights", (4, 143)),
    "jax": ("loss_weights or on_batch_methods or nested_inputs", (6, 118)),
    "torch": ("loss_weights or on_batch_methods or nested_inputs", (6, 86)),
}[BACKEND]


def run(folder, which, **environment):
    """Runs Keras' tests. Returns what they print, and the names of those that fail."""
    options = ["-q", "-rf", "-W", "ignore", "-p", "no:cacheprovider", "-p", "keras_trainer"]
    options += ["-c", os.devnull, "--rootdir", str(folder), "-k", which, TESTS.origin]
    found = os.pathsep.join([os.fspath(HERE), *filter(None, sys.path)])
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env={**os.environ, "PYTHONPATH": found, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ran.stdout, set(re.findall(r"^FAILED \S*::(\w+)", ran.stdout, re.MULTILINE))


@pytest.mark.skipif(TESTS is None, reason="this Keras comes without its tests")
@pytest.mark.parametrize(
    ("which", "passed"),
    [
        pytest.param(QUICK, PASS[0], marks=slow_on("jax"), id="quick"),
        pytest.param(f"not ({QUICK})", PASS[1], marks=thorough, id="others"),
    ],
)
def test_trainer(which, passed, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)  # Keras' tests are of float32.
    output, failed = run(tmp_path, which)
    for what in ("passed", "models accumulated"):
        assert int(re.search(rf"(\d+) {what}", output).group(1)) >= 0.9 * passed, output[-5000:]
    if failed:
        _, plainly = run(tmp_path, " or ".join(sorted(failed)), MACROBATCH_PLAIN="1")
        assert failed <= plainly, output[-10000:]

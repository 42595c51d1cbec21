"""Keras' own tests of fit, evaluate and predict pass with accumulated models too."""

import importlib.util
import os
import re

import fresh
import pytest
from support import thorough

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "keras_trainer.py")
TESTS = importlib.util.find_spec("keras.src.trainers.trainer_test")
# What differs most from the models of our own tests.
QUICK = "raggeds_model or internal_only or partial or loss_weights or on_batch_methods_eager"


@pytest.mark.skipif(TESTS is None, reason="this Keras comes without its tests")
@pytest.mark.parametrize(
    ("which", "passed"),
    [
        (QUICK, 5),
        pytest.param(f"not ({QUICK})", 142, marks=thorough),
    ],
    ids=["quick", "others"],
)
def test_trainer(which, passed, tmp_path):
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider", "-c", os.devnull]
    options += ["--rootdir", tmp_path, "-k", which, TESTS.origin]
    run = fresh.run(SCRIPT, *options, folder=tmp_path)
    assert run.returncode == 0, run.stdout[-10000:]
    # As many as in Keras 3.15.1 without jax and scipy, with room for what other versions have.
    assert int(re.search(r"(\d+) passed", run.stdout).group(1)) >= 0.9 * passed, run.stdout
    assert int(re.search(r"(\d+) models accumulated", run.stdout).group(1)) >= 0.9 * passed

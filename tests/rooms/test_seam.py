"""The Keras arithmetic needs no TensorFlow: its tests run on NumPy, where it cannot be imported."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
TESTS = [
    "test_noise.py",
]

RUN = """
import sys
from unittest import mock
sys.modules["tensorflow"] = None  # An import raises ModuleNotFoundError.
# Keras' NumPy backend convolves with JAX, which need not be there: nothing convolves here.
for name in ("jax", "jax.lax", "keras.src.backend.jax", "keras.src.backend.jax.math"):
    sys.modules[name] = mock.MagicMock()
# Outside of TensorFlow, Keras computes float64 in float32 unless it is kept from it.
from keras.src.backend.common import dtypes
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
import pytest
options = ["-q", "-c", sys.argv[1], "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider"]
code = pytest.main([*options, *sys.argv[2:]])
import keras
assert keras.backend.backend() == "numpy"
sys.exit(code)
"""


def test_the_keras_arithmetic_runs_on_numpy_without_tensorflow():
    paths = [str(HERE / name) for name in TESTS]
    found = subprocess.run(
        [sys.executable, "-c", RUN, os.devnull, *paths],
        env=dict(os.environ, KERAS_BACKEND="numpy"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-2000:]
    assert " passed" in found.stdout

"""Tests on other backends than TensorFlow: that of the environment, which KERAS_BACKEND names.

`make test-backends` runs them, in environments without TensorFlow. The tests of TensorFlow, which
have a conftest.py of their own, leave this folder out.
"""

import os
import tempfile

# float64 on JAX, before it is imported.
os.environ.setdefault("JAX_ENABLE_X64", "1")
# What XLA compiles here runs for microseconds: compile it quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["MACROBATCH_CACHE"] = "0"
# What is compiled in one process, or for one model, need not be compiled again. Processes of this
# run start with the same variables.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import keras
import pytest
from keras.src.backend.common import dtypes

from macrobatch._keras.first_batch import FirstBatch

if keras.backend.backend() == "tensorflow":
    collect_ignore_glob = ["*"]
else:
    others = {"jax": "*torch*", "torch": "*jax*"}
    collect_ignore_glob = [others[keras.backend.backend()]]


@pytest.fixture(autouse=True)
def trials(request, monkeypatch):
    """Whether examples meet is tried by the tests about that. `make test-all` tries all models."""
    if request.config.option.markexpr and not request.node.get_closest_marker("examples_meet"):
        monkeypatch.setattr(FirstBatch, "is_due", property(lambda self: False))


@pytest.fixture(autouse=True)
def double_precision(monkeypatch):
    """float64 that is float64: by default Keras computes some of it in float32 here."""
    for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
        monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, name, name)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")

"""A plugin of pytest for Keras' own trainer tests: their models are accumulated.

Each model without a train step of its own is cut into micro-batches of two when it is compiled.
"""

import sys
import types

import keras
import pytest
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer

import macrobatch
from macrobatch import _checks

# Keras' tests import jax, whatever the backend is. Those that need it are left out.
try:
    import jax  # noqa: F401
except ImportError:
    sys.modules["jax"] = types.ModuleType("jax")

accumulated = 0
plain_compile = Trainer.compile


def compile_and_accumulate(model, *args, **kwargs):
    global accumulated
    plain_compile(model, *args, **kwargs)
    if type(model).train_step is Trainer.train_step and "train_step" not in vars(model):
        macrobatch.accumulate(model, 2)
        accumulated += 1


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_trainable_backend: all that is run here has one")
    # The models are a Trainer and a layer, and no keras.Model.
    _checks.keras_model = lambda model: None
    Trainer.compile = compile_and_accumulate


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that needs a package that is not there says nothing."""
    try:
        return (yield)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in ("grain", "jax", "scipy", "torch"):
            raise
        pytest.skip(str(error))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{accumulated} models accumulated with Keras {keras.__version__}")

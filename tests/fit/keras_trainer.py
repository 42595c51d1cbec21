"""A plugin of pytest for Keras' own trainer tests: their models are accumulated.

Each model without a train step of its own is cut into micro-batches of two when it is compiled.
"""

import importlib.util
import sys
import types

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer

import macrobatch

OPTIONAL = ("grain", "jax", "scipy", "torch")
ABSENT = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
accumulated = 0
plain_compile = Trainer.compile


def compile_and_accumulate(model, *args, **kwargs):
    global accumulated
    plain_compile(model, *args, **kwargs)
    if type(model).train_step is Trainer.train_step and "train_step" not in vars(model):
        macrobatch.accumulate(model, 2)
        accumulated += 1


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_trainable_backend: TensorFlow is one")
    if "jax" in ABSENT:  # Keras' tests import it, whatever the backend is
        sys.modules["jax"] = types.ModuleType("jax")
    # The models are a Trainer and a layer, and no keras.Model: the check is lifted, wherever it is.
    macrobatch.accumulate  # noqa: B018 - imports the rooms
    for name, room in list(sys.modules.items()):
        if name.startswith("macrobatch.") and hasattr(room, "keras_model"):
            room.keras_model = lambda model: None
    Trainer.compile = compile_and_accumulate


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of data that a package makes which is not there."""
    absent = [item for item in items if any(f"_{name}" in item.name for name in ABSENT)]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{accumulated} models accumulated, Keras {keras.__version__}")

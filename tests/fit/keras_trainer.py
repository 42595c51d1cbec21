"""A plugin of pytest for Keras' own trainer tests: their models are accumulated.

Each model without a train step of its own is cut into micro-batches of two when it is compiled.
With MACROBATCH_PLAIN=1 they stay plain, to see what plain Keras does.
"""

import importlib
import importlib.util
import os
import sys
import types

import keras

import macrobatch

BACKEND = keras.backend.backend()
TRAINERS = {"tensorflow": "TensorFlowTrainer", "jax": "JAXTrainer", "torch": "TorchTrainer"}
Trainer = getattr(
    importlib.import_module(f"keras.src.backend.{BACKEND}.trainer"), TRAINERS[BACKEND]
)
OPTIONAL = ("grain", "jax", "scipy", "tensorflow", "torch")
SHORT = {"tensorflow": "tf"}
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
    config.addinivalue_line("markers", f"requires_trainable_backend: {BACKEND} is one")
    if "jax" in ABSENT:  # Keras' tests import it, whatever the backend is
        sys.modules["jax"] = types.ModuleType("jax")
    # The models are a Trainer and a layer, and no keras.Model: the check is lifted, wherever it is.
    macrobatch.accumulate  # noqa: B018 - imports the rooms
    for name, room in list(sys.modules.items()):
        if name.startswith("macrobatch.") and hasattr(room, "keras_model"):
            room.keras_model = lambda model: None
    if not os.environ.get("MACROBATCH_PLAIN"):
        Trainer.compile = compile_and_accumulate


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of data that a package makes which is not there."""
    words = [f"_{SHORT.get(name, name)}" for name in ABSENT]
    absent = [item for item in items if any(word in item.name for word in words)]
    config.hook.pytest_deselected(items=absent)
    items[:] = [item for item in items if item not in absent]


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{accumulated} models accumulated, Keras {keras.__version__}")

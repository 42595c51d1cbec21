"""Everything runs in float64 unless a test says otherwise: equality is then to 1e-10.

Tests run on the backend that KERAS_BACKEND names. A file that imports a backend, at its top, is
left out on the others. So is one that has another backend in its name.
"""

import gc
import os
import re
import tempfile
import time

import pytest

BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What XLA compiles here runs for microseconds: compile it quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# float64 on JAX, before it is imported.
os.environ.setdefault("JAX_ENABLE_X64", "1")

# Sizes that other runs have found would change what tests do.
os.environ["MACROBATCH_CACHE"] = "0"

# JAX need not compile again what it compiled in one process, or for one model. Processes of this
# run start with the same variables.
if BACKEND == "jax" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# A command, and scripts that tests run.
collect_ignore = ["differential", "mutants", "processes/scripts"]

OTHERS = {"tensorflow", "jax", "torch"} - {BACKEND}
IMPORTS_ANOTHER = re.compile(rf"^(import|from) ({'|'.join(OTHERS)})\w*\b", re.MULTILINE)


def pytest_ignore_collect(collection_path):
    """Leaves out files of other backends."""
    if collection_path.suffix != ".py":
        return None
    is_named_so = not OTHERS.isdisjoint(collection_path.stem.split("_"))
    return is_named_so or bool(IMPORTS_ANOTHER.search(collection_path.read_text())) or None


def pytest_configure(config):
    """Prepares the backend in processes that run tests, not in one that starts others for them."""
    starts_others = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_others:
        prepare()


def prepare():
    if BACKEND == "tensorflow":
        import prepared  # noqa: F401
    elif BACKEND == "jax":
        import jax

        jax.config.update("jax_num_cpu_devices", 2)  # before JAX first computes
    else:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def kept_graphs():
    """TensorFlow keeps the graphs of functions in functions: they need not be looked through."""
    yield
    if BACKEND == "tensorflow":
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        words = [word for mark in item.iter_markers("thorough_for") for word in mark.args]
        if words and any(word in item.callspec.id for word in words):
            item.add_marker("thorough")


def is_quick(request):
    """Whether this is the selection of `make test`."""
    return bool(request.config.option.markexpr)


@pytest.fixture(autouse=True)
def interaction_check(request, monkeypatch):
    """Only tests about it check whether examples interact. `make test-all` checks all models."""
    if is_quick(request) and not request.node.get_closest_marker("examples_meet"):
        from support.inside import skip_interaction_check

        skip_interaction_check(monkeypatch)


@pytest.fixture(autouse=True)
def eager(request, monkeypatch):
    """Tests with the mark `eager` run in eager mode, which takes less time than a trace."""
    is_marked = request.node.get_closest_marker("eager")
    if BACKEND == "tensorflow" and is_quick(request) and is_marked:
        from keras import Model

        compile_model = Model.compile

        def compile_eagerly(self, *args, **options):
            is_plain = options.get("steps_per_execution", 1) == 1 and "jit_compile" not in options
            options = {"run_eagerly": True, **options} if is_plain else options
            return compile_model(self, *args, **options)

        monkeypatch.setattr(Model, "compile", compile_eagerly)


@pytest.fixture(autouse=True)
def double_precision(monkeypatch):
    """float64 that is float64: outside of TensorFlow, Keras computes some of it in float32."""
    from keras import config, utils

    if BACKEND != "tensorflow":
        from keras.src.backend.common import dtypes

        for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
            monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, name, name)
    config.set_floatx("float64")
    config.set_dtype_policy("float64")
    utils.set_random_seed(0)
    yield
    config.set_dtype_policy("float32")
    config.set_floatx("float32")


@pytest.fixture
def room(monkeypatch):
    """A layer that runs out of memory, which is an error, as on a GPU."""
    from support import memory
    from support.inside import make_running_out_an_error

    make_running_out_an_error(monkeypatch)
    for name, value in {"most": 10**9, "ran": [], "now": 0.0, "bytes": memory.Room.bytes}.items():
        monkeypatch.setattr(memory.Room, name, value)
    return memory.Room


@pytest.fixture
def counted(room, monkeypatch):
    """The memory of that layer is all that there is; running out of it is no error."""
    from support import memory
    from support.inside import count_memory

    counter = memory.Counter()
    count_memory(monkeypatch, counter)
    return counter


@pytest.fixture
def clock(room, monkeypatch):
    """A clock that only that layer moves."""
    monkeypatch.setattr(time, "perf_counter", lambda: room.now)
    return room

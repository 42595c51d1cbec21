"""Everything runs in float64 unless a test says otherwise: equality is then to 1e-10."""

import gc
import os

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# What XLA compiles here runs for microseconds: compile it quickly rather than well.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

# Sizes that other runs have found would change what tests do.
os.environ["MACROBATCH_CACHE"] = "0"

# A command, tests of other environments, and scripts that tests run.
collect_ignore = ["mutants", "backends", "processes/scripts"]


def pytest_configure(config):
    """Prepares TensorFlow in processes that run tests, not in one that starts others for them."""
    starts_others = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not starts_others:
        import prepared  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def kept_graphs():
    """TensorFlow keeps the graphs of functions in functions: they need not be looked through."""
    yield
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
def trials(request, monkeypatch):
    """Whether examples meet is tried by the tests about that. `make test-all` tries all models."""
    if is_quick(request) and not request.node.get_closest_marker("examples_meet"):
        from macrobatch._fit.meeting import Meeting

        monkeypatch.setattr(Meeting, "start", lambda self: None)
        monkeypatch.setattr(Meeting, "watching", lambda self, step: step)


@pytest.fixture(autouse=True)
def eager(request, monkeypatch):
    """Tests with the mark `eager` run in eager mode, which takes less time than a trace."""
    if is_quick(request) and request.node.get_closest_marker("eager"):
        from keras import Model

        compile_model = Model.compile

        def compile_eagerly(self, *args, **options):
            is_plain = options.get("steps_per_execution", 1) == 1 and "jit_compile" not in options
            options = {"run_eagerly": True, **options} if is_plain else options
            return compile_model(self, *args, **options)

        monkeypatch.setattr(Model, "compile", compile_eagerly)


@pytest.fixture(autouse=True)
def double_precision():
    from keras import config, utils

    config.set_floatx("float64")
    config.set_dtype_policy("float64")
    utils.set_random_seed(0)
    yield
    config.set_dtype_policy("float32")
    config.set_floatx("float32")

"""What the tests of the torch engine share: training plainly and accumulated, and comparing."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if keras.backend.backend() != "torch":
    pytest.skip("these tests are of Keras on torch", allow_module_level=True)

from keras.src.backend.common import dtypes  # noqa: E402

from macrobatch._batches.cut import Cut  # noqa: E402
from macrobatch._torch.fit import Accumulation  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def double_precision(monkeypatch):
    """float64 that is float64: by default Keras computes some of it in float32 on torch."""
    for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
        if "float" in name:
            monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, name, name)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def accumulate(model, micro_batch_size=3, **options):
    """`macrobatch.accumulate`, for this engine."""
    names = ("micro_batch_weight", "nonfinite", "memory_limit", "whole_batch_loss")
    defaults = dict(zip(names, (None, "propagate", None, False)))
    given = {name: options.pop(name, default) for name, default in defaults.items()}
    accumulation = Accumulation(model, Cut(micro_batch_size, **options), **given)
    accumulation.install()
    return accumulation


def pair(build):
    """Two models with the same weights."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        models.append(build())
    return models


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def assert_same(plain, other, tolerance=1e-10):
    """Asserts that two models have the same variables, those of their optimizers included."""
    pairs = zip(
        [*plain.variables, *plain.optimizer.variables],
        [*other.variables, *other.optimizer.variables],
        strict=True,
    )
    for one, two in pairs:
        left, right = (each.value.detach().cpu().numpy() for each in (one, two))
        scale = max(1.0, np.abs(left).max(initial=0.0))
        difference = np.abs(left - right).max(initial=0.0) / scale
        assert difference <= tolerance, f"{one.path} differs by {difference}"


def assert_same_history(left, right, tolerance=1e-10):
    assert left.keys() == right.keys()
    for name, values in left.items():
        np.testing.assert_allclose(values, right[name], rtol=tolerance, err_msg=name)


def check(build, x, y=None, *, optimizer=None, compile=None, batch_size=8, fit=None, **options):
    """Trains plainly and accumulated: the same weights, the same history."""
    models, histories = pair(build), []
    for model in models:
        chosen = keras.optimizers.SGD(0.1, momentum=0.9) if optimizer is None else optimizer()
        arguments = {"loss": "mse", **(compile() if callable(compile) else compile or {})}
        model.compile(chosen, **arguments)
        if model is models[1]:
            accumulate(model, **options)
        given = {"batch_size": batch_size, "epochs": 2, "shuffle": False, "verbose": 0}
        histories.append(model.fit(x, y, **{**given, **(fit or {})}).history)
    assert_same(*models)
    assert_same_history(*histories)
    return models

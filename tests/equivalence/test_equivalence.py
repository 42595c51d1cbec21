"""Weights after several updates equal those of plain Keras on whole batches, to 1e-10."""

import keras
import loss_cases
import model_cases
import numpy as np
import pytest
import support
import tensorflow_cases
from builders import X, Y, data, dense, tagger
from case import parameters
from keras import layers, optimizers
from support import MODES, assert_same, build_pair, check, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch._tensorflow import loop as _loop


@pytest.mark.parametrize(("case", "mode"), parameters(loss_cases.CASES))
def test_losses(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


@pytest.mark.parametrize(
    ("case", "mode"), parameters({**model_cases.CASES, **tensorflow_cases.CASES})
)
def test_models(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


@thorough_for("compiled", "graph")
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_one(mode):
    with pytest.warns(UserWarning, match="Nothing is being accumulated"):
        check(dense, data(3, 4), data(3, 2), batch_size=1, micro_batch_size=4, **MODES[mode])


@thorough_for("mixed_float16")
@pytest.mark.parametrize(
    ("policy", "replicas"),
    [
        ("mixed_float16", False),
        ("mixed_bfloat16", False),
        pytest.param("bfloat16", False, marks=thorough),
        ("mixed_float16", True),
        pytest.param("mixed_bfloat16", True, marks=thorough),
        pytest.param("bfloat16", True, marks=thorough),
    ],
)
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_mixed_precision_is_as_close_as_its_rounding(policy, replicas, monkeypatch):
    if replicas:
        monkeypatch.setattr(support, "strategy", mirrored(2))
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    plain, accumulated = build_pair(dense)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        with model.distribute_strategy.scope():
            model.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    precision = {"mixed_float16": 2e-3, "mixed_bfloat16": 1e-2, "bfloat16": 3e-2}[policy]
    assert_same(plain, accumulated, tolerance=precision)


class Optional(keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, inputs):
        assert inputs["nothing"] is None
        return self.layer(inputs["a"])


def test_dicts_with_none():
    plain, accumulated = build_pair(Optional)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        model.compile(optimizers.SGD(0.1), "mse")
    for start in (0, 8):
        x, y = {"a": X[start : start + 8], "nothing": None}, Y[start : start + 8]
        try:
            plain.train_on_batch(x, y)
        except AttributeError:
            pytest.skip("this Keras does not take None among its inputs")
        accumulated.train_on_batch(x, y)
    assert_same(plain, accumulated)


# Inside of the package


def test_sums_that_are_large(monkeypatch):
    """Then they start with the gradients of the first micro-batch, outside of the loop."""
    monkeypatch.setattr(_loop, "LARGE_SUMS", 0)
    x = np.random.default_rng(0).integers(0, 6, [21, 5]) * (
        np.arange(5) < np.arange(21)[:, None] % 6
    )
    check(tagger, x, x % 3, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

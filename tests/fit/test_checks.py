"""Checks of arguments, and warnings at the user's line."""

import contextlib

import keras
import numpy as np
import pytest
from keras import layers
from support import BACKEND, MODES

import macrobatch


def model():
    return keras.Sequential([keras.Input([4]), layers.Dense(2)])


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8", [8], np.float64(8)])
def test_micro_batch_size_must_be_a_positive_integer(size):
    with pytest.raises(ValueError, match=r"positive integer.*Received: micro_batch_size="):
        macrobatch.accumulate(model(), size)


@pytest.mark.parametrize("size", [1, 8, np.int64(8)])
def test_micro_batch_size_may_be_any_kind_of_integer(size):
    macrobatch.accumulate(model(), size)


@pytest.mark.parametrize("wrong", [None, "model", layers.Dense(2)])
def test_not_a_model(wrong):
    with pytest.raises(ValueError, match=r"Keras 3 model.*Received"):
        macrobatch.accumulate(wrong, 8)
    with pytest.raises(ValueError, match=r"Keras 3 model.*Received"):
        macrobatch.release(wrong)


def test_micro_batch_weight_must_be_a_function():
    with pytest.raises(ValueError, match=r"function of \(x, y, sample_weight\).*Received"):
        macrobatch.accumulate(model(), 8, micro_batch_weight=3)


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    with pytest.raises(ValueError, match=r"'numpy' backend.*KERAS_BACKEND=\"tensorflow\""):
        macrobatch.accumulate(model(), 8)


X, Y = np.ones([8, 4]), np.ones([8, 2])


def normalized(count=1):
    norms = [layers.BatchNormalization(name=f"norm_{i}") for i in range(count)]
    return keras.Sequential([keras.Input([4]), *norms, layers.Dense(2)])


@pytest.mark.filterwarnings("ignore:jit_compile=True has no effect")
@pytest.mark.parametrize("mode", MODES)
def test_a_warning_is_given_once_per_model_at_the_users_line(mode):
    for _ in range(2):
        target = normalized()
        target.compile("sgd", "mse", **MODES[mode])
        macrobatch.accumulate(target, 3)
        with pytest.warns(macrobatch.ExactnessWarning) as caught:
            for _ in range(2):
                target.fit(X, Y, batch_size=8, verbose=0)
        ours = [each for each in caught if each.category is macrobatch.ExactnessWarning]
        assert [each.filename for each in ours] == [__file__]


def test_many_layers_are_not_all_named():
    target = normalized(6)
    target.compile("sgd", "mse", run_eagerly=BACKEND != "jax")
    macrobatch.accumulate(target, 3)
    with pytest.warns(macrobatch.ExactnessWarning, match=r"norm_2, \.\.\. \(6 layers\)") as caught:
        target.fit(X, Y, batch_size=8, verbose=0)
    (message,) = [str(each.message) for each in caught if "norm_2" in str(each.message)]
    assert "norm_0, norm_1, norm_2" in message
    assert "norm_3" not in message
    assert len(message) < 500


@pytest.mark.eager
@pytest.mark.parametrize(
    ("shape", "fits"),
    [((8, 5), True), ((8, 1), True), ((8, 5, 1), True), ((8,), False), ((8, 5, 2), False)],
)
def test_weights_must_fit_losses(shape, fits):
    target = keras.Sequential([keras.Input([5, 4]), layers.Dense(2)])
    target.compile("sgd", "mse")
    macrobatch.accumulate(target, 4)
    given = np.ones([8, 5, 4]), np.ones([8, 5, 2]), np.ones(shape)
    expected = contextlib.nullcontext()
    if not fits:  # JAX and torch have errors of their own for them, in plain Keras too
        ours = r"Received: sample_weight of shape .* \(4, 5\)"
        match = {"jax": "Incompatible shapes", "torch": "size of tensor"}.get(BACKEND, ours)
        expected = pytest.raises((ValueError, RuntimeError), match=match)
    with expected:
        target.fit(given[0], given[1], sample_weight=given[2], batch_size=16, verbose=0)

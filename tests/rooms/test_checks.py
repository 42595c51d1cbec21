"""Checks of arguments, and warnings at the user's line."""

import keras
import numpy as np
import pytest
from keras import layers

import macrobatch
from macrobatch import _checks
from macrobatch._keras import checks as keras_checks


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


def test_a_warning_is_given_once_per_model_and_message():
    first, second = model(), model()
    with pytest.warns(macrobatch.ExactnessWarning) as caught:
        for target in (first, first, second):
            _checks.warn_once(target, "inexact")
    assert len(caught) == 2


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_warning_points_at_the_users_line(run_eagerly):
    normalized = keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(2)])
    normalized.compile("sgd", "mse", run_eagerly=run_eagerly)
    macrobatch.accumulate(normalized, 3)
    with pytest.warns(macrobatch.ExactnessWarning) as caught:
        normalized.fit(np.ones([8, 4]), np.ones([8, 2]), batch_size=8, verbose=0)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("weights", "fits"),
    [((8, 5), True), ((8, 1), True), ((8, 5, 1), True), ((8,), False), ((8, 5, 2), False)],
)
def test_weights_must_fit_losses(weights, fits):
    losses = np.zeros([8, 5])
    if fits:
        keras_checks.weights_fit_losses(np.zeros(weights), losses, "sample_weight")
    else:
        with pytest.raises(ValueError, match=r"Received: sample_weight of shape .* \(8, 5\)"):
            keras_checks.weights_fit_losses(np.zeros(weights), losses, "sample_weight")


def test_many_layers_are_not_all_named():
    (message,) = keras_checks.inexact([f"norm_{i}" for i in range(40)])
    assert "norm_0, norm_1, norm_2, ... (40 layers)" in message
    assert "norm_3" not in message
    assert len(message) < 500

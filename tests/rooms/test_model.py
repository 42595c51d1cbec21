"""A model as a function: nothing is read or written but values."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from macrobatch._keras import model as _model
from macrobatch._keras.losses import Denominators

X = np.random.default_rng(0).normal(size=(6, 4))
Y = np.random.default_rng(1).normal(size=(6, 2))


def function():
    model = keras.Sequential(
        [keras.Input([4]), layers.Dense(3, kernel_regularizer="l2"), layers.Dropout(0.5)]
    )
    model.add(layers.Dense(2))
    model.compile("sgd", "mse", metrics=["mae"])
    batch = (tf.constant(X), tf.constant(Y), None)
    return model, batch, _model.ModelFunction(model, batch, True, None)


def everything(model):
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return [np.array(v) for v in variables]


def test_a_call_changes_nothing_until_it_is_written():
    model, batch, call = function()
    before = everything(model)
    whole = Denominators(6, 6, [6])
    loss, state, logs = call(batch, call.start(tf.constant(0.0, tf.float64)), whole)
    for left, right in zip(before, everything(model)):
        np.testing.assert_array_equal(left, right)
    call.finish(state, logs, 6)
    assert int(model.layers[1].seed_generator.state[1]) == 1
    np.testing.assert_allclose(model.get_metrics_result()["loss"], loss)
    np.testing.assert_allclose(logs["loss"], loss)


def test_regularization_is_apart():
    model, _, call = function()
    expected = 0.01 * (np.array(model.layers[0].kernel) ** 2).sum()
    np.testing.assert_allclose(call.regularization(), expected)


def test_a_dry_run_shows_what_is_written():
    _, _, call = function()
    names = {v.path.split("/")[-1] for v in call.written.carried}
    assert names == {"seed_generator_state", "total", "count"}
    assert call.inexact == []
    assert not call.counted


def test_no_loss():
    model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    model.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        _model.ModelFunction(model, (tf.constant(X), tf.constant(Y), None), True, None)


def test_the_private_names_are_there():
    model = keras.Sequential([keras.Input([4]), layers.Dense(2)])
    model.compile("sgd", "mse")
    for name in ("_loss_tracker", "_compile_loss", "_compile_metrics", "_call_has_training_arg"):
        assert hasattr(model, name)
    assert callable(model._compute_loss)
    assert model in list(model._flatten_layers())

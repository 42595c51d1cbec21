"""Each private name that `verify` uses is still there, and means what it is taken for."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

from macrobatch import _internals


def model():
    built = keras.Sequential([keras.Input([4]), layers.Dense(2), layers.Dropout(0.5)])
    built.compile("sgd", "mse", metrics=["mae"])
    return built


@pytest.mark.parametrize("name", sorted(_internals.with_draws))
def test_all_random_numbers_of_keras_are_drawn_with_these_functions(name):
    arguments = {
        "randint": ([2], 0, 5),
        "gamma": ([2], 1.0),
        "binomial": ([2], 3.0, 0.5),
        "beta": ([2], 1.0, 1.0),
        "categorical": (np.zeros([1, 3]), 2),
    }.get(name, ([2],))
    with _internals.with_draws[name](lambda draw, *args, **kwargs: "drawn"):
        assert getattr(keras.random, name)(*arguments, seed=1) == "drawn"
    assert getattr(keras.random, name)(*arguments, seed=1).shape[-1] == 2


def test_functions_beneath():
    """What stands beneath a patched function is called by those who patch it, too."""
    calls = []

    def beneath(drop, *args, **kwargs):
        calls.append("beneath")
        return drop(*args, **kwargs)

    def instead(drop, *args, **kwargs):
        calls.append("instead")
        return drop(*args, **kwargs)

    x = tf.ones([2, 4])
    with _internals.with_dropout.beneath(beneath):
        layers.Dropout(0.5)(x, training=True)
        with _internals.with_dropout(instead):
            layers.Dropout(0.5)(x, training=True)
    layers.Dropout(0.5)(x, training=True)
    assert calls == ["beneath", "instead", "beneath"]


def test_copies_of_models():
    plain = model()
    other = _internals.copy_of_model(plain)
    assert [id(v) for v in other.variables] == [id(v) for v in plain.variables]
    before = dict(vars(plain))
    saved = tf.train.Checkpoint(model=plain).save_counter  # makes TensorFlow's lists
    del saved
    other.train_function = tf.function(lambda: None)
    other.jit_compile = False
    assert vars(plain) == before
    arguments = _internals.compile_arguments(plain)
    assert (arguments["loss"], arguments["metrics"]) == ("mse", ["mae"])
    keras.Model.compile(other, **{**arguments, "loss": "mae"})
    assert plain.loss == "mse"


def test_losses_in_float64():
    narrow = keras.losses.MeanSquaredError(dtype="float32")
    wide = _internals.in_float64(narrow)
    y = np.array([[1e-9 + 1.0]])
    assert float(narrow(y, y - 1e-9)) == 0.0
    assert float(wide(y, y - 1e-9)) > 0.0


def test_data_as_fit_takes_it():
    x, y = np.ones([5, 2]), np.zeros([5], "int64")
    data = _internals.data_of_fit(x, y=y, batch_size=2, class_weight={0: 3.0})
    assert data.num_batches == 3
    first = next(iter(data.get_tf_dataset()))
    assert [tuple(leaf.shape) for leaf in first] == [(2, 2), (2,), (2,)]
    np.testing.assert_array_equal(first[2], [3.0, 3.0])


def test_global_state():
    keras.utils.set_random_seed(1)

    def drawn():
        return (
            keras.random.uniform([2]).numpy().tolist(),
            tf.random.get_global_generator().uniform([2]).numpy().tolist(),
            layers.Dense(1).name,
        )

    drawn()
    of_operations = context.context()._rng
    before = of_operations.getstate()
    with _internals.same_global_state(), _internals.same_generators_of_tensorflow():
        first = drawn()
        tf.random.uniform([2])
        assert of_operations.getstate() != before
    assert of_operations.getstate() == before
    assert drawn() == first


def test_a_copy_builds_its_compiled_loss_and_metrics_apart():
    shared = keras.Input([4])
    plain = keras.Model(shared, [layers.Dense(1)(shared), layers.Dense(2)(shared)])
    plain.compile("sgd", ["mse", "mae"], metrics=[["mae"], []], run_eagerly=True)
    other = _internals.copy_of_model(plain)
    _internals.set_compiled_apart(other)
    other.train_on_batch(np.ones([2, 4]), [np.ones([2, 1]), np.ones([2, 2])])
    assert other._compile_metrics.built
    assert other._compile_loss.built
    assert not plain._compile_metrics.built
    assert not plain._compile_loss.built
    assert [metric.name for metric in plain._compile_loss.metrics] == []
    assert len(other._compile_loss.metrics) == 2


def test_float64_is_switched_on_where_keras_makes_float32_of_it(monkeypatch):
    from keras.src.backend.common import dtypes

    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float32")  # as on JAX and torch
    with _internals.with_float64():
        assert dtypes.BIT64_TO_BIT32_DTYPE["float64"] == "float64"
    assert dtypes.BIT64_TO_BIT32_DTYPE["float64"] == "float32"

"""predict on an accumulated model: cut into micro-batches, with the results of the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import MODES, thorough_for

import macrobatch
from macrobatch._keras.installed import accumulation_of


class Watching(keras.layers.Layer):
    """Notes how many examples it is called with."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def call(self, x):
        if tf.executing_eagerly():
            self.sizes.append(int(x.shape[0]))
        return x


def build():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([3])
    seen = Watching()(inputs)
    hidden = keras.layers.Dense(4, activation="tanh")(seen)
    outputs = {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(2)(hidden)}
    return keras.Model(inputs, outputs)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


x = np.random.default_rng(0).normal(size=[23, 3])


@thorough_for("4-compiled", "50-compiled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4, 50])
def test_same_results_in_the_same_order(mode, size):
    model = build()
    model.compile("sgd", "mse", **MODES[mode])
    expected = model.predict(x, batch_size=10, verbose=0)
    macrobatch.accumulate(model, micro_batch_size=size)
    model.layers[1].sizes.clear()
    assert_equal(model.predict(x, batch_size=10, verbose=0), expected)
    if mode == "eager":
        sizes = {4: [4, 4, 2, 4, 4, 2, 3], 50: [10, 10, 3]}
        assert model.layers[1].sizes == sizes[size]
    macrobatch.release(model)
    assert "predict_step" not in vars(model)
    assert model.predict_function is None  # A graph would go on as it was traced.
    model.layers[1].sizes.clear()
    assert_equal(model.predict(x, batch_size=10, verbose=0), expected)
    if mode == "eager":
        assert model.layers[1].sizes == [10, 10, 3]


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_on_replicas(mode):
    expected = build().predict(x, batch_size=10, verbose=0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = build()
        model.compile("sgd", "mse", **MODES[mode])
    macrobatch.accumulate(model, micro_batch_size=2)
    assert_equal(model.predict(x, batch_size=10, verbose=0), expected)
    assert_equal(model.predict(x[:1], batch_size=10, verbose=0), build().predict(x[:1], verbose=0))


def test_sizes_that_are_found():
    model = build()
    model.compile("sgd", "mse", run_eagerly=True)
    macrobatch.accumulate(model)
    model.predict(x, verbose=0)
    assert model.layers[1].sizes == [23]  # No size is known yet.
    model.fit(x, {"a": x[:, :1], "b": x[:, :2]}, batch_size=23, epochs=2, verbose=0)
    size = accumulation_of(model).cut.chosen.current
    model.layers[1].sizes.clear()
    model.predict(x, verbose=0)
    assert max(model.layers[1].sizes) == min(size, 23)
    assert sum(model.layers[1].sizes) == 23


def test_tokens():
    model = keras.Sequential([keras.Input([None], dtype="int32"), keras.layers.Embedding(9, 2)])
    model.compile("sgd", "mse")
    tokens = np.arange(56).reshape([8, 7]) % 9
    expected = model.predict(tokens, verbose=0)
    macrobatch.accumulate(model, micro_batch_tokens=20, sequence_axis=1)
    np.testing.assert_array_equal(model.predict(tokens, verbose=0), expected)


def test_a_model_that_is_not_built():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = macrobatch.accumulate(Own(), micro_batch_size=4)
    found = model.predict(x, verbose=0)
    np.testing.assert_allclose(found, np.array(model.dense(x)), rtol=1e-10)


def test_an_own_predict_step_is_left_alone():
    class Own(keras.Model):
        def predict_step(self, data):
            return tf.shape(data[0] if isinstance(data, tuple) else data)[:1]

    inputs = keras.Input([3])
    model = macrobatch.accumulate(Own(inputs, keras.layers.Identity()(inputs)), micro_batch_size=4)
    assert model.predict(x, batch_size=10, verbose=0).tolist() == [10, 10, 3]


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_outputs_without_examples_are_refused(mode):
    class Mean(keras.layers.Layer):
        def call(self, x):
            return tf.reduce_mean(x, 0, keepdims=True)

    inputs = keras.Input([3])
    model = keras.Model(inputs, Mean()(inputs))
    model.compile("sgd", "mse", **MODES[mode])
    macrobatch.accumulate(model, micro_batch_size=4)
    with pytest.raises(ValueError, match="each output must have the examples first"):
        model.predict(x, batch_size=10, verbose=0)

"""predict on an accumulated model: cut into micro-batches, with the results of the whole batch."""

import keras
import numpy as np
import pytest
import support
from keras import layers, ops
from support import BACKEND, MODES, slow_on, thorough_for

import macrobatch
from macrobatch import settings_of

X = np.random.default_rng(0).normal(size=[23, 3])
TARGETS = {"a": X[:, :1], "b": X[:, :2]}


class Watching(layers.Layer):
    """Notes with how many examples it is called, or traced."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def call(self, x):
        self.sizes.append(x.shape[0])
        return x


def compiled(**options):
    keras.utils.set_random_seed(7)
    inputs = keras.Input([3])
    hidden = layers.Dense(4, activation="tanh")(Watching()(inputs))
    model = keras.Model(inputs, {"a": layers.Dense(1)(hidden), "b": layers.Dense(2)(hidden)})
    model.compile("sgd", "mse", **options)
    sizes_of(model)
    return model


def sizes_of(model):
    """The sizes that the layer has seen since the last call."""
    seen = [size for size in model.layers[1].sizes if size is not None]
    model.layers[1].sizes.clear()
    return seen


def predicted(model, **options):
    return model.predict(X, **{"batch_size": 10, "verbose": 0, **options})


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


@thorough_for(*["4-compiled", "50-compiled"] if BACKEND == "tensorflow" else [])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4, 50])
def test_same_results_in_the_same_order(mode, size):
    model = compiled(**MODES[mode])
    expected = predicted(model)
    macrobatch.accumulate(model, micro_batch_size=size)
    sizes_of(model)
    assert_equal(predicted(model), expected)
    sizes = sizes_of(model)
    assert all(seen <= min(size, 10) for seen in sizes)
    if mode == "eager":
        assert sizes == {4: [4, 4, 2, 4, 4, 2, 3], 50: [10, 10, 3]}[size]
    assert_equal(model.predict_on_batch(X[:10]), {name: v[:10] for name, v in expected.items()})
    macrobatch.release(model)
    assert "predict_step" not in vars(model)
    assert model.predict_function is None  # What is compiled would go on as it was.
    sizes_of(model)
    assert_equal(predicted(model), expected)
    if mode == "eager":
        assert sizes_of(model) == [10, 10, 3]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="replicas of TensorFlow")
@thorough_for("graph")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_on_replicas(mode):
    expected = predicted(compiled())
    with support.mirrored(2).scope():
        model = compiled(**MODES[mode])
    macrobatch.accumulate(model, micro_batch_size=2)
    assert_equal(predicted(model), expected)
    found = model.predict(X[:1], batch_size=10, verbose=0)
    assert_equal(found, {name: value[:1] for name, value in expected.items()})


def test_sizes_that_are_found():
    model = macrobatch.accumulate(compiled(run_eagerly=True))
    predicted(model, batch_size=23)
    assert sizes_of(model) == [23]  # No size is known yet.
    model.fit(X, TARGETS, batch_size=23, epochs=2, verbose=0)
    sizes_of(model)
    predicted(model, batch_size=23)
    sizes = sizes_of(model)
    assert max(sizes) == min(settings_of(model).size_in_use, 23)
    assert sum(sizes) == 23


def test_tokens():
    model = keras.Sequential([keras.Input([None], dtype="int32"), layers.Embedding(9, 2)])
    model.compile("sgd", "mse")
    tokens = np.arange(56).reshape([8, 7]) % 9
    expected = model.predict(tokens, verbose=0)
    macrobatch.accumulate(model, micro_batch_tokens=20, sequence_axis=1)
    np.testing.assert_array_equal(model.predict(tokens, verbose=0), expected)


@pytest.mark.skipif(BACKEND == "torch", reason="one step is one execution there")
def test_several_steps_in_an_execution():
    model = compiled(steps_per_execution=2)
    expected = predicted(model, batch_size=5)
    macrobatch.accumulate(model, micro_batch_size=2)
    assert_equal(predicted(model, batch_size=5), expected)


@pytest.mark.eager
def test_training_goes_on_after_a_prediction():
    models = [compiled(), macrobatch.accumulate(compiled(), micro_batch_size=4)]
    for model in models:
        for _ in range(2):
            model.fit(X, TARGETS, batch_size=10, shuffle=False, verbose=0)
            predicted(model)
    support.assert_same(*models)


@slow_on("jax")
def test_a_model_that_is_not_built():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = macrobatch.accumulate(Own(), micro_batch_size=4)
    np.testing.assert_allclose(predicted(model), support.array(model.dense(X)), rtol=1e-10)


def test_an_own_predict_step_is_left_alone():
    class Own(keras.Model):
        def predict_step(self, *args):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
            sizes = ops.full([1], ops.shape(x)[0])
            return (sizes, args[0][1]) if len(args) == 2 else sizes

    inputs = keras.Input([3])
    model = Own(inputs, layers.Identity()(inputs))
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, micro_batch_size=4)
    assert predicted(model).tolist() == [10, 10, 3]


@thorough_for(*["compiled"] if BACKEND == "tensorflow" else [])
@pytest.mark.parametrize("mode", MODES)
def test_outputs_without_examples_are_refused(mode):
    inputs = keras.Input([3])
    hidden = layers.Dense(2)(inputs)
    mean = layers.Lambda(lambda x: ops.mean(x, 0, keepdims=True), output_shape=(2,))
    model = keras.Model(inputs, mean(hidden))
    model.compile("sgd", "mse", **MODES[mode])
    macrobatch.accumulate(model, micro_batch_size=4)
    before = support.ended(model)
    with pytest.raises(ValueError, match="each output must have the examples first"):
        predicted(model)
    support.assert_ended(before, model, 0)

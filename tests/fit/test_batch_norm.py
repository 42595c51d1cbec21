"""Moving statistics after an update are those of one update with the whole batch's moments."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support import MODES, build_pair, thorough, thorough_for

import macrobatch

pytestmark = pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
X = np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=(19, 5, 2))
Y = np.random.default_rng(1).normal(size=(19, 5, 2))


def train(build, x=X, y=Y, **kwargs):
    """The normalisation is the first layer: its inputs do not depend on how the batch is cut."""
    models = build_pair(build)
    macrobatch.accumulate(models[1], 3)
    for model in models:
        model.compile(optimizers.SGD(0.01), "mse", **kwargs)
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return models


def statistics(model):
    return [np.array(v) for v in model.non_trainable_weights]


def sequential(*more, first=(), **kwargs):
    def build():
        normalization = layers.BatchNormalization(momentum=0.7, **kwargs)
        return keras.Sequential(
            [keras.Input([5, 2]), *first, normalization, *more, layers.Dense(2)]
        )

    return build


@thorough_for("compiled")
@pytest.mark.parametrize("mode", list(MODES))
def test_pooled_statistics_are_those_of_the_batch(mode):
    plain, accumulated = train(sequential(), **MODES[mode])
    for left, right in zip(statistics(plain), statistics(accumulated)):
        np.testing.assert_allclose(left, right, rtol=1e-12)


def test_somebody_else_may_wrap_what_gives_the_moments(monkeypatch):
    train(sequential(), **MODES["eager"])
    moments = layers.BatchNormalization._moments
    wrapper = functools.wraps(moments)(lambda *args: moments(*args))
    monkeypatch.setattr(layers.BatchNormalization, "_moments", wrapper)
    plain, accumulated = train(sequential(), **MODES["eager"])
    for left, right in zip(statistics(plain), statistics(accumulated)):
        np.testing.assert_allclose(left, right, rtol=1e-12)


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_masked_inputs_are_pooled_by_their_tokens(mode):
    x = X * (np.arange(5) < np.random.default_rng(2).integers(0, 6, size=(19, 1)))[..., None]
    x[:3] = 0.0  # no token in the first micro-batch
    plain, accumulated = train(sequential(first=[layers.Masking()]), x, **MODES[mode])
    for left, right in zip(statistics(plain), statistics(accumulated)):
        np.testing.assert_allclose(left, right, rtol=1e-10)


def test_no_digits_are_lost_in_float32():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")

    def build():
        return keras.Sequential([keras.Input([5, 2]), layers.BatchNormalization(), layers.Dense(2)])

    plain, accumulated = train(build, X + 100.0)
    for left, right in zip(statistics(plain), statistics(accumulated)):
        np.testing.assert_allclose(left, right, rtol=1e-5)


def test_frozen_layers_and_inference_use_the_real_statistics():
    class Inference(layers.Layer):
        def __init__(self):
            super().__init__()
            self.normalization = layers.BatchNormalization()

        def call(self, inputs):
            return self.normalization(inputs, training=False)

    def build():
        model = keras.Sequential(
            [keras.Input([5, 2]), layers.BatchNormalization(), Inference(), layers.Dense(2)]
        )
        model.layers[0].trainable = False
        for weight in model.non_trainable_weights:
            weight.assign(keras.random.uniform(weight.shape, 1, 2, seed=5, dtype="float64"))
        return model

    plain, accumulated = train(build)
    for left, right in zip(plain.get_weights(), accumulated.get_weights()):
        np.testing.assert_allclose(left, right, rtol=1e-10)


def test_one_warning_that_names_the_layer():
    model = keras.Sequential(
        [keras.Input([5, 2]), layers.BatchNormalization(name="norm"), layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3)
    with pytest.warns(
        macrobatch.ExactnessWarning, match=r"Layers: norm.*micro_batch_size"
    ) as caught:
        for _ in range(2):
            model.fit(X, Y, batch_size=8, verbose=0)
    assert len([w for w in caught if w.category is macrobatch.ExactnessWarning]) == 1


@pytest.mark.eager
@pytest.mark.filterwarnings("error::macrobatch.ExactnessWarning")
def test_no_warning_for_a_frozen_layer():
    model = keras.Sequential(
        [keras.Input([5, 2]), layers.BatchNormalization(trainable=False), layers.Dense(2)]
    )
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3).fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.eager
def test_a_layer_that_is_called_twice_decays_once_per_micro_batch():
    def build():
        inputs = keras.Input([5, 2])
        normalization = layers.BatchNormalization(momentum=0.5)
        return keras.Model(
            inputs, layers.Dense(2)(normalization(inputs) + normalization(2 * inputs))
        )

    with pytest.warns(macrobatch.ExactnessWarning, match="once per micro-batch"):
        _, accumulated = train(build)
    assert all(np.isfinite(value).all() for value in statistics(accumulated))

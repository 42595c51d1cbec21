"""Moving statistics after an update are those of one update with the whole batch's moments."""

import functools

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from support import MODES, array, build_pair, modes, only_on, slow_on

import macrobatch

pytestmark = pytest.mark.filterwarnings(
    "ignore::macrobatch.ExactnessWarning", "ignore:jit_compile=True has no effect"
)
X = np.random.default_rng(0).normal(loc=3.0, scale=2.0, size=(19, 5, 2))
Y = np.random.default_rng(1).normal(size=(19, 5, 2))


def statistics(build, x=X, **options):
    """The statistics of a model that is trained plainly, and of one that is accumulated.

    The normalisation is the first layer: its inputs do not depend on how the batch is cut.
    """
    models = build_pair(build)
    macrobatch.accumulate(models[1], 3)
    for model, given in zip(models, ({}, options)):
        model.compile(optimizers.SGD(0.01), "mse", **given)
        model.fit(x, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [[array(v) for v in model.non_trainable_weights] for model in models]


def assert_close(pair, tolerance=1e-10):
    for left, right in zip(*pair):
        np.testing.assert_allclose(left, right, rtol=tolerance)


def sequential(*first, **options):
    return lambda: keras.Sequential(
        [keras.Input([5, 2]), *first, layers.BatchNormalization(**options), layers.Dense(2)]
    )


@pytest.mark.parametrize("mode", modes("graph eager"))
def test_pooled_statistics_are_those_of_the_batch(mode):
    assert_close(statistics(sequential(momentum=0.7), **MODES[mode]), 1e-12)


@slow_on("jax")
def test_somebody_else_may_wrap_what_gives_the_moments(monkeypatch):
    statistics(sequential(), **MODES["eager"])
    moments = layers.BatchNormalization._moments
    wrapper = functools.wraps(moments)(lambda *args: moments(*args))
    monkeypatch.setattr(layers.BatchNormalization, "_moments", wrapper)
    assert_close(statistics(sequential(), **MODES["eager"]), 1e-12)


@pytest.mark.parametrize("mode", modes("eager"))
def test_masked_inputs_are_pooled_by_their_tokens(mode):
    x = X * (np.arange(5) < np.random.default_rng(2).integers(0, 6, size=(19, 1)))[..., None]
    x[:3] = 0.0  # no token in the first micro-batch
    assert_close(statistics(sequential(layers.Masking(), momentum=0.7), x, **MODES[mode]))


@only_on("tensorflow")
def test_no_digits_are_lost_in_float32():
    """On JAX and torch, moments are Keras' own, which lose some."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    assert_close(statistics(sequential(), X + 100.0), 1e-5)


class Inference(layers.Layer):
    def __init__(self):
        super().__init__()
        self.normalization = layers.BatchNormalization()

    def call(self, inputs):
        return self.normalization(inputs, training=False)


@slow_on("jax")
def test_frozen_layers_and_inference_use_the_real_statistics():
    def build():
        model = keras.Sequential(
            [keras.Input([5, 2]), layers.BatchNormalization(), Inference(), layers.Dense(2)]
        )
        model.layers[0].trainable = False
        for weight in model.non_trainable_weights:
            weight.assign(keras.random.uniform(weight.shape, 1, 2, seed=5, dtype="float64"))
        return model

    assert_close(statistics(build))


@pytest.mark.eager
@pytest.mark.filterwarnings("error::macrobatch.ExactnessWarning")
def test_no_warning_for_a_frozen_layer():
    model = sequential(trainable=False)()
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3).fit(X, Y, batch_size=8, verbose=0)


@slow_on("jax")
@pytest.mark.eager
def test_a_layer_that_is_called_twice_decays_once_per_micro_batch():
    def build():
        inputs = keras.Input([5, 2])
        normalization = layers.BatchNormalization(momentum=0.5)
        return keras.Model(
            inputs, layers.Dense(2)(normalization(inputs) + normalization(2 * inputs))
        )

    with pytest.warns(macrobatch.ExactnessWarning, match="once per micro-batch"):
        _, found = statistics(build)
    assert all(np.isfinite(value).all() for value in found)

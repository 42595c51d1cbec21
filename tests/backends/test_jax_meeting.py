"""Examples that meet are found on JAX too, and random layers are not blamed."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import macrobatch
from macrobatch._jax.meeting import Meeting

pytestmark = pytest.mark.examples_meet


def contrastive(y_true, y_pred):
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return -ops.mean(ops.log_softmax(similarities) * y_true[:, :1], axis=-1)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


def said_of(*inner, loss="mse", size=6, **options):
    """What is said of examples that meet in a fit, whose metrics and seeds go on as before."""
    model = keras.Sequential([keras.Input([4]), *inner, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    macrobatch.accumulate(model, size)
    random = np.random.default_rng(0)
    x, y = random.normal(size=[24, 4]), random.normal(size=[24, 3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", macrobatch.ExactnessWarning)
        model.fit(x, y, batch_size=24, epochs=2, verbose=0)
    found = [each for each in caught if each.category is macrobatch.ExactnessWarning]
    return [str(each.message) for each in found]


class Zero(layers.Layer):
    """Begins as a layer in which no examples meet. Its gradient shows that they will."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.gate * ops.mean(x, axis=0)


# Micro-batches of 8 are as large as those of the trial, for which the step is compiled already.
@pytest.mark.parametrize(("size", "jit_compile"), [(6, True), (8, True), (6, False)])
def test_a_loss(size, jit_compile):
    (message,) = said_of(loss=contrastive, size=size, jit_compile=jit_compile)
    assert message.startswith("Examples meet in these losses: 'contrastive'. ")


@pytest.mark.parametrize("size", [6, 8])
@pytest.mark.parametrize("kind", [Centred, Zero])
def test_a_layer(kind, size):
    (message,) = said_of(kind(name="culprit"), size=size)
    assert message.startswith("Examples meet in these layers: 'culprit'. ")


@pytest.mark.parametrize("size", [6, 8])
def test_random_layers_are_silent(size):
    assert said_of(layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.5), size=size) == []


def test_what_is_compiled_already_is_enough(monkeypatch):
    """Losses and gradients of four micro-batches tell it, and nothing else is compiled."""
    monkeypatch.setattr(Meeting, "_runs", lambda *_: pytest.fail("compiled for the trial"))
    assert said_of(layers.Dense(4, "tanh"), layers.Dropout(0.5, seed=1), size=8) == []


def of_number(y_true, y_pred):
    losses = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return losses / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


class ByNumber(layers.Layer):
    def call(self, x):
        return x / ops.sum(ops.ones_like(x), axis=0)


@pytest.mark.parametrize(("size", "jit_compile"), [(6, True), (8, True), (6, False)])
@pytest.mark.parametrize("inner", [[], [layers.Dropout(0.5, seed=1), layers.BatchNormalization()]])
def test_a_loss_that_depends_on_how_many_examples_there_are(inner, size, jit_compile):
    said = said_of(*inner, loss=of_number, size=size, jit_compile=jit_compile)
    (message,) = [each for each in said if "BatchNormalization" not in each]
    assert message.startswith("These losses depend on how many examples a micro-batch has, ")
    assert "'of_number'" in message


def test_a_layer_that_depends_on_how_many_examples_there_are():
    """Compiled, layers are not tried in this way: it would be compiled for two more sizes."""
    (message,) = said_of(ByNumber(name="culprit"), jit_compile=False)
    assert message.startswith("These layers depend on how many examples a micro-batch has, ")
    assert "'culprit'" in message

"""Examples that meet are found on JAX too, and random layers are not blamed."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import macrobatch

pytestmark = pytest.mark.examples_meet


def contrastive(y_true, y_pred):
    similarities = ops.matmul(y_pred, ops.transpose(y_pred))
    return -ops.mean(ops.log_softmax(similarities) * y_true[:, :1], axis=-1)


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0)


def said_of(*inner, loss="mse", **options):
    """What is said of examples that meet in a fit, whose metrics and seeds go on as before."""
    model = keras.Sequential([keras.Input([4]), *inner, layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    macrobatch.accumulate(model, 6)
    random = np.random.default_rng(0)
    x, y = random.normal(size=[24, 4]), random.normal(size=[24, 3])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", macrobatch.ExactnessWarning)
        model.fit(x, y, batch_size=24, epochs=2, verbose=0)
    found = [each for each in caught if each.category is macrobatch.ExactnessWarning]
    return [str(each.message) for each in found]


@pytest.mark.parametrize("jit_compile", [True, False])
def test_a_loss(jit_compile):
    (message,) = said_of(loss=contrastive, jit_compile=jit_compile)
    assert message.startswith("Examples meet in these losses: 'contrastive'. ")


def test_a_layer():
    (message,) = said_of(Centred(name="culprit"))
    assert message.startswith("Examples meet in these layers: 'culprit'. ")


def test_random_layers_are_silent():
    assert said_of(layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.5)) == []

"""whole_batch_loss=True on torch: losses in which examples meet, in two passes."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from torch_support import (
    accumulate,
    assert_same,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
    pair,
    torch,
)

X, Y = data(21, 4), data(21, 2, seed=1)
GENERATOR = np.random.default_rng(0)


def contrastive(y_true, y_pred):
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.logsumexp(similarity, -1)) + ops.mean(ops.square(y_true - y_pred))


def dense():
    return keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l2"),
            layers.Dense(2),
        ]
    )


def test_a_loss_that_compares_examples():
    check(
        dense,
        X,
        Y,
        whole_batch_loss=True,
        compile=lambda: {"loss": contrastive, "metrics": ["mae"]},
        fit={"validation_data": (X[:7], Y[:7])},
    )


@pytest.mark.parametrize("seed", [None, 5], ids=["unseeded", "seeded"])
def test_dropout_is_the_same_in_both_passes(seed):
    """The gradient is that of one graph over the same draws: a finite difference shows it."""
    model = keras.Sequential(
        [keras.Input([4]), layers.Dense(5, "tanh"), layers.Dropout(0.5, seed=seed), layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.0), contrastive)
    accumulate(model, whole_batch_loss=True)
    model.train_on_batch(X, Y)
    weight = model.layers[0].kernel.value
    seeds = [v for v in model.variables if v.name == "seed_generator_state"]
    states = [v.numpy() for v in seeds]

    def loss_at(offset):
        torch.manual_seed(3)
        for variable, state in zip(seeds, states):
            variable.assign(state)
        with torch.no_grad():
            weight[0, 0] += offset
        loss = model.train_on_batch(X, Y)
        gradient = weight.grad[0, 0].item()
        with torch.no_grad():
            weight[0, 0] -= offset
        return loss, gradient

    _, gradient = loss_at(0.0)
    difference = (loss_at(1e-5)[0] - loss_at(-1e-5)[0]) / 2e-5
    assert gradient == pytest.approx(difference, rel=1e-6)


def test_both_passes_must_come_to_the_same():
    class Noise(layers.Layer):
        def call(self, x):
            return x + torch.tensor(GENERATOR.normal(size=tuple(x.shape)))

    model = keras.Sequential([keras.Input([4]), layers.Dense(2), Noise()])
    model.compile(keras.optimizers.SGD(0.1), contrastive)
    accumulate(model, whole_batch_loss=True)
    before = [v.numpy().copy() for v in model.variables]
    with pytest.raises(ValueError, match="must come to the same both times"):
        model.train_on_batch(X, Y)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable.numpy())


def test_masks_and_weights_reach_the_loss():
    def build():
        inputs = keras.Input([None], dtype="int32")
        embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
        return keras.Model(inputs, layers.Dense(2)(embedded))

    x = np.random.default_rng(1).integers(0, 9, size=(21, 6))
    models = pair(build)
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(models[1], whole_batch_loss=True)
    for model in models:
        model.fit(x, data(21, 6, 2), batch_size=8, shuffle=False, verbose=0)
    assert_same(*models)


def test_metrics_do_not_change_the_weights_of_the_loss():
    """Keras multiplies masks into weights in place, and the gradient of the loss needs them."""

    def build():
        inputs = keras.Input([6, 3])
        return keras.Model(inputs, layers.Dense(2)(layers.Masking()(inputs)))

    x = data(21, 6, 3) * (np.arange(6) < 4)[:, None]
    models = pair(build)
    accumulate(models[1], whole_batch_loss=True)
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
        model.fit(x, data(21, 6, 2), 8, sample_weight=np.abs(data(21, 6)), shuffle=False, verbose=0)
    assert_same(*models)

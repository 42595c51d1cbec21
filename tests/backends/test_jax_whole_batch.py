"""whole_batch_loss=True on JAX: losses in which examples meet, in two passes."""

import keras
import numpy as np
import pytest
from jax_support import (
    accumulate,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
)
from keras import layers, ops

X, Y = data(21, 4), data(21, 2, seed=1)


def contrastive(y_true, y_pred):
    similarity = ops.matmul(y_pred, ops.transpose(y_pred))
    return ops.mean(ops.logsumexp(similarity, -1)) + ops.mean(ops.square(y_true - y_pred))


def dense():
    first = layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    return keras.Sequential([keras.Input([4]), first, layers.Dense(2)])


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_loss_that_compares_examples(run_eagerly):
    check(
        dense,
        X,
        Y,
        whole_batch_loss=True,
        compile=lambda: {"loss": contrastive, "metrics": ["mae"], "run_eagerly": run_eagerly},
        fit={"validation_data": (X[:7], Y[:7])},
    )


def test_dropout_is_the_same_in_both_passes():
    """The update is that of one gradient over the same draws: a finite difference shows it."""
    rate, step = 0.5, 1e-5
    layer = layers.Dense(5, "tanh")
    dropping = layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input([4]), layer, dropping, layers.Dense(2)])
    model.compile(keras.optimizers.SGD(rate), contrastive)
    accumulate(model, whole_batch_loss=True)
    start, seed = model.get_weights(), dropping.seed_generator.state.numpy()

    def loss_after(change):
        model.set_weights(start)
        layer.kernel.assign(layer.kernel + change)
        dropping.seed_generator.state.assign(seed)
        return model.train_on_batch(X, Y)

    change = np.zeros([4, 5])
    change[1, 2] = step
    slope = (loss_after(change) - loss_after(-change)) / (2 * step)
    loss_after(0.0)
    moved = (start[0] - model.get_weights()[0])[1, 2] / rate
    np.testing.assert_allclose(moved, slope, rtol=1e-6)
    assert not np.array_equal(dropping.seed_generator.state.numpy(), seed)


def test_predictions_without_examples_are_refused():
    inputs = keras.Input([4])
    model = keras.Model(inputs, ops.sum(layers.Dense(2)(inputs)))
    model.compile(keras.optimizers.SGD(0.1), lambda y_true, y_pred: y_pred)
    accumulate(model, whole_batch_loss=True)
    before = model.get_weights()
    with pytest.raises(ValueError, match="examples first"):
        model.fit(X, Y, batch_size=7, verbose=0)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)

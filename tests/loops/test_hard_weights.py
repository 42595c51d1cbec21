"""What users and adversaries have stumbled over in value_and_gradients."""

import numpy as np
import pytest
import tensorflow as tf

from macrobatch import value_and_gradients


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_come_once_where_weights_depend_on_the_table_too(mode):
    table = tf.Variable(np.random.default_rng(0).normal(size=(9, 1)))
    indices = tf.constant([1, 2, 2, 1, 5, 1])

    def loss_fn(indices):
        rows = tf.gather(table, indices)[:, 0]
        return rows**2, tf.exp(rows)

    def run(indices):
        return value_and_gradients(loss_fn, [table], indices, micro_batch_size=2)[1][0]

    found = (run if mode == "eager" else tf.function(run))(indices)
    with tf.GradientTape() as tape:
        losses, weights = loss_fn(indices)
        loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    expected = tf.convert_to_tensor(tape.gradient(loss, table))
    assert sorted(found.indices.numpy()) == [1, 2, 5]
    np.testing.assert_allclose(tf.convert_to_tensor(found), expected, rtol=1e-10)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("weight", [float("inf"), float("nan")])
@pytest.mark.parametrize("scalar", [False, True])
def test_weights_that_are_not_finite_are_refused(mode, weight, scalar):
    v = tf.Variable(2.0, dtype=tf.float64)

    def loss_fn(x):
        if scalar:
            return tf.reduce_mean(v * x), weight
        return v * x, tf.where(x > 2, tf.constant(weight, tf.float64), 1.0)

    def run(x):
        return value_and_gradients(loss_fn, v, x, micro_batch_size=2)

    error = ValueError if mode == "eager" else tf.errors.InvalidArgumentError
    with pytest.raises(error, match="finite"):
        (run if mode == "eager" else tf.function(run))(tf.range(4, dtype=tf.float64))


def test_a_weight_below_0_is_refused():
    v = tf.Variable(2.0)
    with pytest.raises(ValueError, match="0 or more"):
        value_and_gradients(lambda x: (v, -1.0), v, tf.ones([4]), micro_batch_size=2)


def test_a_python_number_is_not_rounded_to_float32():
    v = tf.Variable(2.0, dtype=tf.float64)
    weights = iter([0.1, 0.3])

    def loss_fn(x):
        return v * tf.reduce_mean(x), next(weights)

    x = tf.constant([1.0, 1.0, 5.0, 5.0], tf.float64)
    loss, gradient = value_and_gradients(loss_fn, v, x, micro_batch_size=2)
    expected = (0.1 * 1 + 0.3 * 5) / (0.1 + 0.3)
    np.testing.assert_allclose(gradient, expected, rtol=1e-15)
    np.testing.assert_allclose(loss, 2 * expected, rtol=1e-15)

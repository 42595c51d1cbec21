"""The terms of compiled losses, and what is known about the inside of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses

from macrobatch._keras import losses as _losses
from macrobatch._keras.losses import Denominators

Y_TRUE = np.random.default_rng(0).normal(size=(6, 4, 2))
Y_PRED = np.random.default_rng(1).normal(size=(6, 4, 2))
MASK = np.arange(4) < np.array([4, 1, 0, 0, 2, 3])[:, None]
WEIGHTS = np.random.default_rng(2).uniform(size=(6, 4))


def compiled(reduction):
    model = keras.Sequential([keras.Input([4, 2])])
    model.compile(loss=losses.MeanSquaredError(reduction=reduction))
    model._compile_loss(tf.constant(Y_TRUE), tf.constant(Y_PRED))
    return model._compile_loss


def terms(reduction, start, stop, mask, weights, whole=None):
    prediction = tf.constant(Y_PRED[start:stop])
    if mask:
        prediction._keras_mask = tf.constant(MASK[start:stop])
    part = Denominators(stop - start, stop - start, [])
    found = _losses.Terms(compiled(reduction), part, whole)
    sample_weight = tf.constant(WEIGHTS[start:stop]) if weights else None
    return found, found(tf.constant(Y_TRUE[start:stop]), prediction, sample_weight)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_parts_add_up_to_the_formula(reduction, mask, weights):
    """The formula of Keras' documentation, written out with NumPy."""
    cuts = [(0, 2), (2, 3), (3, 6)]
    counted = [terms(reduction, *cut, mask, weights)[0].part.terms[0] for cut in cuts]
    total = None if counted[0] is None else tf.add_n([tf.cast(d, tf.float64) for d in counted])
    whole = Denominators(6, 6, [total])
    found = sum(float(terms(reduction, *cut, mask, weights, whole)[1]) for cut in cuts)

    values = ((Y_TRUE - Y_PRED) ** 2).mean(-1)
    factors = (WEIGHTS if weights else 1.0) * (MASK if mask else 1.0) * np.ones_like(values)
    elements = MASK.sum() if mask else values.size
    expected = {
        "sum_over_batch_size": (values * factors).sum() / elements,
        "mean_with_sample_weight": (values * factors).sum() / factors.sum(),
        "sum": (values * factors).sum(),
    }[reduction]
    np.testing.assert_allclose(found, expected, rtol=1e-6 if _losses.mask_padding() else 1e-12)


def test_a_loss_with_a_call_of_its_own_is_taken_for_what_it_returns():
    class Own(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return keras.ops.mean((y_true - y_pred) ** 2)

    model = keras.Sequential([keras.Input([4, 2])])
    model.compile(loss=Own())
    model._compile_loss(tf.constant(Y_TRUE), tf.constant(Y_PRED))
    found = _losses.Terms(model._compile_loss, Denominators(6, 6, []))
    found(tf.constant(Y_TRUE), tf.constant(Y_PRED), None)
    assert len(found.scalars) == 1


@pytest.mark.parametrize(
    ("shape", "examples", "expected"),
    [([], 3, False), ([3], 3, True), ([1], 3, False), ([None], 3, True), ([1], "?", False)],
)
def test_what_has_a_value_for_each_example(shape, examples, expected):
    values = tf.TensorSpec(shape)
    assert _losses.per_example(values, 3 if examples == 3 else tf.constant(3)) == expected


def test_activity_losses_are_what_they_are_taken_for():
    layer = layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(tf.ones([5, 2]))
    assert float(scope.losses[0]) == (2.0 if _losses.activity_losses_are_means() else 10.0)


def test_the_private_names_are_there():
    found = compiled("sum")
    entry = found._flat_losses[0]
    assert entry._fields == ("path", "loss", "loss_weights", "name")
    assert found._metrics is found.metrics
    assert layers.Dense(1)._get_own_losses() == []

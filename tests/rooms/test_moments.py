"""BatchNormalization's moments, pooled. On any backend of Keras, see test_seam.py."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from macrobatch._engine import Engine
from macrobatch._keras import batch_norm
from macrobatch._keras.batch_norm import Moments
from macrobatch._keras.scope import Written


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def moments_of(values):
    values = np.asarray(values, "float64")
    count = ops.convert_to_tensor(np.float64(len(values)))
    zeros = np.zeros(values.shape[1:])
    mean = values.mean(0) if len(values) else zeros
    variance = values.var(0) if len(values) else zeros
    return Moments(count, ops.convert_to_tensor(mean), ops.convert_to_tensor(variance))


@pytest.mark.parametrize("sizes", [(1, 1), (5, 2), (0, 3), (3, 0)])
def test_two_sets_together(sizes):
    values = 100 + np.random.default_rng(0).normal(size=(sum(sizes), 4))
    pooled = moments_of(values[: sizes[0]]).merged(moments_of(values[sizes[0] :]))
    expected = moments_of(values)
    for found, wanted in zip(pooled, expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-12)


def test_nothing_and_nothing_is_nothing():
    layer = layers.BatchNormalization()
    layer.build([None, 3])
    nothing = batch_norm.nothing(layer)
    for value in nothing.merged(nothing):
        np.testing.assert_array_equal(value, np.zeros(value.shape))


@pytest.mark.parametrize("masked", [False, True])
def test_statistics_move_once_as_for_the_whole_batch(masked):
    x = 5 + np.random.default_rng(1).normal(size=(7, 4, 3))
    mask = np.arange(4) < np.array([4, 1, 2, 3, 4, 1, 2])[:, None] if masked else None
    whole, cut = layers.BatchNormalization(), layers.BatchNormalization()
    for layer in (whole, cut):
        layer.build([None, 4, 3])

    def call(layer, rows):
        given = None if mask is None else ops.convert_to_tensor(mask[rows])
        layer(ops.convert_to_tensor(x[rows]), training=True, mask=given)

    call(whole, slice(None))
    written = Written(cut.non_trainable_variables, cut.trainable_variables, Engine())
    total = None
    for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
        with batch_norm.recorded() as calls_of, written.scope(written.values()) as scope:
            call(cut, rows)
        changed, (moments,) = written.after(scope, calls_of)
        assert changed == [None] * len(changed)
        total = moments if total is None else total.merged(moments)
    written.write(changed, [total])
    for left, right in zip(whole.non_trainable_variables, cut.non_trainable_variables):
        np.testing.assert_allclose(left, right, rtol=1e-12)


def test_nothing_is_recorded_outside():
    layer = layers.BatchNormalization()
    with batch_norm.recorded() as calls_of:
        pass
    layer(ops.ones([2, 3]), training=True)
    assert calls_of == {}

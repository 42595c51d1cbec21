"""Sequences by length on torch: micro-batches of similar length, cut to their longest."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from torch_support import (
    accumulate,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
)


def tokens(examples=21, length=9):
    generator = np.random.default_rng(3)
    x = generator.integers(1, 9, size=(examples, length))
    for row, end in zip(x, generator.integers(1, length + 1, size=examples)):
        row[end:] = 0
    return x


X, Y = tokens(), data(21, 9, 2)
SEEN = []


class Seen(layers.Layer):
    """Tells the shapes that it sees."""

    supports_masking = True

    def call(self, x):
        SEEN.append(tuple(x.shape))
        return x


def tagger(mask_zero=True):
    inputs = keras.Input([None], dtype="int32")
    embedded = Seen()(layers.Embedding(9, 3, mask_zero=mask_zero)(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4, return_sequences=True)(embedded)))


@pytest.mark.parametrize(
    "size", [{"micro_batch_size": 3}, {"micro_batch_size": None, "tokens": 20}]
)
def test_the_update_is_that_of_the_whole_batch(size):
    SEEN.clear()
    check(tagger, X, Y, compile=lambda: {"metrics": ["mae"]}, axis=1, **size)
    assert len({shape[1] for shape in SEEN}) > 3


def test_the_loss_may_see_the_whole_batch():
    def loss(y_true, y_pred):
        positions = ops.cast(ops.any(ops.not_equal(y_pred, 0), -1), y_pred.dtype)
        return ops.logsumexp(ops.sum(ops.square(y_true - y_pred), -1) * positions)

    def build():
        inputs = keras.Input([None], dtype="int32")
        embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
        there = ops.cast(ops.not_equal(inputs, 0), "float64")
        return keras.Model(inputs, layers.Dense(2)(embedded) * ops.expand_dims(there, -1))

    check(build, X, Y, compile=lambda: {"loss": loss}, axis=1, whole_batch_loss=True)


def test_what_depends_on_padding_is_refused_before_anything_changes():
    model = tagger(mask_zero=False)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model, axis=1)
    before = [v.numpy().copy() for v in [*model.variables, *model.optimizer.variables]]
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(X, Y, verbose=0)
    for value, variable in zip(before, [*model.variables, *model.optimizer.variables]):
        np.testing.assert_array_equal(value, variable.numpy())


def test_a_fixed_length_is_named():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 3)(inputs)
    fixed = layers.Lambda(lambda x: ops.reshape(x, [-1, 27]), output_shape=(27,))(embedded)
    model = keras.Model(inputs, layers.Dense(2)(fixed))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model, axis=1)
    with pytest.raises(ValueError, match="fixed sequence length"):
        model.fit(X, data(21, 2), verbose=0)


def test_an_input_of_a_declared_size_is_not_cut():
    """It happens to have as many features as the sequences have positions."""

    def build():
        words, features = keras.Input([None], dtype="int32"), keras.Input([9])
        embedded = layers.Embedding(9, 3, mask_zero=True)(words)
        pooled = layers.GlobalAveragePooling1D()(embedded)
        return keras.Model(
            [words, features], layers.Dense(2)(layers.Concatenate()([pooled, features]))
        )

    check(build, [X, data(21, 9)], data(21, 2), axis=1)

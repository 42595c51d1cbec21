"""fit() on JAX: weights after several updates equal those of plain Keras, to 1e-10."""

import keras
import numpy as np
import pytest
from jax.experimental import sparse
from jax_support import (
    accumulate,
    assert_same,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
    pair,
)
from keras import layers

# `make test` leaves these out: test_same_cases.py has cases like them.
thorough = pytest.mark.thorough

X, Y = data(21, 4), data(21, 2, seed=1)


def dense(**options):
    return keras.Sequential([keras.Input([4]), layers.Dense(5, "tanh", **options), layers.Dense(2)])


def tagger():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4, return_sequences=True)(embedded)))


def tokens(examples=21, length=6):
    generator = np.random.default_rng(3)
    x = generator.integers(1, 9, size=(examples, length))
    for row, end in zip(x, generator.integers(1, length + 1, size=examples)):
        row[end:] = 0
    return x


def two_heads():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    tags = layers.Dense(2, name="tags")(embedded)
    value = layers.Dense(1, name="value")(layers.GlobalAveragePooling1D()(embedded))
    return keras.Model(inputs, {"tags": tags, "value": value})


def test_a_smaller_last_micro_batch_and_a_smaller_last_batch():
    check(dense, X, Y)


def test_an_epoch_of_one_micro_batch_each():
    with pytest.warns(UserWarning, match="Nothing is being accumulated"):
        check(dense, X, Y, micro_batch_size=100)


@thorough
def test_metrics_are_those_of_the_whole_batch():
    check(
        dense,
        X,
        Y,
        compile=lambda: {
            "metrics": ["mae"],
            "weighted_metrics": [keras.metrics.RootMeanSquaredError()],
        },
        fit={"sample_weight": np.linspace(0, 1, 21), "validation_data": (X[:7], Y[:7])},
    )


@thorough
def test_regularisers_count_once():
    check(lambda: dense(kernel_regularizer="l2", activity_regularizer="l2"), X, Y)


@thorough
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", "sum_over_batch_size"])
def test_reductions(reduction):
    check(
        dense,
        X,
        Y,
        compile=lambda: {"loss": keras.losses.MeanSquaredError(reduction=reduction)},
        fit={"sample_weight": np.linspace(0, 2, 21)},
    )


@thorough
@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum_over_batch_size"])
def test_masked_tokens(reduction):
    check(
        tagger,
        tokens(),
        data(21, 6, 2),
        compile=lambda: {"loss": keras.losses.MeanSquaredError(reduction=reduction)},
    )


@thorough
def test_several_outputs_with_denominators_of_their_own():
    loss = keras.losses.MeanSquaredError
    check(
        two_heads,
        tokens(),
        {"tags": data(21, 6, 2), "value": data(21, 1)},
        compile=lambda: {
            "loss": {"tags": loss(), "value": loss(reduction="mean_with_sample_weight")},
            "loss_weights": {"tags": 0.3, "value": 2.0},
        },
        fit={
            "sample_weight": {
                "tags": np.ones([21, 6]),
                "value": np.linspace(0, 3, 21),
            }
        },
    )


@thorough
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adam(0.1, clipnorm=0.5),
        lambda: keras.optimizers.AdamW(0.1, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
    ],
    ids=["clipnorm", "ema", "schedule", "loss scale"],
)
def test_optimizers_see_one_gradient(optimizer):
    check(dense, X, Y, optimizer=optimizer)


@thorough
def test_class_weights():
    labels = np.arange(21) % 3
    check(
        lambda: keras.Sequential([keras.Input([4]), layers.Dense(3, "softmax")]),
        X,
        labels,
        compile={"loss": "sparse_categorical_crossentropy"},
        fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
    )


def test_the_moving_statistics_of_batch_normalization_are_pooled():
    plain, accumulated = pair(
        lambda: keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(2)])
    )
    for model in (plain, accumulated):
        model.compile(keras.optimizers.SGD(0.0), "mse")
    accumulate(accumulated)
    for model in (plain, accumulated):
        context = pytest.warns(UserWarning, match="BatchNormalization normalises")
        if model is accumulated:
            with context:
                model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        else:
            model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_same(plain, accumulated)


def test_sparse_inputs():
    plain, accumulated = pair(dense)
    for model in (plain, accumulated):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(accumulated)
    for start in (0, 7):
        x, y = (part[start : start + 7] for part in (X, Y))
        of_plain = plain.train_on_batch(x, y)
        of_sparse = accumulated.train_on_batch(sparse.BCOO.fromdense(x), y)
        np.testing.assert_allclose(of_sparse, of_plain, rtol=1e-10)
    assert_same(plain, accumulated)
    found = accumulated.predict(sparse.BCOO.fromdense(X), batch_size=7, verbose=0)
    np.testing.assert_allclose(found, plain.predict(X, verbose=0), rtol=1e-10)


def test_train_on_batch_and_evaluate():
    plain, accumulated = pair(dense)
    accumulate(accumulated)
    found = []
    for model in (plain, accumulated):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        logs = [model.train_on_batch(X, Y, np.linspace(0, 1, 21)) for _ in range(2)]
        found.append(
            [logs, model.evaluate(X, Y, batch_size=20, verbose=0), model.test_on_batch(X, Y)]
        )
    assert_same(plain, accumulated)
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-10)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": False}])
def test_without_a_compiler(options):
    y = {"tags": data(21, 6, 2), "value": data(21, 1)}
    check(two_heads, tokens(), y, compile={"loss": "mse", **options})
    check(dense, X, Y, compile={"loss": "mse", **options})


def test_several_steps_per_execution():
    check(dense, X, Y, compile={"steps_per_execution": 2})

"""fit() on torch: weights after several updates equal those of plain Keras, to 1e-10."""

import keras
import numpy as np
import pytest
from keras import layers
from torch_support import (
    accumulate,
    assert_same,
    check,
    data,
    double_precision,  # noqa: F401 - a fixture
    pair,
    torch,
)

from macrobatch._checks import ExactnessWarning

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


def test_regularisers_count_once():
    check(lambda: dense(kernel_regularizer="l2", activity_regularizer="l2"), X, Y)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", "sum_over_batch_size"])
def test_reductions(reduction):
    check(
        dense,
        X,
        Y,
        compile=lambda: {"loss": keras.losses.MeanSquaredError(reduction=reduction)},
        fit={"sample_weight": np.linspace(0, 2, 21)},
    )


@pytest.mark.parametrize("reduction", ["mean_with_sample_weight", "sum_over_batch_size"])
def test_masked_tokens(reduction):
    check(
        tagger,
        tokens(),
        data(21, 6, 2),
        compile=lambda: {"loss": keras.losses.MeanSquaredError(reduction=reduction)},
    )


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


def test_torch_data_loaders():
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    check(dense, loader, batch_size=None)


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


def test_weights_of_the_user_stay_as_they_are():
    """Keras multiplies masks into sample weights in place, and micro-batches are views."""
    model = tagger()
    model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
    accumulate(model)
    weights = torch.ones([21, 6], dtype=torch.float64)  # of another dtype, Keras makes copies
    model.train_on_batch(tokens(), data(21, 6, 2), weights)
    model.test_on_batch(tokens(), data(21, 6, 2), weights)
    assert bool((weights == 1).all())


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training=training)


def own_loss():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    return OwnLoss(inputs, layers.Dense(2)(embedded))


quiet_about_own_losses = pytest.mark.filterwarnings("ignore:The model overrides compute_loss")


@quiet_about_own_losses
def test_metrics_do_not_change_the_weights_of_an_own_loss():
    """Keras multiplies masks into weights in place, and the gradient of the loss needs them."""
    x = np.tile(tokens()[5:6], (21, 1))
    models = pair(own_loss)
    accumulate(models[1])
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"])
        weights = np.abs(data(21, 6))
        model.fit(x, data(21, 6, 2), 8, sample_weight=weights, shuffle=False, verbose=0)
    assert_same(*models)


@quiet_about_own_losses
@pytest.mark.examples_meet
def test_a_trial_does_not_change_the_weights_of_an_own_loss():
    """Two runs of the same examples would come to different numbers."""
    model = own_loss()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    accumulate(model)
    with pytest.warns(ExactnessWarning, match="Examples meet in these losses: 'compute_loss'"):
        model.fit(tokens(), data(21, 6, 2), 8, sample_weight=np.abs(data(21, 6)), verbose=0)


def test_a_mask_of_one_output_does_not_reach_the_weights_of_another():
    """In plain Keras it does on torch, so the reference has weights of their own."""

    def build():
        inputs = keras.Input([None], dtype="int32")
        masked = layers.Embedding(9, 3, mask_zero=True)(inputs)
        plain = layers.Embedding(9, 3)(inputs)
        return keras.Model(inputs, [layers.Dense(2)(masked), layers.Dense(2)(plain)])

    y = [data(21, 6, 2), data(21, 6, 2, seed=1)]
    weights = torch.tensor(np.linspace(0.5, 2, 21 * 6).reshape(21, 6))
    reference, accumulated = pair(build)
    accumulate(accumulated)
    for model in (reference, accumulated):
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"])
        shared = [weights.clone(), weights.clone()] if model is reference else [weights, weights]
        model.train_on_batch(tokens(), y, shared)
    assert_same(reference, accumulated)

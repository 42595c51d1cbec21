"""Equivalence cases: losses, their reductions, masks and weights, regularisers, metrics."""

import keras
import numpy as np
from builders import (
    SCORES,
    TAGS,
    TWO_INPUTS,
    AddsTo,
    N,
    OwnListOfMetrics,
    OwnMetrics,
    X,
    Y,
    data,
    dense,
    linear,
    masked,
    own_loss,
    padded,
    recurrent,
    two_outputs,
    with_metrics,
)
from case import case
from keras import layers, losses, ops, optimizers
from support import KERAS

REDUCTIONS = ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"]
CASES = {}


def slow_sgd():
    return optimizers.SGD(0.01)


def weights(*shape, seed=1):
    return {"sample_weight": np.random.default_rng(seed).uniform(0, 2, shape)}


# Reductions, with and without weights


def mse(reduction):
    return lambda: losses.MeanSquaredError(reduction=reduction)


for reduction in REDUCTIONS:
    quick = "graph" if reduction == "sum_over_batch_size" else "eager"
    CASES[f"reduction-{reduction}"] = case(dense, X, Y, loss=mse(reduction), quick=quick)
    others = {"sum_over_batch_size": "replicas", "mean_with_sample_weight": "graph"}
    CASES[f"reduction-{reduction}-weights"] = case(
        dense,
        X,
        Y,
        loss=mse(reduction),
        fit=weights(N),
        quick=f"eager {others.get(reduction)}",
    )

CASES["no-reduction"] = case(
    dense, X, Y, loss=mse(None), optimizer=slow_sgd, quick="graph", backends="tensorflow"
)  # trains as a sum; elsewhere plain Keras needs a scalar
CASES["weights-that-cancel-in-a-micro-batch"] = case(
    dense,
    data(16, 4),
    data(16, 2, seed=1),
    micro_batch_size=2,
    loss=mse("mean_with_sample_weight"),
    fit={"sample_weight": np.tile([1.0, -1.0, 2.0, 3.0], 4)},
    quick="graph",
)

# Masks


def crossentropy(reduction="sum_over_batch_size", **options):
    return lambda: losses.SparseCategoricalCrossentropy(reduction=reduction, **options)


def masks(reduction, fit=None, **options):
    loss = crossentropy(reduction)
    return case(
        masked, padded(), TAGS, loss=loss, fit=fit, weighted_metrics=["accuracy"], **options
    )


for reduction in REDUCTIONS:
    others = {"sum_over_batch_size": "graph replicas"}
    CASES[f"mask-{reduction}"] = masks(
        reduction, quick=others.get(reduction, "eager"), wrong_metrics="jax"
    )
    CASES[f"mask-{reduction}-weights-of-tokens"] = masks(
        reduction, weights(N, 6), quick="eager", wrong_metrics="jax torch"
    )
    quick = {"mean_with_sample_weight": "graph"}.get(reduction, "")
    CASES[f"mask-{reduction}-weights-of-examples"] = masks(
        reduction,
        weights(N, 1),
        quick=quick,
        wrong_metrics="jax",
        backends="tensorflow jax",  # On torch, Keras cannot multiply masks into such weights.
    )

CASES["no-token-in-a-micro-batch"] = case(
    masked, padded(zero_in_first=4), TAGS, loss=crossentropy(), quick="graph replicas"
)
CASES["no-token-in-a-batch"] = case(
    masked, padded(zero_in_first=9), TAGS, loss=crossentropy(), quick="eager"
)
CASES["recurrent"] = case(
    recurrent, padded(zero_in_first=4), TAGS, loss=crossentropy(), quick="graph"
)
CASES["mask-from-labels"] = case(
    masked, padded(), TAGS, loss=crossentropy(ignore_class=2), quick="eager"
)

# Other losses


def distance(y_true, y_pred):
    return ops.sum(ops.abs(y_true - y_pred), axis=-1)


class Flat(losses.Loss):
    def call(self, y_true, y_pred):
        return ops.reshape((y_true - y_pred) ** 2, [-1])


class OwnCall(losses.Loss):
    """Returns a vector, on whose sum Keras trains."""

    def __call__(self, y, y_pred, sample_weight=None):
        return ops.mean(ops.square(y - y_pred), -1)


def mean_of_all(y_true, y_pred):
    labels = ops.one_hot(ops.cast(y_true, "int32"), 3)
    return ops.mean((labels - y_pred) ** 2)


def scalar(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2)


CASES["function"] = case(dense, X, Y, loss=distance, quick="eager")
CASES["class-weight"] = case(
    lambda: dense(3, activation="softmax"),
    X,
    np.random.default_rng(0).integers(0, 3, N),
    loss="sparse_categorical_crossentropy",
    fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}},
    metrics=["accuracy"],
    weighted_metrics=["sparse_categorical_crossentropy"],
    quick="graph",
)
CASES["sum-of-flattened-values"] = case(
    dense,
    data(16, 4),
    data(16, 2, seed=1),
    micro_batch_size=4,
    loss=lambda: Flat(reduction="sum"),
    optimizer=slow_sgd,
    quick="eager",
)
CASES["own-call"] = case(
    dense,
    X,
    Y,
    loss=lambda: OwnCall(),
    optimizer=slow_sgd,
    quick="graph eager",
    backends="tensorflow",
)
CASES["scalar-mean"] = case(
    lambda: dense(name="head"),
    X,
    Y,
    loss=scalar,
    warns="one scalar for the batch.*'head'",
    quick="graph eager",
    elsewhere="torch",
)
CASES["Dice-by-example"] = case(
    lambda: dense(activation="sigmoid"),
    X,
    (Y > 0).astype("float64"),
    loss=lambda: losses.Dice(axis=1),
    quick="graph",
    elsewhere="torch",
)
# An older Keras adds an epsilon to each mask, which the mean then has too.
if KERAS > 12:
    CASES["scalar-mean-over-a-masked-output"] = case(
        masked,
        padded(),
        TAGS,
        loss=mean_of_all,
        quick="eager",
        filters=["ignore::macrobatch.ExactnessWarning"],
    )

# Several outputs, several losses

LABELS = {"tags": TAGS, "score": SCORES}
CASES["outputs-list"] = case(
    lambda: two_outputs("list"),
    TWO_INPUTS,
    [TAGS, SCORES],
    loss=["sparse_categorical_crossentropy", "mae"],
    loss_weights=[0.3, 2.0],
    per_mode=True,
    quick="eager",
)
CASES["outputs-dict"] = case(
    two_outputs,
    TWO_INPUTS,
    LABELS,
    loss={"tags": "sparse_categorical_crossentropy", "score": "mae"},
    loss_weights={"tags": 0.3, "score": 2.0},
    per_mode=True,
    quick="graph eager",
)
CASES["outputs-nested"] = case(
    lambda: two_outputs("nested"),
    TWO_INPUTS,
    {"a": {"d": TAGS}, "b": {"c": SCORES}},
    loss={"a": {"d": "sparse_categorical_crossentropy"}, "b": {"c": "mae"}},
    per_mode=True,
    quick="eager",
)
CASES["outputs-with-their-own-weights"] = case(
    two_outputs,
    TWO_INPUTS,
    LABELS,
    loss=lambda: {
        "tags": losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
        "score": losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
    },
    weighted_metrics={"tags": ["accuracy"], "score": ["mse"]},
    wrong_metrics="jax",
    per_mode=True,
    fit={"sample_weight": {"tags": data(N, 6, seed=5) ** 2, "score": data(N, seed=6) ** 2}},
    quick="graph",
)
CASES["output-without-loss"] = case(
    two_outputs,
    TWO_INPUTS,
    LABELS,
    loss={"tags": "sparse_categorical_crossentropy", "score": None},
    per_mode=True,
    filters=["ignore:Gradients do not exist"],
    quick="eager",
)


def two_heads():
    inputs = keras.Input([4])
    return keras.Model(inputs, [layers.Dense(2, name=name)(inputs) for name in ("a", "b")])


CASES["outputs-without-reduction"] = case(
    two_heads,
    X,
    [Y, data(N, 2, seed=2)],
    loss=lambda: [losses.MeanSquaredError(reduction=None) for _ in range(2)],
    per_mode=True,
    optimizer=slow_sgd,
    quick="graph",
    backends="tensorflow",
)
CASES["outputs-one-without-reduction"] = case(
    two_heads,  # Keras adds the mean to the value of each example.
    X,
    [Y, data(N, 2, seed=2)],
    loss=lambda: [losses.MeanSquaredError(reduction=None), "mse"],
    per_mode=True,
    optimizer=slow_sgd,
    quick="graph eager",
    backends="tensorflow",
)
CASES["several-losses-of-one-output"] = case(
    lambda: dense(name="output"),
    X,
    Y,
    loss=lambda: ["mse", losses.MeanSquaredError(reduction=None, name="other")],
    quick="eager",
)

# Regularisers and add_loss


def regularized():
    first = {"kernel_regularizer": "l1l2", "bias_regularizer": "l2"}
    return linear(layers.Dense(2, activity_regularizer="l2"), **first)


CASES["regularizers"] = case(regularized, X, Y, elsewhere="jax jax-not-compiled torch")


def of_each(x):
    return ops.mean(ops.square(x), axis=-1)


def of_all(x):
    return ops.mean(ops.square(x))


def with_losses_of(function):
    return lambda: linear(AddsTo(function), layers.Dense(2))


CASES["add_loss-vectors"] = case(
    with_losses_of(of_each), X, Y, optimizer=slow_sgd, quick="graph eager"
)
CASES["add_loss-scalars"] = case(
    with_losses_of(of_all), X, Y, filters=["ignore::macrobatch.ExactnessWarning"], quick="eager"
)
CASES["add_loss-only"] = case(
    lambda: linear(AddsTo(of_each)), X, loss=None, optimizer=slow_sgd, quick="eager"
)
CASES["regularizer-and-mask"] = case(
    lambda: masked(kernel_regularizer="l2", activity_regularizer="l2"),
    padded(),
    TAGS,
    loss=crossentropy(),
    quick="eager",
)
CASES["regularizer-and-loss-scale"] = case(
    lambda: dense(kernel_regularizer="l2"),
    X,
    Y,
    optimizer=lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
    quick="graph",
)

# A compute_loss of the user's


def mean_and_regularizers(model, y, y_pred):
    return scalar(y, y_pred) + sum(model.losses)


def of_keras(model, y, y_pred):
    """On replicas, Keras divides it."""
    return keras.Model.compute_loss(model, None, y, y_pred)


def twice_that_of_keras(model, y, y_pred):
    return 2 * of_keras(model, y, y_pred)


def mean_of_tokens(model, y, y_pred):
    there = ops.cast(y != 0, y_pred.dtype)
    return ops.sum(there * (y - y_pred) ** 2) / ops.sum(there)


def tokens_of(x, y, sample_weight):
    assert sample_weight is None
    return ops.sum(ops.cast(y != 0, "float64"))


def number_of_tokens(x, y, sample_weight):
    """A number of Python, which TensorFlow would round to float32, where there is no graph."""
    count = tokens_of(x, y, sample_weight) / 10
    try:
        return float(count)
    except TypeError:
        return count


def set_own_loss(model):
    model.compute_loss = lambda x, y, y_pred, sample_weight=None, training=True: scalar(y, y_pred)


ONE_DEVICE = "graph eager compiled"
OVERRIDES = "overrides compute_loss"
CASES["compute_loss"] = case(
    own_loss(mean_and_regularizers), X, Y, loss=None, warns=OVERRIDES, quick="graph eager replicas"
)
CASES["compute_loss-of-keras"] = case(own_loss(of_keras), X, Y, warns=OVERRIDES, quick="replicas")
CASES["compute_loss-of-several-outputs"] = case(
    own_loss(twice_that_of_keras, ["a", "b"]),
    X[:16],
    {"a": Y[:16], "b": -Y[:16]},
    loss={"a": "mse", "b": "mae"},
    micro_batch_size=4,  # Even sizes: metrics that compute_loss updates see micro-batches.
    modes=ONE_DEVICE,
    per_mode=True,
    warns=OVERRIDES,
    quick="eager",
)
CASES["compute_loss-of-the-instance"] = case(
    dense, X, Y, before=set_own_loss, warns=OVERRIDES, quick="graph", elsewhere=""
)
some, none = Y * (data(N, 2, seed=5) > 0), Y.copy()
some[::3, 0] = 1.0  # in every micro-batch
none[:3] = none[8:11] = 0.0  # in the first of two batches, where the loss is 0 / 0
CASES["micro_batch_weight"] = case(
    own_loss(mean_of_tokens),
    X,
    some,
    loss=None,
    cut={"micro_batch_weight": number_of_tokens},
    modes=ONE_DEVICE,
    quick="graph eager",
    elsewhere="torch",
)
CASES["micro_batch_weight-of-nothing"] = case(
    own_loss(mean_of_tokens),
    X,
    none,
    loss=None,
    cut={"micro_batch_weight": tokens_of},
    modes=ONE_DEVICE,
    quick="graph eager",
)

# Metrics

CLASSES = np.random.default_rng(0).integers(0, 2, size=(N, 1))
CASES["metrics"] = case(
    lambda: dense(1, activation="sigmoid"),
    X,
    CLASSES,
    loss="binary_crossentropy",
    metrics=lambda: [
        "accuracy",
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="p"),
    ],
    weighted_metrics=lambda: [keras.metrics.Recall(name="r")],
    fit={"sample_weight": np.arange(N), "validation_data": (data(11, 4), CLASSES[:11])},
    epochs=2,  # Metrics start anew in each.
    quick="graph eager",
)
CASES["compute_metrics"] = case(
    lambda: with_metrics(OwnMetrics),
    X,
    Y,
    modes=ONE_DEVICE,
    per_mode=True,  # Eager Keras 3.12 rounds the loss to float32.
    quick="graph eager",
    elsewhere="torch",
)
CASES["metrics-that-are-a-property"] = case(
    lambda: with_metrics(OwnListOfMetrics), X, Y, modes=ONE_DEVICE, quick="eager"
)

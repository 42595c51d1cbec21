"""Equivalence cases: losses, their reductions, masks and weights, regularisers, metrics."""

import keras
import numpy as np
from builders import (
    SCORES,
    TAGS,
    TWO_INPUTS,
    N,
    Penalty,
    X,
    Y,
    data,
    dense,
    linear,
    masked,
    padded,
    recurrent,
    two_outputs,
)
from case import case
from keras import layers, losses, optimizers
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
    return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)


class Flat(losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.reshape((y_true - y_pred) ** 2, [-1])


def mean_of_all(y_true, y_pred):
    labels = keras.ops.one_hot(keras.ops.cast(y_true, "int32"), 3)
    return keras.ops.mean((labels - y_pred) ** 2)


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
CASES["add_loss-vectors"] = case(
    lambda: linear(Penalty(True), layers.Dense(2)),
    X,
    Y,
    optimizer=slow_sgd,
    quick="graph eager",
)
CASES["add_loss-scalars"] = case(
    lambda: linear(Penalty(False), layers.Dense(2)),
    X,
    Y,
    filters=["ignore::macrobatch.ExactnessWarning"],
    quick="eager",
)
CASES["add_loss-only"] = case(
    lambda: linear(Penalty(True)), X, loss=None, optimizer=slow_sgd, quick="eager"
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

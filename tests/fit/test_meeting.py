"""Examples that meet are found, and named: in the layer, or in the loss, where they do."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import macrobatch
from macrobatch import ExactnessWarning

FEATURES, CLASSES = 6, 3


def data(examples=48, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=[examples, FEATURES]), random.integers(0, CLASSES, [examples, 1])


def similarities(z):
    z = ops.normalize(z, axis=-1)
    return ops.matmul(z, ops.transpose(z))


def not_itself(z):
    return 1.0 - ops.eye(ops.shape(z)[0], dtype=z.dtype)


# Losses. Each gives one value for each example, if it can.


def contrastive(y_true, y_pred):
    """Each example and the example after it belong together, in a softmax over all others."""
    others = similarities(y_pred) / 0.5 - 1e9 * (1.0 - not_itself(y_pred))
    partners = ops.roll(ops.arange(ops.shape(y_pred)[0]), 1)
    return keras.losses.sparse_categorical_crossentropy(partners, others, from_logits=True)


def batch_hard_triplet(y_true, y_pred):
    distances = 1.0 - similarities(y_pred)
    same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), y_pred.dtype)
    farthest = ops.max(distances * same * not_itself(y_pred), axis=1)
    nearest = ops.min(distances + 1e3 * same, axis=1)
    return ops.softplus(farthest - ops.minimum(nearest, 2.0))


def supervised_contrastive(y_true, y_pred):
    logits = similarities(y_pred) / 0.5
    others = ops.exp(logits) * not_itself(y_pred)
    same = ops.cast(ops.equal(y_true, ops.transpose(y_true)), y_pred.dtype) * not_itself(y_pred)
    log_shares = logits - ops.log(ops.sum(others, axis=1, keepdims=True))
    return -ops.sum(log_shares * same, axis=1) / ops.maximum(ops.sum(same, axis=1), 1.0)


def correlation(y_true, y_pred):
    """One minus Pearson's correlation, over the batch."""
    x, y = (v - ops.mean(v) for v in (ops.cast(y_true, y_pred.dtype)[:, 0], y_pred[:, 0]))
    return 1.0 - ops.sum(x * y) / ops.sqrt(ops.sum(x * x) * ops.sum(y * y) + 1e-9)


def sorted_distance(y_true, y_pred):
    """The distance of two distributions: sorted predictions against sorted labels."""
    labels = ops.sort(ops.cast(y_true, y_pred.dtype)[:, 0])
    return ops.abs(ops.sort(y_pred[:, 0]) - labels)


# Layers


class Centred(layers.Layer):
    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class AcrossExamples(layers.Layer):
    """Attention of each example to all others."""

    def __init__(self, **options):
        super().__init__(**options)
        self.query, self.key = layers.Dense(4), layers.Dense(4)

    def call(self, x):
        scores = ops.matmul(self.query(x), ops.transpose(self.key(x)))
        return x + ops.matmul(ops.softmax(scores), x)


class Router(layers.Layer):
    """Two experts. Each takes as many examples as it has room for, the first ones first."""

    def __init__(self, **options):
        super().__init__(**options)
        self.gate, self.experts = layers.Dense(2), [layers.Dense(FEATURES) for _ in range(2)]

    def call(self, x):
        chosen = ops.one_hot(ops.argmax(self.gate(x), axis=-1), 2, dtype=x.dtype)
        places = ops.cumsum(chosen, axis=0) * chosen
        room = ops.cast(ops.shape(x)[0] // 4, x.dtype)
        kept = chosen * ops.cast(places <= room, x.dtype)
        return x + sum(kept[:, i : i + 1] * self.experts[i](x) for i in range(2))


class Balanced(layers.Layer):
    """Gives the balance of a router to add_loss: a product of means over the batch."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 2))

    def call(self, x):
        gates = ops.softmax(ops.matmul(x, self.gate))
        self.add_loss(ops.sum(ops.square(ops.mean(gates, axis=0))))
        return x


def build(*inner, outputs=CLASSES):
    return keras.Sequential(
        [
            keras.Input([FEATURES]),
            layers.Dense(FEATURES, activation="tanh"),
            *inner,
            layers.Dense(outputs),
        ]
    )


CROSSENTROPY = "sparse_categorical_crossentropy"


def messages_of(model, x=None, y=None, *, loss="mse", size=6, batch_size=24, fit=None, **options):
    """What is said of examples that meet, when a model is fitted twice."""
    x, y = data() if x is None else (x, y)
    if not model.compiled:
        model.compile(keras.optimizers.SGD(0.01), loss, **options)
    macrobatch.accumulate(model, size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.fit(x, y, batch_size=batch_size, verbose=0, **(fit or {}))
    found = [str(w.message) for w in caught if issubclass(w.category, ExactnessWarning)]
    return [message for message in found if "xamples meet" in message]


LOSSES = [
    contrastive,
    batch_hard_triplet,
    supervised_contrastive,
    correlation,
    sorted_distance,
    keras.losses.Dice(name="dice"),
]
LAYERS = [Centred, AcrossExamples, Router]


def name_of(loss):
    return getattr(loss, "name", None) or loss.__name__


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_losses_in_which_examples_meet(loss, size):
    (message,) = messages_of(
        build(outputs=1 if name_of(loss) == "dice" else CLASSES), loss=loss, size=size
    )
    assert message.startswith(f"Examples meet in these losses: {name_of(loss)!r}. ")
    assert "whole_batch_loss=True" in message


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_in_which_examples_meet(layer, size):
    (message,) = messages_of(build(layer(name="culprit"), layers.Dense(4)), size=size)
    assert message.startswith("Examples meet in these layers: 'culprit'. ")
    assert "LayerNormalization" in message

"""Models for the tests of verify: those that are exact, and those that are not, each for a reason.

A case is a function that returns a compiled model, its batch and settings of `accumulate`.
"""

import keras
import numpy as np
from keras import layers, ops

EXAMPLES = 14
SIZE = {"micro_batch_size": 4}  # with a smaller last one


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=[EXAMPLES, *shape])


def tokens(length=6, vocabulary=9, seed=0):
    """Token ids that end with zeros, in examples of various lengths."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, vocabulary, [EXAMPLES, length])
    return ids * (np.arange(length) < random.integers(1, length + 1, [EXAMPLES, 1]))


X, Y = numbers(5), numbers(1, seed=1)
L1 = keras.regularizers.L1L2(l1=0.01)  # L1 of Keras 3.12 is float32.


# One by one, JAX compiles each operation by itself, which takes longer than a compiled step.
EAGER = keras.backend.backend() != "jax"


def compiled(model, loss="mse", optimizer="adam", eager=EAGER, **options):
    model.compile(optimizer, loss, run_eagerly=eager, **options)
    return model


def sequential(*parts, inputs=None, name=None, **options):
    first = keras.Input([5]) if inputs is None else inputs
    return compiled(keras.Sequential([first, *parts], name=name), **options)


def mlp(*between, **options):
    return sequential(layers.Dense(4, activation="tanh"), *between, layers.Dense(1), **options)


class ByNumber(layers.Layer):
    """Divides by the number of examples."""

    def call(self, inputs):
        return inputs / ops.sum(ops.ones_like(inputs), axis=0)


class DrawsByPlace(layers.Layer):
    """Draws the same numbers each time, by a number that is its seed."""

    def call(self, inputs, training=None):
        drawn = keras.random.normal(ops.shape(inputs), seed=3, dtype=inputs.dtype)
        return inputs + drawn if training else inputs


def of_number(y_true, y_pred):
    losses = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return losses / ops.sum(ops.ones_like(losses))


class Centered(layers.Layer):
    """Takes away the mean over the examples."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0)


class Sampling(layers.Layer):
    """Adds noise, and a loss for it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)))
        noise = keras.random.normal(ops.shape(inputs), dtype=inputs.dtype, seed=self.seeds)
        return inputs + 0.1 * noise


class Balanced(layers.Layer):
    """Adds a scalar in which examples meet, as routers do."""

    def call(self, inputs):
        self.add_loss(ops.sum(ops.square(ops.mean(inputs, axis=0))))
        return inputs


class PerExample(layers.Layer):
    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs), axis=-1))
        return inputs


class Counting(layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.count = self.add_weight(shape=[], initializer="zeros", trainable=False, name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.assign_add(1.0)
        return inputs


class OwnLoss(keras.Model):
    """A subclassed model with a loss of its own: a mean over examples, or over tokens."""

    def __init__(self, over="examples"):
        super().__init__()
        self.over = over
        self.hidden = layers.Dense(3, activation="tanh")
        self.head = layers.Dense(2)

    def get_config(self):
        return {"over": self.over}

    def call(self, inputs):
        return self.head(self.hidden(inputs))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = ops.square(ops.cast(y, y_pred.dtype) - y_pred)
        if self.over == "examples":
            return ops.mean(losses)
        if self.over == "sum":
            return ops.sum(losses)
        real = ops.cast(ops.not_equal(y, 0), y_pred.dtype)
        return ops.sum(losses * real) / ops.sum(real)


class WithTracker(keras.Model):
    """Updates a metric with the scalar loss in compute_loss."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(1)
        self.tracker = keras.metrics.Mean(name="tracked")

    def call(self, inputs):
        return self.head(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean(ops.square(y - y_pred))
        self.tracker.update_state(loss)
        return loss


class NotCopied(keras.Model):
    """Holds a function, so that nobody can make another one."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.hidden, self.head = layers.Dense(4), layers.Dense(1)

    def call(self, inputs):
        return self.head(self.function(self.hidden(inputs)))


def contrastive(y_true, y_pred):
    """In-batch softmax: one value for each example, which depends on the others."""
    scores = ops.matmul(y_pred, ops.transpose(y_pred))
    return -ops.diagonal(ops.log_softmax(scores / 0.5, axis=-1))


def per_example(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def sum_of_all(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def built(model, x=X):
    model(x)
    return model


def in_policy(policy, build):
    def make():
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        return build()

    return make


def text_model(eager=EAGER, head=None, **options):
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(9, 3, mask_zero=True)(inputs)
    outputs = layers.Dense(2)(layers.GRU(3, return_sequences=True)(hidden))
    return compiled(keras.Model(inputs, outputs), eager=eager, **options)


def two_outputs():
    inputs = keras.Input([5])
    shared = layers.Dense(4, activation="tanh")
    hidden = shared(layers.Dense(5)(shared(inputs)[:, :4]))
    outputs = {"a": layers.Dense(1, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)}
    return compiled(
        keras.Model(inputs, outputs),
        loss={"a": "mse", "b": keras.losses.CategoricalCrossentropy(from_logits=True)},
        loss_weights={"a": 0.3, "b": 1.0},
        metrics={"a": ["mae"]},
    )


def nested():
    inner = keras.Sequential([keras.Input([5]), layers.Dense(4), layers.LayerNormalization()])
    inputs = keras.Input([5])
    outputs = layers.Dense(1)(layers.Lambda(lambda t: t * 2.0)(inner(inputs)))
    return compiled(keras.Model(inputs, outputs))


def attention():
    inputs = keras.Input([6, 3])
    hidden = layers.MultiHeadAttention(2, 2, dropout=0.3)(inputs, inputs)
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden))))


def frozen_norm():
    model = mlp(layers.BatchNormalization())
    model.layers[1].trainable = False
    return compiled(model)


def schedule(steps):
    return keras.optimizers.schedules.CosineDecay(0.1, steps)


TEXT = tokens()
TAGS = numbers(6, 2, seed=2)
OWN = numbers(2, seed=3) * (numbers(2, seed=4) > 0)

# Those that others are like.
SLOW = ["masked-text", "convolution", "averages", "sum", "per-example-losses"]

EXACT = {
    "dense": lambda: (mlp(), (X, Y)),
    "graph": lambda: (mlp(layers.Dropout(0.4), eager=False, metrics=["mae"]), (X, Y)),
    "clipped": lambda: (
        mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1)),
        (X, Y),
    ),
    "regularized": lambda: (
        mlp(layers.Dense(4, kernel_regularizer="l2", activity_regularizer=L1)),
        (X, Y),
    ),
    "random-layers": lambda: (
        mlp(
            layers.Dropout(0.5),
            layers.GaussianNoise(0.3),
            layers.GaussianDropout(0.2),
            layers.AlphaDropout(0.2),
        ),
        (X, Y),
    ),
    "sampling": lambda: (mlp(Sampling()), (X, Y)),
    "masked-text": lambda: (text_model(optimizer="sgd"), (TEXT, TAGS)),
    "by-length": lambda: (
        text_model(optimizer="sgd"),
        (TEXT, TAGS),
        {"micro_batch_tokens": 12, "sequence_axis": 1},
    ),
    "weights": lambda: (
        mlp(loss=keras.losses.MeanSquaredError("mean_with_sample_weight")),
        (X, Y, np.abs(numbers(seed=5))),
    ),
    "two-outputs": lambda: (
        two_outputs(),
        (X, {"a": Y, "b": np.eye(3)[np.arange(EXAMPLES) % 3]}),
    ),
    "nested": lambda: (nested(), (X, Y)),
    "attention": lambda: (attention(), (numbers(6, 3), Y)),
    "convolution": lambda: (
        sequential(
            layers.Conv2D(2, 2), layers.GroupNormalization(1), layers.Flatten(), layers.Dense(1),
            inputs=keras.Input([4, 4, 1]),
        ),
        (numbers(4, 4, 1), Y),
    ),
    "frozen-batch-norm": lambda: (frozen_norm(), (X, Y)),
    "own-loss": lambda: (compiled(OwnLoss()), (X, numbers(2))),
    "own-loss-over-tokens": lambda: (
        compiled(OwnLoss("tokens")),
        (X, OWN),
        {**SIZE, "micro_batch_weight": lambda x, y, sample_weight: ops.count_nonzero(y)},
    ),
    "not-copied": in_policy(
        "float32",
        lambda: (
            built(compiled(NotCopied(lambda t: ops.tanh(t)))),
            (X.astype("float32"), Y.astype("float32")),
        ),
    ),
    "mixed": in_policy(
        "mixed_float16",
        lambda: (mlp(optimizer="adam"), (X.astype("float32"), Y.astype("float32"))),
    ),
    "per-example-losses": lambda: (mlp(PerExample(), loss=per_example), (X, Y)),
    "lion": lambda: (mlp(optimizer=keras.optimizers.Lion(1e-3)), (X, Y)),
    "rows-with-sgd": lambda: (
        sequential(
            layers.Embedding(9, 2), layers.Flatten(), layers.Dense(1),
            inputs=keras.Input([6], dtype="int32"), optimizer="sgd",
        ),
        (TEXT, Y),
    ),
    "averages": lambda: (
        mlp(optimizer=keras.optimizers.AdamW(schedule(100), use_ema=True, ema_momentum=0.9)),
        (X, Y),
    ),
    "sum": lambda: (mlp(loss=keras.losses.MeanSquaredError("sum")), (X, Y)),
    "softmax-bias": lambda: (
        # A bias before a softmax over positions has no gradient but rounding.
        sequential(
            layers.Dense(1), layers.Flatten(), layers.Softmax(), layers.Dense(1),
            inputs=keras.Input([5, 1]),
        ),
        (X[:, :, None], Y),
    ),
    "contrastive-of-the-whole-batch": lambda: (
        mlp(layers.Dense(3), layers.Dropout(0.2), loss=contrastive),
        (X, Y),
        {**SIZE, "whole_batch_loss": True},
    ),
}  # fmt: skip

WHOLE = "whole_batch_loss=True. With it the update is exact here, which was tried."
WEIGHT = "micro_batch_weight=lambda x, y, sample_weight: keras.ops.count_nonzero(y)"

# What is not exact: the causes and their names; and what the advice for the last of them says.
INEXACT = {
    "batch-norm": (
        lambda: (mlp(layers.BatchNormalization(name="norm")), (X, Y)),
        {"batch_normalization": ("norm",)},
    ),
    "two-batch-norms": (
        lambda: (
            mlp(
                layers.BatchNormalization(name="first"),
                layers.Dense(3),
                layers.BatchNormalization(name="second"),
            ),
            (X, Y),
        ),
        {"batch_normalization": ("first", "second")},
    ),
    "layer": (
        lambda: (mlp(Centered(name="centered")), (X, Y)),
        {"examples_meet": ("centered",)},
    ),
    "contrastive": (
        lambda: (mlp(layers.Dense(3), loss=contrastive), (X, Y)),
        {"examples_meet": ("contrastive",)},
        f"Pass {WHOLE}",
    ),
    "layer-and-size": (
        lambda: (mlp(ByNumber(name="culprit")), (X, Y)),
        {"number_of_examples": ("culprit",)},
    ),
    "seed-and-place": (
        lambda: (mlp(DrawsByPlace(name="culprit")), (X, Y)),
        {"number_of_examples": ("culprit",)},
    ),
    "loss-and-size": (
        lambda: (mlp(loss=of_number), (X, Y)),
        {"number_of_examples": ("of_number",)},
        f"Pass {WHOLE}",
    ),
    "dice": (
        lambda: (
            mlp(layers.Activation("sigmoid"), loss=keras.losses.Dice(name="dice")),
            (X, (Y > 0).astype("float64")),
        ),
        {"scalar_loss": ("dice",)},
        f"Pass {WHOLE}",
    ),
    "sum": (
        lambda: (mlp(loss=sum_of_all), (X, Y)),
        {"scalar_loss": ("sum_of_all",)},
    ),
    "own-loss": (
        lambda: (compiled(OwnLoss("tokens")), (X, OWN)),
        {"scalar_loss": ("compute_loss",)},
        f"Pass {WEIGHT}, or {WHOLE}",
    ),
    "added": (
        lambda: (mlp(Balanced(name="balanced")), (X, Y)),
        {"scalar_loss": ("balanced",)},
    ),
    "state": (
        lambda: (mlp(Counting(name="counting"), name="model"), (X, Y)),
        {"state": ("model/counting/count",)},
    ),
    "two-causes": (
        lambda: (
            mlp(layers.BatchNormalization(name="norm"), Centered(name="centered")),
            (X, Y),
        ),
        {"batch_normalization": ("norm",), "examples_meet": ("centered",)},
    ),
    "norm-and-loss": (
        lambda: (mlp(layers.BatchNormalization(name="norm"), loss=sum_of_all), (X, Y)),
        {"batch_normalization": ("norm",), "scalar_loss": ("sum_of_all",)},
    ),
}


# Those with a way out that was tried. The statistics of BatchNormalization are put aside for it.
REPAIRED = ["contrastive", "loss-and-size", "dice", "sum", "own-loss", "norm-and-loss"]

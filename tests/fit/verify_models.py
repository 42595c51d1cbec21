"""Models for the tests of verify: those that are exact, and those that are not, and why."""

from typing import Any, Dict, NamedTuple

import keras
import numpy as np
from keras import layers, ops
from support.interaction import Balanced, ByNumber, Centred, contrastive, of_number

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


class DrawsByPlace(layers.Layer):
    """Draws the same numbers each time, by a number that is its seed."""

    def call(self, inputs, training=None):
        drawn = keras.random.normal(ops.shape(inputs), seed=3, dtype=inputs.dtype)
        return inputs + drawn if training else inputs


class Sampling(layers.Layer):
    """Adds noise, and a loss for it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)))
        noise = keras.random.normal(ops.shape(inputs), dtype=inputs.dtype, seed=self.seeds)
        return inputs + 0.1 * noise


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


class OwnOptimizer(keras.optimizers.SGD):
    """Takes what its config does not have."""

    def __init__(self, rate):
        super().__init__(rate)


def built(model, x=X):
    model(x)
    return model


def per_example(y_true, y_pred):
    return ops.mean(ops.abs(y_true - y_pred), axis=-1)


def sum_of_all(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


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


def of_tokens(*parts, **options):
    """A table without a mask."""
    inputs = keras.Input([6], dtype="int32")
    table = layers.Embedding(9, 2, name="table")
    return sequential(table, *parts, layers.Flatten(), layers.Dense(1), inputs=inputs, **options)


def pooled_text():
    """A mean over all positions, padding included."""
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 3)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden)), optimizer="sgd")


def largest(y_true, y_pred):
    return ops.max(y_pred)


class Narrow(layers.Dense):
    """Computes in float32, whatever its dtype is."""

    def call(self, inputs):
        inputs, kernel = (ops.cast(each, "float32") for each in (inputs, self.kernel))
        return ops.cast(ops.matmul(inputs, kernel), "float64")


class Unseeded(layers.Layer):
    """Draws without Keras."""

    def call(self, inputs):
        drawn = np.random.normal(size=[4])  # noqa: NPY002
        return inputs + ops.convert_to_tensor(drawn, inputs.dtype)


class Unused(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=[3], name="unused")

    def call(self, inputs):
        return inputs


class WrongGradient(layers.Layer):
    """Hands on another gradient in micro-batches, as if the package had a fault."""

    def call(self, inputs):
        factor = 1.0 if inputs.shape[0] == EXAMPLES else 1 + 1e-6

        @ops.custom_gradient
        def as_it_is(x):
            def grad(*args, upstream=None):
                return factor * (args[0] if upstream is None else upstream)

            return x, grad

        return as_it_is(inputs)


class Watched(layers.Layer):
    """Notes how many examples there are."""

    examples = 0

    def call(self, inputs):
        Watched.examples = inputs.shape[0]
        return inputs


class WrongUpdate(keras.optimizers.SGD):
    """Makes a longer step after micro-batches."""

    def update_step(self, gradient, variable, learning_rate):
        factor = 1.0 if Watched.examples == EXAMPLES else 1.1
        super().update_step(gradient, variable, factor * learning_rate)


def of_head(*parts, optimizer="sgd"):
    head = layers.Dense(1, use_bias=False, name="head")
    return sequential(head, *parts, optimizer=optimizer, name="model")


def with_rounding():
    """Of most biases the gradient is rounding alone: a softmax over positions sees none."""
    inputs = keras.Input([5, 1])
    hidden = layers.Dense(9)(inputs)
    parts = [layers.Softmax(axis=1)(hidden[:, :, :8]), hidden[:, :, 8:]]
    outputs = layers.Dense(1)(layers.Flatten()(layers.Concatenate()(parts)))
    return compiled(keras.Model(inputs, outputs), optimizer=keras.optimizers.Lion(1e-3))


def double(inputs):
    return 2.0 * inputs


TEXT = tokens()
TAGS = numbers(6, 2, seed=2)
OWN = numbers(2, seed=3) * (numbers(2, seed=4) > 0)
WEIGHT = "micro_batch_weight=lambda x, y, sample_weight: keras.ops.count_nonzero(y)"
OF_WHOLE_BATCH = "whole_batch_loss=True. With it the update is exact here, which was tried."


class Case(NamedTuple):
    """A model and what is said of it.

    Attributes:
        make: makes the model.
        batch: on which it is compared.
        cut: settings of `accumulate`.
        exact: the verdict.
        causes: the names of what is a cause, by kind.
        advice: what is said of the last cause, if a way out was tried. The statistics of
            BatchNormalization are put aside for it.
        policy: the dtype policy of the model.
        noted: a part of a note.
    """

    make: Any
    batch: Any = (X, Y)
    cut: Dict[str, Any] = SIZE
    exact: Any = True
    causes: Any = ()
    advice: str = ""
    policy: str = "float64"
    noted: str = ""


def inexact(make, batch=(X, Y), cut=SIZE, advice="", **causes):
    return Case(make, batch, cut, False, causes, advice)


CASES = {
    # Exact
    "dense": Case(mlp),
    "graph": Case(lambda: mlp(layers.Dropout(0.4), eager=False, metrics=["mae"])),
    "clipped": Case(
        lambda: mlp(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1))
    ),
    "regularized": Case(
        lambda: mlp(layers.Dense(4, kernel_regularizer="l2", activity_regularizer=L1))
    ),
    "random-layers": Case(
        lambda: mlp(
            layers.Dropout(0.5),
            layers.GaussianNoise(0.3),
            layers.GaussianDropout(0.2),
            layers.AlphaDropout(0.2),
        )
    ),
    "sampling": Case(lambda: mlp(Sampling())),
    "masked-text": Case(lambda: text_model(optimizer="sgd"), (TEXT, TAGS)),
    "by-length": Case(
        lambda: text_model(optimizer="sgd"),
        (TEXT, TAGS),
        {"micro_batch_tokens": 12, "sequence_axis": 1},
    ),
    "weights": Case(
        lambda: mlp(loss=keras.losses.MeanSquaredError("mean_with_sample_weight")),
        (X, Y, np.abs(numbers(seed=5))),
    ),
    "two-outputs": Case(two_outputs, (X, {"a": Y, "b": np.eye(3)[np.arange(EXAMPLES) % 3]})),
    "nested": Case(nested),
    "attention": Case(attention, (numbers(6, 3), Y)),
    "convolution": Case(
        lambda: sequential(
            layers.Conv2D(2, 2), layers.GroupNormalization(1), layers.Flatten(), layers.Dense(1),
            inputs=keras.Input([4, 4, 1]),
        ),
        (numbers(4, 4, 1), Y),
    ),
    "frozen-batch-norm": Case(frozen_norm),
    "mean": Case(lambda: compiled(OwnLoss()), (X, numbers(2))),
    "mean-over-tokens": Case(
        lambda: compiled(OwnLoss("tokens")),
        (X, OWN),
        {**SIZE, "micro_batch_weight": lambda x, y, sample_weight: ops.count_nonzero(y)},
    ),
    "not-copied": Case(
        lambda: built(compiled(NotCopied(lambda t: ops.tanh(t)))),
        (X.astype("float32"), Y.astype("float32")),
        policy="float32",
        noted="it cannot be copied",
    ),
    "mixed": Case(mlp, (X.astype("float32"), Y.astype("float32")), policy="mixed_float16"),
    "per-example-losses": Case(lambda: mlp(PerExample(), loss=per_example)),
    "lion": Case(lambda: mlp(optimizer=keras.optimizers.Lion(1e-3))),
    "rows-with-sgd": Case(lambda: of_tokens(optimizer="sgd"), (TEXT, Y)),
    "averages": Case(
        lambda: mlp(
            optimizer=keras.optimizers.AdamW(schedule(100), use_ema=True, ema_momentum=0.9)
        )
    ),
    "sum": Case(lambda: mlp(loss=keras.losses.MeanSquaredError("sum"))),
    # A bias before a softmax over positions has no gradient but rounding.
    "softmax-bias": Case(
        lambda: sequential(
            layers.Dense(1), layers.Flatten(), layers.Softmax(), layers.Dense(1),
            inputs=keras.Input([5, 1]),
        ),
        (X[:, :, None], Y),
    ),
    "lion-and-rounding": Case(with_rounding, (X[:, :, None], Y)),  # It steps by the sign.
    "contrastive-of-the-whole-batch": Case(
        lambda: mlp(layers.Dense(3), layers.Dropout(0.2), loss=contrastive),
        cut={**SIZE, "whole_batch_loss": True},
    ),
    "padding-that-stays": Case(pooled_text, (TEXT, Y)),
    "own-function": Case(lambda: sequential(layers.Dense(1, activation=double))),
    "own-optimizer": Case(lambda: mlp(optimizer=OwnOptimizer(0.1)), noted="optimizer cannot be"),
    "unused": Case(lambda: mlp(Unused())),
    # Exact, and something to know
    "tracker": Case(lambda: compiled(WithTracker()), causes={"metrics": ("tracked",)}),
    "largest": Case(lambda: mlp(metrics=[largest, "mae"]), causes={"metrics": ("largest",)}),
    "narrow-layer": Case(
        lambda: mlp(layers.Dense(4, dtype="float32", name="narrow")),
        causes={"precision": ("narrow",)},
    ),
    "narrow-cast": Case(lambda: mlp(Narrow(4)), causes={"precision": ()}),
    # Not exact
    "batch-norm": inexact(
        lambda: mlp(layers.BatchNormalization(name="norm")), batch_normalization=("norm",)
    ),
    "two-batch-norms": inexact(
        lambda: mlp(
            layers.BatchNormalization(name="first"),
            layers.Dense(3),
            layers.BatchNormalization(name="second"),
        ),
        batch_normalization=("first", "second"),
    ),
    "layer": inexact(lambda: mlp(Centred(name="centred")), examples_meet=("centred",)),
    "contrastive": inexact(
        lambda: mlp(layers.Dense(3), loss=contrastive),
        advice=f"Pass {OF_WHOLE_BATCH}",
        examples_meet=("contrastive",),
    ),
    "layer-and-size": inexact(
        lambda: mlp(ByNumber(name="culprit")), number_of_examples=("culprit",)
    ),
    "seed-and-place": inexact(
        lambda: mlp(DrawsByPlace(name="culprit")), number_of_examples=("culprit",)
    ),
    "loss-and-size": inexact(
        lambda: mlp(loss=of_number),
        advice=f"Pass {OF_WHOLE_BATCH}",
        number_of_examples=("of_number",),
    ),
    "dice": inexact(
        lambda: mlp(layers.Activation("sigmoid"), loss=keras.losses.Dice(name="dice")),
        (X, (Y > 0).astype("float64")),
        advice=f"Pass {OF_WHOLE_BATCH}",
        scalar_loss=("dice",),
    ),
    "sum-of-all": inexact(
        lambda: mlp(loss=sum_of_all), advice="was tried", scalar_loss=("sum_of_all",)
    ),
    "own-loss": inexact(
        lambda: compiled(OwnLoss("tokens")),
        (X, OWN),
        advice=f"Pass {WEIGHT}, or {OF_WHOLE_BATCH}",
        scalar_loss=("compute_loss",),
    ),
    "added": inexact(lambda: mlp(Balanced(name="balanced")), scalar_loss=("balanced",)),
    "added-of-the-whole-batch": inexact(
        lambda: mlp(Balanced(name="balanced")),
        cut={**SIZE, "whole_batch_loss": True},
        scalar_loss=("balanced",),
    ),
    "state": inexact(
        lambda: mlp(Counting(name="counting"), name="model"), state=("model/counting/count",)
    ),
    "two-causes": inexact(
        lambda: mlp(layers.BatchNormalization(name="norm"), Centred(name="centred")),
        batch_normalization=("norm",),
        examples_meet=("centred",),
    ),
    "norm-and-loss": inexact(
        lambda: mlp(layers.BatchNormalization(name="norm"), loss=sum_of_all),
        advice="was tried",
        batch_normalization=("norm",),
        scalar_loss=("sum_of_all",),
    ),
    "padding": inexact(
        pooled_text,
        (tokens(40), Y),
        {**SIZE, "sequence_axis": 1},
        advice="exact, which was tried",
        padding=(),
    ),
    # As if the package had a fault: the verdict does not depend on knowing why.
    "wrong-gradient": inexact(lambda: of_head(WrongGradient()), unknown=("model/head/kernel",)),
    "wrong-update": inexact(
        lambda: of_head(Watched(), optimizer=WrongUpdate(0.1)), unknown=("model/head/kernel",)
    ),
    # No verdict
    "unseeded": Case(
        lambda: mlp(Unseeded()), exact=None, causes={"random": ()}, noted="predicts something else"
    ),
}  # fmt: skip

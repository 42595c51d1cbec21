"""whole_batch_loss=True: the update of a loss that sees the predictions of the whole batch.

Without random layers it is that of plain Keras. With them it is that of one tape over the same
forward passes, joined: see Joined.
"""

import functools
import itertools
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import support
from case import OF_COMPILER, case, parameters
from keras import layers, ops
from support import (
    BACKEND,
    MODES,
    TRIAL,
    array,
    assert_ended,
    assert_same_history,
    ended,
    modes,
    only_on,
    slow_on,
    variables,
)
from support.unchanged import unchanged

import macrobatch

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(15, 4)), RNG.normal(size=(15, 3))
LABELS = np.arange(15) % 3
TOKENS = RNG.integers(1, 9, (15, 6)) * (np.arange(6) < RNG.integers(1, 7, (15, 1)))
CUT = {"micro_batch_size": 3, "whole_batch_loss": True}
train = functools.partial(support.train, batch_size=7)


pytestmark = [pytest.mark.filterwarnings(each) for each in OF_COMPILER]


class Joined(keras.Model):
    """The reference where layers draw: forward passes of micro-batches, joined, under one tape."""

    def train_step(self, data):
        import tensorflow as tf

        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            size = x.shape[0]
            parts = [self(x[i : i + 3], training=True) for i in range(0, size, 3)]
            y_pred = tf.concat(parts, 0)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            self._loss_tracker.update_state(loss, sample_weight=size)
            loss = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return self.compute_metrics(x, y, y_pred, sample_weight)


def similarities(left, right):
    left, right = (t / ops.norm(t, axis=1, keepdims=True) for t in (left, right))
    return ops.matmul(left, ops.transpose(right)) / 0.3


def contrastive(y_true, y_pred):
    """One value for each example, which depends on all others."""
    logits = similarities(y_pred, y_true)
    return -ops.diagonal(ops.log_softmax(logits, axis=-1))


def scalar(y_true, y_pred):
    return ops.log(ops.mean((y_true - y_pred) ** 2)) + ops.std(y_pred)


def dense(*more, last=3):
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(5, activation="tanh"), *more, layers.Dense(last)]
    )


class Ranks(keras.metrics.Metric):
    """In how much of a batch an example's own target is the nearest: it must see them all."""

    def __init__(self, name="ranks"):
        super().__init__(name=name)
        self.best = self.add_weight(shape=(), initializer="zeros", name="best")
        self.seen = self.add_weight(shape=(), initializer="zeros", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        logits = similarities(y_pred, y_true)
        best = ops.mean(ops.cast(ops.diagonal(logits) >= ops.max(logits, axis=1), self.dtype))
        self.best.assign(self.best + best)
        self.seen.assign(self.seen + 1)

    def result(self):
        return self.best / self.seen


class Temperature(keras.Model):
    """A loss of its own, with a weight that only the loss uses."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.temperature = self.add_weight(
            shape=(), initializer=lambda shape, dtype: ops.cast(0.7, dtype), name="temperature"
        )

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = similarities(y_pred, y) * ops.exp(self.temperature)
        losses = -ops.diagonal(ops.log_softmax(logits, axis=-1)) * ops.mean(x, axis=1) ** 2
        return ops.mean(losses) + sum(self.losses)


def temperature():
    inputs = keras.Input([4])
    # L1 of Keras 3.12 is float32.
    penalty = keras.regularizers.L1L2(l1=0.01)
    dense = layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer=penalty)
    hidden = dense(inputs)
    return Temperature(inputs, layers.Dense(3)(hidden))


def towers():
    queries, items = keras.Input([4], name="queries"), keras.Input([3], name="items")
    outputs = {
        "query": layers.Dense(3, name="query")(layers.Dense(4, "tanh")(queries)),
        "item": layers.Dense(3, name="item")(layers.Dense(4, "tanh")(items)),
    }
    return Retrieval({"queries": queries, "items": items}, outputs)


class Retrieval(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = similarities(y_pred["query"], y_pred["item"])
        losses = -ops.diagonal(ops.log_softmax(logits, axis=-1))
        return ops.sum(losses * sample_weight) / ops.sum(sample_weight)


def two_outputs():
    inputs = keras.Input([4])
    hidden = layers.Dense(5, "tanh")(inputs)
    return keras.Model(
        inputs, {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)}
    )


def tagger():
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    return keras.Model(tokens, layers.Dense(5)(layers.Dense(4, "tanh")(hidden)))


def masked():
    inputs = keras.Input([6, 3])
    return keras.Model(inputs, layers.Dense(2)(layers.Masking()(inputs)))


class Adding(layers.Layer):
    """Gives a value for each example to add_loss."""

    def call(self, inputs):
        self.add_loss(ops.mean(inputs**2, axis=1))
        return inputs


crossentropy = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
ONE_HOT = np.eye(3)[LABELS]


def pooled():
    """Sentences as vectors: what is padded does not count."""
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
    hidden = layers.GlobalAveragePooling1D()(layers.Dense(4, "tanh")(hidden))
    return keras.Model(tokens, layers.Dense(3)(hidden))


def tags_and_vector():
    """A prediction for each token, whose padding is restored, and one for each example."""
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.Dense(4, "tanh")(layers.Embedding(9, 4, mask_zero=True)(tokens))
    vector = layers.Dense(3, name="vector")(layers.GlobalAveragePooling1D()(hidden))
    return keras.Model(
        tokens,
        {"tags": layers.Dense(5, name="tags")(hidden), "vector": vector},
    )


def of_positions(y_true, y_pred):
    """One value for all positions of all examples; padding comes to 0."""
    there = ops.cast(ops.any(ops.not_equal(y_true, 0), -1), y_pred.dtype)
    return ops.logsumexp(ops.sum(ops.square(y_true - y_pred), -1) * there)


def of_batch(build, x, y, cut=None, **options):
    """A case. Micro-batches of 3, 3 and 1 examples; replicas have 4 and 3 of them, 1 and none."""
    options = {"quick": "", "elsewhere": "torch", "other_modes": False, "batch_size": 7, **options}
    options["filters"] = ["ignore:Nothing is being accumulated"]
    return case(build, x, y, cut={"whole_batch_loss": True, **(cut or {})}, **options)


CASES = {
    "contrastive": of_batch(
        dense,
        X,
        Y,
        loss=contrastive,
        metrics=lambda: ["mae", Ranks()],
        elsewhere="torch jax",
        other_modes=True,
    ),
    "scalar": of_batch(dense, X, Y, loss=scalar),
    "dice": of_batch(
        lambda: dense(layers.Softmax()), X, ONE_HOT, loss=keras.losses.Dice(), per_mode=True
    ),
    "tversky": of_batch(
        lambda: dense(layers.Softmax()),
        X,
        ONE_HOT,
        loss=keras.losses.Tversky(alpha=0.3),
        metrics=lambda: [keras.metrics.AUC(name="auc")],
    ),
    "compute_loss with a temperature": of_batch(
        temperature, X, Y, metrics=["mae"], quick="graph eager replicas", elsewhere="torch jax"
    ),
    "towers": of_batch(
        towers,
        {"queries": X, "items": Y},
        LABELS,
        loss=None,
        fit={"sample_weight": RNG.uniform(size=15)},
    ),
    "outputs": of_batch(
        two_outputs,
        X,
        {"a": Y, "b": Y},
        loss={"a": contrastive, "b": "mse"},
        loss_weights={"a": 0.5, "b": 2.0},
        metrics={"b": ["mae"]},
        per_mode=True,
    ),
    "mask": of_batch(
        tagger,
        TOKENS,
        TOKENS % 5,
        loss=lambda: crossentropy(),
        weighted_metrics=["accuracy"],
        quick="graph",
        elsewhere="torch",
        wrong_metrics="jax",
    ),
    "sample weights": of_batch(
        dense,
        X,
        Y,
        loss=lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        fit={"sample_weight": RNG.uniform(size=15)},
        weighted_metrics=["mae"],
    ),
    "masks and weights": of_batch(  # which Keras multiplies in place on torch
        masked,
        RNG.normal(size=[15, 6, 3]) * (np.arange(6) < 4)[:, None],
        RNG.normal(size=[15, 6, 2]),
        fit={"sample_weight": np.abs(RNG.normal(size=[15, 6]))},
        weighted_metrics=["mae"],
        wrong_metrics="jax",
    ),
    "class weights": of_batch(
        dense,
        X,
        LABELS,
        loss=lambda: crossentropy(),
        fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}},
    ),
    "no reduction": of_batch(
        dense,
        X,
        Y,
        loss=lambda: keras.losses.MeanSquaredError(reduction=None),
        backends="tensorflow",  # Elsewhere Keras must have a scalar.
    ),
    "add_loss": of_batch(lambda: dense(Adding()), X, Y, loss=contrastive, quick="graph"),
    "embedding": of_batch(
        lambda: keras.Sequential(
            [keras.Input([6], dtype="int32"), layers.Embedding(9, 4), layers.Flatten()]
        ),
        TOKENS,
        RNG.normal(size=(15, 24)),
        loss=contrastive,
    ),
}
BY_LENGTH = {
    "vector": (pooled, Y, contrastive),
    "tags and vector": (
        tags_and_vector,
        {"tags": TOKENS % 5, "vector": Y},
        {"tags": crossentropy(), "vector": contrastive},
    ),
    "positions": (tagger, np.eye(5)[TOKENS % 5] * (TOKENS > 0)[..., None], of_positions),
}
for (name, (build, y, loss)), tokens, modes_of_case in itertools.product(
    BY_LENGTH.items(),
    (None, 12),
    ("eager", "graph compiled"),  # Eager Keras weighs losses of several outputs in another way.
):
    size = {"micro_batch_size": None, "micro_batch_tokens": tokens} if tokens else {}
    CASES[f"{name} by length, {tokens}, {modes_of_case}"] = of_batch(
        build,
        TOKENS,
        y,
        {**size, "sequence_axis": 1},
        loss=loss,
        modes=modes_of_case,
        quick="eager" if (name, tokens) == ("vector", None) else "",
        backends="tensorflow torch" if modes_of_case == "eager" else "tensorflow",
    )


@pytest.mark.parametrize(("case", "mode"), parameters(CASES))
def test_as_plain_keras_on_the_whole_batch(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


# Random layers


def noisy(kind=keras.Model):
    inputs = keras.Input([4])
    hidden = layers.Dropout(0.4)(layers.Dense(6, "tanh")(inputs))
    hidden = layers.GaussianNoise(0.5)(layers.Dense(5, "tanh", kernel_regularizer="l2")(hidden))
    return kind(inputs, layers.Dropout(0.3)(layers.Dense(3)(hidden)))


@functools.lru_cache(maxsize=None)
def joined(mode):
    options = {"loss": contrastive, "metrics": ["mae"], **MODES[mode]}
    return ended(*train(functools.partial(noisy, Joined), X[:14], Y[:14], **options))


@only_on("tensorflow")
@pytest.mark.parametrize("mode", modes("graph eager"))
def test_random_layers_draw_the_same_in_both_passes(mode):
    options = {"loss": contrastive, "metrics": ["mae"], **MODES[mode]}
    model, history = train(noisy, X[:14], Y[:14], cut=CUT, **options)
    # XLA draws other numbers from the same seeds.
    reference = joined(mode if mode == "compiled" else "graph")
    assert_ended(reference, model)  # with the state of their seeds
    assert_same_history(reference.history, history)


@slow_on("tensorflow")
@pytest.mark.eager
@pytest.mark.parametrize("seed", [pytest.param(None, marks=slow_on("jax")), 5])
def test_the_gradient_is_that_of_one_draw(seed):
    """A finite difference shows it, with the same draws each time."""

    def comparing(y_true, y_pred):
        products = ops.matmul(y_pred, ops.transpose(y_pred))
        return ops.mean(ops.logsumexp(products, -1)) + ops.mean((y_true - y_pred) ** 2)

    rate, step = 0.5, 1e-5
    model = dense(layers.Dropout(0.5, seed=seed))
    model.compile(keras.optimizers.SGD(rate), comparing)
    macrobatch.accumulate(model, **CUT)
    kernel, start = model.layers[0].kernel, [array(v) for v in variables(model)]

    def loss_after(change):
        keras.utils.set_random_seed(3)
        for variable, value in zip(variables(model), start):
            variable.assign(value)
        kernel.assign(kernel + change)
        model.reset_metrics()  # Keras 3.12 does not do so.
        return model.train_on_batch(X, Y)

    change = np.zeros(kernel.shape)
    change[1, 2] = step
    slope = (loss_after(change) - loss_after(-change)) / (2 * step)
    loss_after(0.0)
    moved = (start[0] - array(kernel))[1, 2] / rate
    np.testing.assert_allclose(moved, slope, rtol=1e-6)
    states = [not np.array_equal(v, s) for v, s in zip(map(array, variables(model)), start)]
    seeds = [moved for v, moved in zip(variables(model), states) if "seed" in v.path]
    assert seeds
    assert all(seeds) or (BACKEND == "torch" and seed is None)  # drawn from torch's own generator


@only_on("tensorflow")
def test_mixed_precision_with_a_loss_scale():
    """float16 gradients are those of the scaled loss of the whole batch."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")

    def optimizer():
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**12)

    data = X[:14].astype("float32"), Y[:14].astype("float16")
    options = {"loss": contrastive, "optimizer": optimizer, "moved": False}
    reference, _ = train(functools.partial(noisy, Joined), *data, **options)
    model, _ = train(noisy, *data, cut=CUT, **options)
    for one, other in zip(reference.trainable_weights, model.trainable_weights):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)
    assert float(model.optimizer.dynamic_scale) == float(reference.optimizer.dynamic_scale)


@pytest.mark.eager
def test_gradients_of_a_tiny_loss_do_not_vanish_in_float16():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    moved = []
    for scale in (1.0, 2.0**14):
        keras.utils.set_random_seed(7)
        model = dense()
        before = model.get_weights()
        adam = keras.optimizers.Adam(0.1, epsilon=1e-20)
        optimizer = keras.optimizers.LossScaleOptimizer(adam, scale)
        model.compile(optimizer, lambda y, p: 1e-9 * ops.mean(ops.cast(p, "float32") ** 2))
        macrobatch.accumulate(model, **CUT).fit(X, Y, batch_size=15, verbose=0)
        moved.append(max(np.abs(a - b).max() for a, b in zip(before, model.get_weights())))
    assert moved[0] < 1e-3 < moved[1]


# BatchNormalization


@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
@slow_on("jax")
@pytest.mark.parametrize("mode", modes("graph")[:2])
def test_moving_statistics_are_those_of_the_batch(mode):
    def build(kind=keras.Model):
        inputs = keras.Input([4])
        normalized = layers.BatchNormalization(momentum=0.7)(inputs)
        return kind(inputs, layers.Dense(3)(layers.Dropout(0.2)(normalized)))

    # A micro-batch of one example would be normalised to nothing.
    options = {"loss": contrastive, "batch_size": 6}
    model, _ = train(build, X[:12], Y[:12], cut=CUT, **options, **MODES[mode])
    of_batch, _ = train(build, X[:12], Y[:12], **options)
    pairs = list(zip(of_batch.layers[1].weights[2:], model.layers[1].weights[2:]))
    if BACKEND == "tensorflow":
        of_tape, _ = train(functools.partial(build, Joined), X[:12], Y[:12], **options)
        pairs += zip(of_tape.trainable_weights, model.trainable_weights)
    for one, other in pairs:
        np.testing.assert_allclose(array(one), array(other), rtol=1e-10, atol=1e-12)


# What is said


def warnings_of(build, loss, cut=CUT, y=Y):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile("sgd", loss)
    macrobatch.accumulate(model, **cut)
    with pytest.warns(macrobatch.ExactnessWarning) as caught:
        model.fit(X, y, batch_size=8, verbose=0)
    return [str(w.message) for w in caught if w.category is macrobatch.ExactnessWarning]


@pytest.mark.eager
@slow_on("jax")
@pytest.mark.parametrize(
    ("build", "loss"), [(dense, scalar), (temperature, None)], ids=["scalar", "compute_loss"]
)
def test_plain_accumulation_names_the_way_out(build, loss):
    messages = warnings_of(build, loss, {"micro_batch_size": 3})
    assert any("whole_batch_loss=True" in message for message in messages)


@slow_on("tensorflow", "jax")
def test_a_scalar_that_a_layer_adds_is_still_that_of_micro_batches():
    class Scalar(layers.Layer):
        def call(self, inputs):
            self.add_loss(ops.mean(inputs**2))
            return inputs

    (message,) = warnings_of(lambda: dense(Scalar(name="balance")), contrastive)
    assert "['balance']" in message
    assert "micro_batch_weight" not in message
    plain, _ = train(lambda: dense(Scalar()), X, Y, loss=contrastive)
    with pytest.warns(macrobatch.ExactnessWarning, match="add_loss"):
        model, _ = train(lambda: dense(Scalar()), X, Y, loss=contrastive, cut=CUT)
    support.assert_same(plain, model)  # since it is a mean


def test_arguments():
    model = dense()
    with pytest.raises(ValueError, match=r"^micro_batch_weight= says how.*Leave"):
        macrobatch.accumulate(model, 3, whole_batch_loss=True, micro_batch_weight=lambda *_: 1.0)
    with pytest.raises(ValueError, match=r"^whole_batch_loss must be True or False"):
        macrobatch.accumulate(model, 3, whole_batch_loss="yes")
    assert "train_step" not in vars(model)


OTHERS = "other outputs in the second"
DRAWS = {
    "tensorflow": [
        ("tensorflow", "graph", "RandomStandardNormal"),
        ("tensorflow", "eager", OTHERS),
        ("tensorflow", "compiled", "RandomStandardNormal"),
        ("numpy", "graph", OTHERS),
    ],
    "jax": [],
    "torch": [("numpy", "eager", OTHERS)],
}[BACKEND]


@pytest.mark.parametrize(("library", "mode", "match"), DRAWS)
def test_what_draws_anew_is_refused_and_nothing_changes(library, mode, match):
    """Generators other than Keras' own draw other numbers each time."""

    def draw():
        if library == "numpy":
            return np.random.normal(size=5)  # noqa: NPY002
        import tensorflow as tf

        return tf.random.normal([5], dtype=tf.float64)

    class Noise(layers.Layer):
        def call(self, inputs):
            return inputs + ops.convert_to_tensor(draw())

    model = dense(Noise())
    model.compile(keras.optimizers.Adam(), contrastive, metrics=["mae"], **MODES[mode])
    macrobatch.accumulate(model, **CUT)
    with unchanged(model, ValueError, f"runs twice.*must come to the same.*{match}"):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("mode", modes("graph eager"))
def test_predictions_must_have_the_examples_first(mode):
    inputs = keras.Input([4])
    model = Temperature(inputs, [layers.Dense(3)(inputs), ops.sum(inputs)])
    model.compile("sgd", **MODES[mode])
    macrobatch.accumulate(model, **CUT)
    with unchanged(model, ValueError, "must have the examples first"):
        model.fit(X, Y, batch_size=8, verbose=0)


@only_on("tensorflow", "torch")
@pytest.mark.parametrize("mode", modes("eager")[:2])
def test_a_loss_that_fails_changes_nothing(mode):
    def failing(y_true, y_pred):
        if BACKEND == "tensorflow":
            import tensorflow as tf

            limit = tf.constant(2.0, tf.float64)
            tf.debugging.assert_less(tf.reduce_max(y_true), limit, "too large")
        else:
            assert float(ops.max(y_true)) < 2, "too large"
        return contrastive(y_true, y_pred)

    y = np.where(np.arange(15)[:, None] == 12, 5.0, Y.clip(-1.9, 1.9))  # in the second batch
    finals = []
    for examples in (8, 15):
        keras.utils.set_random_seed(1)
        model = dense(layers.Dropout(0.5))
        model.compile(keras.optimizers.Adam(), failing, metrics=["mae"], **MODES[mode])
        macrobatch.accumulate(model, **CUT)
        fails = pytest.raises(Exception, match="too large") if examples > 8 else nullcontext()
        with fails:
            model.fit(X[:examples], y[:examples], batch_size=8, shuffle=False, verbose=0)
        finals.append(model)
    assert_ended(ended(finals[0]), finals[1], 0)


# Evaluation


@pytest.mark.parametrize("mode", modes("graph"))
def test_evaluate_sees_the_whole_batch(mode):
    keras.utils.set_random_seed(1)
    model = dense(layers.Dropout(0.5))
    model.compile("sgd", contrastive, metrics=["mae", Ranks()], **MODES[mode])
    expected = model.evaluate(X, Y, batch_size=8, verbose=0)
    macrobatch.accumulate(model, **CUT)
    found = model.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@only_on("tensorflow", "torch")
@pytest.mark.examples_meet
def test_memory_is_that_of_micro_batches():
    seen = []

    class Sizes(layers.Layer):
        def call(self, inputs):
            if BACKEND == "torch":
                seen.append(len(inputs))
            else:
                import tensorflow as tf

                tf.py_function(lambda t: seen.append(len(t)), [inputs], [])
            return inputs

    model = dense(Sizes())
    model.compile("sgd", contrastive)
    seen.clear()
    macrobatch.accumulate(model, **CUT).fit(X[:8], Y[:8], batch_size=8, verbose=0)
    # The trial whether examples meet keeps no activations. The loss may compare them.
    assert seen[6:] == TRIAL or BACKEND != "tensorflow"
    seen.clear()
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert seen == [3, 3, 2] * 2  # two passes
    seen.clear()
    model.evaluate(X[:8], Y[:8], batch_size=8, verbose=0)
    assert seen == [3, 3, 2]


@only_on("tensorflow", "torch")
@slow_on("tensorflow")
def test_padding_that_counts_is_refused():
    model = keras.Sequential(
        [keras.Input([None], dtype="int32"), layers.Embedding(9, 3), layers.GlobalMaxPooling1D()]
    )
    model.compile("sgd", contrastive)
    macrobatch.accumulate(model, 3, sequence_axis=1, whole_batch_loss=True)
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(TOKENS, Y, batch_size=8, verbose=0)


class Centring(keras.Model):
    """A loss that assigns to a variable, and then asks for it."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.centre.assign(0.5 * self.centre + 0.5 * ops.mean(y_pred, axis=0))
        return ops.mean(ops.square(y_pred - self.centre)) + ops.mean(ops.square(y - y_pred))


@slow_on("jax")
@pytest.mark.parametrize("mode", modes("eager"))
def test_no_gradient_flows_through_what_the_loss_assigns(mode):
    def build():
        inputs = keras.Input([4])
        model = Centring(inputs, layers.Dense(3)(inputs))
        model.centre = keras.Variable(np.zeros(3), trainable=False)
        return model

    support.check(build, X, Y, loss=None, cut=CUT, **MODES[mode])

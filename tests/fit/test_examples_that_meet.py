"""Examples that meet are found, and named: in the layer, or in the loss, where they do."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support import MODES, TRIAL, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch import ExactnessWarning
from macrobatch._batches.cut import Cut
from macrobatch._keras import meeting
from macrobatch._keras.tried import Tried
from macrobatch._meeting import is_cut
from macrobatch._tensorflow.engine import ENGINE

FEATURES, CLASSES = 6, 3
pytestmark = pytest.mark.examples_meet


def data(examples=24, seed=0):
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
    return ops.square(ops.sort(y_pred[:, 0]) - labels)


# Losses whose sum does not tell that examples meet


def over_the_mean(y_true, y_pred):
    """The sum is the number of examples, always. No gradient flows through the mean."""
    losses = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return losses / ops.stop_gradient(ops.mean(losses))


def with_the_next(y_true, y_pred):
    return ops.mean(ops.square(y_true - ops.roll(y_pred, 1, axis=0)), axis=-1)


def slightly_contrastive(y_true, y_pred):
    """A part of a thousandth, which the rounding of a sum may hide."""
    return ops.mean(ops.square(y_true - y_pred), axis=-1) + 1e-3 * contrastive(y_true, y_pred)


def mean_for_each(y_true, y_pred):
    """Each example has a value that depends on all. The sum is that of examples."""
    return ops.square(y_true - y_pred)[:, 0] + ops.mean(ops.abs(y_pred)) + 0.0 * y_pred[:, 0]


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


def said_of(
    model, x=None, y=None, *, loss="mse", size=6, cut=None, fit=None, strict=True, **options
):
    """What is said of examples that meet, in a fit of a model. If `strict`, nothing else is."""
    x, y = data() if x is None else (x, y)
    options.setdefault("run_eagerly", True)  # it is the quickest
    model.compile(keras.optimizers.SGD(0.01), loss, **options)
    macrobatch.accumulate(model, size, **(cut or {}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, verbose=0, shuffle=False, **({"batch_size": 24} if fit is None else fit))
    found = [str(each.message) for each in caught]
    starts = (
        "Examples meet",
        "It is not known whether examples meet",
        "These layers depend on",
        "These losses depend on",
    )
    meeting = [message for message in found if message.startswith(starts)]
    assert not strict or meeting == found
    return meeting


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


@pytest.mark.parametrize("size", [6, pytest.param(1, marks=thorough)])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_losses_in_which_examples_meet(loss, size):
    outputs = 1 if name_of(loss) == "dice" else CLASSES
    is_scalar = name_of(loss) in ("dice", "correlation")  # which has a message of its own
    (message,) = said_of(build(outputs=outputs), loss=loss, size=size, strict=not is_scalar)
    if size == 1 and loss is supervised_contrastive:  # An example alone has no other of its class:
        assert message.startswith("It is not known whether examples meet")  # weights become NaN.
        return
    assert message.startswith(f"Examples meet in these losses: {name_of(loss)!r}. ")
    assert "whole_batch_loss=True" in message


@thorough_for("AcrossExamples-6", "Router-6")
@pytest.mark.parametrize("size", [6, pytest.param(1, marks=thorough)])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_in_which_examples_meet(layer, size):
    model = build(layer(name="culprit"), layers.Dense(4))
    # An expert may be idle. Keras warns of a softmax over a single example.
    is_strict = layer is not Router and not (layer is AcrossExamples and size == 1)
    (message,) = said_of(model, size=size, strict=is_strict)
    assert message.startswith("Examples meet in these layers: 'culprit'. ")
    assert "LayerNormalization" in message


@pytest.mark.eager
def test_micro_batches_of_one():
    assert "contrastive" in said_of(build(), loss=contrastive, size=1)[0]
    assert "culprit" in said_of(build(Centred(name="culprit")), size=1)[0]


@thorough_for("compiled", "layer-eager", "layer-graph", "loss-graph")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["loss", "layer"])
def test_modes(mode, place):
    inner = [layers.GaussianNoise(0.5), *([Centred(name="culprit")] if place == "layer" else [])]
    loss = contrastive if place == "loss" else "mse"
    options = {"run_eagerly": False, "jit_compile": False, **MODES[mode]}
    (message,) = said_of(build(*inner), loss=loss, **options)
    assert ("'culprit'" if place == "layer" else "'contrastive'") in message


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=thorough)])
def test_replicas(eager):
    strategy = mirrored(2)
    with strategy.scope():
        model = build(Centred(name="culprit"))
        message, _ = said_of(model, loss=contrastive, run_eagerly=eager)
    assert "'culprit'" in message


def test_replicas_with_one_example_each():
    strategy = mirrored(2)
    fit = {"batch_size": 2, "steps_per_epoch": 1}
    with strategy.scope():
        model = build(Centred(name="culprit"))
        (message,) = said_of(model, size=1, fit=fit, run_eagerly=False, strict=False)
    assert "'culprit'" in message


def test_several_steps_in_an_execution_and_single_batches():
    (message,) = said_of(build(Centred(name="culprit")), run_eagerly=False, steps_per_execution=2)
    assert "'culprit'" in message
    model = build(Centred(name="culprit"))
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 6)
    with pytest.warns(ExactnessWarning, match="'culprit'"):
        model.train_on_batch(*data(24))


# What hides in a sum


@pytest.mark.parametrize("loss", [over_the_mean, with_the_next, slightly_contrastive])
@pytest.mark.parametrize("floats", ["float32", "float64"])
def test_losses_that_hide_in_their_sum(loss, floats):
    keras.config.set_floatx(floats)
    x, y = data(24)
    y = np.random.default_rng(1).normal(size=[24, CLASSES])
    (message,) = said_of(build(), x.astype(floats), y.astype(floats), loss=loss)
    assert message.startswith("Examples meet in these losses: ")


def test_values_that_differ_with_the_same_gradient_are_silent():
    assert said_of(build(layers.Dropout(0.5)), loss=mean_for_each) == []


# How many examples there are, and their places


def squares(y_true, y_pred):
    return ops.mean(ops.square(y_true - y_pred), axis=-1)


def of_number(y_true, y_pred):
    return squares(y_true, y_pred) / ops.cast(ops.shape(y_pred)[0], y_pred.dtype)


def of_places(y_true, y_pred):
    """A loss that gives later examples more weight."""
    losses = squares(y_true, y_pred)
    return losses * ops.cumsum(ops.ones_like(losses))


class ByNumber(layers.Layer):
    def call(self, x):
        return x / ops.cast(ops.shape(x)[0], x.dtype)


class ByPlace(layers.Layer):
    def call(self, x):
        return x + ops.cumsum(ops.ones_like(x), axis=0)


@pytest.mark.parametrize("loss", [of_number, of_places])
@pytest.mark.parametrize("inner", [[], [layers.Dropout(0.5)], [layers.GaussianNoise(1.0)]])
def test_losses_that_depend_on_how_many_examples_there_are(loss, inner):
    (message,) = said_of(build(*inner), loss=loss)
    assert message.startswith("These losses depend on how many examples a micro-batch has, ")
    assert (
        f"examples a micro-batch has, or on the place of an example in it: {loss.__name__!r}"
        in (message)
    )
    assert "whole_batch_loss=True" in message


@pytest.mark.parametrize("layer", [ByNumber, ByPlace])
@pytest.mark.parametrize("before", [[], [layers.Dropout(0.5)], [layers.BatchNormalization()]])
def test_layers_that_depend_on_how_many_examples_there_are(layer, before):
    model = build(*before, layer(name="culprit"), layers.Dense(4))
    message = said_of(model, strict=not any("norm" in each.name for each in before))[0]
    assert message.startswith("These layers depend on how many examples a micro-batch has, ")
    assert "'culprit'" in message


@pytest.mark.eager
def test_a_loss_of_the_whole_batch_may_depend_on_how_many_examples_there_are():
    options = {"loss": of_number, "cut": {"whole_batch_loss": True}}
    assert said_of(build(), **options) == []
    (message,) = said_of(build(ByNumber(name="culprit")), **options)
    assert "'culprit'" in message


def test_one_of_several_outputs_depends_on_how_many_examples_there_are():
    inputs = keras.Input([FEATURES])
    hidden = layers.Dense(4, activation="tanh")(inputs)
    outputs = {name: layers.Dense(CLASSES, name=name)(hidden) for name in ("one", "two")}
    x, y = data()
    losses = {"one": "mse", "two": of_number}
    weights = {"one": np.arange(24.0) % 3, "two": np.arange(24.0) % 2}
    fit = {"batch_size": 24, "sample_weight": weights}
    model = keras.Model(inputs, outputs)
    (message,) = said_of(model, x, {"one": y, "two": y}, loss=losses, fit=fit)
    assert "'two'" in message
    assert "'one'" not in message


class OwnLoss(keras.Model):
    """A model whose loss draws, and asks for what its layers have added."""

    def __init__(self, by_number, draws):
        super().__init__()
        self.dense = layers.Dense(CLASSES, kernel_regularizer="l2")
        self.noise = layers.GaussianNoise(1.0) if draws else layers.Identity()
        self.by_number = by_number

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = squares(ops.cast(y, y_pred.dtype), self.noise(y_pred, training=True))
        reduced = ops.sum(losses) if self.by_number else ops.mean(losses)
        return reduced + sum(self.losses)


@pytest.mark.parametrize(
    ("by_number", "draws", "expected"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_an_own_loss_that_depends_on_how_many_examples_there_are(by_number, draws, expected):
    """Of what a loss draws, other numbers of examples get other numbers: nothing is known."""
    said = said_of(OwnLoss(by_number, draws), strict=False)
    assert [message[:12] for message in said] == (["These losses"] if expected else [])


# What is named


def test_losses_of_the_whole_batch_may_compare_and_layers_may_not():
    options = {"loss": contrastive, "cut": {"whole_batch_loss": True}}
    assert said_of(build(), **options) == []
    (message,) = said_of(build(Centred(name="culprit")), **options)
    assert message.startswith("Examples meet in these layers: 'culprit'. ")


def test_causes_beside_each_other_are_all_named():
    model = build(Centred(name="one"), layers.Dense(4, activation="tanh"), Centred(name="two"))
    of_layers, of_losses = said_of(model, loss=contrastive)
    assert "'one', 'two'. " in of_layers
    assert "'contrastive'. " in of_losses


@pytest.mark.eager
def test_batch_normalization_hides_nothing_and_causes_nothing():
    normalized = [layers.BatchNormalization(), layers.Dense(5, activation="tanh")]
    assert said_of(build(*normalized, layers.BatchNormalization()), strict=False) == []
    (message,) = said_of(build(*normalized, Centred(name="culprit")), strict=False)
    assert "layers: 'culprit'. " in message
    (message,) = said_of(build(*normalized), loss=contrastive, strict=False)
    assert "'contrastive'. " in message


def test_attention_of_examples_in_operations_of_a_functional_model():
    inputs = keras.Input([5, 4])
    x = ops.transpose(layers.Dense(4)(inputs), (1, 0, 2))
    x = layers.MultiHeadAttention(1, 4, name="across")(x, x)
    model = keras.Model(inputs, layers.Dense(2)(ops.transpose(x, (1, 0, 2))))
    x = np.random.default_rng(0).normal(size=[24, 5, 4])
    (message,) = said_of(model, x, x[..., :2])
    assert "layers: 'across'. " in message


def test_an_operation_of_a_functional_model_is_named():
    inputs = keras.Input([FEATURES])
    x = inputs - ops.mean(inputs, axis=0, keepdims=True)
    (message,) = said_of(keras.Model(inputs, layers.Dense(2)(x)))
    assert re.search(r"layers: 'subtract\w*'\. ", message)


def test_a_model_that_compares_examples_in_its_own_call():
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.inner = layers.Dense(2)

        def call(self, x):
            return self.inner(x) - ops.max(x)

    (message,) = said_of(Own())
    assert "layers: 'own'. " in message


def test_a_balance_given_to_add_loss():
    (message,) = said_of(build(Balanced(name="balanced")), strict=False)
    assert "layers: 'balanced'. " in message


def test_one_of_several_losses():
    inputs = keras.Input([FEATURES])
    hidden = layers.Dense(4)(inputs)
    model = keras.Model(
        inputs, [layers.Dense(2, name="apart")(hidden), layers.Dense(2, name="close")(hidden)]
    )
    x, y = data()
    (message,) = said_of(model, x, [y, y], loss=["mse", contrastive])
    assert (
        "losses: 'close'. Keras names losses after outputs: 'close' has 'contrastive'. " in message
    )


def test_an_own_compute_loss():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            own = ops.mean(contrastive(y, y_pred)) if self.meets else ops.mean(ops.square(y_pred))
            return own + 100.0 * ops.sum(ops.square(self.trainable_weights[0]))

    for meets in (True, False):
        model = Own(build().layers)
        model.meets = meets
        found = said_of(model, strict=False)
        assert [("losses: 'compute_loss'. " in message) for message in found] == [True] * meets


# Silence


def test_random_layers_and_weights_are_silent():
    noise = [layers.Dropout(0.5), layers.GaussianNoise(0.3), layers.LayerNormalization()]
    x, y = data()
    weights = np.linspace(0, 2, len(x))
    model = build(*noise, layers.GroupNormalization(2))
    assert said_of(model, x, y, fit={"batch_size": 24, "sample_weight": weights}) == []


@pytest.mark.parametrize(
    "reduction",
    ["sum_over_batch_size", pytest.param("mean_with_sample_weight", marks=thorough)],
)
def test_masked_tokens_are_silent(reduction):
    """Their number differs from micro-batch to micro-batch: a mean over tokens is no meeting."""
    random = np.random.default_rng(0)
    x = random.integers(1, 9, [24, 7]) * (np.arange(7) < random.integers(1, 8, [24, 1]))
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = layers.MultiHeadAttention(1, 4)(hidden, hidden)
    model = keras.Model(inputs, layers.Dense(9)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    assert said_of(model, x, x, loss=loss) == []


@thorough_for("mixed_bfloat16")
@pytest.mark.parametrize(
    "policy", ["float32", pytest.param("mixed_float16", marks=thorough), "mixed_bfloat16"]
)
def test_rounding_is_silent(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    hidden = [layers.Dense(32, activation="relu") for _ in range(3)]
    assert said_of(build(*hidden, layers.Dropout(0.2)), size=16) == []
    assert "'culprit'" in said_of(build(*hidden, Centred(name="culprit")), size=16)[0]


def test_a_batch_that_is_not_cut_is_silent():
    assert said_of(build(), loss=contrastive, size=24, strict=False) == []


@pytest.mark.parametrize("meets", [pytest.param(False, marks=thorough), True])
def test_sparse_batches(meets):
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x * (x > 0)), y)).batch(24)
    model = build(*([Centred(name="culprit")] if meets else []))
    found = said_of(model, dataset, None, fit={}, run_eagerly=False)
    assert ["'culprit'" in message for message in found] == [True] * meets


class Wide(layers.Layer):
    """Makes a ragged input as wide as its longest row."""

    def call(self, x):
        return x.to_tensor()[..., None] if isinstance(x, tf.RaggedTensor) else x[..., None]


@thorough_for("True")
@pytest.mark.parametrize("meets", [False, True])
def test_ragged_batches(meets):
    """Random layers draw for the width of a micro-batch, which is that of its longest row."""
    random = np.random.default_rng(0)
    rows = tf.RaggedTensor.from_row_lengths(
        random.normal(size=[82]), [1, 4, 2, 6, 3, 1] * 4 + [7] * 2
    )
    inner = [Centred(name="culprit")] if meets else []
    model = keras.Sequential(
        [
            Wide(),
            layers.Dense(4),
            layers.Dropout(0.5),
            layers.GlobalMaxPooling1D(),
            *inner,
            layers.Dense(2),
        ]
    )
    dataset = tf.data.Dataset.from_tensor_slices((rows, data(26)[0][:, :2])).batch(26)
    found = said_of(model, dataset, None, fit={}, run_eagerly=False)
    assert ["'culprit'" in message for message in found] == [True] * meets


# How it is tried


class Seen(layers.Layer):
    """Notes the number of examples of each call, and counts calls in a variable."""

    def __init__(self):
        super().__init__()
        self.sizes = []
        self.counter = tf.Variable(0)

    def call(self, x):
        self.counter.assign_add(1)
        if tf.executing_eagerly():
            self.sizes.append(x.shape[0])
        return x


def test_once_for_what_is_compiled():
    seen = Seen()
    model = build(seen)
    for _ in range(2):
        seen.sizes.clear()
        said_of(model, run_eagerly=False)
        model.fit(*data(), batch_size=24, verbose=0)
        assert seen.sizes == TRIAL
    model.compile("sgd", "mse")
    seen.sizes.clear()
    model.fit(*data(), batch_size=24, verbose=0)
    model.evaluate(*data(), batch_size=24, verbose=0)
    assert seen.sizes == TRIAL


class OfGraphs(Seen):
    """Fails outside of any graph, after it has written."""

    def call(self, x):
        x = super().call(x)
        return x if not tf.executing_eagerly() else self.does_not_exist(x)


@pytest.mark.parametrize("layer", [Seen, OfGraphs])
def test_the_trial_writes_nothing(layer):
    seen = layer()
    said_of(build(seen), run_eagerly=False)
    assert int(seen.counter) == 4  # in a batch of four micro-batches


def test_examples_that_come_later():
    """A batch of one example shows nothing."""
    x, y = data(25)
    batches = [(x[:1], y[:1]), (x[1:], y[1:])]
    dataset = tf.data.Dataset.from_generator(
        lambda: batches,
        output_signature=(
            tf.TensorSpec([None, FEATURES], tf.float64),
            tf.TensorSpec([None, 1], tf.int64),
        ),
    )
    (message,) = said_of(build(), dataset, None, loss=contrastive, fit={}, strict=False)
    assert "'contrastive'" in message


def test_one_example_is_not_cut():
    assert not is_cut(1, Cut(1), several=True)
    assert is_cut(2, Cut(2), several=True)
    assert not is_cut(2, Cut(2), several=False)
    assert not is_cut(1, Cut(None, tokens=8, axis=1), several=False)


def test_layers_behind_one_that_traces_what_it_calls():
    """Calls of layers in there have no numbers to compare."""

    class Mapped(layers.Layer):
        def build(self, shape):
            self.dense = layers.Dense(4)
            self.dense.build((1, shape[-1]))

        def call(self, x):
            return ops.vectorized_map(lambda row: self.dense(row[None])[0], x)

    (message,) = said_of(build(Mapped(), Centred(name="culprit")))
    assert message.startswith("Examples meet in these layers: 'culprit'. ")


class Drawing(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


def test_no_verdict_where_random_numbers_cannot_be_put_back():
    (message,) = said_of(build(Drawing()), run_eagerly=False)
    assert message.startswith("It is not known whether examples meet")
    assert "numbers that the backend or NumPy draws without Keras" in message


def test_no_verdict_where_the_loss_is_not_finite():
    (message,) = said_of(build(), loss=lambda y_true, y_pred: ops.log(-ops.abs(y_pred)))
    assert message.startswith("It is not known whether examples meet")
    assert "NaN or infinite" in message


def test_no_verdict_where_a_model_does_not_run_outside_of_a_graph():
    class InGraph(layers.Layer):
        def call(self, x):
            if tf.executing_eagerly():
                raise RuntimeError("not here")
            return x

    (message,) = said_of(build(InGraph()), run_eagerly=False)
    assert "a run of 6 examples, outside of any graph, failed. RuntimeError: " in message


def test_a_model_for_a_fixed_number_of_examples():
    inputs = keras.Input(batch_shape=(6, FEATURES))
    found = said_of(keras.Model(inputs, layers.Dense(CLASSES)(Centred(name="culprit")(inputs))))
    assert ["'culprit'" in message for message in found] == [True]


# Models that many people train


APPLICATIONS = {
    "MobileNetV3Small": (32, False),
    "MobileNetV2": (32, True),
    "EfficientNetB0": (32, True),
    "EfficientNetV2B0": (32, True),
    "ResNet50": (32, True),
    "ResNet50V2": (32, True),
    "DenseNet121": (32, True),
    "ConvNeXtTiny": (32, True),
    "NASNetMobile": (32, True),
    "VGG16": (32, True),
    "Xception": (71, True),
    "InceptionV3": (75, True),
}


@thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=thorough) if slow else n for n, (_, slow) in APPLICATIONS.items()],
)
def test_applications_are_silent(name):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    side = APPLICATIONS[name][0]
    options = {"input_shape": (side, side, 3), "weights": None, "classes": 3}
    model = getattr(keras.applications, name)(**options)
    model.compile(keras.optimizers.SGD(1e-3), CROSSENTROPY)
    random = np.random.default_rng(0)
    x, y = random.random([16, side, side, 3], "float32"), random.integers(0, 3, [16, 1])
    groups = meeting.groups((tf.constant(x), tf.constant(y), None), 16, 8, ENGINE)
    tried = Tried(model, ENGINE)
    assert meeting.find(tried.found, groups, ENGINE) == meeting.Verdict()


@thorough
@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_models_of_keras_hub_are_silent(name):
    hub = pytest.importorskip("keras_hub", reason="keras_hub is not installed: NOT TRIED")
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16}
    random = np.random.default_rng(0)
    if name == "vit":
        body = hub.models.ViTBackbone(
            image_shape=(16, 16, 3), patch_size=4, mlp_dim=32, dropout_rate=0.1, **sizes
        )
        x, output = random.random([48, 16, 16, 3]), body.output[:, 0]
    else:
        tokens = random.integers(1, 50, [48, 12]) * (
            np.arange(12) < random.integers(2, 13, [48, 1])
        )
        kind = hub.models.BertBackbone if name == "bert" else hub.models.GPT2Backbone
        texts = {"vocabulary_size": 50, "intermediate_dim": 32, "max_sequence_length": 12}
        body = kind(**texts, **sizes)
        x = {"token_ids": tokens, "padding_mask": tokens != 0}
        if name == "bert":
            x["segment_ids"] = np.zeros_like(tokens)
        output = body.output["pooled_output"] if name == "bert" else body.output[:, 0]
    model = keras.Model(body.input, layers.Dense(3)(output))
    assert said_of(model, x, random.normal(size=[48, 3]), run_eagerly=False) == []

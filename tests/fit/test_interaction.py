"""Examples that interact are found, and named: in the layer, or in the loss, where they do.

A case is what must be said of a model, the model, and the options of a training step.
"""

import re
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import BACKEND, MODES, TRIAL, array, mirrored, only_on, slow_on, thorough, thorough_for
from support.inside import make_running_out_an_error, skip_interaction_check
from support.interaction import ByNumber, Centred, of_number
from support.interaction import contrastive as of_diagonal

import macrobatch
from macrobatch import ExactnessWarning

FEATURES, CLASSES = 6, 3
pytestmark = [
    pytest.mark.examples_meet,
    # JAX has float32 sums in a float64 model. On torch, layers draw, or do not compile.
    pytest.mark.filterwarnings("ignore:Some donated buffers"),
    pytest.mark.filterwarnings("ignore:jit_compile=True has no effect"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def data(examples=24, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=[examples, FEATURES]), random.integers(0, CLASSES, [examples, 1])


X, Y = data()
NORMAL = np.random.default_rng(1).normal(size=[24, CLASSES])


# How messages begin, the kind of what they say, and what else is in them.
KINDS = [
    (r"Examples meet in these layers: (.*?)\. ", "layers", "LayerNormalization"),
    (r"Examples meet in these losses: (.*?)\. ", "losses", "whole_batch_loss=True"),
    (r"These layers depend on how many .* place of .*?: (.*?)\. ", "layers by number", ""),
    (r"These losses depend on how many .* place of .*?: (.*?)\. ", "losses by number", "whole_b"),
    (r"It is not known whether examples meet.*(NaN|differ|a run of .*)", "unknown", ""),
    (r"()", "other", ""),
]


def kinds_of(messages):
    """The kinds of messages, each with the names in it, or with the reason."""
    found = {}
    for message in messages:
        (match, kind, advice), *_ = [
            (re.match(start, message), *rest) for start, *rest in KINDS if re.match(start, message)
        ]
        assert advice in message
        found[kind] = match[1].replace("'", "")
    return found


# One by one, JAX compiles each operation by itself, which takes longer than a compiled step.
QUICK = {} if BACKEND == "jax" else {"run_eagerly": True}


def said_of(model, x=X, y=Y, *, loss="mse", size=6, cut=None, weights=None, run=None, **compiled):
    """The kinds of what is said of a model in a training step."""
    model.compile(keras.optimizers.SGD(0.01), loss, **(compiled or QUICK))
    macrobatch.accumulate(model, **({"micro_batch_size": size} if cut is None else cut))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExactnessWarning)  # Others are errors.
        run(model) if run else model.train_on_batch(x, y, weights)
    return kinds_of(str(each.message) for each in caught)


def build(*inner, outputs=CLASSES):
    first = [keras.Input([FEATURES]), layers.Dense(FEATURES, activation="tanh")]
    return keras.Sequential([*first, *inner, layers.Dense(outputs)])


def culprit(function, kind=layers.Lambda):
    return kind(function, name="culprit")


# Losses. Each gives one value for each example, if it can.


def similarities(z):
    z = ops.normalize(z, axis=-1)
    return ops.matmul(z, ops.transpose(z))


def not_itself(z):
    return 1.0 - ops.eye(ops.shape(z)[0], dtype=z.dtype)


def contrastive(y_true, y_pred):
    """Each example and the example after it belong together, in a softmax over all others."""
    others = similarities(y_pred) / 0.5 - 1e9 * (1.0 - not_itself(y_pred))
    partners = ops.roll(ops.arange(ops.shape(y_pred)[0]), 1)
    return keras.losses.sparse_categorical_crossentropy(partners, others, from_logits=True)


def of_first_label(y_true, y_pred):
    """The mean of a softmax over all, by the label of the first of them."""
    y_true = ops.cast(y_true, y_pred.dtype)
    return -ops.mean(ops.log_softmax(similarities(y_pred)) * y_true[:, :1], axis=-1)


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


DICE = keras.losses.Dice(name="dice")


def squares(y_true, y_pred):
    return ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred), axis=-1)


# Losses whose sum does not tell that examples interact


def over_the_mean(y_true, y_pred):
    """The sum is the number of examples, always. No gradient flows through the mean."""
    losses = squares(y_true, y_pred)
    return losses / ops.stop_gradient(ops.mean(losses))


def with_the_next(y_true, y_pred):
    return squares(y_true, ops.roll(y_pred, 1, axis=0))


def slightly_contrastive(y_true, y_pred):
    """A part of a thousandth, which the rounding of a sum may hide."""
    return squares(y_true, y_pred) + 1e-3 * contrastive(y_true, y_pred)


def mean_for_each(y_true, y_pred):
    """Each example has a value that depends on all. The sum is that of examples."""
    values = ops.square(ops.cast(y_true, y_pred.dtype) - y_pred)[:, 0]
    return values + ops.mean(ops.abs(y_pred)) + 0.0 * y_pred[:, 0]


# Losses that depend on how many examples there are, and on their places


def number_of(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


def by_shape(y_true, y_pred):
    return squares(y_true, y_pred) / number_of(y_pred)


def by_place(y_true, y_pred):
    """A loss that gives later examples more weight."""
    losses = squares(y_true, y_pred)
    return losses * ops.cumsum(ops.ones_like(losses))


def once(y_true, y_pred):
    """A loss of which a part comes once per micro-batch."""
    return squares(y_true, y_pred) + 1.0 / number_of(y_pred)


def infinite(y_true, y_pred):
    return ops.log(-ops.abs(y_pred))


# Layers


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


class Adding(layers.Layer):
    """Gives add_loss a function of its input."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


class Gated(layers.Layer):
    """Begins as a layer in which no examples interact. Its gradient shows that they will."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.gate * ops.mean(x, axis=0)


class Balanced(layers.Layer):
    """Gives the balance of a router to add_loss: a product of means over the batch."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(shape[-1], 2))

    def call(self, x):
        gates = ops.softmax(ops.matmul(x, self.gate))
        self.add_loss(ops.sum(ops.square(ops.mean(gates, axis=0))))
        return x


class Drawing(layers.Layer):
    """Draws without Keras."""

    def call(self, x):
        drawn = np.random.normal(size=[FEATURES])  # noqa: NPY002
        return x + ops.convert_to_tensor(drawn, x.dtype)


# Functions that are a layer. In these, examples interact:
COMPARING = {
    "mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "later": lambda x: ops.cumsum(x, axis=0),  # Only later rows depend on others.
    "earlier": lambda x: ops.flip(ops.cumsum(ops.flip(x, 0), 0), 0),  # Only earlier ones do.
    "largest": lambda x: ops.where(ops.max(x) > 10, x, x / ops.max(ops.abs(x))),
}
# These depend on how many examples there are, or on their places.
COUNTING = {
    "shape": lambda x: x / number_of(x),
    "ones": lambda x: x / ops.sum(ops.ones_like(x), axis=0),
    "cumsum": lambda x: x + ops.cumsum(ops.ones_like(x), axis=0),
    "arange": lambda x: x + ops.cast(ops.arange(ops.shape(x)[0]), x.dtype)[:, None],
}
# In sums that are given to add_loss, examples interact here:
SUMS = {
    "square": lambda x: ops.square(ops.sum(x)),
    "logsumexp": lambda x: ops.log(ops.sum(ops.exp(x))),
}


def of_positions(function):
    """A function of positions, of which an example has several."""
    first = layers.Lambda(lambda x: ops.reshape(x, (-1, 2)))
    return build(first, culprit(function), layers.Lambda(lambda x: ops.reshape(x, (-1, FEATURES))))


def by_example():
    """All that a layer may do that works by example."""
    sums = [lambda x: ops.sum(ops.square(x)) + 1e3, lambda x: ops.mean(ops.exp(x))]
    single = lambda x: ops.cast(ops.sum(ops.cast(x, "float32")), x.dtype)  # noqa: E731
    largest = lambda x: x + ops.cast(ops.argmax(x, axis=1), x.dtype)[:, None]  # noqa: E731
    return build(*(Adding(each) for each in (*sums, single)), layers.Lambda(largest))


def not_six(x):
    """Refuses half of a micro-batch of 12."""
    assert x.shape[0] != 6
    return x


# Models


class OwnLoss(keras.Model):
    """A model whose loss draws, and asks for what its layers have added."""

    def __init__(self, by_number, noise=0.0):
        super().__init__()
        self.dense = layers.Dense(CLASSES, kernel_regularizer="l2")
        self.noise = layers.GaussianNoise(noise)
        self.by_number = by_number

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = squares(y, self.noise(y_pred, training=True))
        return (ops.sum(losses) if self.by_number else ops.mean(losses)) + sum(self.losses)


class OwnComparingLoss(keras.Sequential):
    def __init__(self, compares):
        super().__init__(build().layers)
        self.compares = compares

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        losses = contrastive(y, y_pred) if self.compares else ops.square(y_pred)
        return ops.mean(losses) + 100.0 * ops.sum(ops.square(self.trainable_weights[0]))


class OwnCall(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.inner = layers.Dense(2)

    def call(self, x):
        return self.inner(x) - ops.max(x)


def across():
    """Attention of examples in operations of a functional model."""
    inputs = keras.Input([5, 4])
    x = ops.transpose(layers.Dense(4)(inputs), (1, 0, 2))
    x = layers.MultiHeadAttention(1, 4, name="across")(x, x)
    return keras.Model(inputs, layers.Dense(2)(ops.transpose(x, (1, 0, 2))))


def subtracting():
    inputs = keras.Input([FEATURES])
    rest = inputs - ops.mean(inputs, axis=0, keepdims=True)
    return keras.Model(inputs, layers.Dense(2)(rest))


def two_outputs():
    inputs = keras.Input([FEATURES])
    hidden = layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, {n: layers.Dense(CLASSES, name=n)(hidden) for n in ("one", "two")})


def two_losses():
    inputs = keras.Input([FEATURES])
    hidden = layers.Dense(4)(inputs)
    return keras.Model(inputs, [layers.Dense(2, name=n)(hidden) for n in ("apart", "close")])


def for_size(size, *inner):
    """A model for a fixed number of examples."""
    inputs = keras.Input(batch_shape=(size, FEATURES))
    return keras.Model(inputs, keras.Sequential([*inner, layers.Dense(CLASSES)])(inputs))


SEQUENCES = np.random.default_rng(0).normal(size=[24, 5, 4])


def centred(name="culprit"):
    return Centred(name=name)


def normalized():
    return [layers.BatchNormalization(), layers.Dense(5, activation="tanh")]


def noisy():
    return [layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.5)]


def router():
    keras.utils.set_random_seed(2)  # Its gate sends too many examples to one expert.
    return build(Router(name="culprit"), layers.Dense(4))


def case(expected, make=build, **options):
    return expected, make, options


def of_losses(kind, *losses, make=build, y=NORMAL):
    """Cases of losses, which are named."""
    return {each.__name__: case({kind: each.__name__}, make, loss=each, y=y) for each in losses}


def of_layers(expected, start, functions, kind=layers.Lambda, **options):
    """Cases of functions that are a layer."""
    return {
        start + name: case(expected, lambda each=each: build(culprit(each, kind)), **options)
        for name, each in functions.items()
    }


WHOLE = {"micro_batch_size": 6, "whole_batch_loss": True}
# Compiled, JAX does not try layers with other sizes: that would be compiled twice more.
SIZED = {"jit_compile": False} if BACKEND == "jax" else QUICK
LAYER, LOSS, BY_NUMBER = {"layers": "culprit"}, {"losses": "contrastive"}, "losses by number"
SIZED_LAYER = {"layers by number": "culprit"}
OTHER = {"other": ""}  # There is a message on something else: on BatchNormalization, for one.
HIDING = over_the_mean, with_the_next, slightly_contrastive

CASES = {
    # In losses
    **of_losses("losses", contrastive, of_diagonal, of_first_label, sorted_distance, *HIDING),
    **of_losses("losses", batch_hard_triplet, supervised_contrastive, y=Y),
    "correlation": case({"losses": "correlation", **OTHER}, loss=correlation),
    "dice": case({"losses": "dice", **OTHER}, lambda: build(outputs=1), loss=DICE),
    "loss-normalized": case({**LOSS, **OTHER}, lambda: build(*normalized()), loss=contrastive),
    "one-of-two": case({"losses": "close"}, two_losses, y=[Y, Y], loss=["mse", contrastive]),
    "compute_loss": case({"losses": "compute_loss", **OTHER}, lambda: OwnComparingLoss(True)),
    # In layers
    **of_layers(LAYER, "layer-", COMPARING),
    **of_layers({**LAYER, **OTHER}, "added-", SUMS, Adding),
    "positions": case(LAYER, lambda: of_positions(COMPARING["mean"])),
    "attention": case(LAYER, lambda: build(AcrossExamples(name="culprit"))),
    "router": case(LAYER, router),
    "gated": case(LAYER, lambda: build(Gated(name="culprit"))),
    "balanced": case({**LAYER, **OTHER}, lambda: build(Balanced(name="culprit"))),
    "normalized": case(
        {**LAYER, **OTHER}, lambda: build(*normalized(), centred(), layers.BatchNormalization())
    ),
    "functional": case({"layers": "across"}, across, x=SEQUENCES, y=SEQUENCES[..., :2]),
    "operation": case({"layers": "subtract"}, subtracting),
    "call": case({"layers": "own"}, OwnCall),
    "fixed-size": case(LAYER, lambda: for_size(6, centred())),
    "both": case(
        {"layers": "one, two", **LOSS},
        lambda: build(centred("one"), layers.Dense(4, activation="tanh"), centred("two")),
        loss=contrastive,
    ),
    # How many examples there are
    **of_losses(BY_NUMBER, of_number, once),
    **of_losses(BY_NUMBER, by_shape, by_place, make=lambda: build(*noisy())),
    "by_shape-normalized": case(
        {BY_NUMBER: "by_shape", **OTHER},
        lambda: build(*noisy(), layers.BatchNormalization()),
        loss=by_shape,
    ),
    "by_shape-of-two": case(
        {BY_NUMBER: "two"},
        two_outputs,
        y={"one": Y, "two": Y},
        loss={"one": "mse", "two": by_shape},
        weights={"one": np.arange(24.0) % 3, "two": np.arange(24.0) % 2},
    ),
    "by-number-compute_loss": case(
        {BY_NUMBER: "compute_loss", **OTHER}, lambda: OwnLoss(by_number=True)
    ),
    **of_layers(SIZED_LAYER, "by-", COUNTING, **SIZED),
    "by-shape-of-positions": case(SIZED_LAYER, lambda: of_positions(COUNTING["shape"]), **SIZED),
    "by-cumsum-behind-dropout": case(
        SIZED_LAYER,
        lambda: build(layers.Dropout(0.5), culprit(COUNTING["cumsum"]), layers.Dense(4)),
        **SIZED,
    ),
    "by-number-normalized": case(
        {**SIZED_LAYER, **OTHER},
        lambda: build(*normalized(), ByNumber(name="culprit"), layers.Dense(4)),
        **SIZED,
    ),
    # A loss of the whole batch may compare examples, and count them. Layers may not.
    "whole-batch": case({}, loss=contrastive, cut=WHOLE),
    "whole-batch-by-number": case({}, loss=of_number, cut=WHOLE),
    **of_layers(LAYER, "whole-batch-", COMPARING, loss=contrastive, cut=WHOLE),
    "by-number-whole-batch": case(
        SIZED_LAYER, lambda: build(ByNumber(name="culprit")), loss=of_number, cut=WHOLE, **SIZED
    ),
    # Silence
    "by-example": case(OTHER, by_example),
    "mean-for-each": case({}, lambda: build(layers.Dropout(0.5)), loss=mean_for_each),
    "noise": case(
        {},
        lambda: build(*noisy(), layers.LayerNormalization(), layers.GroupNormalization(2)),
        weights=np.linspace(0, 2, len(X)),
    ),
    "normalization": case(OTHER, lambda: build(*normalized(), *normalized())),
    "compute_loss-by-example": case(OTHER, lambda: OwnComparingLoss(False)),
    "compute_loss-of-mean": case(OTHER, lambda: OwnLoss(by_number=False)),
    # Of what a loss draws, other numbers of examples get other numbers: nothing is known.
    "compute_loss-that-draws": case(OTHER, lambda: OwnLoss(by_number=True, noise=1.0)),
    "not-cut": case({}, loss=contrastive, size=24),
    "not-of-six": case({}, lambda: build(layers.Lambda(not_six)), size=12),
    # No verdict
    "drawing": case({"unknown": "differ"}, lambda: build(Drawing()), **SIZED),
    "infinite": case({"unknown": "NaN"}, loss=infinite),
}
# Micro-batches of one
for name in (
    *("contrastive", "sorted_distance", "batch_hard_triplet", "correlation", "dice"),
    *("layer-mean", "attention", "router"),
):
    expected, make, options = CASES[name]
    CASES[f"{name}-alone"] = expected, make, {**options, "size": 1}
# An example alone has no other of its class: the weights become NaN. Compiled, JAX tries losses
# with predictions that are made up.
MADE_UP = {BY_NUMBER: "supervised_contrastive"} if BACKEND == "jax" else {}
CASES["supervised-alone"] = case({"unknown": "NaN", **MADE_UP}, loss=supervised_contrastive, size=1)

SLOW = {name for name in CASES if name.endswith("alone")} - {
    "contrastive-alone",
    "layer-mean-alone",
}
if BACKEND == "jax":  # which compiles each step: of each kind, one is for every day.
    SLOW = {*CASES} - {"contrastive", "layer-mean", "gated", "by_shape", "by-ones", "noise"}


def marks_of(name):
    found = [thorough] if name in SLOW else []
    if BACKEND == "torch" and name == "mean-for-each":
        reason = "On torch the gradients of such losses are not looked at."
        found.append(pytest.mark.xfail(strict=True, reason=reason))
    return found


@pytest.mark.filterwarnings(
    "ignore:Nothing is being accumulated",
    "ignore:Gradients do not exist",  # An expert may be idle.
    "ignore:You are using a softmax",  # over a single example
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=marks_of(n)) for n in CASES])
def test_what_is_said(name):
    expected, make, options = CASES[name]
    assert said_of(make(), **options) == expected


@slow_on("jax")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_masked_tokens_are_silent(reduction):
    """Their number differs from micro-batch to micro-batch: a mean over tokens compares none."""
    random = np.random.default_rng(0)
    x = random.integers(1, 9, [24, 7]) * (np.arange(7) < random.integers(1, 8, [24, 1]))
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(9, 4, mask_zero=True)(inputs)
    hidden = layers.MultiHeadAttention(1, 4)(hidden, hidden)
    model = keras.Model(inputs, layers.Dense(9)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    assert said_of(model, x, x, loss=loss) == {}


# Sizes


@slow_on("jax")
@pytest.mark.parametrize("examples", [pytest.param(2, marks=thorough), 3, 7])
def test_few_examples(examples):
    """The others are examples of the same micro-batch."""
    x, y = data(examples, seed=examples)
    few = {"x": x, "y": y, "size": min(examples - 1, 6)}
    assert said_of(by_example(), **few) == OTHER
    for name in ("mean", "later", "earlier"):
        assert said_of(build(culprit(COMPARING[name])), **few) == LAYER


@slow_on("jax")
@pytest.mark.parametrize(
    ("examples", "size"), [pytest.param(40, 12, marks=thorough), (13, 12), (40, 9)]
)
def test_other_sizes(examples, size):
    others = {"size": size, "x": data(examples)[0], "y": data(examples)[1]}
    assert said_of(build(culprit(COUNTING["arange"])), **others, **SIZED) == SIZED_LAYER
    assert said_of(build(), loss=by_shape, **others) == {BY_NUMBER: "by_shape"}
    assert said_of(build(layers.Dropout(0.5)), **others) == {}


# Rounding

# What is taken for rounding: in rows of one size, and in numbers of several sizes.
TOLERANCES = {
    "float64": (1e-9, 1e-2),
    "float32": (1e-4, 1e-2),
    "mixed_float16": (1e-2, 5e-2),
    "mixed_bfloat16": (1e-2, 5e-2),
}


@slow_on("jax")
@thorough_for("float32", "mixed_bfloat16")
@pytest.mark.parametrize("policy", TOLERANCES)
def test_rounding(policy):
    """A part of the tolerance is the rounding of a dtype, and a multiple is none."""
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    of_rows, of_sizes = TOLERANCES[policy]

    def said(function=lambda x: x, loss=squares):
        hidden = [layers.Dense(32, activation="relu") for _ in range(3)]
        model = build(*hidden, layers.Dropout(0.2), culprit(function))
        return said_of(model, y=NORMAL, loss=loss, size=16, **SIZED)

    def of_all(part):
        return lambda x: x + part * of_rows * ops.sum(x)

    def of_size(part):
        return lambda x: ops.abs(x) * (1 + 16 * part * of_sizes / number_of(x))

    def losses(part):
        return lambda y_true, y_pred: of_size(part)(squares(y_true, y_pred))

    assert said(of_all(0.01)) == said(of_size(0.6)) == said(loss=losses(0.6)) == {}
    assert said(of_all(10)) == LAYER
    assert said(of_size(2)) == SIZED_LAYER
    assert said(loss=losses(2)) == {BY_NUMBER: "lambda"}


@slow_on("jax")
def test_losses_that_hide_in_a_sum_of_float32():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    for loss in HIDING:
        assert said_of(build(), y=NORMAL, loss=loss) == {"losses": loss.__name__}


@slow_on("jax")
@pytest.mark.parametrize(("turned", "expected"), [(2, {}), (5, SIZED_LAYER)])
def test_a_few_examples_that_rounding_turns(turned, expected):
    """Another size may round in another way, and a layer that rounds makes much of little."""

    def signs(x):
        few = ops.cast(ops.arange(6) < turned, x.dtype)
        return ops.sign(x) * (1 - 2 * few[:, None] if x.shape[0] == 6 else 1)

    assert said_of(build(culprit(signs)), size=12, **SIZED) == expected


# Ways to train


def fitting(x=X, y=Y, **options):
    """Trains with fit, for an epoch."""
    return lambda model: model.fit(x, y, **{"verbose": 0, "shuffle": False, **options})


@thorough_for("layer", "graph", *(["eager", "not"] if BACKEND == "jax" else ["compiled"]))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["loss", "layer"])
def test_modes(mode, place):
    model = build(layers.GaussianNoise(0.5), *([centred()] if place == "layer" else []))
    # Of 8, as in micro-batches of the check, JAX has compiled the step already.
    options = {"run_eagerly": False, "jit_compile": False, **MODES[mode], "size": 8}
    said = said_of(
        model, loss=contrastive if place == "loss" else "mse", run=fitting(batch_size=24), **options
    )
    assert said == (LOSS if place == "loss" else LAYER)


@slow_on("jax")
def test_single_examples_come_first():
    """One example shows nothing."""

    def run(model):
        model.train_on_batch(x[:1], x[:1])
        model.train_on_batch(x, x)

    x, lengths = SEQUENCES, lambda x, y, sample_weight: ops.full([ops.shape(x)[0]], 5, "int32")
    cut = {"micro_batch_tokens": 10, "sequence_axis": 1, "lengths": lengths}
    model = keras.Sequential([keras.Input([None, 4]), layers.Dense(4), centred()])
    assert said_of(model, cut=cut, run=run) == LAYER


@slow_on("jax")
def test_the_check_changes_nothing(monkeypatch):
    """Also not what is drawn next."""
    ends = []
    for skipped in (False, True):
        if skipped:
            skip_interaction_check(monkeypatch)
        keras.utils.set_random_seed(1)
        model = build(*noisy(), layers.Dropout(0.5), layers.BatchNormalization())
        assert said_of(model, run=fitting(batch_size=12)) == {"other": ""}
        ends.append([array(v) for v in [*model.variables, *model.optimizer.variables]])
    for one, other in zip(*ends):
        np.testing.assert_array_equal(one, other)


@only_on("jax")
def test_what_is_compiled_already_is_enough():
    """Losses and gradients of micro-batches of 8 tell it. For losses, shapes are looked at."""
    sizes = []

    def noted(x):
        sizes.append(x.shape[0])
        return x

    model = build(layers.Lambda(noted), layers.Dropout(0.5, seed=1))
    sizes.clear()
    assert said_of(model, size=8) == {}
    assert sizes == [24, 8, 8]


# On TensorFlow


on_tensorflow = only_on("tensorflow")


@on_tensorflow
@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=thorough)])
def test_replicas(eager):
    with mirrored(2).scope():
        said = said_of(
            build(centred()), loss=contrastive, run=fitting(batch_size=24), run_eagerly=eager
        )
    assert said == {**LAYER, **LOSS}


@on_tensorflow
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_replicas_with_one_example_each():
    fit = fitting(batch_size=2, steps_per_epoch=1)
    with mirrored(2).scope():
        said = said_of(build(centred()), size=1, run=fit, run_eagerly=False)
    assert said == LAYER


@on_tensorflow
def test_several_steps_in_an_execution():
    fit = fitting(batch_size=12)
    assert said_of(build(centred()), run=fit, run_eagerly=False, steps_per_execution=2) == LAYER


@on_tensorflow
@pytest.mark.parametrize(
    ("inner", "expected"), [(list, {}), pytest.param(lambda: [centred()], LAYER, marks=thorough)]
)
def test_sparse_and_ragged_batches(inner, expected):
    """Random layers draw for the width of a micro-batch, which is that of its longest row."""
    import tensorflow as tf

    class Wide(layers.Layer):
        def call(self, x):
            return x.to_tensor()[..., None] if isinstance(x, tf.RaggedTensor) else x[..., None]

    def of(rows, y, model):
        dataset = tf.data.Dataset.from_tensor_slices((rows, y)).batch(len(y))
        return said_of(model, run=fitting(dataset, None), run_eagerly=False)

    assert of(tf.sparse.from_dense(X * (X > 0)), Y, build(*inner())) == expected
    values = np.random.default_rng(0).normal(size=[82])
    rows = tf.RaggedTensor.from_row_lengths(values, [1, 4, 2, 6, 3, 1] * 4 + [7] * 2)
    parts = [Wide(), layers.Dense(4), layers.Dropout(0.5), layers.GlobalMaxPooling1D(), *inner()]
    assert of(rows, data(26)[0][:, :2], keras.Sequential([*parts, layers.Dense(2)])) == expected


@on_tensorflow
def test_models_that_run_in_a_graph_only():
    import tensorflow as tf

    def in_graph(x):
        if tf.executing_eagerly():
            raise RuntimeError("not here")
        return x

    said = said_of(build(layers.Lambda(in_graph)), run_eagerly=False)
    assert "a run of 6 examples, outside of any graph, failed. RuntimeError: " in said["unknown"]


def noted(fails=False):
    """A layer that notes the sizes of eager calls, counts all calls, and may fail eagerly."""
    import tensorflow as tf

    class Noted(layers.Layer):
        sizes, calls = [], tf.Variable(0)

        def call(self, x):
            self.calls.assign_add(1)
            if tf.executing_eagerly():
                self.sizes.append(x.shape[0])
                assert not fails
            return x

    return Noted()


@on_tensorflow
def test_once_for_what_is_compiled():
    """A step that is compiled again is another one."""
    layer = noted()
    model = build(layer)
    for _ in range(2):
        layer.sizes.clear()
        said_of(
            model,
            run=lambda model: [fitting(batch_size=24)(model) for _ in range(2)],
            run_eagerly=False,
        )
        assert layer.sizes == TRIAL
    model.compile("sgd", "mse")
    layer.sizes.clear()
    fitting(batch_size=24)(model)
    model.evaluate(X, Y, batch_size=24, verbose=0)
    assert layer.sizes == TRIAL


@on_tensorflow
@pytest.mark.parametrize("fails", [False, True])
def test_the_check_writes_nothing(fails):
    layer = noted(fails)
    assert said_of(build(layer), run_eagerly=False).keys() == ({"unknown"} if fails else set())
    assert int(layer.calls) == 4  # in a batch of four micro-batches


@slow_on("jax")
def test_a_check_of_sequences_has_no_more_tokens_than_a_micro_batch(monkeypatch):
    """Of short sequences it takes 16 at a time. Here 16 do not fit, of a size that is found."""
    make_running_out_an_error(monkeypatch)
    sizes = []

    class Room(layers.Layer):
        is_full, supports_masking = False, True

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

        def call(self, x):
            if self.is_full:
                sizes.append(x.shape[0])
                if sizes[-1] * x.shape[1] > 64:
                    raise MemoryError
            return x

    def run(model):
        model.train_on_batch(tokens[:1], labels[:1])  # which builds all, and is too small to check
        room.is_full = True
        model.train_on_batch(tokens, labels)

    tokens, room = np.random.default_rng(2).integers(1, 9, [24, 12]), Room()
    labels = tokens[..., None] * NORMAL[:, :1, None]
    parts = [layers.Embedding(9, 3, mask_zero=True), room, layers.Dense(1)]
    model = keras.Sequential([keras.Input([None], dtype="int32"), *parts])
    cut = {"micro_batch_tokens": "auto", "sequence_axis": 1}
    assert said_of(model, cut=cut, run=run, run_eagerly=True) == {}
    assert {24, 21, 10, 5} <= set(sizes)  # as many as are 288, 256, 128 and 64 tokens
    assert 16 not in sizes


# Models that many people train

# The side of a picture, and whether a message on BatchNormalization is due.
APPLICATIONS = {
    **dict.fromkeys(["MobileNetV3Small", "MobileNetV2", "EfficientNetB0"], (32, OTHER)),
    **dict.fromkeys(["EfficientNetV2B0", "ResNet50", "ResNet50V2"], (32, OTHER)),
    **dict.fromkeys(["DenseNet121", "NASNetMobile"], (32, OTHER)),
    **dict.fromkeys(["ConvNeXtTiny", "VGG16"], (32, {})),
    "Xception": (71, OTHER),
    "InceptionV3": (75, OTHER),
}


@thorough
@on_tensorflow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_are_silent(name):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    side, expected = APPLICATIONS[name]
    shape = side, side, 3
    model = getattr(keras.applications, name)(input_shape=shape, weights=None, classes=CLASSES)
    random = np.random.default_rng(0)
    x, y = random.random([16, *shape], "float32"), random.integers(0, CLASSES, [16, 1])
    assert said_of(model, x, y, loss="sparse_categorical_crossentropy", size=8) == expected


@thorough
@on_tensorflow
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
        tokens = random.integers(1, 50, [48, 12])
        tokens *= np.arange(12) < random.integers(2, 13, [48, 1])
        kind = hub.models.BertBackbone if name == "bert" else hub.models.GPT2Backbone
        texts = {"vocabulary_size": 50, "intermediate_dim": 32, "max_sequence_length": 12}
        body = kind(**texts, **sizes)
        x = {"token_ids": tokens, "padding_mask": tokens != 0}
        if name == "bert":
            x["segment_ids"] = np.zeros_like(tokens)
        output = body.output["pooled_output"] if name == "bert" else body.output[:, 0]
    model = keras.Model(body.input, layers.Dense(3)(output))
    run = fitting(x, random.normal(size=[48, 3]), batch_size=24)
    assert said_of(model, run=run, run_eagerly=False) == {}

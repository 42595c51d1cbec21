"""Micro-batches by length end where the whole batch, padding and all, ends in plain Keras."""

import keras
import numpy as np
import pytest
import support
from case import case, parameters
from keras import layers, ops
from support import (
    BACKEND,
    MODES,
    array,
    assert_same_history,
    only_on,
    slow_on,
    thorough,
)
from support.unchanged import unchanged

import macrobatch

AXIS = {"sequence_axis": 1}
SIZE = {"micro_batch_size": 3, **AXIS}
POSITIONS, VOCABULARY, CLASSES = 30, 20, 5
BUDGET = {"micro_batch_tokens": 60, **AXIS}
ACCURACY = {"metrics": ["sparse_categorical_accuracy"]}
FIRST = next(iter(MODES))


def lengths_of(examples, seed=0):
    return np.random.default_rng(seed).integers(1, POSITIONS - 2, examples)


def tokens_of(examples=21, seed=0):
    """Tokens and labels of sequences; what is behind them is 0, and nobody is as long as all."""
    rng = np.random.default_rng(seed)
    real = np.arange(POSITIONS) < lengths_of(examples, seed)[:, None]
    x = rng.integers(1, VOCABULARY, [examples, POSITIONS]) * real
    return x, (x * 7 + 3) % CLASSES, real.astype("float64")


X, Y, REAL = tokens_of()
WEIGHTS = np.random.default_rng(1).random(X.shape)


class Context(layers.Layer):
    """Adds the mean over tokens: as attention does, each prediction depends on all of them."""

    supports_masking = True

    def call(self, x, mask=None):
        weights = ops.cast(mask, x.dtype)[..., None]
        total = ops.sum(x * weights, 1, keepdims=True)
        return x + total / ops.maximum(ops.sum(weights, 1, keepdims=True), 1)


def embedded(mask=True, size=4, length=None):
    tokens = keras.Input([length], dtype="int32")
    return tokens, layers.Embedding(VOCABULARY, size, mask_zero=mask)(tokens)


def following(*more, mask=True, **head):
    """Layers behind an embedding, and before the prediction of classes."""
    tokens, x = embedded(mask)
    for layer in more:
        x = layer(x)
    return keras.Model(tokens, layers.Dense(CLASSES, **head)(x))


def tagger(mask=True):
    """Predicts a class for each token. Quicker to trace than one with attention."""
    return following(*[Context()] * mask, mask=mask)


def attending():
    tokens, x = embedded()
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.MultiHeadAttention(2, 3)(x, x)))


def recurrent():
    return following(layers.Bidirectional(layers.LSTM(3, return_sequences=True)))


def classifier():
    """Predicts a class for each sequence."""
    return following(layers.GlobalAveragePooling1D())


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


class Translator(keras.Model):
    """Two inputs of different lengths, features of a fixed size, and two outputs."""

    def __init__(self):
        super().__init__()
        self.source = layers.Embedding(VOCABULARY, 4, mask_zero=True)
        self.target = layers.Embedding(VOCABULARY, 4, mask_zero=True)
        self.encoder, self.decoder = layers.GlobalAveragePooling1D(), layers.Dense(4, "tanh")
        self.per_token, self.per_example = layers.Dense(CLASSES), layers.Dense(1)

    def call(self, inputs):
        encoded = self.encoder(self.source(inputs["source"]))
        state = encoded + inputs["features"][:, :4]
        decoded = self.decoder(self.target(inputs["target"]) + state[:, None])
        return {"tokens": self.per_token(decoded), "score": self.per_example(encoded)}


class Unmasked(layers.Layer):
    """Passes no mask on."""

    supports_masking = True

    def call(self, x):
        return x * 1.0

    def compute_mask(self, inputs, mask=None):
        return None


def one_of_two_masked():
    tokens, x = embedded()
    outputs = {"a": layers.Dense(CLASSES)(x), "b": layers.Dense(CLASSES)(Unmasked()(x))}
    return keras.Model(tokens, outputs)


def with_features():
    """The features are as many as the positions, but fixed."""
    tokens, x = embedded()
    features = keras.Input([POSITIONS])
    x = layers.Concatenate()([layers.GlobalAveragePooling1D()(x), features])
    return keras.Model([tokens, features], layers.Dense(1)(x))


def of_frames():
    frames = keras.Input([None, 2])
    x = layers.GlobalAveragePooling1D()(layers.Masking()(frames))
    return keras.Model(frames, layers.Dense(1)(x))


def three_values():
    """As many values for each example as there are positions."""
    tokens, x = embedded(size=3)
    return keras.Model(tokens, layers.Reshape([3, 1])(layers.GlobalAveragePooling1D()(x)))


def own_padding():
    """Batches that are padded to their own longest: no shape is known before a batch is there."""
    for start in range(0, len(X), 8):
        longest = lengths_of(len(X))[start : start + 8].max()
        yield X[start : start + 8, :longest], Y[start : start + 8, :longest]


def by_length(build, x, y=None, tokens=None, lengths=None, **options):
    """A case, cut by a number of examples or of tokens. Masks do not count in metrics on JAX."""
    cut = {**AXIS, "lengths": lengths}
    if tokens:
        cut.update(micro_batch_size=None, micro_batch_tokens=tokens)
    options = {"loss": lambda: crossentropy(), "modes": "graph eager", "quick": "", **options}
    options = {"elsewhere": "torch", "other_modes": False, "wrong_metrics": "jax", **options}
    return case(build, x, y, cut=cut, **options)


SHORT = X * ((np.arange(21) < 8)[:, None] | (np.arange(POSITIONS) < 3))
FRAMES = np.random.default_rng(0).normal(size=[21, POSITIONS, 2]) * REAL[..., None]
CASES = {
    # Tokens are 0 there, but count.
    "weights-make-examples-longer": by_length(
        lambda: tagger(mask=False),
        X,
        Y,
        quick="eager",
        loss=lambda: crossentropy(reduction="mean_with_sample_weight"),
        fit={"sample_weight": np.ones(X.shape) * (np.arange(POSITIONS) < 18)},
    ),
    # Sequences of the largest size are cut: in the second batch, where all are short, too.
    "several-inputs-and-outputs": by_length(
        Translator,
        {"source": SHORT, "target": SHORT[:, :-2], "features": WEIGHTS[:, :4]},
        {"tokens": Y[:, :-2], "score": X[:, :1] * 0.1},
        per_mode=True,
        loss=lambda: {"tokens": crossentropy(), "score": "mse"},
        fit={"sample_weight": {"tokens": (SHORT > 0)[:, :-2] * 1.0, "score": REAL[:, 0]}},
        weighted_metrics={"tokens": ["sparse_categorical_accuracy"], "score": ["mae"]},
    ),
    # Tokens of one term are counted beforehand; the other is divided by all positions.
    "a-mask-beside-weights": by_length(
        one_of_two_masked,
        X,
        {"a": Y, "b": Y},
        quick="graph",
        per_mode=True,
        loss=lambda: {"a": crossentropy(), "b": crossentropy()},
        fit={"sample_weight": {"a": REAL * 0.5, "b": REAL * (np.arange(21)[:, None] % 3)}},
    ),
    "fixed-features": by_length(
        with_features, [X, WEIGHTS], X[:, :1] * 0.1, loss="mse", quick="eager"
    ),
    # A function gives the lengths of what is no integer.
    "real-numbers": by_length(
        of_frames,
        FRAMES,
        FRAMES[:, :1, 0],
        loss="mse",
        quick="eager",
        lengths=lambda x, y, sample_weight: ops.sum(ops.any(x != 0, -1), 1),
    ),
    "as-many-values-as-positions": by_length(
        three_values, X, X[:, :3, None] * 0.1, loss="mse", metrics=["mae"], quick="eager"
    ),
    "recurrent": by_length(recurrent, X, Y, tokens=60, modes="graph", **ACCURACY),
}
for name, tokens in (("size", None), ("tokens", 60)):
    how = {"tokens": tokens, **ACCURACY}
    CASES[f"attention-{name}"] = by_length(
        attending,
        X,
        Y,
        modes="graph eager compiled",
        quick="graph" if name == "size" else "",
        backends="tensorflow torch",  # JAX computes a softmax in float32.
        **how,
    )
    CASES[f"lengths-of-each-batch-{name}"] = by_length(
        tagger,
        lambda: own_padding(),
        tokens=tokens,
        fit={"steps_per_epoch": 3},
        modes="graph compiled",
    )
    CASES[f"tags-{name}"] = by_length(
        lambda: following(Context(), kernel_regularizer="l2"),
        X,
        Y,
        modes="replicas",
        batch_size=9,
        elsewhere="torch jax" if name == "size" else "torch",
        other_modes=name == "size",
        **how,
    )
    CASES[f"classes-{name}"] = by_length(
        classifier,
        X,
        Y[:, 0],
        modes="graph replicas",
        batch_size=9,
        fit={"sample_weight": WEIGHTS[:, 0]},
        weighted_metrics=lambda: [keras.metrics.SparseCategoricalCrossentropy()],
        **how,
    )
# No mask: padding has weight 0, and by default counts in the mean all the same.
for reduction in ("sum_over_batch_size", "mean_with_sample_weight", "sum"):
    CASES[f"weights-{reduction}"] = by_length(
        lambda: tagger(mask=False),
        X,
        Y,
        tokens=60,
        loss=lambda reduction=reduction: crossentropy(reduction=reduction),
        weighted_metrics=ACCURACY["metrics"],
        optimizer=lambda: keras.optimizers.SGD(0.01),
        fit={"sample_weight": REAL * WEIGHTS},
        quick="graph" if reduction == "sum_over_batch_size" else "",
        wrong_metrics="",
    )


@pytest.mark.parametrize(("case", "mode"), parameters(CASES))
def test_the_update_of_the_whole_batch(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


def compiled(model=None, cut=SIZE, **options):
    """An accumulated model; by default one that depends on padding."""
    model = model or tagger(mask=False)
    model.compile(keras.optimizers.SGD(0.1), **{"loss": crossentropy(), **options})
    return macrobatch.accumulate(model, **cut)


@slow_on("tensorflow", "jax")
@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_model_that_is_not_built_is_built_for_any_length(way):
    histories, models = [], []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        embedding = layers.Embedding(VOCABULARY, 3, mask_zero=True)
        model = compiled(keras.Sequential([embedding, layers.Dense(CLASSES)]))
        if not accumulated:
            macrobatch.release(model)
        if way == "fit":
            histories.append(model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history)
        else:
            histories.append(model.train_on_batch(X, Y, return_dict=True))
        models.append(model)
    support.assert_same(*models)
    assert_same_history(*histories)
    assert model.input_shape == (None, None)
    assert model.predict(X[:2, :4], verbose=0).shape == (2, 4, CLASSES)


@pytest.mark.eager
def test_evaluate_cuts_too_and_predict_keeps_the_order():
    model = compiled(tagger(), BUDGET, metrics=ACCURACY["metrics"])
    results = []
    for _ in range(2):
        results.append((model.evaluate(X, Y, batch_size=8, verbose=0), model.predict(X, verbose=0)))
        macrobatch.release(model)
    for cut, plain in zip(*results):
        np.testing.assert_allclose(cut, plain, rtol=1e-10)


# What is cut


class Shapes(layers.Layer):
    """Counts the shapes of the micro-batches that it is trained on, in whatever mode."""

    supports_masking = True

    def build(self, shape):
        self.counts = self.add_weight(shape=[64, 64], initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            examples, positions = (ops.one_hot(size, 64) for size in ops.shape(x)[:2])
            self.counts.assign_add(examples[:, None] * positions)
        return x

    def seen(self):
        """How often each number of examples came with each number of positions."""
        counts = array(self.counts)
        self.counts.assign(np.zeros_like(counts))
        return {(int(i), int(j)): int(counts[i, j]) for i, j in zip(*counts.nonzero())}


def counting(cut, **options):
    shapes = Shapes()
    return compiled(following(shapes, layers.GlobalAveragePooling1D()), cut, **options), shapes


writes = pytest.mark.filterwarnings("ignore:These variables are written by the forward pass")


@writes
@pytest.mark.parametrize(
    ("cut", "most"),
    [(SIZE, 3 * POSITIONS), pytest.param(BUDGET, 60, marks=slow_on("tensorflow", "jax"))],
    ids=["size", "tokens"],
)
def test_there_is_less_work(cut, most):
    model, shapes = counting(cut)
    model.fit(X, Y[:, 0], batch_size=21, verbose=0)
    seen = shapes.seen()
    assert all(examples * length <= most for examples, length in seen)
    assert sum(times * examples for (examples, _), times in seen.items()) == 21
    work = sum(times * examples * length for (examples, length), times in seen.items())
    # On JAX, lengths are rounded up.
    assert lengths_of(21).sum() <= work < (0.7 if BACKEND == "jax" else 0.6) * X.size


@writes
@only_on("tensorflow", "jax")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("size", marks=slow_on("tensorflow")),
        pytest.param("tokens", marks=slow_on("jax")),
    ],
)
def test_compiled_shapes_are_few(name):
    """A few lengths; of each the size, and powers of two below it. All batches share them."""
    cut = {"size": {**SIZE, "micro_batch_size": 5}, "tokens": BUDGET}[name]
    model, shapes = counting(cut, **MODES["compiled"])
    found = set()
    for seed, examples in enumerate([21, 13]):
        x, y, _ = tokens_of(examples, seed)
        model.train_on_batch(x, y[:, 0])
        seen = shapes.seen()
        assert sum(times * count for (count, _), times in seen.items()) == examples
        found |= set(seen)
    assert {length for _, length in found} <= {8, 12, 16, 24, POSITIONS}
    for count, length in found:
        assert count in {1, 2, 4, 5 if name == "size" else 60 // length}


# What is refused


def assert_refused(model, match, x=X, y=Y, **fit):
    """Raises before anything has changed."""
    with unchanged(model, ValueError, match):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **fit)


class Total(keras.metrics.Metric):
    """Adds up predictions, those of padding too."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_pred)))

    def result(self):
        return self.total * 1.0


def unmasked(*more, **head):
    return lambda: following(*more, mask=False, **head)


class Positional(keras.Model):
    """Adds something for each of a fixed number of positions."""

    def build(self, shape):
        self.table = self.add_weight(shape=(POSITIONS, 4))
        self.embedding = layers.Embedding(VOCABULARY, 4, mask_zero=True)
        self.head = layers.Dense(CLASSES)

    def call(self, x):
        return self.head(self.embedding(x) + self.table)


pooling = layers.GlobalAveragePooling1D
LAYER, FIXED = "a layer before it, depends on padding", "fixed sequence length"
WEIGHTED = {"sample_weight": REAL}
LAST = np.where((np.arange(7) == 3)[:, None] & (np.arange(POSITIONS) > 4), 0, 1)
# A model, its data, and what is said; then what compile and fit take besides.
REFUSED = {
    "loss": (unmasked(), X, Y, "The loss, or " + LAYER),
    "metric": (
        unmasked(),
        X,
        Y,
        r"[mM]etric .*(means over all positions|depends on padding).*weighted_metrics=",
        lambda: ACCURACY,
        WEIGHTED,
    ),
    "own-metric": (
        unmasked(),
        X,
        Y,
        r"(?s)The metric .{1,4}total.{1,4} depends on padding.*weighted_metrics=",
        lambda: {"metrics": [Total()]},
        WEIGHTED,
    ),
    "mean": (unmasked(pooling()), X, Y[:, 0], LAYER),
    "statistics": (
        unmasked(layers.BatchNormalization(), layers.Lambda(lambda x: x[:, 0])), X, Y[:, 0], LAYER
    ),
    # All examples but one are as long as all sequences.
    "last-micro-batch": (unmasked(pooling()), LAST, LAST[:, 0], LAYER),
    "zeros": (unmasked(pooling(), kernel_initializer="zeros"), X, Y[:, 0], LAYER),
    "reshape": (unmasked(layers.Reshape([POSITIONS * 4])), X, Y[:, 0], FIXED),
    "positions": (Positional, X, Y, FIXED + ": it failed on sequences"),
}  # fmt: skip
# In real examples the padding is seldom the largest, and some have none in any micro-batch.
for seed in range(3):
    some, labels, _ = tokens_of(16, seed)
    REFUSED[f"maximum-{seed}"] = (unmasked(layers.GlobalMaxPooling1D()), some, labels[:, 0], LAYER)


def refusals():
    found = []
    quick = {"loss": ["graph", "eager"], "metric": ["graph", "eager"], "zeros": ["graph"]}
    for name in REFUSED:
        for mode in MODES if BACKEND == "tensorflow" else [FIRST]:
            in_modes = mode in quick.get(name, ["eager"]) or BACKEND != "tensorflow"
            is_quick = in_modes and (BACKEND != "jax" or name in ("loss", "last-micro-batch"))
            found.append(pytest.param(name, mode, marks=[] if is_quick else [thorough]))
    return found


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize(("name", "mode"), refusals())
def test_what_depends_on_padding_is_refused(name, mode):
    build, x, y, match, *more = REFUSED[name]
    options, fit = more or (dict, {})
    keras.utils.set_random_seed(len(x))
    assert_refused(compiled(build(), **options(), **MODES[mode]), match, x, y, **fit)


@slow_on("jax")
@pytest.mark.eager
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_a_refusal_says_where_the_mask_went():
    convolution = layers.Conv1D(4, 3, padding="same", name="convolution")
    cut = {**SIZE, "lengths": lambda x, y, sample_weight: x[:, 0] * 0}
    model = compiled(following(convolution), cut)
    assert_refused(
        model, r"No mask reaches the loss.*pass none on: convolution\..*lengths that are too short"
    )
    with pytest.raises(ValueError, match="depends on padding") as refused:
        model.fit(X, Y, sample_weight=REAL, verbose=0)
    assert "No mask" not in str(refused.value)


@slow_on("jax")
@pytest.mark.eager
def test_testing_tells_nothing_about_training():
    class OnlyInTraining(layers.Layer):
        def call(self, x, training=False):
            return ops.mean(x, 1) if training else x[:, 0]

    model = compiled(following(OnlyInTraining(), mask=False))
    model.evaluate(X, Y[:, 0], verbose=0)
    model.reset_metrics()
    assert_refused(model, LAYER, y=Y[:, 0])


@slow_on("jax")
@pytest.mark.eager
def test_another_loss_is_tried_again():
    model = compiled()
    model.fit(X, Y, batch_size=8, verbose=0, **WEIGHTED)
    model.compile("sgd", crossentropy())
    assert_refused(model, LAYER)


@pytest.mark.eager
def test_dropout_does_not_look_like_padding():
    """Each micro-batch draws, and what is tried does not."""
    dropout = layers.Dropout(0.5)
    recurrent = [layers.LSTM(3, dropout=0.3, return_sequences=True)] * (BACKEND != "jax")
    model = compiled(following(dropout, *recurrent))
    before = array(dropout.seed_generator.state)
    model.fit(X, Y, batch_size=8, verbose=0)
    if BACKEND != "torch":  # which draws from a generator of its own
        moved = array(dropout.seed_generator.state) - before
        assert moved.tolist() == [0, 3 + 3 + 2]


@slow_on("tensorflow", "jax")
def test_noise_cannot_be_compared():
    with pytest.warns(macrobatch.ExactnessWarning, match="cannot be tried: random numbers"):
        compiled(following(layers.GaussianNoise(0.5))).fit(X, Y, batch_size=8, epochs=2, verbose=0)


@slow_on("tensorflow", "jax")
@pytest.mark.filterwarnings("ignore:It is not known whether examples meet")
def test_what_is_not_finite_is_no_matter_of_padding():
    model = compiled(classifier(), loss=lambda y, p: ops.sum(p, -1) * np.nan)
    assert np.isnan(model.fit(X, Y[:, 0], batch_size=8, verbose=0).history["loss"][0])


# What does not go with it


def test_a_fixed_length():
    tokens, x = embedded(length=POSITIONS)
    match = rf"fixed sequence length.*shape \(None, {POSITIONS}\).*keras.Input\(\(None,\)\)"
    with pytest.raises(ValueError, match=match):
        macrobatch.accumulate(keras.Model(tokens, x), **SIZE)


@pytest.mark.eager
@pytest.mark.xfail(BACKEND == "tensorflow", reason="Keras says so, and the model stays half built")
def test_a_model_that_must_have_a_length_gets_one():
    embedding = layers.Embedding(VOCABULARY, 3)
    model = compiled(keras.Sequential([embedding, layers.Flatten(), layers.Dense(CLASSES)]))
    with pytest.raises(ValueError, match=r"fixed sequence length.*Expected: None along that axis"):
        model.train_on_batch(X, Y[:, 0])
    macrobatch.accumulate(model, 4)
    model.train_on_batch(X, Y[:, 0])
    assert model.input_shape == (21, POSITIONS)


ARGUMENTS = [
    ({"micro_batch_size": 2, "micro_batch_tokens": 9, "sequence_axis": 1}, "Only one"),
    ({"micro_batch_tokens": 0, "sequence_axis": 1}, "micro_batch_tokens must be a positive"),
    ({"micro_batch_tokens": 1.5, "sequence_axis": 1}, "micro_batch_tokens must be a positive"),
    ({"micro_batch_tokens": 9}, "micro_batch_tokens= needs sequence_axis="),
    ({"micro_batch_size": 2, "lengths": len}, "lengths= needs sequence_axis="),
    ({"micro_batch_size": 2, "sequence_axis": 0}, "sequence_axis must be a positive integer"),
    ({"micro_batch_size": 2, "sequence_axis": -1}, "sequence_axis must be a positive integer"),
    ({**SIZE, "lengths": 3}, "Received: lengths=3, which is"),
    (
        {**SIZE, "lengths": lambda x, y: x},
        r"lengths= must be a function of \((x, y, sample_weight|batch)\).*other arguments",
    ),
]


@pytest.mark.parametrize(("arguments", "match"), ARGUMENTS)
def test_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        macrobatch.accumulate(tagger(), **arguments)


@only_on("jax")  # Elsewhere these go together.
def test_what_goes_with_other_settings():
    with pytest.raises(ValueError, match=r"sequence_axis=1 and whole_batch_loss=True"):
        macrobatch.accumulate(tagger(), whole_batch_loss=True, **SIZE)
    error = pytest.raises(ValueError, match=r"one device only.*DataParallel")
    with support.several_devices(), error:
        macrobatch.accumulate(tagger(), **SIZE)

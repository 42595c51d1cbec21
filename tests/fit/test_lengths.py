"""Micro-batches by length end where the whole batch, padding and all, ends in plain Keras."""

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from support import MODES, check, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch._batches.by_length import BUCKETS
from macrobatch._batches.cut import Cut
from macrobatch._tensorflow.engine import ENGINE

CUTS = {
    "size": {"micro_batch_size": 3, "sequence_axis": 1},
    "tokens": {"micro_batch_tokens": 16, "sequence_axis": 1},
}
POSITIONS, VOCABULARY, CLASSES = 11, 20, 5


@pytest.fixture
def strategy():
    return mirrored(2)


def lengths_of(examples, seed=0):
    return np.random.default_rng(seed).integers(1, POSITIONS - 2, examples)


def tokens_of(examples=21, seed=0):
    """Tokens and labels of sequences; what is behind them is 0, and nobody is as long as all."""
    rng = np.random.default_rng(seed)
    real = np.arange(POSITIONS) < lengths_of(examples, seed)[:, None]
    x = rng.integers(1, VOCABULARY, [examples, POSITIONS]) * real
    return x, (x * 7 + 3) % CLASSES, real.astype("float64")


class Context(layers.Layer):
    """Adds the mean over tokens: as attention does, each prediction depends on all of them."""

    supports_masking = True

    def call(self, x, mask=None):
        weights = tf.cast(mask, x.dtype)[..., None]
        total = tf.reduce_sum(x * weights, 1, keepdims=True)
        return x + total / tf.maximum(tf.reduce_sum(weights, 1, keepdims=True), 1)


def tagger(mask=True, length=None):
    """Predicts a class for each token. Quicker to trace than one with attention."""
    tokens = keras.Input([length], dtype="int32")
    x = layers.Embedding(VOCABULARY, 4, mask_zero=mask)(tokens)
    return keras.Model(tokens, layers.Dense(CLASSES)(Context()(x) if mask else x))


def attending(*more):
    tokens = keras.Input([None], dtype="int32")
    x = layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    for layer in more:
        x = layer(x)
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def recurrent():
    return attending(layers.Bidirectional(layers.LSTM(3, return_sequences=True)))


def classifier():
    """Predicts a class for each sequence."""
    tokens = keras.Input([None], dtype="int32")
    x = layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


@pytest.mark.parametrize(
    ("build", "cut", "mode"),
    [
        (attending, "size", "graph"),
        pytest.param(attending, "tokens", "eager", marks=thorough),
        pytest.param(attending, "tokens", "graph", marks=thorough),
        pytest.param(attending, "size", "eager", marks=thorough),
        pytest.param(attending, "size", "compiled", marks=thorough),
        pytest.param(attending, "tokens", "compiled", marks=thorough),
        pytest.param(recurrent, "tokens", "graph", marks=thorough),
    ],
)
def test_masked_tokens(build, cut, mode):
    x, y, _ = tokens_of()
    metrics = ["sparse_categorical_accuracy"]
    how = {"cut": CUTS[cut], "metrics": metrics, **MODES[mode]}
    check(build, x, y, loss=lambda: crossentropy(), **how)


@thorough
@pytest.mark.parametrize(
    ("cut", "mode"),
    [
        ("tokens", "compiled"),  # the harder one
        pytest.param("size", "graph", marks=thorough),
        pytest.param("tokens", "graph", marks=thorough),
        pytest.param("size", "compiled", marks=thorough),
    ],
)
def test_batches_padded_to_their_own_longest(cut, mode):
    """Then no shape is known before a batch is there."""
    x, y, _ = tokens_of()
    dataset = tf.data.Dataset.from_tensor_slices((x, y, lengths_of(len(x))))
    dataset = dataset.map(lambda x, y, n: (x[:n], y[:n])).padded_batch(8)
    check(tagger, dataset, cut=CUTS[cut], loss=lambda: crossentropy(), **MODES[mode])


class Dense(layers.Layer):
    """Makes a ragged input as wide as its longest row. Notes sizes, if it is told to."""

    seen = None

    def call(self, x):
        if not isinstance(x, tf.RaggedTensor):
            return x
        x = x.to_tensor()
        if self.seen is not None:
            tf.py_function(lambda x: self.seen.append(x.shape), [x], [])
        return x


def ragged_tagger(mask=True):
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, tagger(mask=mask)(Dense()(tokens)))


def ragged_batches(x, y):
    """Batches of ragged tokens, and labels as wide as the longest."""
    tokens = tf.RaggedTensor.from_tensor(x, padding=0)
    labels = tf.ragged.boolean_mask(tf.constant(y), x > 0)
    batches = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(8)
    return batches.map(lambda x, y: (x, y.to_tensor()))


@thorough_for("size-eager")
@pytest.mark.parametrize(
    ("cut", "mode"),
    [
        ("tokens", "graph"),
        ("size", "eager"),
        pytest.param("size", "graph", marks=thorough),
        pytest.param("tokens", "eager", marks=thorough),
    ],
)
def test_ragged_tokens(cut, mode):
    """Labels beside them are cut too, and masked metrics are of the whole batch's width."""
    x, y, _ = tokens_of()
    how = {"cut": CUTS[cut], "loss": lambda: crossentropy(), **MODES[mode]}
    check(ragged_tagger, ragged_batches(x, y), metrics=["sparse_categorical_accuracy"], **how)


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("features", [False, True])
def test_a_budget_for_ragged_tokens(features, mode):
    """It is what rows come to when they are as wide as the longest, whatever else there is."""
    rows = np.arange(1, 14)
    tokens = tf.RaggedTensor.from_row_lengths(tf.ones([rows.sum()]), rows)
    others = (tf.ones([13, 4], tf.int32),) if features else ()
    variable = tf.Variable(1.0, dtype="float64")
    seen = []

    def loss_fn(micro_batch):
        padded = micro_batch[0][0].to_tensor()
        tf.py_function(lambda x: seen.append(tuple(x.shape)), [padded], [])
        return tf.cast(tf.reduce_sum(padded, 1), "float64") * variable, padded

    def run():
        batch = ((tokens, *others), tf.zeros([13]))
        return macrobatch.value_and_gradients(
            loss_fn, [variable], batch, micro_batch_tokens=24, sequence_axis=1, has_aux=True
        )

    (loss, padded), (gradient,) = (run if mode == "eager" else tf.function(run))()
    np.testing.assert_allclose([loss, gradient], [7, 7], atol=1e-10)
    np.testing.assert_array_equal(padded, tokens.to_tensor())
    # Then the trial whether examples meet, without gradients: two examples and the longest.
    steps, trial = seen[:-4], seen[-4:]
    assert steps[-6:] == [(1, 13), (2, 12), (2, 10), (3, 8), (4, 5), (1, 1)]
    assert all(examples * longest <= 24 for examples, longest in steps)
    assert trial == [(3, 13)] * 4


@thorough
@pytest.mark.parametrize(
    ("build", "cut"),
    [
        (tagger, "tokens"),
        pytest.param(classifier, "size", marks=thorough),
        pytest.param(classifier, "tokens", marks=thorough),
        pytest.param(tagger, "size", marks=thorough),
    ],
)
def test_replicas(build, cut, strategy, monkeypatch):
    monkeypatch.setattr(support, "strategy", strategy)
    x, y, _ = tokens_of(19)
    y = y if build is tagger else y[:, 0]
    metrics = ["sparse_categorical_accuracy"]
    check(build, x, y, cut=CUTS[cut], loss=lambda: crossentropy(), metrics=metrics, batch_size=9)


@thorough
@pytest.mark.parametrize("cut", ["tokens", pytest.param("size", marks=thorough)])
def test_labels_without_the_axis(cut):
    x, y, _ = tokens_of()
    weights = np.random.default_rng(1).random(len(x))
    check(
        classifier,
        x,
        y[:, 0],
        cut=CUTS[cut],
        loss=lambda: crossentropy(),
        metrics=["sparse_categorical_accuracy"],
        weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy],
        fit={"sample_weight": weights},
    )


@thorough_for("mean_with_sample_weight-eager")
@pytest.mark.parametrize(
    ("reduction", "mode"),
    [
        ("sum_over_batch_size", "graph"),
        ("mean_with_sample_weight", "eager"),
        pytest.param("sum_over_batch_size", "eager", marks=thorough),
        pytest.param("mean_with_sample_weight", "graph", marks=thorough),
        pytest.param("sum", "graph", marks=thorough),
        pytest.param("sum", "eager", marks=thorough),
    ],
)
def test_weights_of_tokens(reduction, mode):
    """No mask: padding has weight 0, and by default counts in the mean all the same."""
    x, y, real = tokens_of()
    weights = real * np.random.default_rng(1).random(x.shape)
    check(
        lambda: tagger(mask=False),
        x,
        y,
        cut=CUTS["tokens"],
        loss=lambda: crossentropy(reduction=reduction),
        weighted_metrics=["sparse_categorical_accuracy"],
        optimizer=lambda: keras.optimizers.SGD(0.01),
        fit={"sample_weight": weights},
        **MODES[mode],
    )


@pytest.mark.eager
def test_a_weight_makes_an_example_longer():
    """Tokens are 0 there, but count."""
    x, y, real = tokens_of()
    weights = np.ones_like(real)
    weights[:, 7:] = 0
    loss = {"loss": lambda: crossentropy(reduction="mean_with_sample_weight")}
    fit = {"sample_weight": weights}
    check(lambda: tagger(mask=False), x, y, cut=CUTS["size"], fit=fit, **loss)


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


@thorough
def test_several_inputs_and_outputs():
    """Sequences of the largest size are cut: in the second batch, where all are short, too."""
    x, y, _ = tokens_of()
    x[8:, 3:] = 0
    inputs = {
        "source": x,
        "target": x[:, : POSITIONS - 2],
        "features": np.random.default_rng(2).normal(size=[len(x), 4]),
    }
    labels = {"tokens": y[:, : POSITIONS - 2], "score": x[:, :1] * 0.1}
    losses = {"tokens": crossentropy(), "score": "mse"}
    real = (x != 0).astype("float64")
    weights = {"tokens": real[:, : POSITIONS - 2], "score": real[:, 0]}
    how = {"cut": CUTS["size"], "loss": losses, "fit": {"sample_weight": weights}}
    how["weighted_metrics"] = {"tokens": ["sparse_categorical_accuracy"], "score": ["mae"]}
    check(Translator, inputs, labels, plain={}, **how)


class Unmasked(layers.Layer):
    """Passes no mask on."""

    supports_masking = True

    def call(self, x):
        return x * 1.0

    def compute_mask(self, inputs, mask=None):
        return None


@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=thorough)])
def test_an_output_with_a_mask_beside_one_with_weights(mode):
    """Tokens of one term are counted beforehand; the other is divided by all positions."""

    def build():
        tokens = keras.Input([None], dtype="int32")
        x = layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
        unmasked = layers.Dense(CLASSES)(Unmasked()(x))
        outputs = {"a": layers.Dense(CLASSES)(x), "b": unmasked}
        return keras.Model(tokens, outputs)

    x, y, real = tokens_of()
    losses = {"a": crossentropy(), "b": crossentropy()}
    how = {"cut": CUTS["size"], "loss": losses, **MODES[mode]}
    weights = {"a": real * 0.5, "b": real * (np.arange(len(x))[:, None] % 3)}
    check(build, x, {"a": y, "b": y}, fit={"sample_weight": weights}, plain={}, **how)


@pytest.mark.eager
def test_an_input_that_is_as_large_as_sequences_but_fixed():
    tokens = keras.Input([None], dtype="int32", name="tokens")
    features = keras.Input([POSITIONS], name="features")

    def build():
        x = layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
        x = layers.GlobalAveragePooling1D()(x)
        return keras.Model([tokens, features], layers.Dense(1)(layers.Concatenate()([x, features])))

    x, _, _ = tokens_of()
    features_of_all = np.random.default_rng(2).normal(size=x.shape)
    check(build, [x, features_of_all], x[:, :1] * 0.1, cut=CUTS["size"])


@pytest.mark.eager
def test_lengths_of_real_numbers():
    """A function gives the lengths of what is no integer."""
    rng = np.random.default_rng(0)
    ends = lengths_of(21)
    real = np.arange(POSITIONS) < ends[:, None]
    x = rng.normal(size=[21, POSITIONS, 2]) * real[..., None]

    def build():
        frames = keras.Input([None, 2])
        x = layers.GlobalAveragePooling1D()(layers.Masking()(frames))
        return keras.Model(frames, layers.Dense(1)(x))

    def lengths(x, y, sample_weight):
        return tf.reduce_sum(tf.cast(tf.reduce_any(x != 0, -1), tf.int32), 1)

    check(build, x, x[:, :1, 0], cut={**CUTS["size"], "lengths": lengths})


@thorough
def test_a_model_that_is_not_built_is_built_for_any_length():
    x, y, _ = tokens_of()

    def build():
        embedding = layers.Embedding(VOCABULARY, 4, mask_zero=True)
        pooling = layers.GlobalAveragePooling1D()
        return keras.Sequential([embedding, pooling, layers.Dense(CLASSES)])

    _, model = check(build, x, y[:, 0], cut=CUTS["size"], loss=lambda: crossentropy())
    assert model.predict(x[:2, :4], verbose=0).shape == (2, CLASSES)


@pytest.mark.eager
def test_evaluate_cuts_too_and_predict_keeps_the_order():
    x, y, _ = tokens_of()
    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        model = tagger()
        model.compile("sgd", crossentropy(), metrics=["sparse_categorical_accuracy"])
        if accumulated:
            macrobatch.accumulate(model, **CUTS["tokens"])
        results.append((model.evaluate(x, y, batch_size=8, verbose=0), model.predict(x, verbose=0)))
    (plain, predicted), (cut, predicted_too) = results
    np.testing.assert_allclose(cut, plain, rtol=1e-10)
    np.testing.assert_allclose(predicted_too, predicted, rtol=1e-10)


class Recorder(layers.Layer):
    """Notes the shapes that it sees, in eager mode."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self.shapes = []

    def call(self, x):
        self.shapes.append(tuple(x.shape))
        return x


@pytest.mark.parametrize(
    ("cut", "most"),
    [pytest.param("size", 3 * (POSITIONS - 3), marks=thorough), ("tokens", 16)],
)
def test_there_is_less_work(cut, most):
    x, y, _ = tokens_of()
    recorder = Recorder()
    tokens = keras.Input([None], dtype="int32")
    hidden = recorder(layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens))
    hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(tokens, layers.Dense(CLASSES)(hidden))
    model.compile("sgd", crossentropy(), run_eagerly=True)
    macrobatch.accumulate(model, **CUTS[cut])
    model.fit(x, y[:, 0], batch_size=21, epochs=1, verbose=0)
    recorder.shapes.clear()
    model.fit(x, y[:, 0], batch_size=21, epochs=1, verbose=0)
    shapes = recorder.shapes
    assert all(examples * length <= most for examples, length, _ in shapes)
    assert sum(examples for examples, *_ in shapes) == 21
    work = sum(examples * length for examples, length, _ in shapes)
    assert lengths_of(21).sum() <= work < 0.6 * x.size


# value_and_gradients


def loss_of(table, kernel, batch):
    """Tokens' losses, and weights that are 0 for padding."""
    tokens, labels = batch["tokens"], batch["labels"]
    weights = tf.cast(tokens > 0, table.dtype)
    embedded = tf.gather(table, tokens) * weights[..., None]
    context = tf.cumsum(embedded, 1)
    logits = tf.linalg.matmul(tf.tanh(context), kernel)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return losses, weights, logits


def whole(table, kernel, batch):
    with tf.GradientTape() as tape:
        losses, weights, _ = loss_of(table, kernel, batch)
        loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    return loss, [tf.convert_to_tensor(g) for g in tape.gradient(loss, [table, kernel])]


def parameters():
    rng = np.random.default_rng(0)
    return tf.Variable(rng.normal(size=[VOCABULARY, 3])), tf.Variable(rng.normal(size=[3, CLASSES]))


def batch_of(examples, seed=0):
    x, y, _ = tokens_of(examples, seed)
    # Of a dict all integers count: labels behind the end would make an example longer.
    return {"tokens": tf.constant(x), "labels": tf.constant(y * (x > 0))}


def cut_by_length(table, kernel, batch, **cut):
    def loss_fn(micro_batch):
        losses, weights, logits = loss_of(table, kernel, micro_batch)
        first = micro_batch["tokens"][:, 0]
        aux = {"logits": logits, "first": first, "size": tf.size(first), "none": None}
        aux["ragged"] = tf.RaggedTensor.from_tensor(micro_batch["tokens"], padding=0)
        aux["classes"] = logits[:, 0]
        aux["pairs"] = weights[:, :, None] * weights[:, None, :]
        return (losses, weights), aux

    (loss, aux), gradients = macrobatch.value_and_gradients(
        loss_fn, [table, kernel], batch, sequence_axis=1, has_aux=True, **cut
    )
    return loss, [tf.convert_to_tensor(g) for g in gradients], aux


def assert_whole(found, table, kernel, batch):
    loss, gradients, aux = found
    expected_loss, expected = whole(table, kernel, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
    for gradient, whole_gradient in zip(gradients, expected):
        np.testing.assert_allclose(gradient, whole_gradient, atol=1e-10)
    tokens = batch["tokens"].numpy()
    _, weights, logits = loss_of(table, kernel, batch)
    real = weights.numpy()[..., None]
    assert aux["logits"].shape == logits.shape
    np.testing.assert_allclose(aux["logits"] * real, logits * real, atol=1e-10)
    np.testing.assert_array_equal(aux["first"], tokens[:, 0])
    pairs = weights.numpy()[:, :, None] * weights.numpy()[:, None, :]
    np.testing.assert_array_equal(aux["pairs"], pairs)
    np.testing.assert_allclose(aux["classes"], logits[:, 0], atol=1e-10)
    assert aux["ragged"].to_list() == [list(row[row > 0]) for row in tokens]
    assert int(tf.reduce_sum(aux["size"])) == len(tokens)
    assert aux["none"] is None


@thorough_for("cut0-graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("cut", [{"micro_batch_size": 4}, {"micro_batch_tokens": 20}])
def test_value_and_gradients(mode, cut):
    table, kernel = parameters()
    batch = batch_of(18)
    run = cut_by_length if mode == "eager" else tf.function(cut_by_length)
    assert_whole(run(table, kernel, batch, **cut), table, kernel, batch)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=17),
    size=st.one_of(
        st.builds(lambda n: {"micro_batch_size": n}, st.integers(1, 19)),
        st.builds(lambda n: {"micro_batch_tokens": n}, st.integers(1, 60)),
    ),
    padding=st.integers(1, 4),
)
def test_any_lengths(lengths, size, padding):
    rng = np.random.default_rng(len(lengths))
    real = np.arange(max(lengths) + padding) < np.array(lengths)[:, None]
    x = rng.integers(1, VOCABULARY, real.shape) * real
    batch = {"tokens": tf.constant(x), "labels": tf.constant(x % CLASSES)}
    if not x.any():
        return
    table, kernel = parameters()
    assert_whole(cut_by_length(table, kernel, batch, **size), table, kernel, batch)


@thorough
def test_a_compiled_loss():
    table, kernel = parameters()
    batch = batch_of(18)
    loss_fn = tf.function(lambda batch: loss_of(table, kernel, batch)[:2], jit_compile=True)

    @tf.function
    def run(batch):
        loss, gradients = macrobatch.value_and_gradients(
            loss_fn, [table, kernel], batch, micro_batch_size=4, sequence_axis=1
        )
        return loss, [tf.convert_to_tensor(g) for g in gradients]

    loss, gradients = run(batch)
    expected_loss, expected = whole(table, kernel, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
    for gradient, whole_gradient in zip(gradients, expected):
        np.testing.assert_allclose(gradient, whole_gradient, atol=1e-10)


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ragged_and_sparse_parts(mode):
    table, kernel = parameters()
    x, y, _ = tokens_of(13)
    dense = {"tokens": tf.constant(x), "labels": tf.constant(y)}
    extra = np.where(np.arange(13)[:, None] % 3 == 0, x, 0)[:, :5]
    batch = {
        "tokens": tf.RaggedTensor.from_tensor(x, padding=0),
        "labels": tf.ragged.boolean_mask(tf.constant(y), x > 0),
        "extra": tf.sparse.from_dense(tf.constant(extra)),
    }

    def loss_fn(micro_batch):
        tokens = micro_batch["tokens"].to_tensor()
        padded = {"tokens": tokens, "labels": micro_batch["labels"].to_tensor()}
        losses, weights, _ = loss_of(table, kernel, padded)
        return (losses, weights), (micro_batch["extra"], tf.shape(tokens)[1])

    def run(batch):
        return macrobatch.value_and_gradients(
            loss_fn, [table, kernel], batch, micro_batch_size=3, sequence_axis=1, has_aux=True
        )

    run = run if mode == "eager" else tf.function(run)
    (loss, (sparse, lengths)), gradients = run(batch)
    expected_loss, expected = whole(table, kernel, dense)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-10)
    for gradient, whole_gradient in zip(gradients, expected):
        np.testing.assert_allclose(tf.convert_to_tensor(gradient), whole_gradient, atol=1e-10)
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), extra)
    longest_first = np.sort((x > 0).sum(1))[::-1]
    np.testing.assert_array_equal(lengths, longest_first[::3])


@thorough
def test_value_and_gradients_on_replicas(strategy):
    with strategy.scope():
        table, kernel = parameters()
    batch = batch_of(7)
    parts = [{k: v[:3] for k, v in batch.items()}, {k: v[3:] for k, v in batch.items()}]

    def distributed(name):
        return strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group][name]
        )

    @tf.function
    def run(batch):
        def on_replica(batch):
            loss, gradients, _ = cut_by_length(table, kernel, batch, micro_batch_tokens=12)
            context = tf.distribute.get_replica_context()
            return loss, context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

        return strategy.run(on_replica, args=(batch,))

    loss, gradients = run({name: distributed(name) for name in batch})
    first = strategy.experimental_local_results
    expected_loss, expected = whole(table, kernel, batch)
    np.testing.assert_allclose(first(loss)[0], expected_loss, rtol=1e-10)
    for gradient, whole_gradient in zip(gradients, expected):
        np.testing.assert_allclose(first(gradient)[0], whole_gradient, atol=1e-10)


# What is refused


def compiled_tagger(**options):
    model = options.pop("model", None) or tagger(mask=False)
    options.setdefault("loss", crossentropy())
    model.compile(keras.optimizers.SGD(0.1), **options)
    return model


def assert_refused(model, match, *data, error=Exception, **fit):
    """Raises before anything has changed."""
    before = [np.array(v) for v in model.variables]
    with pytest.raises(error, match=match):
        model.fit(*data, batch_size=8, epochs=1, verbose=0, **fit)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_a_loss_that_depends_on_padding(mode):
    x, y, _ = tokens_of()
    model = compiled_tagger(**MODES[mode])
    macrobatch.accumulate(model, **CUTS["size"])
    assert_refused(model, "The loss, or a layer before it, depends on padding", x, y)


@pytest.mark.eager
@pytest.mark.parametrize(
    "layer",
    [pytest.param(layers.BatchNormalization, marks=thorough), layers.GlobalAveragePooling1D],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_a_layer_that_depends_on_padding(layer):
    x, y, _ = tokens_of()
    tokens = keras.Input([None], dtype="int32")
    hidden = layer()(layers.Embedding(VOCABULARY, 4)(tokens))
    hidden = hidden if layer is layers.GlobalAveragePooling1D else hidden[:, 0]
    model = compiled_tagger(model=keras.Model(tokens, layers.Dense(CLASSES)(hidden)))
    macrobatch.accumulate(model, **CUTS["tokens"])
    assert_refused(model, "a layer before it, depends on padding", x, y[:, 0])


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=thorough), "eager"])
def test_a_layer_after_ragged_tokens_that_depends_on_padding(mode):
    x, y, _ = tokens_of()
    model = compiled_tagger(model=ragged_tagger(mask=False), **MODES[mode])
    macrobatch.accumulate(model, **CUTS["size"])
    before = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match="The loss, or a layer before it, depends on padding"):
        model.fit(ragged_batches(x, y), shuffle=False, verbose=0)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable)


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
def test_ragged_tokens_of_examples_that_depend_on_each_other(mode):
    """Then a difference says nothing of padding."""
    norm = layers.BatchNormalization()
    norm(tf.ones([2, 1]))
    rows = np.arange(1, 14)
    tokens = tf.RaggedTensor.from_row_lengths(tf.ones([rows.sum()]), rows)

    def loss_fn(tokens):
        return tf.abs(norm(tf.reduce_sum(tokens, 1)[:, None], training=True)[:, 0])

    def run():
        return macrobatch.value_and_gradients(
            loss_fn, norm.trainable_variables, tokens, micro_batch_size=4, sequence_axis=1
        )

    with pytest.warns(macrobatch.ExactnessWarning, match="examples depend on each other"):
        (run if mode == "eager" else tf.function(run))()


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=thorough), "eager"])
@pytest.mark.filterwarnings("ignore:Layer .* was passed an input with a mask")
def test_a_refusal_says_where_the_mask_went(mode):
    x, y, _ = tokens_of()
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens)
    hidden = layers.Conv1D(4, 3, padding="same", name="convolution")(hidden)
    model = keras.Model(tokens, layers.Dense(CLASSES)(hidden))
    model = compiled_tagger(model=model, **MODES[mode])
    macrobatch.accumulate(model, **CUTS["size"], lengths=lambda x, y, sample_weight: x[:, 0] * 0)
    match = r"No mask reaches the loss.*pass none on: convolution\..*lengths that are too short"
    assert_refused(model, match, x, y)
    weights = (x > 0).astype("float64")
    with pytest.raises(ValueError, match="depends on padding") as refused:
        model.fit(x, y, sample_weight=weights, verbose=0)
    assert "No mask" not in str(refused.value)


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_a_metric_over_all_positions(mode):
    x, y, real = tokens_of()
    model = compiled_tagger(metrics=["sparse_categorical_accuracy"], **MODES[mode])
    macrobatch.accumulate(model, **CUTS["size"])
    match = r"[mM]etric .*(means over all positions|depends on padding).*weighted_metrics="
    assert_refused(model, match, x, y, sample_weight=real)


class Total(keras.metrics.Metric):
    """Adds up predictions, those of padding too."""

    def __init__(self):
        super().__init__(name="total")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_pred)))

    def result(self):
        return self.total


@pytest.mark.eager
def test_a_metric_that_depends_on_padding():
    x, y, real = tokens_of()
    model = compiled_tagger(metrics=[Total()])
    macrobatch.accumulate(model, **CUTS["size"])
    match = r"(?s)The metric .{1,4}total.{1,4} depends on padding.*weighted_metrics="
    assert_refused(model, match, x, y, sample_weight=real)


@pytest.mark.eager
def test_dropout_does_not_look_like_padding():
    x, y, _ = tokens_of()
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.Dropout(0.5)(layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens))
    hidden = layers.LSTM(3, dropout=0.3, return_sequences=True)(hidden)
    model = compiled_tagger(model=keras.Model(tokens, layers.Dense(CLASSES)(hidden)))
    macrobatch.accumulate(model, **CUTS["size"])
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)


@thorough
def test_noise_cannot_be_compared():
    x, y, _ = tokens_of()
    tokens = keras.Input([None], dtype="int32")
    hidden = layers.GaussianNoise(0.5)(layers.Embedding(VOCABULARY, 4, mask_zero=True)(tokens))
    model = compiled_tagger(model=keras.Model(tokens, layers.Dense(CLASSES)(hidden)))
    macrobatch.accumulate(model, **CUTS["size"])
    with pytest.warns(macrobatch.ExactnessWarning, match="cannot be tried: random numbers"):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)


def pooling(layer, **head):
    tokens = keras.Input([None], dtype="int32")
    hidden = layer(layers.Embedding(VOCABULARY, 4)(tokens))
    return keras.Model(tokens, layers.Dense(CLASSES, **head)(hidden))


@pytest.mark.eager
@pytest.mark.parametrize("seed", range(3))
def test_a_maximum_over_all_positions(seed):
    """In real examples the padding is seldom the largest, and some have none in any micro-batch."""
    x, y, _ = tokens_of(16, seed)
    keras.utils.set_random_seed(seed)
    model = compiled_tagger(model=pooling(layers.GlobalMaxPooling1D()))
    macrobatch.accumulate(model, **CUTS["size"])
    assert_refused(model, "a layer before it, depends on padding", x, y[:, 0], error=ValueError)


@pytest.mark.eager
def test_padding_of_the_last_micro_batch_alone():
    """All examples but one are as long as all sequences."""
    x, y = np.ones([7, POSITIONS], int), np.zeros([7], int)
    x[3, 2:] = 0
    model = compiled_tagger(model=pooling(layers.GlobalAveragePooling1D()))
    macrobatch.accumulate(model, **CUTS["size"])
    assert_refused(model, "a layer before it, depends on padding", x, y, error=ValueError)


def test_a_layer_behind_which_all_is_0_at_first():
    x, y, _ = tokens_of()
    model = pooling(layers.GlobalAveragePooling1D(), kernel_initializer="zeros")
    model = compiled_tagger(model=model)
    macrobatch.accumulate(model, **CUTS["size"])
    assert_refused(model, "a layer before it, depends on padding", x, y[:, 0], error=ValueError)


class OnlyInTraining(layers.Layer):
    def call(self, x, training=False):
        return tf.reduce_mean(x, 1) if training else x[:, 0]


@pytest.mark.eager
def test_testing_tells_nothing_about_training():
    x, y, _ = tokens_of()
    model = compiled_tagger(model=pooling(OnlyInTraining()))
    macrobatch.accumulate(model, **CUTS["size"])
    model.evaluate(x, y[:, 0], verbose=0)
    assert_refused(model, "a layer before it, depends on padding", x, y[:, 0], error=ValueError)


@pytest.mark.eager
def test_another_loss_is_tried_again():
    x, y, real = tokens_of()
    model = compiled_tagger()
    macrobatch.accumulate(model, **CUTS["size"])
    model.fit(x, y, sample_weight=real, batch_size=8, verbose=0)
    model.compile("sgd", crossentropy())
    assert_refused(model, "The loss, or a layer before it, depends on padding", x, y)


def test_labels_that_are_made_longer():
    """A compiled step pads sequences of unknown size with 0, which here is a class."""
    x, y, _ = tokens_of()
    ends = lengths_of(len(x))
    ends[0] = 10  # then the batch is 10 wide, and padded to 12
    dataset = tf.data.Dataset.from_tensor_slices((x, y, ends))
    dataset = dataset.map(lambda x, y, n: (x[:n], y[:n]))
    dataset = dataset.padded_batch(
        8, padding_values=(tf.constant(0, x.dtype), tf.constant(-1, y.dtype))
    )
    model = compiled_tagger(loss=crossentropy(ignore_class=-1, reduction="sum"), jit_compile=True)
    macrobatch.accumulate(model, **CUTS["size"])
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(dataset, shuffle=False, verbose=0)


@thorough
@pytest.mark.filterwarnings("ignore:It is not known whether examples meet")
def test_what_is_not_finite_is_no_matter_of_padding():
    x, y, _ = tokens_of()
    loss = lambda y, p: tf.reduce_sum(p, -1) * np.nan  # noqa: E731
    model = compiled_tagger(model=classifier(), loss=loss)
    macrobatch.accumulate(model, **CUTS["size"])
    assert np.isnan(model.fit(x, y[:, 0], batch_size=8, verbose=0).history["loss"][0])


@pytest.mark.parametrize("mode", [pytest.param("graph", marks=thorough), "eager"])
def test_values_that_happen_to_be_as_many_as_positions(mode):
    """A metric of three values for each example, and sequences of a length of three."""

    def build():
        tokens = keras.Input([None], dtype="int32")
        x = layers.Embedding(VOCABULARY, 3, mask_zero=True)(tokens)
        x = layers.GlobalAveragePooling1D()(x)
        return keras.Model(tokens, layers.Reshape([3, 1])(x))

    x, _, _ = tokens_of()
    how = {"cut": CUTS["size"], "metrics": ["mae"], **MODES[mode]}
    check(build, x, x[:, :3, None] * 0.1, **how)


def test_a_fixed_length():
    match = r"fixed sequence length.*shape \(None, 11\).*keras.Input\(\(None,\)\)"
    with pytest.raises(ValueError, match=match):
        macrobatch.accumulate(tagger(length=POSITIONS), **CUTS["size"])


class Positional(keras.Model):
    """Adds something for each of a fixed number of positions."""

    def build(self, shape):
        self.table = self.add_weight(shape=(POSITIONS, 4))
        self.embedding = layers.Embedding(VOCABULARY, 4, mask_zero=True)
        self.head = layers.Dense(CLASSES)

    def call(self, x):
        return self.head(self.embedding(x) + self.table)


@thorough
def test_a_model_of_a_class_with_a_fixed_length():
    x, y, _ = tokens_of()
    model = compiled_tagger(model=Positional())
    macrobatch.accumulate(model, **CUTS["size"])
    with pytest.raises(ValueError, match="has a fixed sequence length: it failed on sequences"):
        model.fit(x, y, batch_size=8, verbose=0)


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_fn_that_depends_on_padding(mode):
    table, kernel = parameters()

    def run(batch):
        return macrobatch.value_and_gradients(
            lambda batch: loss_of(table, kernel, batch)[0],
            [table, kernel],
            batch,
            micro_batch_size=4,
            sequence_axis=1,
        )

    run = run if mode == "eager" else tf.function(run)
    for _ in range(2):
        with pytest.raises(Exception, match=r"depends on padding.*in loss_fn with \(losses"):
            run(batch_of(18))


def test_closures_over_several_models():
    """One is fine, the other is not."""
    batch = batch_of(18)["tokens"]

    def loss_of_model(mask):
        table = tf.Variable(np.random.default_rng(0).normal(size=[VOCABULARY, 1]))

        def loss_fn(batch):
            weights = tf.cast(batch > 0, tf.float64) if mask else tf.ones_like(batch, tf.float64)
            return tf.gather(table, batch)[..., 0] ** 2, weights

        return loss_fn, [table]

    options = {"micro_batch_size": 4, "sequence_axis": 1}
    macrobatch.value_and_gradients(*loss_of_model(True), batch, **options)
    with pytest.raises(ValueError, match="depends on padding"):
        macrobatch.value_and_gradients(*loss_of_model(False), batch, **options)


def test_a_loss_fn_with_a_fixed_length():
    table, _ = parameters()
    positions = tf.Variable(tf.ones([POSITIONS, 3], tf.float64))

    def loss_fn(batch):
        weights = tf.cast(batch > 0, tf.float64)
        return tf.reduce_sum((tf.gather(table, batch) + positions) ** 2, -1), weights

    @tf.function
    def run(batch):
        return macrobatch.value_and_gradients(
            loss_fn, [table], batch, micro_batch_size=4, sequence_axis=1
        )

    with pytest.raises(ValueError, match="has a fixed sequence length"):
        run(batch_of(18)["tokens"])


@thorough
def test_layers_that_xla_cannot_compile_for_any_length():
    tokens = keras.Input([None], dtype="int32")
    x = layers.GRU(2, return_sequences=True)(
        layers.Embedding(VOCABULARY, 2, mask_zero=True)(tokens)
    )
    model = keras.Model(tokens, layers.Dense(CLASSES)(x))
    model.compile("sgd", crossentropy(), jit_compile=True)
    macrobatch.accumulate(model, 3, sequence_axis=1)
    x, y, _ = tokens_of(8)
    with pytest.raises(ValueError, match=r"recurrent layers.*Received: jit_compile=True and seq"):
        model.fit(x, y, verbose=0)


def test_inside_of_what_is_compiled():
    table, kernel = parameters()

    @tf.function(jit_compile=True)
    def run(batch):
        return cut_by_length(table, kernel, batch, micro_batch_size=4)[0]

    with pytest.raises(ValueError, match=r"XLA cannot.*tf.function\(loss_fn, jit_compile=True\)"):
        run(batch_of(18))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"micro_batch_size": 2, "micro_batch_tokens": 9, "sequence_axis": 1}, "Only one"),
        ({"micro_batch_tokens": 0, "sequence_axis": 1}, "micro_batch_tokens must be a positive"),
        ({"micro_batch_tokens": 1.5, "sequence_axis": 1}, "micro_batch_tokens must be a positive"),
        ({"micro_batch_tokens": 9}, "micro_batch_tokens= needs sequence_axis="),
        ({"micro_batch_size": 2, "lengths": len}, "lengths= needs sequence_axis="),
        ({"micro_batch_size": 2, "sequence_axis": 0}, "sequence_axis must be a positive integer"),
        ({"micro_batch_size": 2, "sequence_axis": -1}, "sequence_axis must be a positive integer"),
        (
            {"micro_batch_size": 2, "sequence_axis": 1, "lengths": 3},
            "Received: lengths=3, which is",
        ),
        (
            {"micro_batch_size": 2, "sequence_axis": 1, "lengths": lambda x, y: x},
            r"lengths= must be a function of \((x, y, sample_weight|batch)\).*other arguments",
        ),
    ],
)
def test_arguments(arguments, match):
    with pytest.raises(ValueError, match=match):
        macrobatch.accumulate(tagger(), **arguments)
    variable = tf.Variable(1.0)
    with pytest.raises(ValueError, match=match):
        macrobatch.value_and_gradients(lambda x: x, [variable], tf.ones([4]), **arguments)


@pytest.mark.parametrize(
    ("batch", "options", "match"),
    [
        (tf.ones([4], tf.int32), {}, "Nothing in the batch has an axis 1"),
        (tf.ones([4, 3]), {}, "nothing to tell the length of an example from"),
        (tf.ones([4, 3]), {"lengths": lambda x: [1.0] * 4}, "Received: a tensor of shape .4,. a"),
        (tf.ones([4, 3]), {"lengths": lambda x: [1, 2]}, "another number of lengths than there"),
    ],
)
def test_batches_without_lengths(batch, options, match):
    variable = tf.Variable(1.0)
    options = {"micro_batch_size": 2, "sequence_axis": 1, **options}
    with pytest.raises(Exception, match=match):
        macrobatch.value_and_gradients(lambda x: variable * 1.0, [variable], batch, **options)


# Inside of the package


@pytest.mark.parametrize("size", [{"size": 8, "tokens": None}, {"size": None, "tokens": 1024}])
def test_compiled_shapes_are_few(size):
    cut = Cut(*size.values(), 1)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)], autograph=False)
    def shapes_of(x):
        micro_batches = cut.apply(x, tf.shape(x)[0], ENGINE, x=x, few_shapes=True)
        run = micro_batches.runs[0]
        array = tf.TensorArray(tf.int32, run.count, element_shape=[2])
        return tf.while_loop(
            lambda i, _: i < run.count,
            lambda i, a: (i + 1, a.write(i, tf.shape(micro_batches.get(run, i)))),
            (0, array),
        )[1].stack()

    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(20):
        examples = int(rng.integers(1, 60))
        x = np.arange(300) < rng.integers(1, 300, examples)[:, None]
        found = shapes_of(tf.constant(x[:, : x.any(0).sum()].astype("int32"))).numpy()
        assert found[:, 0].sum() == examples
        for count, length in found:  # what is left at the end is cut into powers of two
            assert count == (cut.size or 1024 // length) or count & (count - 1) == 0
        shapes |= set(map(tuple, found))
    lengths = {length for _, length in shapes}
    assert lengths <= set(BUCKETS)
    # Of each length: the size, and powers of two below it.
    assert len(shapes) <= len(lengths) * 12

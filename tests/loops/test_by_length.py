"""Sequences by length in what TensorFlow alone has: value_and_gradients, ragged tensors, XLA."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from case import parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from support import thorough, thorough_for
from support.loops import (
    accumulated,
    assert_close,
    call,
    check_on_replicas,
    made_in,
    mirrored,
    of_one_tape,
)
from test_lengths import (
    ACCURACY,
    ARGUMENTS,
    AXIS,
    CLASSES,
    LAYER,
    POSITIONS,
    SIZE,
    VOCABULARY,
    X,
    Y,
    by_length,
    compiled,
    crossentropy,
    following,
    lengths_of,
    tagger,
    tokens_of,
)

import macrobatch

in_each_mode = pytest.mark.parametrize("mode", ["eager", "graph"])


def variables_of():
    rng = np.random.default_rng(0)
    return tf.Variable(rng.normal(size=[VOCABULARY, 3])), tf.Variable(rng.normal(size=[3, CLASSES]))


def batch_of(x):
    # Of a dict all integers count: labels behind the end would make an example longer.
    return {"tokens": tf.constant(x), "labels": tf.constant((x * 7 + 3) % CLASSES * (x > 0))}


BATCH = batch_of(tokens_of(18)[0])


def outputs(variables, batch):
    """Tokens' losses, weights that are 0 for padding, and predictions."""
    table, kernel = variables
    weights = tf.cast(batch["tokens"] > 0, table.dtype)
    context = tf.cumsum(tf.gather(table, batch["tokens"]) * weights[..., None], 1)
    logits = tf.linalg.matmul(tf.tanh(context), kernel)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits), weights, logits


def loss_of(variables):
    return lambda batch: outputs(variables, batch)[:2]


def check(mode, batch, **cut):
    """Also of what comes with the loss: padding is restored, and the order of examples."""
    variables = variables_of()

    def loss_fn(micro_batch):
        losses, weights, logits = outputs(variables, micro_batch)
        first = micro_batch["tokens"][:, 0]
        aux = {"logits": logits, "first": first, "size": tf.size(first), "none": None}
        aux["ragged"] = tf.RaggedTensor.from_tensor(micro_batch["tokens"], padding=0)
        aux["classes"] = logits[:, 0]
        aux["pairs"] = weights[:, :, None] * weights[:, None, :]
        return (losses, weights), aux

    step = accumulated(loss_fn, variables, **{"size": None, **AXIS, **cut}, has_aux=True)
    (loss, aux), gradients = call(mode, step, batch)
    assert_close((loss, gradients), of_one_tape(loss_of(variables), variables, batch))
    tokens, (_, weights, logits) = batch["tokens"].numpy(), outputs(variables, batch)
    real = weights.numpy()[..., None]
    assert aux["logits"].shape == logits.shape
    pairs = {
        "logits": (aux["logits"] * real, logits * real),
        "first": (aux["first"], tokens[:, 0]),
        "pairs": (aux["pairs"], real * weights.numpy()[:, None, :]),
        "classes": (aux["classes"], logits[:, 0]),
    }
    for name, (found, expected) in pairs.items():
        np.testing.assert_allclose(found, expected, atol=1e-10, err_msg=name)
    assert aux["ragged"].to_list() == [list(row[row > 0]) for row in tokens]
    assert int(tf.reduce_sum(aux["size"])) == len(tokens)
    assert aux["none"] is None


@thorough_for("cut0-graph")
@in_each_mode
@pytest.mark.parametrize("cut", [{"size": 4}, {"micro_batch_tokens": 60}])
def test_value_and_gradients(mode, cut):
    check(mode, BATCH, **cut)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=17),
    size=st.one_of(
        st.builds(lambda n: {"size": n}, st.integers(1, 19)),
        st.builds(lambda n: {"micro_batch_tokens": n}, st.integers(1, 60)),
    ),
    padding=st.integers(1, 4),
)
def test_any_lengths(lengths, size, padding):
    rng = np.random.default_rng(len(lengths))
    real = np.arange(max(lengths) + padding) < np.array(lengths)[:, None]
    if real.any():
        check("eager", batch_of(rng.integers(1, VOCABULARY, real.shape) * real), **size)


@thorough
def test_a_compiled_loss():
    variables = variables_of()
    loss_fn = tf.function(loss_of(variables), jit_compile=True)
    found = call("graph", accumulated(loss_fn, variables, 4, **AXIS), BATCH)
    assert_close(found, of_one_tape(loss_fn, variables, BATCH))


@thorough
def test_on_replicas():
    variables = made_in(mirrored(2), variables_of)
    batch = batch_of(tokens_of(7)[0])
    step = accumulated(loss_of(variables), variables, None, micro_batch_tokens=36, **AXIS)
    check_on_replicas(step, of_one_tape(loss_of(variables), variables, batch), batch, (3, 4))


# Ragged and sparse tensors


@thorough_for("graph")
@in_each_mode
def test_ragged_and_sparse_parts(mode):
    variables, (x, y, _) = variables_of(), tokens_of(13)
    extra = np.where(np.arange(13)[:, None] % 3 == 0, x, 0)[:, :5]
    batch = {
        "tokens": tf.RaggedTensor.from_tensor(x, padding=0),
        "labels": tf.ragged.boolean_mask(tf.constant(y), x > 0),
        "extra": tf.sparse.from_dense(tf.constant(extra)),
    }

    def loss_fn(micro_batch):
        padded = {name: micro_batch[name].to_tensor() for name in ("tokens", "labels")}
        aux = micro_batch["extra"], tf.shape(padded["tokens"])[1]
        return loss_of(variables)(padded), aux

    step = accumulated(loss_fn, variables, 3, has_aux=True, **AXIS)
    (loss, (sparse, lengths)), gradients = call(mode, step, batch)
    assert_close((loss, gradients), of_one_tape(loss_of(variables), variables, batch_of(x)))
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), extra)
    np.testing.assert_array_equal(lengths, np.sort((x > 0).sum(1))[::-1][::3])  # longest first


def ragged(rows):
    return tf.RaggedTensor.from_row_lengths(tf.ones([sum(rows)]), rows)


@in_each_mode
@pytest.mark.parametrize("features", [False, True])
def test_a_budget_for_ragged_tokens(features, mode):
    """It is what rows come to when they are as wide as the longest, whatever else there is."""
    tokens = ragged(range(1, 14))
    others = (tf.ones([13, 4], tf.int32),) if features else ()
    variable = tf.Variable(1.0, dtype="float64")
    seen = []

    def loss_fn(micro_batch):
        padded = micro_batch[0][0].to_tensor()
        tf.py_function(lambda x: seen.append(tuple(x.shape)), [padded], [])
        return tf.cast(tf.reduce_sum(padded, 1), "float64") * variable, padded

    budget = {"micro_batch_tokens": 24, "has_aux": True, **AXIS}
    step = accumulated(loss_fn, [variable], None, **budget)
    (loss, padded), gradients = call(mode, step, ((tokens, *others), tf.zeros([13])))
    assert_close((loss, gradients), (7.0, [7.0]))
    np.testing.assert_array_equal(padded, tokens.to_tensor())
    # Then the trial whether examples meet, without gradients: two examples and the longest.
    steps, trial = seen[:-4], seen[-4:]
    assert steps[-6:] == [(1, 13), (2, 12), (2, 10), (3, 8), (4, 5), (1, 1)]
    assert all(examples * longest <= 24 for examples, longest in steps)
    assert trial == [(3, 13)] * 4


class Dense(layers.Layer):
    """Makes a ragged input as wide as its longest row."""

    def call(self, x):
        return x.to_tensor() if isinstance(x, tf.RaggedTensor) else x


def ragged_tagger(mask=True):
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, tagger(mask)(Dense()(tokens)))


def ragged_batches():
    """Batches of ragged tokens, and labels as wide as the longest."""
    tokens = tf.RaggedTensor.from_tensor(X, padding=0)
    labels = tf.ragged.boolean_mask(tf.constant(Y), X > 0)
    batches = tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(8)
    return batches.map(lambda x, y: (x, y.to_tensor()))


# Labels beside ragged tokens are cut too, and masked metrics are of the whole batch's width.
RAGGED = {
    "tokens": by_length(
        ragged_tagger, lambda: ragged_batches(), tokens=60, quick="graph", **ACCURACY
    ),
    "size": by_length(ragged_tagger, lambda: ragged_batches(), **ACCURACY),
}


@pytest.mark.parametrize(("case", "mode"), parameters(RAGGED))
def test_ragged_tokens(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


# What is refused


@pytest.mark.parametrize("run_eagerly", [pytest.param(False, marks=thorough), True])
def test_a_layer_after_ragged_tokens_that_depends_on_padding(run_eagerly):
    model = compiled(ragged_tagger(mask=False), run_eagerly=run_eagerly)
    before = model.get_weights()
    with pytest.raises(ValueError, match="The loss, or " + LAYER):
        model.fit(ragged_batches(), shuffle=False, verbose=0)
    np.testing.assert_equal(before, model.get_weights())


@in_each_mode
@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
def test_ragged_tokens_of_examples_that_depend_on_each_other(mode):
    """Then a difference says nothing of padding."""
    norm = layers.BatchNormalization()
    norm(tf.ones([2, 1]))

    def loss_fn(tokens):
        return tf.abs(norm(tf.reduce_sum(tokens, 1)[:, None], training=True)[:, 0])

    step = accumulated(loss_fn, norm.trainable_variables, 4, **AXIS)
    with pytest.warns(macrobatch.ExactnessWarning, match="examples depend on each other"):
        call(mode, step, ragged(range(1, 14)))


def test_labels_that_are_made_longer():
    """A compiled step pads sequences of unknown size with 0, which here is a class."""
    ends = lengths_of(len(X))
    ends[0] = 10  # then the batch is 10 wide, and padded to 12
    dataset = tf.data.Dataset.from_tensor_slices((X, Y, ends))
    padding = tf.constant(0, X.dtype), tf.constant(-1, Y.dtype)
    batches = dataset.map(lambda x, y, n: (x[:n], y[:n])).padded_batch(8, padding_values=padding)
    loss = crossentropy(ignore_class=-1, reduction="sum")
    with pytest.raises(ValueError, match="depends on padding"):
        compiled(loss=loss, jit_compile=True).fit(batches, shuffle=False, verbose=0)


@thorough
def test_layers_that_xla_cannot_compile_for_any_length():
    model = compiled(following(layers.GRU(2, return_sequences=True)), jit_compile=True)
    with pytest.raises(ValueError, match=r"recurrent layers.*Received: jit_compile=True and seq"):
        model.fit(X, Y, verbose=0)


def unweighted(variables, batch):
    return outputs(variables, batch)[0]


def of_fixed_length(variables, batch):
    weights = tf.cast(batch["tokens"] > 0, tf.float64)
    vectors = tf.gather(variables[0], batch["tokens"]) + tf.ones([POSITIONS, 3], tf.float64)
    return tf.reduce_sum(vectors**2, -1), weights


@thorough_for("unweighted-graph")
@pytest.mark.parametrize(
    ("loss", "mode", "match"),
    [
        (unweighted, "eager", r"depends on padding.*in loss_fn with \(losses"),
        (unweighted, "graph", r"depends on padding.*in loss_fn with \(losses"),
        (of_fixed_length, "graph", "has a fixed sequence length"),
        (outputs, "compiled", r"XLA cannot.*tf.function\(loss_fn, jit_compile=True\)"),
    ],
)
def test_loss_fn(loss, mode, match):
    variables = variables_of()
    step = accumulated(lambda batch: loss(variables, batch), variables, 4, **AXIS)
    errors = ValueError, tf.errors.InvalidArgumentError  # the latter where a graph runs
    for _ in range(2):
        with pytest.raises(errors, match=match):
            call(mode, step, BATCH)


def test_closures_over_several_models():
    """One is fine, the other is not."""

    def step_of(mask):
        table = tf.Variable(np.random.default_rng(0).normal(size=[VOCABULARY, 1]))

        def loss_fn(batch):
            weights = tf.cast(batch > 0, tf.float64) if mask else tf.ones_like(batch, tf.float64)
            return tf.gather(table, batch)[..., 0] ** 2, weights

        return accumulated(loss_fn, [table], 4, **AXIS)

    step_of(True)(BATCH["tokens"])
    with pytest.raises(ValueError, match="depends on padding"):
        step_of(False)(BATCH["tokens"])


INTEGERS, NUMBERS = tf.ones([4, 3], tf.int32), tf.ones([4, 3])


@pytest.mark.parametrize(
    ("options", "match", "batch"),
    [
        *((options, match, NUMBERS) for options, match in ARGUMENTS),
        (SIZE, "Nothing in the batch has an axis 1", INTEGERS[:, 0]),
        (SIZE, "nothing to tell the length of an example from", NUMBERS),
        ({**SIZE, "lengths": lambda x: [1.0] * 4}, "Received: a tensor of shape .4,. a", NUMBERS),
        ({**SIZE, "lengths": lambda x: [1, 2]}, "another number of lengths than there", NUMBERS),
    ],
)
def test_arguments_and_batches(options, match, batch):
    variable = tf.Variable(1.0)
    with pytest.raises(ValueError, match=match):
        macrobatch.value_and_gradients(lambda x: variable * 1.0, [variable], batch, **options)

"""value_and_gradients(..., forward=): the gradients of one tape over all outputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from support import mirrored, thorough, thorough_for
from support.loops import (
    accumulated,
    assert_close,
    call,
    check_on_replicas,
    made_in,
    of_one_tape,
    on_replicas,
)

import macrobatch

with_python = pytest.mark.parametrize("mode", ["eager", "graph"])


def data(examples, seed=0):
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=(examples, 4))), tf.constant(rng.normal(size=(examples, 3)))


def encoder(*more):
    keras.utils.set_random_seed(3)
    hidden = layers.Dense(5, activation="tanh")
    return keras.Sequential([keras.Input([4]), hidden, *more, layers.Dense(3)])


def similarities(left, right):
    return tf.linalg.l2_normalize(left, 1) @ tf.transpose(tf.linalg.l2_normalize(right, 1))


def softmax_losses(logits):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits)


class Clip:
    """Two encoders, a temperature, and outputs of many kinds."""

    def __init__(self, *more):
        self.images, self.texts = encoder(*more), encoder()
        self.temperature = tf.Variable(0.4, dtype=tf.float64)
        self.unused = tf.Variable([1.0, 2.0], dtype=tf.float64)
        self.variables = {
            "images": self.images.trainable_variables,
            "rest": [*self.texts.trainable_variables, self.temperature, self.unused],
        }

    def forward(self, micro_batch):
        x, y = micro_batch
        return {
            "images": self.images(x, training=True),
            "texts": [self.texts(tf.concat([y, y[:, :1]], 1))],
            "ids": tf.argmax(y, 1),
            "none": None,
            # Its gradient is infinite. The loss does not use it, so it must not count.
            "unused": tf.sqrt(tf.reduce_sum(self.images(x), 1) * 0.0) * self.unused[0],
        }

    def loss(self, outputs, batch):
        logits = similarities(outputs["images"], outputs["texts"][0]) * tf.exp(self.temperature)
        same = tf.cast(outputs["ids"][:, None] == outputs["ids"][None], tf.float64)
        return softmax_losses(logits + same) * tf.reduce_mean(batch[1] ** 2, 1)

    def step(self, size=4, **changed):
        arguments = {"loss_fn": self.loss, "forward": self.forward, **changed}
        return accumulated(variables=self.variables, size=size, **arguments)

    def expected(self, batch, loss_fn=None, forward=None):
        return whole(loss_fn or self.loss, forward or self.forward, self.variables, batch)


def whole(loss_fn, forward, variables, batch):
    """The loss of a batch, and its gradients, from one tape over all outputs."""
    return of_one_tape(lambda batch: loss_fn(forward(batch), batch), variables, batch)


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    assert_close(found[1], expected[1], of_zero=1e-13)


@thorough_for("compiled")
@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_as_one_tape(mode):
    clip, batch = Clip(), data(11)
    loss, gradients = call(mode, clip.step(), batch)
    assert gradients.keys() == clip.variables.keys()
    assert_same((loss, gradients), clip.expected(batch))


@settings(max_examples=10, deadline=None)
@given(
    examples=st.integers(1, 9),
    size=st.integers(1, 10),
    seed=st.integers(0, 99),
    form=st.sampled_from(["scalar", "losses", "losses and weights"]),
)
def test_any_batch_and_any_form_of_the_loss(examples, size, seed, form):
    keras.config.set_floatx("float64")  # Hypothesis runs the fixture once
    keras.config.set_dtype_policy("float64")
    clip, batch = Clip(), data(examples, seed)

    def loss_fn(outputs, batch):
        losses, weights = clip.loss(outputs, batch), tf.abs(outputs["images"][:, 0])
        if form == "losses and weights":
            return losses, weights
        return losses if form == "losses" else tf.math.log(1 + tf.reduce_sum(losses))

    assert_same(clip.step(size, loss_fn=loss_fn)(batch), clip.expected(batch, loss_fn))


@thorough_for("graph")
@with_python
def test_random_layers_draw_the_same_in_both_passes(mode):
    """One tape over the same forward passes, joined. Seeds end where they end there."""
    batch = data(10)
    plain, clip = (
        Clip(layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.3, seed=2)) for _ in range(2)
    )

    def joined(batch):
        parts = [plain.forward([t[i : i + 4] for t in batch]) for i in range(0, 10, 4)]
        return tf.nest.map_structure(
            lambda *each: None if each[0] is None else tf.concat(each, 0), *parts
        )

    found = call(mode, clip.step(), batch)
    assert_same(found, plain.expected(batch, forward=joined))
    seeds = [[np.array(v) for v in each.images.non_trainable_variables] for each in (clip, plain)]
    np.testing.assert_equal(*seeds)


def test_aux_comes_back_as_it_is():
    clip, batch = Clip(), data(7)

    def loss_fn(outputs, batch):
        return clip.loss(outputs, batch), {"logits": outputs["images"], "examples": len(batch[0])}

    (_, aux), _ = clip.step(3, loss_fn=loss_fn, has_aux=True)(batch)
    np.testing.assert_allclose(aux["logits"], clip.images(batch[0]))
    assert aux["examples"] == 7


@with_python
def test_ragged_outputs(mode):
    words = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7], [1, 1]])
    table = tf.Variable(np.random.default_rng(0).normal(size=(9, 2)))

    def forward(words):
        return words.with_flat_values(tf.gather(table, words.flat_values))

    def loss_fn(outputs, _):
        sums = tf.reduce_sum(outputs, 1)
        return tf.reduce_sum(tf.matmul(sums, sums, transpose_b=True) ** 2)

    found = call(mode, accumulated(loss_fn, [table], 4, forward=forward), words)
    assert_same(found, whole(loss_fn, forward, [table], words))


@with_python
def test_sequences_by_length(mode):
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 9, (9, 7)) * (np.arange(7) < rng.integers(1, 8, (9, 1)))
    table = tf.Variable(rng.normal(size=(9, 3)))

    def forward(tokens):
        seen = tf.cast(tokens != 0, tf.float64)[..., None]
        each = tf.nn.embedding_lookup(table, tokens) * seen
        return each, tf.reduce_sum(each, 1) / tf.reduce_sum(seen, 1)

    def loss_fn(outputs, tokens):
        each, vectors = outputs
        losses = softmax_losses(similarities(vectors, vectors))
        return losses + tf.reduce_sum(each**2 * tf.cast(tokens, tf.float64)[..., None], [1, 2])

    tokens = tf.constant(tokens)
    step = accumulated(loss_fn, [table], 2, sequence_axis=1, forward=forward)
    assert_same(call(mode, step, tokens), whole(loss_fn, forward, [table], tokens))


# Replicas

REPLICAS = [((6, 2), True)]
MORE_REPLICAS = [((4, 4), True), ((0, 8), True), ((8, 0), True), ((6, 2), False), ((8, 0), False)]


@pytest.mark.parametrize(
    ("sizes", "graph"),
    [*REPLICAS, *(pytest.param(*each, marks=thorough) for each in MORE_REPLICAS)],
)
def test_replicas_see_the_outputs_of_all(sizes, graph):
    batch = data(8)
    clip = made_in(mirrored(2), Clip)
    check_on_replicas(clip.step(), Clip().expected(batch), batch, sizes, graph)


def test_replicas_that_come_to_different_losses_are_refused():
    clip = made_in(mirrored(2), Clip)

    def loss_fn(outputs, batch):
        return clip.loss(outputs, batch) * tf.random.uniform([], dtype=tf.float64)

    step = clip.step(loss_fn=loss_fn)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the same loss of the whole batch"):
        on_replicas(lambda batch: step(batch)[0], data(8), (4, 4))


# What is refused


@thorough_for("from a seed-compiled")
@pytest.mark.parametrize(
    ("mode", "match"),
    [("eager", "other outputs in the second pass"), ("graph", "Random"), ("compiled", "Random")],
)
@pytest.mark.parametrize("seeded", [False, True], ids=["drawn anew", "from a seed"])
def test_random_numbers_must_be_drawn_from_seeds(mode, match, seeded):
    clip = Clip()
    draw = tf.function(lambda shape: tf.random.normal(shape, dtype=tf.float64))

    def forward(micro_batch):
        outputs = clip.forward(micro_batch)
        shape = tf.shape(outputs["images"])
        if seeded:
            noise = tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)
        else:
            noise = draw(shape)
        return {**outputs, "images": outputs["images"] + noise}

    step = clip.step(2, forward=forward)
    if seeded:
        call(mode, step, data(6))
    else:
        with pytest.raises(ValueError, match=f"runs twice.*{match}"):
            call(mode, step, data(6))


EXAMPLES_FIRST = "What forward returns must have the examples first"


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"forward": lambda _: tf.constant(1.0)}, EXAMPLES_FIRST),
        ({"forward": lambda _: tf.zeros([5, 2])}, EXAMPLES_FIRST),
        ({"forward": lambda _: tf.sparse.eye(2)}, "must be dense or ragged"),
        ({"forward": 3}, "^forward must be a function of a micro-batch"),
        ({"forward": lambda: None}, "^forward must take one argument"),
        ({"loss_fn": lambda outputs: 0.0}, "^loss_fn must take two arguments with forward="),
    ],
)
def test_what_forward_returns_must_have_the_examples_first(changed, match):
    with pytest.raises(ValueError, match=match):
        Clip().step(2, **changed)(data(6))


def test_batch_normalization_is_said_and_written_once():
    clip, batch = Clip(layers.BatchNormalization(momentum=0.5)), data(6)
    hidden = clip.images.layers[0](batch[0])
    with pytest.warns(macrobatch.ExactnessWarning, match="normalises by the statistics"):
        clip.step(2)(batch)
    moving = clip.images.layers[1].moving_mean
    np.testing.assert_allclose(moving, 0.5 * tf.reduce_mean(hidden, 0), rtol=1e-10)

"""value_and_gradients(..., forward=): the gradients of one tape over all outputs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from support import thorough, thorough_for
from test_accumulator_everywhere import mirrored
from test_replicas import made_in, on_replicas

import macrobatch
from macrobatch import value_and_gradients

MODES = {
    "eager": lambda function: function,
    "graph": tf.function,
    "compiled": lambda function: tf.function(function, jit_compile=True),
}


def data(examples, seed=0):
    rng = np.random.default_rng(seed)
    return tf.constant(rng.normal(size=(examples, 4))), tf.constant(rng.normal(size=(examples, 3)))


def encoder(*more):
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(5, activation="tanh"), *more, layers.Dense(3)]
    )


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


def weights_of(variables):
    return [v if isinstance(v, tf.Variable) else v.value for v in tf.nest.flatten(variables)]


def of_one_tape(forward, loss_fn, variables, batch):
    with tf.GradientTape() as tape:
        loss = loss_fn(forward(batch), batch)
    return loss, tape.gradient(loss, weights_of(variables))


def assert_same(expected, found):
    (loss, gradients), (other, others) = expected, found
    np.testing.assert_allclose(loss, other, rtol=1e-12)
    others = tf.nest.flatten(others)
    assert len(gradients) == len(others)
    for gradient, other in zip(gradients, others):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            dense = tf.convert_to_tensor(gradient), tf.convert_to_tensor(other)
            np.testing.assert_allclose(*dense, rtol=1e-10, atol=1e-13)


@thorough_for("compiled")
@pytest.mark.parametrize("mode", MODES)
def test_as_one_tape(mode):
    clip, batch = Clip(), data(11)
    expected = of_one_tape(
        clip.forward, lambda *args: tf.reduce_mean(clip.loss(*args)), clip.variables, batch
    )

    def step(batch):
        return value_and_gradients(
            clip.loss, clip.variables, batch, micro_batch_size=4, forward=clip.forward
        )

    loss, gradients = MODES[mode](step)(batch)
    assert gradients.keys() == clip.variables.keys()
    assert_same(expected, (loss, gradients))


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

    def whole(outputs, batch):
        found = loss_fn(outputs, batch)
        if form == "losses and weights":
            return tf.reduce_sum(found[0] * found[1]) / tf.reduce_sum(found[1])
        return tf.reduce_mean(found)

    expected = of_one_tape(clip.forward, whole, clip.variables, batch)
    found = value_and_gradients(
        loss_fn, clip.variables, batch, micro_batch_size=size, forward=clip.forward
    )
    assert_same(expected, found)


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_random_layers_draw_the_same_in_both_passes(mode):
    """One tape over the same forward passes, joined. Seeds end where they end there."""
    batch = data(10)
    results, seeds = [], []
    for joins in (True, False):
        clip = Clip(layers.Dropout(0.5, seed=1), layers.GaussianNoise(0.3, seed=2))

        def joined(batch, clip=clip):
            parts = [clip.forward([t[i : i + 4] for t in batch]) for i in range(0, 10, 4)]
            return tf.nest.map_structure(
                lambda *each: None if each[0] is None else tf.concat(each, 0), *parts
            )

        def loss_fn(outputs, batch, clip=clip):
            return tf.reduce_sum(clip.loss(outputs, batch))

        def step(batch, clip=clip, loss_fn=loss_fn):
            return value_and_gradients(
                loss_fn, clip.variables, batch, micro_batch_size=4, forward=clip.forward
            )

        if joins:
            results.append(of_one_tape(joined, loss_fn, clip.variables, batch))
        else:
            results.append(MODES[mode](step)(batch))
        seeds.append([np.array(v) for v in clip.images.non_trainable_variables])
    assert_same(*results)
    np.testing.assert_equal(*seeds)


def test_aux_comes_back_as_it_is():
    clip, batch = Clip(), data(7)

    def loss_fn(outputs, batch):
        return clip.loss(outputs, batch), {"logits": outputs["images"], "examples": len(batch[0])}

    (_, aux), _ = value_and_gradients(
        loss_fn, clip.variables, batch, micro_batch_size=3, forward=clip.forward, has_aux=True
    )
    np.testing.assert_allclose(aux["logits"], clip.images(batch[0]))
    assert aux["examples"] == 7


def test_ragged_outputs():
    words = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7], [1, 1]])
    table = tf.Variable(np.random.default_rng(0).normal(size=(9, 2)))

    def forward(words):
        return words.with_flat_values(tf.gather(table, words.flat_values))

    def loss_fn(outputs, _):
        sums = tf.reduce_sum(outputs, 1)
        return tf.reduce_sum(tf.matmul(sums, sums, transpose_b=True) ** 2)

    expected = of_one_tape(forward, loss_fn, [table], words)
    for mode in ("eager", "graph"):

        def step(words):
            return value_and_gradients(loss_fn, [table], words, micro_batch_size=4, forward=forward)

        assert_same(expected, MODES[mode](step)(words))


@pytest.mark.parametrize("mode", ["eager", "graph"])
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

    def step(tokens):
        return value_and_gradients(
            loss_fn, [table], tokens, micro_batch_size=2, sequence_axis=1, forward=forward
        )

    tokens = tf.constant(tokens)
    expected = of_one_tape(forward, lambda *args: tf.reduce_mean(loss_fn(*args)), [table], tokens)
    assert_same(expected, MODES[mode](step)(tokens))


# Replicas


@pytest.mark.parametrize(
    ("sizes", "graph"),
    [
        ((6, 2), True),
        *[
            pytest.param(*each, marks=thorough)
            for each in [
                ((4, 4), True),
                ((0, 8), True),
                ((8, 0), True),
                ((6, 2), False),
                ((8, 0), False),
            ]
        ],
    ],
)
def test_replicas_see_the_outputs_of_all(sizes, graph):
    batch = data(8)
    clip, plain = made_in(mirrored(2), Clip), Clip()
    expected = of_one_tape(
        plain.forward, lambda *args: tf.reduce_mean(plain.loss(*args)), plain.variables, batch
    )

    def function(batch):
        loss, gradients = value_and_gradients(
            clip.loss, clip.variables, batch, micro_batch_size=4, forward=clip.forward
        )
        return loss, [g for g in tf.nest.flatten(gradients) if g is not None]

    losses, gradients = on_replicas(function, batch, sizes, graph)
    for loss in losses:
        np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
    found = [g for g in expected[1] if g is not None]
    assert len(found) == len(gradients)
    for one, parts in zip(found, gradients):
        np.testing.assert_allclose(one, sum(parts), rtol=1e-10, atol=1e-13)


def test_replicas_that_come_to_different_losses_are_refused():
    clip, batch = made_in(mirrored(2), Clip), data(8)

    def loss_fn(outputs, batch):
        return clip.loss(outputs, batch) * tf.random.uniform([], dtype=tf.float64)

    def function(batch):
        return value_and_gradients(
            loss_fn, clip.variables["images"], batch, micro_batch_size=4, forward=clip.forward
        )[0]

    with pytest.raises(tf.errors.InvalidArgumentError, match="the same loss of the whole batch"):
        on_replicas(function, batch, (4, 4))


# What is refused


@thorough_for("from a seed-compiled")
@pytest.mark.parametrize(
    ("mode", "match"),
    [("eager", "other outputs in the second pass"), ("graph", "Random"), ("compiled", "Random")],
)
@pytest.mark.parametrize("seeded", [False, True], ids=["drawn anew", "from a seed"])
def test_random_numbers_must_be_drawn_from_seeds(mode, match, seeded):
    clip, batch = Clip(), data(6)
    draw = tf.function(lambda shape: tf.random.normal(shape, dtype=tf.float64))

    def forward(micro_batch):
        outputs = clip.forward(micro_batch)
        shape = tf.shape(outputs["images"])
        if seeded:
            noise = tf.random.stateless_normal(shape, [1, 2], dtype=tf.float64)
        else:
            noise = draw(shape)
        return {**outputs, "images": outputs["images"] + noise}

    def step(batch):
        return value_and_gradients(
            clip.loss, clip.variables, batch, micro_batch_size=2, forward=forward
        )

    if seeded:
        MODES[mode](step)(batch)
    else:
        with pytest.raises(ValueError, match=f"runs twice.*{match}"):
            MODES[mode](step)(batch)


def test_what_forward_returns_must_have_the_examples_first():
    clip, batch = Clip(), data(6)

    def refused(forward, match, loss_fn=clip.loss):
        with pytest.raises(ValueError, match=match):
            value_and_gradients(loss_fn, clip.variables, batch, micro_batch_size=2, forward=forward)

    refused(lambda _: tf.constant(1.0), r"What forward returns must have the examples first")
    refused(lambda _: tf.zeros([5, 2]), r"What forward returns must have the examples first")
    refused(lambda _: tf.sparse.eye(2), r"must be dense or ragged")
    refused(3, r"^forward must be a function of a micro-batch")
    refused(lambda: None, r"^forward must take one argument")
    refused(clip.forward, r"^loss_fn must take two arguments with forward=", lambda outputs: 0.0)


def test_batch_normalization_is_said_and_written_once():
    clip, batch = Clip(layers.BatchNormalization(momentum=0.5)), data(6)
    hidden = clip.images.layers[0](batch[0])
    with pytest.warns(macrobatch.ExactnessWarning, match="normalises by the statistics"):
        value_and_gradients(
            clip.loss, clip.variables, batch, micro_batch_size=2, forward=clip.forward
        )
    moving = clip.images.layers[1].moving_mean
    np.testing.assert_allclose(moving, 0.5 * tf.reduce_mean(hidden, 0), rtol=1e-10)

"""Sequences by length on JAX: cut on the host, to a few lengths, before anything is compiled."""

import contextlib
import logging

import keras
import numpy as np
import pytest
from jax_support import (
    accumulate,
    assert_same,
    data,
    double_precision,  # noqa: F401 - a fixture
    jax,
    pair,
)
from keras import layers, ops
from support import thorough

EXAMPLES, LENGTH = 21, 30


def tokens(seed=3):
    generator = np.random.default_rng(seed)
    x = generator.integers(1, 9, size=(EXAMPLES, LENGTH))
    return x * (np.arange(LENGTH) < generator.integers(1, LENGTH + 1, size=(EXAMPLES, 1)))


X, Y = tokens(), data(EXAMPLES, LENGTH, 2)
SHAPES = []


class Seen(layers.Layer):
    """Tells the shapes that it is traced with, and forgets them where nothing is trained."""

    supports_masking = True

    def call(self, x, training=False):
        if training:
            SHAPES.append(tuple(x.shape[:2]))
        return x


def tagger(mask_zero=True, dropout=0.0):
    inputs = keras.Input([None], dtype="int32")
    hidden = Seen()(layers.Embedding(9, 3, mask_zero=mask_zero)(inputs))
    hidden = layers.Dense(4, "tanh", kernel_regularizer="l2")(hidden)
    return keras.Model(inputs, layers.Dense(2)(layers.Dropout(dropout)(hidden)))


def compiled(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return model


@contextlib.contextmanager
def compilations():
    """The names of the steps of micro-batches that JAX compiles in this context."""
    records = []

    class Handler(logging.Handler):
        def emit(self, record):
            if "_part" in record.getMessage() and "Finished XLA compilation" in record.getMessage():
                records.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("jax._src.dispatch")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield records
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    "size",
    [
        {"micro_batch_size": 3},
        pytest.param({"micro_batch_size": None, "tokens": 60}, marks=thorough),
    ],
    ids=["examples", "tokens"],
)
def test_the_update_is_that_of_the_whole_batch(size):
    """Two batches, the last one smaller; and the metrics of evaluate, which see masks."""
    plain, other = (compiled(model, metrics=["mae"]) for model in pair(tagger))
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, Y, **options).history["loss"]
    accumulate(other, axis=1, **size)
    SHAPES.clear()
    np.testing.assert_allclose(other.fit(X, Y, **options).history["loss"], expected, rtol=1e-10)
    assert len({length for _, length in SHAPES}) > 2
    assert_same(plain, other)
    if size["micro_batch_size"]:
        results = [model.evaluate(X, Y, batch_size=12, verbose=0) for model in (plain, other)]
        np.testing.assert_allclose(*results, rtol=1e-10)


def test_shapes_are_few():
    """Whatever the lengths of a batch: those that are known are compiled once, for all batches."""
    model = compiled(tagger())
    accumulate(model, 4, axis=1)
    counts = []
    with compilations() as found:
        for seed in range(10):
            model.train_on_batch(tokens(seed), Y)
            counts.append(len(found))
    # Lengths of 8, 12, 16, 24 and 30; 4 examples, and a tail of 1.
    assert 3 <= counts[-1] <= 10
    assert counts[-1] == counts[6]


def test_what_depends_on_padding_is_refused_before_anything_changes():
    model = compiled(tagger(mask_zero=False))
    accumulate(model, axis=1)
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(v.value) for v in variables]
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(X, Y, verbose=0)
    for value, variable in zip(before, variables, strict=True):
        np.testing.assert_array_equal(value, np.array(variable.value))


def test_a_fixed_length_is_named():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 1)(inputs)
    fixed = layers.Lambda(lambda x: ops.reshape(x, [-1, LENGTH]), output_shape=(LENGTH,))(embedded)
    model = compiled(keras.Model(inputs, layers.Dense(2)(fixed)))
    accumulate(model, axis=1)
    with pytest.raises(ValueError, match="fixed sequence length"):
        model.fit(X, data(EXAMPLES, 2), verbose=0)


@thorough
def test_eager_steps():
    plain, other = (compiled(model, run_eagerly=True) for model in pair(tagger))
    accumulate(other, axis=1)
    for model in (plain, other):
        model.train_on_batch(X, Y)
    assert_same(plain, other)


@thorough
def test_lengths_that_are_given_and_weights_of_tokens():
    """Inputs that show no length; sample weights; each batch in another padding."""

    def build():
        inputs = keras.Input([None, 3])
        return keras.Model(inputs, layers.Dense(2)(layers.Dense(4, "tanh")(inputs)))

    weights = (X != 0).astype("float64")
    plain, other = (compiled(model, weighted_metrics=["mae"]) for model in pair(build))
    accumulate(other, 4, axis=1, lengths=lambda x, y, sample_weight: ops.sum(sample_weight > 0, 1))
    results = []
    for model in (plain, other):
        for width in (LENGTH, 22):
            kept = weights[:, :width]
            x = data(EXAMPLES, width, 3) * kept[..., None]
            logs = model.train_on_batch(x, Y[:, :width], sample_weight=kept, return_dict=True)
        results.append(logs)
    assert_same(plain, other)
    for name, value in results[0].items():
        np.testing.assert_allclose(value, results[1][name], rtol=1e-10)


@thorough
def test_dropout_is_fresh_in_each_micro_batch_and_seeds_move():
    model = compiled(tagger(dropout=0.5))
    accumulate(model, axis=1)
    seeds = [v for v in model.non_trainable_variables if "seed" in v.name]
    before = [np.array(v.value) for v in seeds]
    model.train_on_batch(X, Y)
    moved = [int(np.array(v.value)[1]) - int(b[1]) for v, b in zip(seeds, before, strict=True)]
    assert moved == [-(-EXAMPLES // 3)]


def test_what_goes_with_other_settings():
    with pytest.raises(ValueError, match=r"sequence_axis=1 and whole_batch_loss=True"):
        accumulate(compiled(tagger()), axis=1, whole_batch_loss=True)
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=jax.devices()[:2]))
    try:
        with pytest.raises(ValueError, match=r"one device only.*DataParallel"):
            accumulate(compiled(tagger()), axis=1)
    finally:
        keras.distribution.set_distribution(None)

"""micro_batch_size="auto" with jit_compile=True on TensorFlow, where each size is compiled, and a
step that fails takes all variables with it.

In thorough tests XLA runs out of memory in earnest, because it is asked for more than there are
addresses. oneDNN's allocator then waits for ten seconds each time.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit.test_auto import AUTO, adam, assert_unchanged, state, x, y
from keras import layers
from support import assert_same, thorough, train, variables
from support.inside import count_memory, make_running_out_an_error
from support.memory import Counter, OutOfMemory

import macrobatch


class Huge(layers.Layer):
    """Takes more bytes than there are addresses, for more examples than some number."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def call(self, inputs):
        # XLA knows sizes. A table that is sorted must be there as a whole.
        size = 1 + tf.shape(inputs)[0] // (self.most + 1) * 2**23
        seed = tf.cast(tf.reduce_sum(inputs, 0)[:2], tf.int32)
        table = tf.sort(tf.random.stateless_uniform([size, size], seed, dtype=inputs.dtype))
        return inputs + 1e-300 * tf.stop_gradient(table[0, 0])


class Spoils(Huge):
    """Fails where a step is traced for larger micro-batches, and writes over all variables.

    Attributes:
        model: whose steps.
        spoiled: its variables.
        traced: the sizes for which it was traced.
    """

    model, spoiled, traced = None, (), ()

    def call(self, inputs):
        settings = self.model and macrobatch.settings_of(self.model)
        size = settings and settings.size_in_use
        self.traced = (*self.traced, size)
        if size and size > self.most:
            with tf.init_scope():
                for variable in self.spoiled:
                    variable.assign(tf.ones_like(variable) * 77)
            raise tf.errors.ResourceExhaustedError(None, None, "no room")
        return inputs


def trained(*parts, count=24, **options):
    """A model with layers in front of it, trained on so many examples, and its history."""

    def build():
        dense = [layers.Dense(5, "tanh"), layers.Dense(1)]
        return keras.Sequential([keras.Input([4]), *parts, *dense])

    def before(model):
        model.optimizer.build(model.trainable_variables)
        for layer in parts:
            # Not as a part of the layer.
            found = [variable.value for variable in variables(model)]
            vars(layer).update(model=model, spoiled=found)

    options = {"batch_size": 12, "optimizer": adam, "before": before, **options}
    return train(build, x[:count], y[:count], **options)


COMPILED = {"cut": AUTO, "jit_compile": True}


@pytest.mark.parametrize("kind", [Spoils, pytest.param(Huge, marks=thorough)])
def test_a_batch_that_runs_out_is_run_again(kind, room, caplog):
    expected, _ = trained()
    model, history = trained(kind(most=5), **COMPILED)
    assert_same(expected, model)
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    assert "and was run again with 4" in line
    assert set(history["micro_batch_size"]) <= {1, 2, 4}


@thorough
def test_each_size_is_compiled_once(room):
    layer = Spoils(most=8)
    options = {"count": 48, "batch_size": 24, "epochs": 20}
    expected, _ = trained(**options)
    model, history = trained(layer, **options, **COMPILED)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4, 8}
    before = layer.traced
    model.fit(x[:48], y[:48], batch_size=24, epochs=3, verbose=0)
    assert layer.traced == before


@thorough
def test_where_nothing_fits_nothing_has_changed(room):
    layer = Huge(most=10**9)
    model, _ = trained(layer, **COMPILED)
    before = state(model)
    layer.most = 0
    with pytest.raises(OutOfMemory, match="Not even a micro-batch of one"):
        model.train_on_batch(x[:2], y[:2])
    assert_unchanged(before, model)


def test_a_step_that_fitted_before_and_fails_is_not_run_again(room):
    """Its variables were not kept: they are only while it is not known whether a step fits."""
    layer = Spoils(most=16)
    # With dropout a size is settled at once.
    model, _ = trained(layer, layers.Dropout(0.5, seed=1), count=12, **COMPILED)
    batch = x[:12], y[:12]
    model.train_on_batch(*batch)
    layer.most, before = 0, layer.traced
    with pytest.raises(OutOfMemory, match="the memory of the weights"):
        # For numbers of another type it is traced anew.
        model.train_on_batch(*(part.astype(np.float32) for part in batch))
    assert layer.traced == (*before, 16)


def test_memory_is_watched(monkeypatch):
    """Where memory has run out, XLA may end the process."""
    counter = Counter()
    count_memory(monkeypatch, counter)
    make_running_out_an_error(monkeypatch, compiled=False)
    trained(count=2, **COMPILED)
    assert counter.resets > 0

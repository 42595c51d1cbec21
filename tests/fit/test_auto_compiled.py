"""micro_batch_size="auto" with jit_compile=True. In some tests XLA runs out of memory in earnest,
because it is asked for more than there are addresses. oneDNN's allocator then waits for ten seconds
each time. tests/processes/test_memory.py has limits of the kernel.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import assert_same, thorough

import macrobatch
from macrobatch._fit import auto as autos
from macrobatch._keras.installed import accumulation_of
from macrobatch._sizes import limit

x = np.random.RandomState(0).randn(24, 4)
y = np.random.RandomState(1).randn(24, 1)


class Huge(keras.layers.Layer):
    """Takes more bytes than there are addresses, for more examples than some number."""

    most = 10**9

    def call(self, inputs):
        # XLA knows sizes. A table that is sorted must be there as a whole.
        size = 1 + tf.shape(inputs)[0] // (Huge.most + 1) * 2**23
        seed = tf.cast(tf.reduce_sum(inputs, 0)[:2], tf.int32)
        table = tf.sort(tf.random.stateless_uniform([size, size], seed, dtype=inputs.dtype))
        return inputs + 1e-300 * tf.stop_gradient(table[0, 0])


@pytest.fixture(autouse=True)
def an_error(monkeypatch):
    """Running out of memory is an error, as on a GPU."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    monkeypatch.setattr(autos.Auto, "host_raises", True)
    monkeypatch.setattr(Huge, "most", 10**9)


def build(*more, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input([4]), Huge(), *more, keras.layers.Dense(5, "tanh")]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], **options)
    return model


def state(model):
    variables = [*model.weights, *model.optimizer.variables]
    return [np.array(variable.value) for variable in variables]


def fitted(model, epochs=1, size=12):
    options = {"batch_size": size, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **options).history


@thorough
def test_a_compiled_batch_that_runs_out_is_run_again(monkeypatch, caplog):
    expected = build()
    fitted(expected)
    monkeypatch.setattr(Huge, "most", 5)
    model = macrobatch.accumulate(build(jit_compile=True))
    history = fitted(model)
    assert_same(expected, model)
    for one, other in zip(state(expected), state(model)):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    assert "and was run again with 4" in line
    assert set(history["micro_batch_size"]) <= {1, 2, 4}


@thorough
def test_a_compiled_batch_of_which_nothing_fits_changes_nothing(monkeypatch):
    model = macrobatch.accumulate(build(jit_compile=True))
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    monkeypatch.setattr(Huge, "most", 0)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="Not even a micro-batch of one"):
        model.train_on_batch(x[:2], y[:2])
    for old, new in zip(before, state(model)):
        np.testing.assert_array_equal(old, new)


def spoiling(monkeypatch, most):
    """Steps with larger micro-batches fail, and take all variables with them: as in XLA."""
    attempt = autos.Auto.attempt

    def failing(self, training):
        inner = attempt(self, training)

        def attempted(run, batch):
            def step(batch):
                if self._chosen.current > most:
                    for part in self._held._parts():
                        part.assign(tf.ones_like(part) * 77)
                    raise tf.errors.ResourceExhaustedError(None, None, "no room")
                return run(batch)

            return inner(step, batch)

        return attempted

    monkeypatch.setattr(autos.Auto, "attempt", failing)


def test_what_a_failed_step_took_with_it_is_put_back(monkeypatch):
    expected = build()
    expected.evaluate(x, y, batch_size=12, verbose=0)
    fitted(expected)
    spoiling(monkeypatch, 4)
    model = macrobatch.accumulate(build(jit_compile=True))
    model.evaluate(x, y, batch_size=12, verbose=0)
    history = fitted(model)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4}


def test_a_step_that_fitted_before_and_fails_is_not_run_again(monkeypatch):
    model = macrobatch.accumulate(build(keras.layers.Dropout(0.5, seed=1), jit_compile=True))
    fitted(model)
    failures = []

    def fail(batch):
        failures.append(1)
        raise tf.errors.ResourceExhaustedError(None, None, "no room")

    auto = accumulation_of(model).auto
    batch = tuple(tf.constant(each[:12]) for each in (x, y))
    auto.attempt(True)(lambda batch: {}, batch)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="the memory of the weights"):
        auto.attempt(True)(fail, batch)
    assert len(failures) == 1


@pytest.mark.parametrize("jit_compile", [False, True])
def test_memory_is_watched_where_xla_may_end_the_process(jit_compile, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    model = macrobatch.accumulate(build(jit_compile=jit_compile))
    model.train_on_batch(x[:2], y[:2])
    assert (accumulation_of(model).auto._finder._watch is not None) == jit_compile


def test_memory_of_variables_is_kept_once_for_each_kind_of_batch(monkeypatch):
    model = macrobatch.accumulate(build(keras.layers.Dropout(0.5, seed=1), jit_compile=True))
    held = accumulation_of(model).auto._held
    found, parts = [], type(held)._parts

    def counted(self):
        found.append(accumulation_of(model).auto._chosen.current)
        return parts(self)

    monkeypatch.setattr(type(held), "_parts", counted)
    fitted(model, epochs=3)
    assert len(found) == 1
    fitted(model, epochs=2, size=10)  # and a last batch of 4
    assert len(found) == 3

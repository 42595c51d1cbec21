"""value_and_gradients with a size that is found: the largest that fits, or the fastest."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import mirrored, thorough
from support.memory import OutOfMemory, limit_for, taken

import macrobatch

x = np.random.RandomState(0).randn(40, 3)
y = np.random.RandomState(1).randn(40, 1)


class Fit:
    """A line through points, whose loss takes the memory of `support.memory.Room`."""

    def __init__(self):
        self.weight = tf.Variable(tf.ones([3, 1], tf.float64))

    def loss(self, batch):
        with tf.control_dependencies([taken(batch[0])]):
            return tf.reduce_sum((tf.tanh(batch[0] @ self.weight) - batch[1]) ** 2, 1)

    def found(self, batch=(x, y), **options):
        return macrobatch.value_and_gradients(self.loss, [self.weight], batch, **options)

    def check(self, found, batch=(x, y)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(batch[0] @ self.weight) - batch[1]) ** 2)
        np.testing.assert_allclose(found[0], loss, rtol=1e-10)
        np.testing.assert_allclose(found[1][0], tape.gradient(loss, self.weight), rtol=1e-10)


@pytest.fixture
def fit(room):
    room.narrow(3 * 12)
    return Fit()


def size_of(room, run):
    """Examples in the largest micro-batch of a run."""
    room.ran.clear()
    run()
    return max(room.ran) // 3


def test_is_run_again_with_less(fit, room, caplog):
    fit.check(fit.found())
    assert "micro_batch_size=40, 32, 16, and was run again with 8" in caplog.text
    assert size_of(room, lambda: fit.check(fit.found())) == 8
    batch = x[:6], y[:6]
    fit.check(fit.found(batch), batch)


def slow(numbers):
    """Small micro-batches are slow, and large ones too."""
    return 1 + (numbers / 3) ** 2 / 16


def test_finds_the_fastest(fit, clock, monkeypatch, caplog):
    monkeypatch.setattr(clock, "seconds", slow)
    batch = x[:16], y[:16]
    step = tf.function(lambda: fit.found(batch))
    for _ in range(60):
        fit.check(fit.found(batch), batch)
        if "fastest" in caplog.text:
            break
    assert "micro_batch_size=4 for batches of 16: the fastest of" in caplog.text
    for found in (lambda: fit.found(batch), step):
        assert size_of(clock, lambda found=found: fit.check(found(), batch)) == 4


@pytest.mark.parametrize("cause", ["draws", "interacts"])
def test_where_the_size_shows_it_is_the_largest(cause, fit, clock, monkeypatch, caplog):
    monkeypatch.setattr(clock, "seconds", slow)
    dropout, loss = keras.layers.Dropout(0.5, seed=3), fit.loss
    if cause == "draws":
        fit.loss = lambda batch: loss((dropout(batch[0], training=True), batch[1]))
        fit.found()
    else:
        fit.loss = lambda batch: loss(batch) - tf.reduce_mean(loss(batch)) ** 2
        with pytest.warns(macrobatch.ExactnessWarning):
            fit.found()
    assert "micro_batch_size=8 for batches of 40: the largest that fits" in caplog.text
    for _ in range(3):
        assert size_of(clock, fit.found) == 8


def test_nothing_fits(fit, room):
    room.narrow(0)
    with pytest.raises(OutOfMemory, match="RematScope"):
        fit.found()


def test_in_a_graph_the_next_call_has_half(fit, room):
    step = tf.function(lambda x, y: fit.found((x, y)))
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            step(x, y)
    fit.check(step(x, y))
    assert size_of(room, lambda: fit.check(step(x, y))) == 10
    assert step.experimental_get_tracing_count() == 1


def test_in_replicas(room):
    strategy = mirrored(2)
    with strategy.scope():
        fit = Fit()
    room.narrow(3 * 12)
    # Both run out, or none: TensorFlow exchanges no gradients any more if one of them waits then.
    parts = [
        strategy.experimental_distribute_values_from_function(
            lambda context, whole=whole: tf.split(whole, [24, 16])[context.replica_id_in_sync_group]
        )
        for whole in (x, y)
    ]

    @tf.function
    def step(x, y):
        def replica(x, y):
            loss, (gradient,) = fit.found((x, y))
            context = tf.distribute.get_replica_context()
            return loss, context.all_reduce("sum", gradient)

        return strategy.run(replica, args=(x, y))

    for _ in range(4):
        try:
            loss, gradient = step(*parts)
        except OutOfMemory:
            continue
        fit.check((loss.values[0], [gradient.values[0]]))
        return
    pytest.fail("did not fit")


@thorough
def test_the_size_of_a_graph_on_a_cpu_is_found_outside_of_it(room, counted):
    fit = Fit()
    fit.found(micro_batch_size=4)  # which checks, once, whether examples interact
    # Room for 16 examples: beyond what was measured, growth counts one and a half times.
    most = limit_for(3 * 21)
    step = tf.function(lambda: fit.found(memory_limit=most))
    with pytest.raises(ValueError, match="needs a size that was found before"):
        step()
    seen = [size_of(room, lambda: fit.check(fit.found(memory_limit=most))) for _ in range(6)]
    assert seen == sorted(seen)
    assert seen[-1] == 16
    assert size_of(room, lambda: fit.check(step())) == 16


def test_compiled_functions_need_a_number():
    with pytest.raises(ValueError, match=r"does not go with jit_compile=True.*outside of a tf\.fu"):
        tf.function(lambda: Fit().found(), jit_compile=True)()


def test_seeds_are_drawn_once(fit):
    loss, results = fit.loss, []
    for options in ({}, {"micro_batch_size": 8}):
        dropout = keras.layers.Dropout(0.5, seed=3)
        fit.loss = lambda batch, drop=dropout: loss((drop(batch[0], training=True), batch[1]))
        found = fit.found(**options)
        results.append((found[1][0], dropout.seed_generator.state))
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)

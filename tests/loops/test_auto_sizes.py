"""value_and_gradients with a size that is found: the largest that fits, or the fastest."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import thorough
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch._gradients import auto as autos
from macrobatch._sizes import limit, watch

x = np.random.RandomState(0).randn(40, 3)
y = np.random.RandomState(1).randn(40, 1)


class Room:
    """A loss whose micro-batches must not be larger than some number of examples."""

    def __init__(self, most):
        self.most, self.sizes = most, []
        self.weight = tf.Variable(tf.ones([3, 1], tf.float64))

    def loss(self, batch):
        def check(size):
            self.sizes.append(int(size))
            if size > self.most:
                raise MemoryError("no room")  # ResourceExhaustedError in a graph
            return size

        size = tf.shape(batch[0])[0]
        if tf.executing_eagerly():
            check(size)
            checked = []
        else:
            checked = [tf.py_function(check, [size], tf.int32)]
        with tf.control_dependencies(checked):
            return tf.reduce_sum((tf.tanh(batch[0] @ self.weight) - batch[1]) ** 2, 1)

    def found(self, batch=(x, y), **options):
        return macrobatch.value_and_gradients(self.loss, [self.weight], batch, **options)

    def expected(self, batch=(x, y)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(batch[0] @ self.weight) - batch[1]) ** 2)
        return loss, tape.gradient(loss, [self.weight])

    def check(self, found, batch=(x, y)):
        loss, gradients = self.expected(batch)
        np.testing.assert_allclose(found[0], loss, rtol=1e-10)
        np.testing.assert_allclose(found[1][0], gradients[0], rtol=1e-10)


@pytest.fixture(autouse=True)
def an_error(monkeypatch):
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)


def test_is_run_again_with_less(caplog):
    room = Room(12)
    room.check(room.found())
    assert "micro_batch_size=40, 32, 16, and was run again with 8" in caplog.text
    room.sizes.clear()
    room.check(room.found())
    assert max(room.sizes) == 8
    batch = x[:6], y[:6]
    room.check(room.found(batch), batch)


class Clock:
    """A clock that only loss functions move: small micro-batches are slow, and large ones too."""

    now = 0.0

    def __init__(self, monkeypatch, room):
        monkeypatch.setattr(autos.time, "perf_counter", lambda: self.now)
        loss = room.loss

        def slow(batch):
            size = len(batch[0])
            self.now += 1 + size**2 / 16
            return loss(batch)

        room.loss = slow


def test_finds_the_fastest(monkeypatch, caplog):
    room, batch = Room(12), (x[:16], y[:16])
    step = tf.function(lambda: room.found(batch))
    Clock(monkeypatch, room)
    for _ in range(60):
        room.check(room.found(batch), batch)
        if "fastest" in caplog.text:
            break
    assert "micro_batch_size=4 for batches of 16: the fastest of" in caplog.text
    for found in (lambda: room.found(batch), step):
        room.sizes.clear()
        room.check(found(), batch)
        assert max(room.sizes) == 4


@pytest.mark.parametrize("cause", ["draws", "meets"])
def test_where_the_size_shows_it_is_the_largest(cause, monkeypatch, caplog):
    room, dropout = Room(12), keras.layers.Dropout(0.5, seed=3)
    Clock(monkeypatch, room)
    loss = room.loss
    if cause == "draws":
        room.loss = lambda batch: loss((dropout(batch[0], training=True), batch[1]))
        room.found()
    else:
        room.loss = lambda batch: loss(batch) - tf.reduce_mean(loss(batch)) ** 2
        with pytest.warns(macrobatch.ExactnessWarning):
            room.found()
    assert "micro_batch_size=8 for batches of 40: the largest that fits" in caplog.text
    for _ in range(3):
        room.sizes.clear()
        room.found()
        assert max(room.sizes) == 8


def test_nothing_fits():
    room = Room(0)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="RematScope"):
        room.found()


def test_in_a_graph_the_next_call_has_half():
    room = Room(12)

    @tf.function
    def step(x, y):
        return room.found((x, y))

    tried = 0
    while True:
        tried += 1
        try:
            found = step(x, y)
            break
        except tf.errors.ResourceExhaustedError:
            pass
    assert tried == 3
    room.check(found)
    room.sizes.clear()
    room.check(step(x, y))
    assert max(room.sizes) == 10
    assert step.experimental_get_tracing_count() == 1


def test_in_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        room = Room(12)
    parts = [
        strategy.experimental_distribute_values_from_function(
            lambda context, whole=whole: tf.split(whole, [25, 15])[context.replica_id_in_sync_group]
        )
        for whole in (x, y)
    ]

    @tf.function
    def step(x, y):
        def replica(x, y):
            loss, (gradient,) = room.found((x, y))
            context = tf.distribute.get_replica_context()
            return loss, context.all_reduce("sum", gradient)

        return strategy.run(replica, args=(x, y))

    for _ in range(4):
        try:
            loss, gradient = step(*parts)
        except tf.errors.ResourceExhaustedError:
            continue
        room.check((loss.values[0], [gradient.values[0]]))
        return
    pytest.fail("did not fit")


@thorough
def test_the_size_of_a_graph_on_a_cpu_is_found_outside_of_it(monkeypatch):
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: False)
    room = Room(10**9)

    class Count:
        can_reset = True

        def reset(self):
            room.sizes.clear()

        def read(self):
            return 2**20 + max(room.sizes, default=0)

        def now(self):
            return 2**20

    monkeypatch.setattr(watch, "ProcessCounter", Count)
    room.found(micro_batch_size=4)  # which tries, once, whether examples meet
    # Room for 16 examples: beyond what was measured, growth counts one and a half times.
    most = int((2**20 + 21) / 0.95)
    step = tf.function(lambda: room.found(memory_limit=most))
    with pytest.raises(ValueError, match="needs a size that was found before"):
        step()
    seen = []
    for _ in range(6):
        room.check(room.found(memory_limit=most))
        seen.append(max(room.sizes))
    assert seen == sorted(seen)
    assert seen[-1] == 16
    room.check(step())
    assert max(room.sizes) == 16


def test_compiled_functions_need_a_number():
    room = Room(10**9)
    with pytest.raises(ValueError, match=r"does not go with jit_compile=True.*outside of a tf\.fu"):
        tf.function(lambda: room.found(), jit_compile=True)()


def test_seeds_are_drawn_once(monkeypatch):
    dropout = keras.layers.Dropout(0.5, seed=3)
    room = Room(12)
    loss = room.loss
    room.loss = lambda batch: loss((dropout(batch[0], training=True), batch[1]))
    found = room.found()
    state = dropout.seed_generator.state.numpy()
    other = keras.layers.Dropout(0.5, seed=3)
    room.loss = lambda batch: loss((other(batch[0], training=True), batch[1]))
    again = room.found(micro_batch_size=8)
    np.testing.assert_array_equal(found[1][0], again[1][0])
    np.testing.assert_array_equal(state, other.seed_generator.state.numpy())

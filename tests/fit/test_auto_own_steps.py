"""micro_batch_size="auto" for models with a train step of their own: a batch is run again from the
state before it, whatever the step had written by then.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit import test_auto
from fit.step_cases import CASES, Networks
from fit.test_auto import Room, narrow, x, y
from fit.test_own_steps import reference, state_of, trained
from support import MODES, assert_same_history, thorough

import macrobatch
from macrobatch._keras.installed import accumulation_of

an_error, watched = test_auto.an_error, test_auto.watched


class Pair(Networks):
    """Two networks. The second learns from the first, which has been updated by then."""

    tracked = ("first", "second")

    def train_step(self, data):
        x, y = data[:2]
        self.steps.assign(self.steps + 1)
        with tf.GradientTape() as tape:
            first = tf.reduce_mean((self.teacher(x) - y) ** 2)
        gradients = tape.gradient(first, self.teacher.trainable_variables)
        self.optimizers[0].apply(gradients, self.teacher.trainable_variables)
        with tf.GradientTape() as tape:
            second = tf.reduce_mean((self.student(x, training=True) - self.teacher(x)) ** 2)
        gradients = tape.gradient(second, self.student.trainable_variables)
        self.optimizers[1].apply(gradients, self.student.trainable_variables)
        self.mean.assign(0.5 * self.mean + self.student.layers[-1].kernel)
        return self.track(first=first, second=second)


def pair(*layers, optimizer=keras.optimizers.Adam, **mode):
    keras.utils.set_random_seed(1)
    # A decay of weights does not wait for gradients.
    optimizers = [keras.optimizers.Adam(0.05), optimizer(0.05, weight_decay=0.1)]
    teacher = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    student = keras.Sequential([keras.Input([4]), Room(), *layers, keras.layers.Dense(1)])
    model = Pair(*optimizers, teacher=teacher, student=student)
    model.steps = keras.Variable(0, trainable=False, dtype="int32")
    model.mean = keras.Variable(np.zeros([4, 1]), trainable=False)
    model.compile(**mode)
    return model


def fitted(model, **options):
    return test_auto.fitted(model, epochs=1, **options)


def assert_same_state(expected, model):
    values = list(state_of(expected).values())
    for value, (path, own) in zip(values, state_of(model).items()):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10, err_msg=path)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_batch_that_runs_out_is_run_again(run_eagerly, monkeypatch, caplog):
    expected = pair(run_eagerly=True)
    history = fitted(expected)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(pair(run_eagerly=run_eagerly))
    found = fitted(model)
    assert_same_state(expected, model)
    assert found.pop("micro_batch_size")[0] <= 4
    assert_same_history(history, found)
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    assert "micro_batch_size=24, 16, 8, and was run again with 4" in line
    assert Room.largest == 16


@pytest.mark.parametrize("run_eagerly", [False, pytest.param(True, marks=thorough)])
def test_an_optimizer_that_runs_out_is_not_called_again(run_eagerly):
    calls = []

    class Large(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            def fail():
                calls.append(1)
                raise MemoryError("no room for slots")

            if tf.executing_eagerly():
                fail()
            tf.py_function(fail, [], [])

    model = macrobatch.accumulate(pair(optimizer=Large, run_eagerly=run_eagerly))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="while the optimizer was writing"):
        fitted(model)
    assert len(calls) <= 2  # one for each weight, of one update


def test_where_nothing_fits_nothing_has_changed(monkeypatch):
    model = macrobatch.accumulate(pair(run_eagerly=True))
    fitted(model)
    model.reset_metrics()  # as train_on_batch does
    before = state_of(model)
    monkeypatch.setattr(Room, "most", 3)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"(?s)RematScope.*no room for 4"):
        model.train_on_batch(x[:24], y[:24])
    for path, own in state_of(model).items():
        np.testing.assert_array_equal(own, before[path], err_msg=path)


def test_sizes_grow_where_memory_is_watched(watched, monkeypatch):
    batches = [(x[start : start + 24], y[start : start + 24]) for start in (0, 24, 48, 0)]
    expected = pair(run_eagerly=True)
    for batch in batches:
        expected.train_on_batch(*batch)
    monkeypatch.setattr(Room, "largest", 0)
    most = int((2**20 + 4 * 4 * 11) / 0.95)  # bytes of 11 examples
    model = macrobatch.accumulate(pair(run_eagerly=True), memory_limit=most)
    search, sizes = accumulation_of(model).auto, []
    for batch in batches:
        model.train_on_batch(*batch)
        sizes.append(search._chosen.current)
    assert_same_state(expected, model)
    assert sizes == [1, 2, 4, 8]
    for _ in range(2):
        model.train_on_batch(*batches[0])
        assert search._chosen.current <= 8


def test_a_limit_below_an_update(watched, monkeypatch):
    monkeypatch.setattr(test_auto.autos.Rehearsal, "of_update", lambda self: 2**20)
    model = macrobatch.accumulate(pair(run_eagerly=True), memory_limit=2**20 + 2**19)
    with pytest.raises(ValueError, match="memory_limit must be more"):
        fitted(model)
    assert int(model.steps) == 0


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("kind", ["dropout", pytest.param("norm", marks=thorough)])
def test_where_the_size_shows_it_is_only_shrunk(kind, monkeypatch):
    kinds = {
        "dropout": lambda: keras.layers.Dropout(0.5, seed=1),
        "norm": keras.layers.BatchNormalization,
    }
    narrow(monkeypatch, 4 * 9)
    model = macrobatch.accumulate(pair(kinds[kind](), run_eagerly=True))
    assert fitted(model)["micro_batch_size"] == [8]
    again = macrobatch.accumulate(pair(kinds[kind](), run_eagerly=True), micro_batch_size=8)
    fitted(again)
    for one, other in zip(state_of(model).values(), state_of(again).values()):
        np.testing.assert_array_equal(one, other)


class Exhausted:
    """Lets a Dense layer run out of memory, after some calls, with more than some examples."""

    def __init__(self, monkeypatch, most, skipped):
        self.most, self.skipped, self.calls = most, skipped, 0
        plain = keras.layers.Dense.call

        def call(layer, inputs, *args, **kwargs):
            outputs, size = plain(layer, inputs, *args, **kwargs), tf.shape(inputs)[0]
            if tf.executing_eagerly():
                self.check(size)
                return outputs
            with tf.control_dependencies([tf.py_function(self.check, [size], tf.int32)]):
                return tf.identity(outputs)

        monkeypatch.setattr(keras.layers.Dense, "call", call)

    def check(self, size):
        self.calls += 1
        if self.calls > self.skipped and size > self.most:
            raise MemoryError(f"no room for {size}")
        return size


@thorough
@pytest.mark.filterwarnings("ignore:BatchNormalization:macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_steps_as_people_write_them(name, mode, monkeypatch, caplog):
    values, history = reference(name)
    Exhausted(monkeypatch, most=5, skipped=6)
    model, found = trained(*CASES[name], MODES[mode], {"micro_batch_size": "auto"})
    for value, (path, own) in zip(values, state_of(model).items()):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10, err_msg=path)
    del found["micro_batch_size"]
    assert_same_history(history, found)
    assert "ran out" in caplog.text

"""micro_batch_size="auto": sizes that are found while training, and batches that are run again.

Memory runs out where a layer says so. tests/processes/test_memory.py has real limits.
"""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from support import assert_same, thorough
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch._fit import auto as autos
from macrobatch._keras.installed import accumulation_of
from macrobatch._sizes import limit, watch
from macrobatch._tensorflow import device_memory

x = np.random.RandomState(0).randn(60, 4)
y = np.random.RandomState(1).randn(60, 1)
tokens = np.random.RandomState(2).randint(1, 9, [60, 12])
tokens[:, 3:] *= np.arange(9)[None] < np.random.RandomState(3).randint(0, 10, 60)[:, None]


class Room(keras.layers.Layer):
    """Runs out of memory where a micro-batch has more than some number of elements."""

    most = 10**9
    largest = 0  # that ran
    supports_masking = True

    def call(self, inputs):
        def check(size):
            if size > Room.most:
                raise MemoryError(f"no room for {size}")  # ResourceExhaustedError in a graph
            Room.largest = max(Room.largest, int(size))
            return size

        size = tf.size(inputs)
        if tf.executing_eagerly():
            check(size)
            return inputs
        with tf.control_dependencies([tf.py_function(check, [size], tf.int32)]):
            return tf.identity(inputs)


@pytest.fixture(autouse=True)
def an_error(monkeypatch):
    """Running out of memory is an error, as on a GPU."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    monkeypatch.setattr(Room, "most", 10**9)
    monkeypatch.setattr(Room, "largest", 0)


def narrow(monkeypatch, most):
    monkeypatch.setattr(Room, "most", most)
    monkeypatch.setattr(Room, "largest", 0)


def dense(*more):
    keras.utils.set_random_seed(1)
    layers = [keras.Input([4]), Room(), keras.layers.Dense(5, "tanh"), *more]
    return keras.Sequential([*layers, keras.layers.Dense(1)])


def compiled(model, **options):
    model.compile(**{"optimizer": keras.optimizers.Adam(0.05), "loss": "mse", **options})
    return model


def fitted(model, *data, **options):
    keras.utils.set_random_seed(5)
    options = {"batch_size": 24, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(*(data or (x, y)), **options).history


def plain(build=dense, *data, **options):
    model = compiled(build(), **options)
    fitted(model, *data)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_eagerly": True},
        {"steps_per_execution": 2},
        pytest.param({"metrics": ["mae"], "loss": "mae"}, marks=thorough),
    ],
    ids=["graph", "eager", "steps_per_execution", "metrics"],
)
def test_a_batch_that_runs_out_is_run_again(options, monkeypatch, caplog):
    expected = plain(**options)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), **options))
    history = fitted(model)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4}
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    assert "micro_batch_size=24, 16, 8, and was run again with 4" in line
    assert Room.largest == 16
    assert int(model.optimizer.iterations) == 9


@thorough
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_that_come_once(monkeypatch):
    def batches():
        for start in range(0, 60, 24):
            yield x[start : start + 24], y[start : start + 24]

    expected = compiled(dense())
    for batch in batches():  # At the end of a generator, plain fit() counts an update too many.
        expected.train_on_batch(*batch)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense()))
    fitted(model, batches(), epochs=1, batch_size=None)
    assert_same(expected, model)


def test_train_on_batch_and_evaluate(monkeypatch):
    expected = compiled(dense())
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense()))
    before = model.evaluate(x, y, batch_size=24, verbose=0)
    for _ in range(2):
        loss = model.train_on_batch(x[:30], y[:30])
    after = model.evaluate(x, y, batch_size=40, verbose=0)
    monkeypatch.setattr(Room, "most", 10**9)
    np.testing.assert_allclose(before, expected.evaluate(x, y, verbose=0), rtol=1e-10)
    for _ in range(2):
        of_expected = expected.train_on_batch(x[:30], y[:30])
    np.testing.assert_allclose(loss, of_expected, rtol=1e-10)
    assert_same(expected, model)
    np.testing.assert_allclose(after, expected.evaluate(x, y, verbose=0), rtol=1e-10)


def pooled():
    """A model of sequences of any length."""
    keras.utils.set_random_seed(1)
    pool = keras.layers.GlobalAveragePooling1D()
    return compiled(keras.Sequential([keras.Input([None, 4]), pool, keras.layers.Dense(1)]))


def kinds_of_batches():
    random = np.random.default_rng(0)
    for length, *weights in [(4,), (9,), (9, random.random(16)), (30,), (4,)]:
        yield (random.normal(size=[16, length, 4]), random.normal(size=[16, 1]), *weights)


def test_batches_of_all_kinds_where_memory_is_watched(monkeypatch):
    """A rehearsal is made for each: of x and y alone, of other lengths, with weights."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: False)
    expected, model = pooled(), macrobatch.accumulate(pooled())
    for batch in kinds_of_batches():
        of_expected = expected.train_on_batch(*batch)
        np.testing.assert_allclose(model.train_on_batch(*batch), of_expected, rtol=1e-10)
    assert_same(expected, model)


@pytest.mark.filterwarnings("ignore:.*shuffle=True", "ignore:Your input ran out of data")
@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_generator_that_yields_none(size, run_eagerly):
    """Keras makes an Optional of it."""
    models = [compiled(dense(), run_eagerly=run_eagerly) for _ in range(2)]
    macrobatch.accumulate(models[1], size)
    for model in models:
        parts = ((x[start : start + 12], y[start : start + 12], None) for start in (0, 12, 24))
        model.fit(parts, steps_per_epoch=3, verbose=0)
    assert_same(*models)


@thorough
@pytest.mark.parametrize("is_watched", [False, pytest.param(True, marks=thorough)])
def test_replicas_have_one_size(is_watched, monkeypatch):
    # Parts of 12, and of 6 in the last batch.
    expected = plain()
    narrow(monkeypatch, 4 * 5)
    with mirrored(2).scope():
        model = compiled(dense())
    limits = {}
    if is_watched:
        monkeypatch.setattr(watch, "ProcessCounter", Count)
        monkeypatch.setattr(autos.Rehearsal, "of_update", lambda self: 0)
        limits = {"memory_limit": int((2**20 + 4 * 4 * 5) / 0.95)}
    history = fitted(macrobatch.accumulate(model, **limits))
    assert_same(expected, model)
    assert max(history["micro_batch_size"]) <= 4


@pytest.mark.eager
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_synchronized_layers_need_a_number():
    with mirrored(2).scope():
        model = compiled(dense(keras.layers.BatchNormalization(synchronized=True)))
    with pytest.raises(ValueError, match='micro_batch_size="auto" and synchronized=True'):
        fitted(macrobatch.accumulate(model))


def embedded():
    keras.utils.set_random_seed(1)
    inputs = keras.Input([None], dtype="int32")
    outputs = keras.layers.Embedding(9, 3, mask_zero=True)(inputs)
    outputs = keras.layers.Dense(1)(Room()(outputs))
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    "unit", [pytest.param("micro_batch_size", marks=thorough), "micro_batch_tokens"]
)
def test_sequences(unit, monkeypatch):
    labels = np.random.RandomState(4).randn(60, 12, 1)
    options = {"optimizer": keras.optimizers.SGD(0.05)}
    expected = compiled(embedded(), optimizer=keras.optimizers.SGD(0.05))
    fitted(expected, tokens, labels)
    narrow(monkeypatch, 3 * 12 * 5)
    model = macrobatch.accumulate(
        compiled(embedded(), **options), **{unit: "auto"}, sequence_axis=1
    )
    history = fitted(model, tokens, labels)
    assert_same(expected, model)
    assert all(1 <= size <= 64 for size in history[unit])


@pytest.mark.eager
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_longer_batches_later_run_out_again(monkeypatch):
    def generate():
        for length in (3, 3, 12, 3):
            yield tokens[:24, :length], np.ones([24, length, 1])

    def batches():
        types = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None, 1], tf.float64)
        return tf.data.Dataset.from_generator(generate, output_signature=types)

    expected = compiled(embedded(), optimizer="sgd")
    for batch in generate():
        expected.train_on_batch(*batch)
    narrow(monkeypatch, 3 * 3 * 24)
    model = macrobatch.accumulate(compiled(embedded(), optimizer="sgd"))
    history = fitted(model, batches(), epochs=1, batch_size=None)
    assert_same(expected, model)
    assert Room.largest <= 3 * 3 * 24
    assert history["micro_batch_size"] <= [4]


@thorough
def test_whole_batch_loss(monkeypatch):
    def compares(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.mean(y_pred) - y_true))

    expected = plain(loss=compares)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), loss=compares), whole_batch_loss=True)
    fitted(model)
    assert_same(expected, model)
    assert Room.largest == 16


@thorough
def test_compiled_steps_are_compiled_for_each_size_once(monkeypatch):
    traced = []

    class Traced(keras.layers.Layer):
        def call(self, inputs):
            traced.append(inputs.shape[0])
            return inputs

    def build():
        keras.utils.set_random_seed(1)
        layers = [keras.Input([4]), Traced(), keras.layers.Dense(1)]
        return compiled(keras.Sequential(layers), jit_compile=True)

    attempt = autos.Auto.attempt

    def failing(self, training):
        inner = attempt(self, training)

        def run(run, batch):
            def step(batch):
                if self._chosen.current > 8:
                    raise tf.errors.ResourceExhaustedError(None, None, "no room")
                return run(batch)

            return inner(step, batch)

        return run

    expected = build()
    fitted(expected, x[:48], y[:48], epochs=20)
    monkeypatch.setattr(autos.Auto, "attempt", failing)
    monkeypatch.setattr(autos.Auto, "host_raises", True)
    model = macrobatch.accumulate(build())
    history = fitted(model, x[:48], y[:48], epochs=20)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4, 8}
    count = len(traced)
    fitted(model, x[:48], y[:48], epochs=3)
    assert len(traced) == count


def test_another_size_needs_no_other_trace():
    traced = []

    class Traced(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            return inputs

    model = macrobatch.accumulate(compiled(dense(Traced())))
    model.fit(x, y, batch_size=60, epochs=1, verbose=0)
    count = len(traced)
    sizes = []
    for _ in range(8):
        sizes += model.fit(x, y, batch_size=60, epochs=1, verbose=0).history["micro_batch_size"]
    assert len(set(sizes)) > 1
    assert len(traced) == count


@pytest.mark.eager
def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(Room, "most", 3)
    model = macrobatch.accumulate(compiled(dense()))
    before = model.get_weights()
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"(?s)RematScope.*no room for 4"):
        fitted(model)
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_optimizer_that_runs_out_is_not_called_again(run_eagerly):
    calls = []

    class Large(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

            def fail():
                calls.append(1)
                raise MemoryError("no room for slots")

            if tf.executing_eagerly():
                fail()
            tf.py_function(fail, [], [])

    model = compiled(dense(), optimizer=Large(), run_eagerly=run_eagerly)
    macrobatch.accumulate(model)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="while the optimizer was writing"):
        fitted(model)
    assert len(calls) <= 4  # one for each weight, of one update


@pytest.mark.parametrize(
    "layer",
    [lambda: keras.layers.Dropout(0.5, seed=1), lambda: keras.layers.BatchNormalization()],
    ids=["dropout", "norm"],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_where_the_size_shows_it_is_only_shrunk(layer, monkeypatch):
    narrow(monkeypatch, 4 * 9)
    model = macrobatch.accumulate(compiled(dense(layer())))
    sizes = fitted(model, epochs=4)["micro_batch_size"]
    assert sizes == [8] * 4
    again = macrobatch.accumulate(compiled(dense(layer())), micro_batch_size=8)
    fitted(again, epochs=4)
    for one, other in zip(model.weights, again.weights):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.examples_meet
def test_draws_of_tf_random_show_the_size():
    noisy = keras.layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype))
    model = macrobatch.accumulate(compiled(dense(noisy)), micro_batch_size=2)
    with pytest.warns(macrobatch.ExactnessWarning, match="draws without Keras"):  # no verdict
        fitted(model)
    assert accumulation_of(model).shows_size is True


@pytest.mark.eager
def test_another_error_is_none_of_our_business():
    def fail(y_true, y_pred):
        with tf.control_dependencies(
            [tf.debugging.assert_none_equal(y_pred, y_pred, message="too much")]
        ):
            return tf.identity(y_pred)

    model = macrobatch.accumulate(compiled(dense(), loss=fail))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too much"):
        fitted(model)


class Count:
    """A counter of memory: 1000 bytes, and one for each element in the layer Room."""

    can_reset = True

    def reset(self):
        Room.largest = 0

    def read(self):
        return 2**20 + 4 * Room.largest

    def now(self):
        return 2**20


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: False)
    monkeypatch.setattr(watch, "ProcessCounter", Count)
    monkeypatch.setattr(autos.Rehearsal, "of_update", lambda self: 0)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((), id="exact"),
        pytest.param((keras.layers.BatchNormalization,), id="norm", marks=thorough),
    ],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_memory_is_watched_where_running_out_is_no_error(layers, watched, monkeypatch):
    expected = plain()
    monkeypatch.setattr(Room, "largest", 0)
    # Bytes of 11 examples. Beyond what was measured, growth counts one and a half times.
    largest = 4 * 4 * 11
    most = int((2**20 + largest) / 0.95)
    model = compiled(dense(*(layer() for layer in layers)))
    macrobatch.accumulate(model, memory_limit=most)
    history = fitted(model)
    assert 1 <= max(history["micro_batch_size"]) <= 8
    if layers:
        assert set(history["micro_batch_size"]) == {8}
    else:
        assert_same(expected, model)


def test_sizes_of_tests_grow(watched):
    model = compiled(dense(), run_eagerly=True)
    expected = model.test_on_batch(x[:24], y[:24])
    macrobatch.accumulate(model, memory_limit=int((2**20 + 4 * 4 * 11) / 0.95))
    sizes, auto = [], accumulation_of(model).auto
    for _ in range(5):
        found = model.test_on_batch(x[:24], y[:24])
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        sizes.append(auto._chosen.current)
    assert sizes == [1, 2, 4, 8, 8]


def test_a_limit_in_which_nothing_fits(watched):
    model = compiled(dense())
    before = model.get_weights()
    macrobatch.accumulate(model, memory_limit=2**20 + 10)
    with pytest.raises(ValueError, match="memory_limit must be more"):
        fitted(model)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": "6 apples"}, "Units are"),
        ({"memory_limit": -1}, "memory_limit=-1"),
        ({"micro_batch_size": 8, "memory_limit": "6GiB"}, "and a size, 8"),
        ({"micro_batch_size": "all"}, 'Or "auto"'),
        ({"micro_batch_tokens": "auto"}, "needs sequence_axis="),
        ({"micro_batch_size": "auto", "micro_batch_tokens": "auto"}, "Only one of"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        macrobatch.accumulate(compiled(dense()), **arguments)


def test_what_was_found_is_found_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    narrow(monkeypatch, 4 * 5)

    def build():  # With dropout it settles at once.
        return compiled(dense(keras.layers.Dropout(0.5, seed=1)), run_eagerly=True)

    fitted(macrobatch.accumulate(build()), epochs=1)
    assert "ran out" in caplog.text
    caplog.clear()
    fitted(macrobatch.accumulate(build()), epochs=1)
    assert "ran out" not in caplog.text
    assert "found before" in caplog.text


def test_what_was_found_is_found_again_whatever_others_use(watched, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")

    def lines(available, **limits):
        caplog.clear()
        found = limit.Limit(int(available * 2**30), "the machine has it, less what others use")
        monkeypatch.setattr(limit, "available", lambda machine=limit.THIS: found)
        model = compiled(dense(keras.layers.Dropout(0.5, seed=1)), run_eagerly=True)
        fitted(macrobatch.accumulate(model, **limits), epochs=1)
        return caplog.text

    assert "all at once" in lines(1.0)
    assert "found before" in lines(7.9)
    assert "found before" in lines(0.3)
    assert "found before" not in lines(2**20 / 2**30 + 1e-7)  # which does not fit now
    assert "found before" not in lines(1.0, memory_limit="200MiB")
    assert "found before" not in lines(1.0, memory_limit=0.5)
    assert "found before" in lines(7.9, memory_limit=0.5)


def test_history_with_callbacks_of_the_users_own(tmp_path):
    path = str(tmp_path / "log.csv")
    model = macrobatch.accumulate(compiled(dense()))
    history = fitted(model, callbacks=keras.callbacks.CSVLogger(path), validation_data=(x, y))
    assert len(history["micro_batch_size"]) == 3
    assert {"loss", "val_loss", "micro_batch_size"} == set(history)
    with open(path) as file:
        assert "micro_batch_size" in file.readline()
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=1)
    assert "micro_batch_size" in fitted(model, callbacks=callbacks, epochs=1)


@pytest.mark.eager
def test_release_takes_everything_back():
    model = macrobatch.release(macrobatch.accumulate(compiled(dense())))
    assert "fit" not in vars(model)
    assert set(fitted(model)) == {"loss"}
    assert logging.getLogger("macrobatch").level == logging.NOTSET


def test_a_fraction_of_a_gpu_whose_size_nobody_knows(monkeypatch):
    monkeypatch.setattr(device_memory, "gpus", lambda: ["GPU:0"])
    assert watch.needed(None, device_memory) is None
    with pytest.raises(ValueError, match=r"a fraction of it is not known. Received: .*=0\.5"):
        watch.needed(0.5, device_memory)

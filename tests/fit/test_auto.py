"""micro_batch_size="auto": sizes that are found while training, and batches that are run again.

Memory runs out where a layer says so. test_memory.py has real limits.
"""

import builtins
import contextlib
import json
import logging

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import (
    BACKEND,
    array,
    assert_same,
    assert_same_history,
    mirrored,
    slow_on,
    thorough,
    train,
    variables,
)
from support.inside import (
    count_memory,
    make_available,
    make_running_out_an_error,
    skip_interaction_check,
)
from support.memory import (
    BASE,
    MIB,
    Counter,
    OutOfMemory,
    Room,
    errors,
    limit_for,
    pretend_gpu,
    run_each_time,
)

import macrobatch

x = np.random.RandomState(0).randn(60, 4)
y = np.random.RandomState(1).randn(60, 1)
tokens = np.random.RandomState(2).randint(1, 9, [48, 12])
tokens[:, 3:] *= np.arange(9)[None] < np.random.RandomState(3).randint(0, 10, 48)[:, None]

AUTO = {"micro_batch_size": "auto"}
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="only TensorFlow has it")
# Models with Keras' train step, and with one of their own, which only TensorFlow cuts.
STEPS = ["keras", "own"] if BACKEND == "tensorflow" else ["keras"]


class Own(keras.Sequential):
    """A train step of its own, which has written something before it is known whether it fits."""

    def __init__(self, parts):
        super().__init__(parts)
        self.steps = keras.Variable(0, trainable=False, dtype="int32", name="steps")

    def train_step(self, data):
        import tensorflow as tf

        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def dense(*more, steps="keras"):
    parts = [keras.Input([4]), Room(), layers.Dense(5, "tanh"), *more, layers.Dense(1)]
    return Own(parts) if steps == "own" else keras.Sequential(parts)


def adam():
    return keras.optimizers.Adam(0.05)


def made(*more, steps="keras", cut=None, scope=None, **options):
    """A model that is compiled, and accumulated if it is told how."""
    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        model = dense(*more, steps=steps)
        model.compile(**{"optimizer": adam(), "loss": "mse", **options})
    return model if cut is None else macrobatch.accumulate(model, **cut)


def fitted(build=dense, *data, **options):
    options = {"batch_size": 24, "epochs": 3, "optimizer": adam, **options}
    return train(build, *(data or (x, y)), **options)


WAYS = [
    *(pytest.param(steps, {}, id=steps) for steps in STEPS),
    pytest.param(STEPS[-1], {"run_eagerly": True}, id="eager", marks=slow_on("jax", "torch")),
    pytest.param("keras", {"metrics": ["mae"], "loss": "mae"}, id="metrics", marks=thorough),
]
if BACKEND != "torch":  # which has none of that
    two = {"steps_per_execution": 2}
    WAYS.append(pytest.param("keras", two, id="two", marks=slow_on("jax")))


@pytest.mark.parametrize(("steps", "options"), WAYS)
def test_a_batch_that_runs_out_is_run_again(steps, options, room, caplog):
    def build():
        return dense(steps=steps)

    expected, history = fitted(build, **options)
    room.narrow(4 * 5)
    model, found = fitted(build, cut=AUTO, **options)
    assert_same(expected, model)
    assert set(found.pop("micro_batch_size")) <= {1, 2, 4}
    assert_same_history(history, found)
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    is_compiled = BACKEND == "jax" and not options.get("run_eagerly")  # in powers of two
    first = 32 if is_compiled else 24
    assert f"micro_batch_size={first}, 16, 8, and was run again with 4" in line
    assert max(room.ran) == 4 * 4
    assert int(model.optimizer.iterations) == 9


def batches_of(*sizes):
    start = 0
    for size in sizes:
        yield x[start : start + size], y[start : start + size]
        start += size


@slow_on("tensorflow")
def test_batches_that_come_once(room):
    expected = made()
    for batch in batches_of(24, 24, 12):
        expected.train_on_batch(*batch)
    room.narrow(4 * 5)
    model = made(cut=AUTO)
    model.fit(batches_of(24, 24, 12), steps_per_epoch=3, shuffle=False, verbose=0)
    assert_same(expected, model)
    assert max(room.ran) == 4 * 4


@slow_on("jax")
def test_training_and_testing_in_turns(room):
    def found(model):
        before = model.evaluate(x, y, batch_size=24, verbose=0)
        losses = [model.train_on_batch(x[:30], y[:30]) for _ in range(2)]
        return [before, losses[1], model.evaluate(x, y, batch_size=40, verbose=0)]

    expected, model = made(), made(cut=AUTO)
    losses = found(expected)
    room.narrow(4 * 5)
    np.testing.assert_allclose(found(model), losses, rtol=1e-10)
    assert_same(expected, model)


@slow_on("jax", "torch")
def test_batches_of_all_kinds_where_memory_is_watched():
    """A rehearsal is made for each: of x and y alone, of other lengths, with weights."""

    def pooled():
        keras.utils.set_random_seed(1)
        parts = [keras.Input([None, 4]), layers.GlobalAveragePooling1D(), layers.Dense(1)]
        model = keras.Sequential(parts)
        model.compile(adam(), "mse")
        return model

    random = np.random.default_rng(0)
    expected, model = pooled(), macrobatch.accumulate(pooled())
    for length, *weights in [(4,), (9,), (9, random.random(16)), (30,), (4,)]:
        batch = random.normal(size=[16, length, 4]), random.normal(size=[16, 1]), *weights
        losses = [each.train_on_batch(*batch) for each in (expected, model)]
        np.testing.assert_allclose(*losses, rtol=1e-10)
    assert_same(expected, model)


@slow_on("jax", "torch")
@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_generator_that_yields_none(size, run_eagerly):
    """Keras makes an Optional of it."""
    models = [made(cut=cut, run_eagerly=run_eagerly) for cut in (None, {"micro_batch_size": size})]
    for model in models:
        batches = ((*each, None) for each in batches_of(12, 12, 12))
        model.fit(batches, steps_per_epoch=3, shuffle=False, verbose=0)
    assert_same(*models)


@thorough
@on_tensorflow
@pytest.mark.parametrize("is_watched", [False, True])
def test_replicas_have_one_size(is_watched, room, request):
    expected, _ = fitted()  # Parts of 12, and of 6 in the last batch.
    room.narrow(4 * 5)
    cut = AUTO
    if is_watched:
        request.getfixturevalue("counted")
        cut = {**AUTO, "memory_limit": limit_for(4 * 5)}
    model, history = fitted(cut=cut, scope=mirrored(2).scope())
    assert_same(expected, model)
    assert max(history["micro_batch_size"]) <= 4


@pytest.mark.eager
@on_tensorflow
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_synchronized_layers_need_a_number():
    norm = layers.BatchNormalization(synchronized=True)
    model = made(norm, cut=AUTO, scope=mirrored(2).scope())
    with pytest.raises(ValueError, match='micro_batch_size="auto" and synchronized=True'):
        model.fit(x, y, verbose=0)


def embedded():
    inputs = keras.Input([None], dtype="int32")
    outputs = Room()(layers.Embedding(9, 3, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(1)(outputs))


@pytest.mark.parametrize(
    "unit", [pytest.param("micro_batch_size", marks=thorough), "micro_batch_tokens"]
)
def test_sequences(unit, room):
    labels = np.random.RandomState(4).randn(48, 12, 1)
    options = {"epochs": 2, "optimizer": lambda: keras.optimizers.SGD(0.05)}
    expected, _ = fitted(embedded, tokens, labels, **options)
    room.narrow(3 * 12 * 5)
    cut = {unit: "auto", "sequence_axis": 1}
    model, history = fitted(embedded, tokens, labels, cut=cut, **options)
    assert_same(expected, model)
    assert all(1 <= size <= 64 for size in history[unit])


@pytest.mark.eager
@slow_on("jax")
def test_longer_batches_later_run_out_again(room):
    def batches():
        for length in (3, 12, 3, 12):
            yield tokens[:24, :length], np.ones([24, length, 1])

    def build():
        keras.utils.set_random_seed(1)
        model = embedded()
        model.compile("sgd", "mse")
        return model

    expected, model = build(), macrobatch.accumulate(build())
    for batch in batches():
        expected.train_on_batch(*batch)
    room.narrow(3 * 3 * 24)
    history = model.fit(batches(), steps_per_epoch=4, shuffle=False, verbose=0).history
    assert_same(expected, model)
    assert max(room.ran) == 3 * 3 * 24
    assert history["micro_batch_size"] <= [4]


@thorough
def test_whole_batch_loss(room):
    def compares(y_true, y_pred):
        return ops.mean(ops.square(y_pred - ops.mean(y_pred) - y_true))

    # A function is called for each model.
    expected, _ = fitted(loss=lambda: compares)
    room.narrow(4 * 5)
    model, _ = fitted(loss=lambda: compares, cut={**AUTO, "whole_batch_loss": True})
    assert_same(expected, model)
    assert max(room.ran) == 4 * 4


@on_tensorflow
def test_another_size_needs_no_other_trace(room):
    traced, sizes = [], []

    class Traced(layers.Layer):
        def call(self, inputs):
            traced.append(1)
            return inputs

    model = made(Traced(), cut=AUTO)
    for _ in range(9):
        sizes += model.fit(x, y, batch_size=60, verbose=0).history["micro_batch_size"]
        if len(sizes) == 1:
            count = len(traced)
    assert len(set(sizes)) > 1
    assert len(traced) == count


def state(model):
    return [array(variable) for variable in variables(model)]


def assert_unchanged(before, model):
    for old, new in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.eager
@pytest.mark.parametrize("steps", STEPS)
def test_nothing_fits(steps, room):
    model = made(layers.Dropout(0.5, seed=1), steps=steps, cut=AUTO)
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    room.narrow(3)
    with pytest.raises(OutOfMemory, match=r"(?s)RematScope.*no room for 4"):
        model.train_on_batch(x[:2], y[:2])
    assert_unchanged(before, model)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("run_eagerly", [False, True] if BACKEND == "tensorflow" else [None])
def test_an_optimizer_that_runs_out_is_not_called_again(steps, run_eagerly, room):
    calls = []

    def fail():
        calls.append(1)
        raise MemoryError("no room for slots")

    class Large(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            run_each_time(fail)

    options = {} if run_eagerly is None else {"run_eagerly": run_eagerly}
    model = made(steps=steps, cut=AUTO, optimizer=Large(), **options)
    with pytest.raises(OutOfMemory, match="while the optimizer was writing"):
        model.fit(x, y, verbose=0)
    assert len(calls) <= 4  # one for each weight, of one update


# What says that there is no memory, and what does not.
ERRORS = {
    "tensorflow": [
        ("ResourceExhaustedError", "", True),
        ("InternalError", "Out of memory", True),
        ("UnknownError", "Failed to allocate 9 bytes", True),
        ("InternalError", "something else", False),
        ("InvalidArgumentError", "out of memory", False),
    ],
    "jax": [
        ("JaxRuntimeError", "RESOURCE_EXHAUSTED: no memory", True),
        ("JaxRuntimeError", "INTERNAL: Out of memory allocating 9 bytes.", True),
        ("JaxRuntimeError", "INTERNAL: something else", False),
    ],
    "torch": [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", True),
        ("RuntimeError", "MPS backend out of memory (MPS allocated: 9 GB)", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
    ],
}[BACKEND]
ERRORS += [("MemoryError", "", True), ("ValueError", "RESOURCE_EXHAUSTED: out of memory", False)]


class Fails(layers.Layer):
    """Calls a function for more than four examples at a time."""

    def __init__(self, fail):
        super().__init__()
        self.fail = fail

    def call(self, inputs):
        if inputs.shape[0] > 4:
            self.fail()
        return inputs

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


@pytest.mark.parametrize(("kind", "text", "is_of_memory"), ERRORS)
def fails_with(fail):
    """Trains a batch of four, and one of eight, for which a function is called that fails."""
    model = made(Fails(fail), cut=AUTO, run_eagerly=True)
    for size in (4, 8):
        model.train_on_batch(x[:size], y[:size])
    return macrobatch.settings_of(model).size_in_use


@pytest.mark.parametrize(("kind", "text", "is_of_memory"), ERRORS)
def test_which_errors_are_of_memory(kind, text, is_of_memory, room):
    def fail():
        raise error

    kind = getattr(errors, kind, None) or getattr(builtins, kind)
    of_tensorflow = BACKEND == "tensorflow" and hasattr(errors, kind.__name__)
    error = kind(None, None, text) if of_tensorflow else kind(text)
    if is_of_memory:
        assert fails_with(fail) == 4
    else:
        with pytest.raises(kind, match=text):
            fails_with(fail)


@slow_on("tensorflow")  # whose allocator waits before it gives up
def test_an_allocation_that_cannot_be(room):
    assert fails_with(lambda: ops.zeros([2**50], "int8")) == 4


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dropout(0.5, seed=1),
        pytest.param(layers.BatchNormalization, marks=slow_on("jax", "torch")),
    ],
    ids=["dropout", "norm"],
)
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_where_the_size_shows_it_is_only_shrunk(layer, steps, room):
    def build():
        return dense(layer(), steps=steps)

    room.narrow(4 * 9)
    model, history = fitted(build, batch_size=12, cut=AUTO)
    assert history["micro_batch_size"] == [8] * 3
    again, _ = fitted(build, batch_size=12, cut={"micro_batch_size": 8})
    assert_unchanged(state(again), model)


@on_tensorflow
@pytest.mark.examples_meet
def test_draws_of_tf_random_show_the_size(caplog):
    import tensorflow as tf

    noisy = layers.Lambda(lambda x: x + tf.random.normal(tf.shape(x), dtype=x.dtype))
    model = made(noisy, cut=AUTO)
    with pytest.warns(macrobatch.ExactnessWarning, match="draws without Keras"):  # no verdict
        model.train_on_batch(x, y)
    assert "micro_batch_size=60 for batches of 60: all at once" in caplog.text


@pytest.mark.parametrize("pays", [pytest.param(True, marks=slow_on("jax")), False])
def test_the_fastest_size_is_looked_for_where_that_pays(pays, clock, monkeypatch, caplog):
    """Where each size is compiled. Elsewhere looking is free."""

    class Compiled(layers.Layer):
        def call(self, inputs):
            Room.now += 1.0
            return inputs

    monkeypatch.setattr(Room, "seconds", lambda numbers: 1.0)
    options = {"batch_size": 60, "epochs": 200 if pays else 4}
    _, history = fitted(lambda: dense(Compiled()), cut=AUTO, **options)
    if pays or BACKEND != "jax":
        assert len(set(history["micro_batch_size"])) > 1
    else:  # Compiled sizes are powers of two.
        assert set(history["micro_batch_size"]) == {64}
        assert "micro_batch_size=64 for batches of 60: all at once" in caplog.text


# Memory that is watched


# Room for 11 examples. Beyond what was measured, growth counts one and a half times.
FOR_11 = {**AUTO, "memory_limit": limit_for(4 * 11)}


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: layers.Activation("linear"), marks=slow_on("jax")),
        lambda: layers.Dropout(0.5, seed=1),
        pytest.param(layers.BatchNormalization, marks=thorough),
    ],
    ids=["exact", "dropout", "norm"],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_memory_is_watched_where_running_out_is_no_error(layer, request, counted):
    """The random layer shows whether a rehearsal draws numbers."""

    def build():
        return dense(layer())

    is_exact = "exact" in request.node.name
    model, history = fitted(build, batch_size=20, cut=FOR_11)
    expected, _ = fitted(build, batch_size=20, cut=None if is_exact else {"micro_batch_size": 8})
    assert_same(expected, model, tolerance=1e-10 * is_exact)
    assert max(history["micro_batch_size"]) <= 8
    assert is_exact or history["micro_batch_size"] == [8] * 3


@pytest.mark.eager
@slow_on("jax")
@pytest.mark.parametrize("steps", STEPS)
def test_sizes_grow_where_nothing_is_rehearsed(steps, room, counted, monkeypatch):
    """In tests, and in train steps that are not Keras'."""
    skip_interaction_check(monkeypatch)
    expected, model = made(steps=steps), made(steps=steps, cut=FOR_11)
    sizes = []
    for _ in range(5):
        losses = []
        for each in (expected, model):
            room.ran.clear()
            run = each.test_on_batch if steps == "keras" else each.train_on_batch
            losses.append(run(x[:24], y[:24]))
        np.testing.assert_allclose(*losses, rtol=1e-10)
        sizes.append(max(room.ran) // 4)
    assert sizes == [1, 2, 4, 8, 8]


@pytest.mark.parametrize("steps", STEPS)
def test_a_limit_in_which_nothing_fits(steps, counted):
    model = made(steps=steps, cut={**AUTO, "memory_limit": BASE + 10})
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    with pytest.raises(ValueError, match="memory_limit must be more"):
        model.fit(x, y, verbose=0)
    assert_unchanged(before, model)


def test_memory_is_watched_where_a_compiler_may_end_the_process(monkeypatch):
    counter = Counter()
    count_memory(monkeypatch, counter)
    make_running_out_an_error(monkeypatch, compiled=False)
    made(cut=AUTO).train_on_batch(x[:2], y[:2])
    assert bool(counter.resets) == (BACKEND == "jax")


@slow_on("jax")
def test_a_limit_of_a_gpu_is_a_share_of_its_memory(counted, room, monkeypatch):
    counted.left = 2**50  # The memory of the process does not count.
    pretend_gpu(monkeypatch, 2 * FOR_11["memory_limit"])
    _, history = fitted(cut={**AUTO, "memory_limit": 0.5})
    assert 1 <= max(history["micro_batch_size"]) <= 8
    room.narrow(4 * 5)
    _, history = fitted(cut=AUTO, epochs=1)  # Without a limit, running out is an error.
    assert history["micro_batch_size"] <= [4]


@pytest.mark.parametrize(
    ("memory_limit", "message"),
    [
        (0.5, r"a fraction of it is not known. Received: .*=0\.5"),
        pytest.param(
            "1GiB",
            r"does not tell the peak.*torch\.cuda.*Leave",
            marks=pytest.mark.skipif(BACKEND != "torch", reason="others tell it of all GPUs"),
        ),
    ],
)
def test_a_gpu_that_tells_nothing(memory_limit, message, counted, monkeypatch):
    pretend_gpu(monkeypatch, None)
    model = made(cut={**AUTO, "memory_limit": memory_limit})
    with pytest.raises(ValueError, match=message):
        model.train_on_batch(x, y)


# Sizes that were found before


@pytest.fixture
def files(tmp_path, room, monkeypatch):
    """The folder in which sizes are kept."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    return tmp_path / "macrobatch" / "sizes"


@pytest.fixture
def log(caplog):
    """A function that trains another model of the same kind, and returns what was logged."""

    def log(**cut):
        caplog.clear()
        # With dropout a size is settled at once.
        eager = {"run_eagerly": True} if BACKEND == "tensorflow" else {}
        model = made(layers.Dropout(0.5, seed=1), cut={**AUTO, **cut}, **eager)
        model.train_on_batch(x[:20], y[:20])
        return caplog.text

    return log


def test_what_was_found_is_found_again(files, room, log):
    room.narrow(4 * 17)
    assert "ran out" in log()
    again = log()
    assert "ran out" not in again
    assert "found before" in again


@slow_on("jax", "torch")
def test_what_was_found_is_found_again_whatever_others_use(files, log, counted, monkeypatch):
    def with_available(size):
        make_available(monkeypatch, size)
        return log

    assert "all at once" in with_available(1000 * MIB)()
    assert "found before" in with_available(8000 * MIB)()
    assert "found before" in with_available(300 * MIB)()
    assert "found before" not in with_available(BASE + 10)()  # which does not fit now
    assert "found before" not in with_available(1000 * MIB)(memory_limit="200MiB")
    assert "found before" not in log(memory_limit=0.5)
    assert "found before" in with_available(8000 * MIB)(memory_limit=0.5)


@slow_on("jax")
def test_a_damaged_file_is_ignored_with_a_warning(files, log):
    log()
    (path,) = files.iterdir()
    right = json.loads(path.read_text())
    wrong = [{"size": "8"}, {"size": 0}, {"size": 2 * right["size"]}, {"size": True}, {"key": {}}]
    texts = [json.dumps({**right, **each}) for each in wrong]
    for text in [*texts, "", "{", "[]", '{"size": 8}', "\x00\xff", "[" * 100_000]:
        path.write_text(text, encoding="latin-1")
        with pytest.warns(UserWarning, match="is ignored"):
            log()
        assert json.loads(path.read_text())["key"] == right["key"]


@slow_on("jax")
def test_files_can_be_switched_off(files, log, monkeypatch):
    for off in ("0", "False", " NO "):
        monkeypatch.setenv("MACROBATCH_CACHE", off)
        log()
    assert not files.exists()


@slow_on("jax")
def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path, files, log, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="is ignored"):
        log()


# What is said


@pytest.mark.eager
@slow_on("jax")
def test_history_with_callbacks_of_the_users_own(tmp_path):
    path = tmp_path / "log.csv"
    model = made(cut=AUTO)
    options = {"batch_size": 20, "validation_data": (x[:20], y[:20]), "verbose": 0}
    history = model.fit(x, y, callbacks=keras.callbacks.CSVLogger(str(path)), **options).history
    assert set(history) == {"loss", "val_loss", "micro_batch_size"}
    assert "micro_batch_size" in path.read_text().splitlines()[0]
    callbacks = keras.callbacks.CallbackList([], add_history=True, model=model, epochs=1)
    assert "micro_batch_size" in model.fit(x, y, callbacks=callbacks, **options).history
    macrobatch.release(model)
    assert set(model.fit(x, y, **options).history) == {"loss", "val_loss"}
    assert logging.getLogger("macrobatch").level == logging.NOTSET


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batch_size": 8, "memory_limit": "6GiB"}, "and a size, 8"),
        ({"micro_batch_size": "all"}, 'Or "auto"'),
        ({"micro_batch_tokens": "auto"}, "needs sequence_axis="),
        ({"micro_batch_size": "auto", "micro_batch_tokens": "auto"}, "Only one of"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        made(cut=arguments)

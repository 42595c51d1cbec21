"""micro_batch_size="auto": sizes that are found while training, and batches that are run again.

Memory runs out where a layer says so, with the error that the backend has for it. test_memory.py
has real limits.
"""

import logging

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import BACKEND, assert_same, thorough

import macrobatch
from macrobatch import _found_sizes
from macrobatch._sizes import limit, watch

x = np.random.RandomState(0).randn(60, 4)
y = np.random.RandomState(1).randn(60, 1)


def ran_out(size):
    """The error of the backend."""
    if BACKEND == "torch":
        return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: no room for {size}")
    return MemoryError(f"RESOURCE_EXHAUSTED: no room for {size}")  # a JaxRuntimeError outside


class Room(layers.Layer):
    """Runs out of memory where a micro-batch has more than some number of elements."""

    most = 10**9
    ran: list = None  # the examples in each micro-batch
    supports_masking = True

    def call(self, inputs):
        if BACKEND == "torch":
            return inputs if inputs.device.type == "meta" else self.checked(inputs)
        import jax

        @jax.custom_jvp
        def checked(values):
            shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
            return jax.pure_callback(self.checked, shape, values)

        checked.defjvp(lambda values, tangents: (checked(*values), tangents[0]))
        return checked(inputs)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def checked(self, inputs):
        size = int(np.prod(inputs.shape))
        if size > Room.most:
            raise ran_out(size)
        Room.ran.append(inputs.shape[0])
        return inputs


@pytest.fixture(autouse=True)
def an_error(monkeypatch):
    """Running out of memory is an error, as on a GPU."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    if BACKEND == "jax":
        monkeypatch.setattr("macrobatch._jax.auto.Auto.host_raises", True)
    monkeypatch.setattr(Room, "most", 10**9)
    monkeypatch.setattr(Room, "ran", [])


def narrow(monkeypatch, most):
    monkeypatch.setattr(Room, "most", most)
    Room.ran.clear()


def dense(*more):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    outputs = layers.Dense(5, "tanh")(Room()(inputs))
    for layer in more:
        outputs = layer(outputs)
    return keras.Model(inputs, layers.Dense(1)(outputs))


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


MORE = [{"metrics": ["mae"], "loss": "mae"}]
if BACKEND == "jax":
    MORE += [{"run_eagerly": True}, {"steps_per_execution": 2}]


@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(each, marks=thorough) for each in MORE)], ids=str
)
def test_a_batch_that_runs_out_is_run_again(options, monkeypatch, caplog):
    expected = plain(**options)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), **options))
    history = fitted(model)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4}
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    is_compiled = BACKEND == "jax" and not options.get("run_eagerly")
    first = 32 if is_compiled else 24
    assert f"micro_batch_size={first}, 16, 8, and was run again with 4" in line
    assert max(Room.ran) == 4
    assert int(model.optimizer.iterations.value) == 9


def test_batches_that_come_once_and_testing(monkeypatch):
    def batches():
        for start in range(0, 60, 24):
            yield x[start : start + 24], y[start : start + 24]

    expected = compiled(dense())
    for batch in batches():
        expected.train_on_batch(*batch)
    narrow(monkeypatch, 4 * 17)
    model = macrobatch.accumulate(compiled(dense()))
    fitted(model, batches(), epochs=1, batch_size=None, steps_per_epoch=3)
    assert_same(expected, model)
    found = model.evaluate(x, y, batch_size=20, verbose=0)
    assert max(Room.ran) == 16
    monkeypatch.setattr(Room, "most", 10**9)
    np.testing.assert_allclose(found, expected.evaluate(x, y, verbose=0), rtol=1e-10)


@thorough
def test_testing_first_and_train_on_batch(monkeypatch):
    expected = compiled(dense(), metrics=["mae"])
    before = expected.evaluate(x, y, verbose=0)
    expected.train_on_batch(x[:30], y[:30])
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), metrics=["mae"]))
    np.testing.assert_allclose(model.evaluate(x, y, batch_size=24, verbose=0), before, rtol=1e-10)
    model.train_on_batch(x[:30], y[:30])
    assert_same(expected, model)


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(ops.convert_to_numpy(variable.value)) for variable in variables]


def assert_unchanged(before, model):
    for old, new in zip(before, values_of(model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(Room, "most", 3)
    model = macrobatch.accumulate(compiled(dense(layers.Dropout(0.5, seed=1))))
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    with pytest.raises(RuntimeError, match=r"(?s)RematScope.*no room for 4") as caught:
        fitted(model, batch_size=2)
    kind = {"torch": "OutOfMemoryError", "jax": "JaxRuntimeError"}[BACKEND]
    assert type(caught.value).__name__ == kind
    assert_unchanged(before, model)


def test_an_optimizer_that_runs_out_is_not_called_again():
    calls = []

    class Large(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            calls.append(1)
            raise MemoryError("no room for slots")

    model = macrobatch.accumulate(compiled(dense(), optimizer=Large()))
    with pytest.raises(RuntimeError, match="while the optimizer was writing"):
        fitted(model)
    assert len(calls) == 1


def test_another_error_is_none_of_our_business():
    def fail(y_true, y_pred):
        raise RuntimeError("too much")

    model = macrobatch.accumulate(compiled(dense(), loss=fail))
    with pytest.raises(RuntimeError, match="too much"):
        fitted(model)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dropout(0.5, seed=1),
        pytest.param(lambda: layers.BatchNormalization(), marks=thorough),
    ],
    ids=["dropout", "norm"],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_where_the_size_shows_it_is_only_shrunk(layer, monkeypatch):
    narrow(monkeypatch, 4 * 9)
    model = macrobatch.accumulate(compiled(dense(layer())))
    assert fitted(model, batch_size=12)["micro_batch_size"] == [8] * 3
    again = macrobatch.accumulate(compiled(dense(layer())), micro_batch_size=8)
    fitted(again, batch_size=12)
    assert_unchanged(values_of(again), model)


@pytest.mark.parametrize("pays", [pytest.param(True, marks=thorough), False])
def test_the_fastest_size_is_looked_for_where_that_pays(pays, monkeypatch, caplog):
    """Compiled, each size costs a compilation. In eager steps, looking is free."""
    monkeypatch.setattr(_found_sizes.Paying, "__call__", lambda self, is_new, seconds: pays)
    sizes, choose = set(), _found_sizes.FoundSizes.set

    def chosen(self, size):
        sizes.add(size)
        choose(self, size)

    monkeypatch.setattr(_found_sizes.FoundSizes, "set", chosen)
    expected = plain()
    model = macrobatch.accumulate(compiled(dense()))
    fitted(model)
    assert_same(expected, model)
    if pays or BACKEND == "torch":
        assert {32 if BACKEND == "jax" else 24, 16} <= sizes
    else:  # Compiled sizes are powers of two.
        assert sizes == {32}
        assert "micro_batch_size=32 for batches of 24: all at once" in caplog.text


@thorough
def test_whole_batch_loss(monkeypatch):
    def compares(y_true, y_pred):
        return ops.mean(ops.square(y_pred - ops.mean(y_pred) - y_true))

    expected = plain(loss=compares)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), loss=compares), whole_batch_loss=True)
    fitted(model)
    assert_same(expected, model)
    assert max(Room.ran) == 4


def test_sequences(monkeypatch):
    tokens = np.random.RandomState(2).randint(1, 9, [48, 12])
    tokens[:, 3:] *= np.arange(9)[None] < np.random.RandomState(3).randint(0, 10, 48)[:, None]
    labels = np.random.RandomState(4).randn(48, 12, 1)

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input([None], dtype="int32")
        outputs = Room()(layers.Embedding(9, 3, mask_zero=True)(inputs))
        return compiled(keras.Model(inputs, layers.Dense(1)(outputs)))

    expected = build()
    fitted(expected, tokens, labels, epochs=2)
    narrow(monkeypatch, 3 * 12 * 5)
    model = macrobatch.accumulate(build(), micro_batch_tokens="auto", sequence_axis=1)
    history = fitted(model, tokens, labels, epochs=2)
    assert_same(expected, model)
    assert all(1 <= size <= 64 for size in history["micro_batch_tokens"])


class Count:
    """A counter of memory: 1 MiB, and four bytes for each element in the layer Room."""

    can_reset = True

    def reset(self):
        Room.ran.clear()

    def read(self):
        return 2**20 + 16 * max(Room.ran, default=0)

    def now(self):
        return 2**20


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: False)
    monkeypatch.setattr(watch, "ProcessCounter", Count)
    monkeypatch.setattr(_found_sizes.FoundSizes, "of_update", lambda self: 0)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_memory_is_watched_where_running_out_is_no_error(watched):
    def build():  # The random layer shows whether a rehearsal draws numbers.
        return compiled(dense(layers.Dropout(0.5, seed=1)), metrics=["mae"])

    # Bytes of 11 examples. Beyond what was measured, growth counts one and a half times.
    most = int((2**20 + 16 * 11) / 0.95)
    model = macrobatch.accumulate(build(), memory_limit=most)
    history = fitted(model, batch_size=20)
    assert history["micro_batch_size"] == [8, 8, 8]
    again = macrobatch.accumulate(build(), micro_batch_size=8)
    fitted(again, batch_size=20)
    assert_unchanged(values_of(again), model)


def test_a_limit_in_which_nothing_fits(watched):
    model = macrobatch.accumulate(compiled(dense()), memory_limit=2**20 + 10)
    model.optimizer.build(model.trainable_variables)
    before = values_of(model)
    with pytest.raises(ValueError, match="memory_limit must be more"):
        fitted(model)
    assert_unchanged(before, model)


def test_what_was_found_is_found_again(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    narrow(monkeypatch, 4 * 17)

    def build():  # With dropout it settles at once.
        return compiled(dense(layers.Dropout(0.5, seed=1)))

    fitted(macrobatch.accumulate(build()), epochs=1, batch_size=20)
    assert "ran out" in caplog.text
    caplog.clear()
    fitted(macrobatch.accumulate(build()), epochs=1, batch_size=20)
    assert "ran out" not in caplog.text
    assert "found before" in caplog.text


def test_history_with_callbacks_of_the_users_own(tmp_path):
    path = str(tmp_path / "log.csv")
    model = macrobatch.accumulate(compiled(dense()))
    options = {"batch_size": 20, "validation_data": (x[:20], y[:20])}
    history = fitted(model, callbacks=keras.callbacks.CSVLogger(path), **options)
    assert {"loss", "val_loss", "micro_batch_size"} == set(history)
    assert len(history["micro_batch_size"]) == 3
    with open(path) as file:
        assert "micro_batch_size" in file.readline()
    macrobatch.release(model)
    assert "fit" not in vars(model)
    assert set(fitted(model, batch_size=20, epochs=1)) == {"loss"}
    assert logging.getLogger("macrobatch").level == logging.NOTSET


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_limit": "6 apples"}, "Units are"),
        ({"micro_batch_size": 8, "memory_limit": "6GiB"}, "and a size, 8"),
        ({"micro_batch_tokens": "auto"}, "needs sequence_axis="),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        macrobatch.accumulate(compiled(dense()), **arguments)

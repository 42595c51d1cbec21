"""Each private name of Keras that macrobatch uses is still there, and means what it is taken for.

On each backend. Names that only TensorFlow has are in test_of_tensorflow.py.
"""

import functools
import inspect
import pathlib
import threading

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import BACKEND, array, only_on

from macrobatch import _internals

ONES, ZEROS = ops.ones, ops.zeros


def model(**options):
    built = keras.Sequential([keras.Input([4]), layers.Dense(2), layers.Dropout(0.5)])
    built.compile("sgd", "mse", metrics=["mae"], **options)
    return built


def kept(value):
    return array(value).tolist()


def test_every_name_has_a_test():
    """A new name in the room needs a test that names it."""
    files = pathlib.Path(__file__).parent.glob("*.py")
    source = "".join(path.read_text() for path in files)
    names = set(_internals.__all__) - {"Patch"}
    assert not [name for name in sorted(names) if f"_internals.{name}" not in source]


# Models


def test_parts_of_a_model():
    plain, x = model(), ONES([3, 4])
    assert _internals.layers_of(plain)[0] is plain
    assert len(_internals.layers_of(plain)) == 3 + 1  # with the InputLayer
    assert _internals.loss_tracker(plain) in plain.metrics
    assert _internals.compiled_loss(plain).built is False
    assert _internals.compiled_metrics(plain) in plain.metrics
    assert _internals.strategy_of(plain) is None
    found = _internals.predictions(plain, x, False)
    np.testing.assert_array_equal(array(found), array(plain(x)))
    loss = _internals.compute_loss(plain, x, ZEROS([3, 2]), found, None, True)
    np.testing.assert_allclose(array(loss), np.mean(array(found) ** 2))


def test_fit_starts_at_an_epoch():
    plain, epochs = model(), []
    log = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    _internals.set_initial_epoch(plain, 3)
    plain.fit(np.ones([3, 4]), np.zeros([3, 2]), epochs=5, verbose=0, callbacks=[log])
    assert epochs == [3, 4]


def test_models_are_looked_at_before_they_train():
    seen, plain = [], model()
    _internals.before_training(seen.append)
    try:
        plain.fit(np.ones([2, 4]), np.ones([2, 2]), verbose=0)
        assert seen == [plain]
    finally:
        _internals.models._before_training.remove(seen.append)


def test_losses_and_metrics_are_built_without_a_forward_pass():
    calls = []

    class Counting(layers.Layer):
        def call(self, inputs):
            calls.append(1)
            return inputs

    inputs = keras.Input([4])
    outputs = {"a": Counting()(inputs), "b": layers.Dense(2)(inputs)}
    functional = keras.Model(inputs, outputs)
    functional.compile("sgd", {"a": "mse", "b": "mae"}, metrics={"b": ["mse"]})
    calls.clear()
    y = {"a": keras.KerasTensor([None, 4]), "b": keras.KerasTensor([None, 2])}
    _internals.build(functional, keras.KerasTensor([None, 4]), y, None)
    assert calls == []
    assert _internals.compiled_loss(functional).built
    assert _internals.compiled_metrics(functional).built
    assert len(functional.metrics_variables) == 2 * (1 + 2 + 1)


def test_a_sequential_that_cannot_be_built_is_as_before():
    unbuilt = keras.Sequential([layers.Flatten(), layers.Dense(2)])
    with pytest.raises(ValueError, match="None"):
        _internals.build_sequential(unbuilt, (None, None, 3))
    assert not unbuilt.built
    _internals.build_sequential(unbuilt, (None, 2, 3))
    assert unbuilt.input_shape == (None, 2, 3)
    assert unbuilt(np.ones([4, 2, 3])).shape == (4, 2)


@only_on("jax", "torch")
@pytest.mark.parametrize("steps", [1, *([2] if BACKEND == "jax" else [])])
def test_keras_builds_with_the_first_batch(steps):
    seen = []

    class Watched(keras.Sequential):
        pass

    def build(self, iterator=None, data_batch=None):
        if iterator is not None:
            data_batch = _internals.batch_to_build_with(iterator)
        seen.append(np.asarray(data_batch[0]))
        keras.Sequential._symbolic_build(self, data_batch=data_batch)

    setattr(Watched, _internals.BUILDING_AT_ONCE, build)
    watched = Watched([layers.Dense(1)])
    watched.compile("sgd", "mse", steps_per_execution=steps)
    x = np.arange(8.0).reshape(4, 2)
    watched.fit(x, np.ones([4, 1]), batch_size=1, shuffle=False, verbose=0)
    assert int(watched.optimizer.iterations) == 4  # The first batch is trained on all the same.
    watched.train_on_batch(x, np.ones([4, 1]))
    assert [len(each) for each in seen] == [1, 4]
    np.testing.assert_array_equal(seen[0], x[:1])


@only_on("jax")
def test_steps_and_states():
    plain = model(steps_per_execution=2)
    function = _internals.step_by_step(plain, lambda state, data: (data, state + data))
    assert function(1, iter([2, 3, 4])) == (3, 6)
    kernel = plain.trainable_variables[0]
    expected = kernel.numpy() + 1
    values = [v.value + 1 for v in plain.trainable_variables]
    _internals.keep_state(plain, ["trainable_variables"], [values])
    plain.jax_state_sync()
    np.testing.assert_array_equal(kernel.numpy(), expected)


@only_on("jax")
def test_keras_calls_the_method_call():
    calls = []

    class Watched(keras.Model):
        def call(self, inputs, training=False):
            calls.append(inspect.stack()[1].function)
            return inputs

    assert _internals.predictions(Watched(), 3.0, True) == 3.0
    assert calls == ["predictions"]


# Losses, masks, variables


def test_compiled_losses():
    compiled, y = _internals.compiled_loss(model()), (ONES([3, 2]), ZEROS([3, 2]))
    compiled(*y)
    (entry,) = _internals.flat_losses(compiled)
    assert entry._fields == ("path", "loss", "loss_weights", "name")
    other = entry._replace(loss=lambda y, y_pred, sample_weight: ops.convert_to_tensor(5.0))
    assert float(_internals.with_losses(compiled, [other], [])(*y)) == 5.0
    assert float(compiled(*y)) == 1.0
    copied = _internals.shallow_copy(entry.loss)
    copied.reduction = "sum"
    assert entry.loss.reduction == "sum_over_batch_size"


def test_losses_of_layers():
    added = layers.ActivityRegularization(l1=1.0)
    built = keras.Sequential([keras.Input([3]), added])
    with keras.StatelessScope(collect_losses=True):
        built(ONES([2, 3]))
        assert len(_internals.own_losses(added)) == len(built.losses) == 1
        _internals.clear_losses(built)
        assert built.losses == []
        added.add_loss(ops.convert_to_tensor(3.0))
        assert [float(loss) for loss in built.losses] == [3.0]


def test_masks():
    found = _internals.mask_of(layers.Masking()(ZEROS([2, 3, 1])))
    assert not array(found).any()
    assert _internals.mask_of(ZEROS([2])) is None
    tensor, mask = ZEROS([2, 3]), ONES([2, 3], "bool")
    _internals.set_mask(tensor, mask)
    assert _internals.mask_of(tensor) is mask


def test_variables():
    variable = keras.Variable(1.0)
    with keras.StatelessScope(state_mapping=[(variable, ops.convert_to_tensor(2.0, "float64"))]):
        assert kept(variable.value) == 2.0
        assert kept(_internals.raw_value(variable)) == 1.0
        assert _internals.variables_without_value() == []
        made = keras.Variable(lambda shape, dtype: ZEROS(shape, dtype), shape=[2])
        assert any(each is made for each in _internals.variables_without_value())
    assert _internals.variables_without_value() == []


def test_optimizers():
    plain, inner = model(), keras.optimizers.SGD()
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    assert any(each is inner for each in _internals.with_inner_optimizers(scaled))
    for optimizer in (plain.optimizer, scaled):
        optimizer.build(plain.trainable_variables)
        found = _internals.variables_of_optimizer(optimizer)
        assert all(one is other for one, other in zip(found, plain.trainable_variables))
        assert len(found) == 2


# Functions that are replaced for a while


def test_a_patch_is_for_its_thread_and_knows_itself():
    class Place:
        @staticmethod
        def double(x):
            return 2 * x

    patch = _internals.Patch(lambda: Place, "double", lambda double, add, x: double(x) + add)
    with patch(1):
        assert Place.double(3) == 7
        found = []
        thread = threading.Thread(target=lambda: found.append(Place.double(3)))
        thread.start()
        thread.join()
        assert found == [6]

    # Somebody else's wrapper has a __wrapped__ too, and all attributes of what it wraps.
    inner = Place.double
    Place.double = staticmethod(functools.wraps(inner)(lambda x: inner(x) + 100))
    with patch(1):
        assert Place.double(3) == 107
    assert Place.double(3) == 106
    Place.double = staticmethod(inner)
    with patch(1):
        assert Place.double(3) == 7


def noting(seen, note):
    """What is called instead of a function: it notes something of the arguments."""

    def instead(function, *args, **kwargs):
        seen.append(note(*args))
        return function(*args, **kwargs)

    return instead


DROPPING = {
    "Dropout": layers.Dropout,
    "LSTM": lambda rate: layers.LSTM(2, dropout=rate),
    "SpatialDropout1D": layers.SpatialDropout1D,
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_has_one_function(name):
    layer, x = DROPPING[name](0.9), ONES([3, 4, 5])
    expected = array(layer(x, training=False))
    with _internals.with_dropout(lambda drop, inputs, *args, **kwargs: inputs):
        np.testing.assert_allclose(array(layer(x, training=True)), expected, rtol=1e-6)
    assert np.abs(array(layer(x, training=True)) - expected).max() > 1e-3


def test_functions_beneath():
    """What stands beneath a patched function is called by those who patch it, too."""
    calls, x = [], ONES([2, 4])
    with _internals.with_dropout.beneath(noting(calls, lambda *_: "beneath")):
        layers.Dropout(0.5)(x, training=True)
        with _internals.with_dropout(noting(calls, lambda *_: "instead")):
            layers.Dropout(0.5)(x, training=True)
    layers.Dropout(0.5)(x, training=True)
    assert calls == ["beneath", "instead", "beneath"]


@pytest.mark.parametrize("name", sorted(_internals.with_draws))
def test_all_random_numbers_are_drawn_with_these_functions(name):
    arguments = {
        "randint": ([2], 0, 5),
        "gamma": ([2], 1.0),
        "binomial": ([2], 3.0, 0.5),
        "beta": ([2], 1.0, 1.0),
        "categorical": (np.zeros([1, 3]), 2),
    }.get(name, ([2],))
    with _internals.with_draws[name](lambda draw, *args, **kwargs: "drawn"):
        assert getattr(keras.random, name)(*arguments, seed=1) == "drawn"
    assert getattr(keras.random, name)(*arguments, seed=1).shape[-1] == 2


def test_metrics_reduce_with_one_function():
    def quarter(reduce, *args, **kwargs):
        values, weights = reduce(*args, **kwargs)
        return values * 0.25, weights * 0.25

    metric, y = keras.metrics.MeanAbsoluteError(), ZEROS([2, 3, 1])
    weights = ops.convert_to_tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    with _internals.with_samplewise_values(quarter):
        metric.update_state(y, y + 2, sample_weight=weights)
    assert [float(metric.total), float(metric.count)] == [0.5, 0.25]


def test_moments_have_one_function():
    layer, seen = layers.BatchNormalization(), []
    with _internals.with_moments(noting(seen, lambda layer, *_: layer)):
        for training in (True, False):
            layer(ONES([2, 3]), training=training)
    layer(ONES([2, 3]), training=True)
    assert seen == [layer]


def test_calls_of_layers_and_operations():
    inputs = keras.Input([4], name="inputs")
    outputs = ops.square(layers.Dense(2, name="dense")(inputs))
    functional, seen = keras.Model(inputs, outputs, name="functional"), []
    with _internals.with_calls(noting(seen, lambda operation, *_: operation.name)):
        functional(np.ones([2, 4]))
    functional(np.ones([2, 4]))
    assert seen[:2] == ["functional", "dense"]
    assert seen[2].startswith("square")
    assert len(seen) == 3


# Copies, and what is put back


def test_copies_of_models():
    plain = model()
    other = _internals.copy_of_model(plain)
    assert [id(v) for v in other.variables] == [id(v) for v in plain.variables]
    before = dict(vars(plain))
    other.train_function, other.jit_compile = len, False
    assert vars(plain) == before
    arguments = _internals.compile_arguments(plain)
    assert (arguments["loss"], arguments["metrics"]) == ("mse", ["mae"])
    keras.Model.compile(other, **{**arguments, "loss": "mae"})
    assert plain.loss == "mse"


def test_a_copy_builds_its_compiled_loss_and_metrics_apart():
    shared = keras.Input([4])
    plain = keras.Model(shared, [layers.Dense(1)(shared), layers.Dense(2)(shared)])
    plain.compile("sgd", ["mse", "mae"], metrics=[["mae"], []])
    other = _internals.copy_of_model(plain)
    _internals.set_compiled_apart(other)
    other.train_on_batch(np.ones([2, 4]), [np.ones([2, 1]), np.ones([2, 2])])
    assert other._compile_metrics.built
    assert other._compile_loss.built
    assert not plain._compile_metrics.built
    assert not plain._compile_loss.built
    assert plain._compile_loss.metrics == []
    assert len(other._compile_loss.metrics) == 2


def test_losses_in_float64(monkeypatch):
    from keras.src.backend.common import dtypes

    monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float32")  # as on JAX and torch
    narrow = keras.losses.MeanSquaredError(dtype="float32")
    wide = _internals.in_float64(narrow)
    y = np.array([[1e-9 + 1.0]])
    assert float(narrow(y, y - 1e-9)) == 0.0
    with _internals.with_float64():
        assert dtypes.BIT64_TO_BIT32_DTYPE["float64"] == "float64"
        assert float(wide(y, y - 1e-9)) > 0.0
    assert dtypes.BIT64_TO_BIT32_DTYPE["float64"] == "float32"


def test_global_state():
    def drawn():
        return kept(keras.random.uniform([2])), layers.Dense(1).name

    keras.utils.set_random_seed(1)
    drawn()
    with _internals.same_global_state():
        first = drawn()
    assert drawn() == first

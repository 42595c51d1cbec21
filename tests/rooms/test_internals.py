"""Each private name of Keras and TensorFlow that macrobatch uses is still there, and means what it
is taken for.
"""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from macrobatch import _internals


def model():
    built = keras.Sequential([keras.Input([4]), layers.Dense(2), layers.Dropout(0.5)])
    built.compile("sgd", "mse", metrics=["mae"])
    return built


def test_every_name_has_a_test():
    """A new name in the room needs a test that names it, here or in files of a similar name."""
    tests = pathlib.Path(__file__).parents[1]
    files = [*tests.glob("rooms/test_internals*.py"), *tests.glob("backends/test_*_internals.py")]
    source = "".join(path.read_text() for path in files)
    names = set(_internals.__all__) - {"Patch"}
    assert not [name for name in sorted(names) if f"_internals.{name}" not in source]


def test_models():
    plain = model()
    assert _internals.layers_of(plain)[0] is plain
    assert len(_internals.layers_of(plain)) == 3 + 1  # with the InputLayer
    assert _internals.loss_tracker(plain) in plain.metrics
    assert _internals.compiled_loss(plain).built is False
    assert _internals.compiled_metrics(plain) in plain.metrics
    assert _internals.strategy_of(plain) is None
    assert callable(getattr(plain, _internals.BUILDING))
    x = tf.ones([3, 4])
    np.testing.assert_array_equal(_internals.predictions(plain, x, False), plain(x))
    loss = _internals.compute_loss(plain, x, tf.zeros([3, 2]), plain(x), None, True)
    np.testing.assert_allclose(loss, tf.reduce_mean(plain(x) ** 2))
    _internals.set_initial_epoch(plain, 3)
    epochs = []
    log = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: epochs.append(epoch))
    plain.fit(x, tf.zeros([3, 2]), epochs=5, verbose=0, callbacks=[log])
    assert epochs == [3, 4]


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


def test_compiled_losses():
    plain = model()
    compiled = _internals.compiled_loss(plain)
    compiled(tf.ones([3, 2]), tf.zeros([3, 2]))
    (entry,) = _internals.flat_losses(compiled)
    assert entry._fields == ("path", "loss", "loss_weights", "name")
    other = entry._replace(loss=lambda y, y_pred, sample_weight: tf.constant(5.0, tf.float64))
    replaced = _internals.with_losses(compiled, [other], [])
    assert float(replaced(tf.ones([3, 2]), tf.zeros([3, 2]))) == 5.0
    assert float(compiled(tf.ones([3, 2]), tf.zeros([3, 2]))) == 1.0
    copied = _internals.shallow_copy(entry.loss)
    copied.reduction = "sum"
    assert entry.loss.reduction == "sum_over_batch_size"


def test_losses_of_layers_and_masks():
    layer = layers.ActivityRegularization(l1=1.0)
    with keras.StatelessScope(collect_losses=True):
        layer(tf.ones([2, 3]))
        assert len(_internals.own_losses(layer)) == 1
    masked = layers.Masking()(tf.zeros([2, 3, 1]))
    assert not np.any(_internals.mask_of(masked))
    assert _internals.mask_of(tf.zeros([2])) is None
    tensor, mask = tf.zeros([2, 3]), tf.ones([2, 3], tf.bool)
    _internals.set_mask(tensor, mask)
    assert _internals.mask_of(tensor) is mask


def test_losses_that_layers_added_can_be_forgotten():
    built = keras.Sequential([keras.Input([3]), layers.ActivityRegularization(l1=1.0)])
    with keras.StatelessScope(collect_losses=True):
        built(tf.ones([2, 3]))
        assert len(built.losses) == 1
        _internals.clear_losses(built)
        assert built.losses == []
        built.layers[0].add_loss(tf.constant(3.0))
        assert [float(loss) for loss in built.losses] == [3.0]


def test_variables():
    variable = keras.Variable(1.0)
    with keras.StatelessScope(state_mapping=[(variable, tf.constant(2.0, tf.float64))]):
        assert float(variable.value) == 2.0
        assert float(_internals.raw_value(variable)) == 1.0
        assert _internals.variables_without_value() == []
        made = keras.Variable(lambda shape, dtype: tf.zeros(shape, dtype), shape=[2])
        assert any(each is made for each in _internals.variables_without_value())
    assert _internals.variables_without_value() == []


def test_optimizers():
    inner = [keras.optimizers.SGD(), keras.optimizers.Adam()]
    scaled = keras.optimizers.LossScaleOptimizer(inner[0])
    found = _internals.with_inner_optimizers(scaled)
    assert any(each is inner[0] for each in found)
    assert all(hasattr(each, _internals.REDUCING) for each in (scaled, *inner))


def test_tensorflow():
    seen = []

    def compiled():
        seen.append(_internals.is_in_xla(tf.compat.v1.get_default_graph()))
        return tf.constant(1)

    tf.function(compiled)()
    tf.function(compiled, jit_compile=True)()
    assert seen[0] is False
    assert seen[-1] is True
    assert _internals.is_compiled(tf.function(compiled, jit_compile=True))
    assert not _internals.is_compiled(tf.function(compiled))
    assert not _internals.is_compiled(compiled)

    @tf.function(jit_compile=True)
    def of_random_size():
        return tf.zeros([tf.random.uniform([], 1, 3, tf.int32)])

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        of_random_size()
    assert _internals.is_of_unknown_shape(caught.value)

    def branching(x):
        if x > 0:
            return x
        return -x

    convert = _internals.autograph_converted(branching, _internals.autograph_status())
    assert float(tf.function(convert, autograph=False)(tf.constant(-2.0))) == 2.0


# Functions that are replaced for a while


def test_means_are_divided_by_the_number_of_replicas_in_one_place(monkeypatch):
    module = __import__(keras.losses.Loss.__module__, fromlist=["loss"])
    monkeypatch.setattr(module, "scale_loss_for_distribution", lambda value: value / 2)
    loss = keras.losses.MeanSquaredError()
    assert float(loss(tf.ones([2, 1]), tf.zeros([2, 1]))) == 0.5
    with _internals.without_replica_scaling():
        assert float(loss(tf.ones([2, 1]), tf.zeros([2, 1]))) == 1.0
    assert float(loss(tf.ones([2, 1]), tf.zeros([2, 1]))) == 0.5
    monkeypatch.setattr(module, "unscale_loss_for_distribution", lambda value: value * 2)
    with _internals.without_replica_unscaling():
        assert float(module.unscale_loss_for_distribution(tf.constant(1.0))) == 1.0
    assert float(module.unscale_loss_for_distribution(tf.constant(1.0))) == 2.0


def test_dropout_has_one_function():
    ones = tf.ones([3, 4, 5])
    for layer in (layers.Dropout(0.9), layers.LSTM(2, dropout=0.9), layers.SpatialDropout1D(0.9)):
        layer(ones)
        with _internals.with_dropout(lambda drop, inputs, *args, **kwargs: inputs):
            inside = layer(ones, training=True)
        np.testing.assert_allclose(inside, layer(ones, training=False), rtol=1e-6)
        assert np.abs(layer(ones, training=True) - layer(ones, training=False)).max() > 1e-3


def test_metrics_reduce_with_one_function():
    def quarter(reduce, *args, **kwargs):
        values, weights = reduce(*args, **kwargs)
        return values * 0.25, weights * 0.25

    metric = keras.metrics.MeanAbsoluteError()
    y, weights = tf.zeros([2, 3, 1]), tf.constant([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    with _internals.with_samplewise_values(quarter):
        metric.update_state(y, y + 2, sample_weight=weights)
    np.testing.assert_allclose([metric.total.numpy(), metric.count.numpy()], [0.5, 0.25])


def test_moments_have_one_function():
    layer, seen = layers.BatchNormalization(), []

    def note(moments, layer, inputs, mask):
        seen.append(layer)
        return moments(layer, inputs, mask)

    with _internals.with_moments(note):
        layer(tf.ones([2, 3]), training=True)
        layer(tf.ones([2, 3]), training=False)
    layer(tf.ones([2, 3]), training=True)
    assert seen == [layer]


def test_a_patch_is_for_its_thread_and_knows_itself():
    import functools
    import threading

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


def test_calls_of_layers_and_operations():
    inputs = keras.Input([4], name="inputs")
    outputs = keras.ops.square(layers.Dense(2, name="dense")(inputs))
    functional = keras.Model(inputs, outputs, name="functional")
    seen = []

    def instead(call, operation, *args, **kwargs):
        outputs = call(operation, *args, **kwargs)
        seen.append(operation.name)
        return outputs

    with _internals.with_calls(instead):
        functional(np.ones([2, 4]))
    functional(np.ones([2, 4]))
    assert seen[0] == "dense"
    assert seen[1].startswith("square")
    assert seen[2:] == ["functional"]


def test_writes_of_variables():
    seen = []

    def instead(write, variable, *args, **kwargs):
        seen.append(variable)
        return write(variable, *args, **kwargs)

    variable, of_keras = tf.Variable([1.0]), keras.Variable([1.0])
    with _internals.with_writes(instead):
        for write in (variable.assign, variable.assign_add, variable.assign_sub):
            write([1.0])
        variable.scatter_nd_update([[0]], [1.0])
        of_keras.assign([2.0])
    assert [each is variable for each in seen] == [True] * 4 + [False]


def test_steps_pass_through_a_method():
    plain, seen = model(), []
    passing = getattr(plain, _internals.STEPPING)

    def watching(step):
        def watched(data):
            seen.append(data)
            return step(data)

        return passing(watched)

    setattr(plain, _internals.STEPPING, watching)
    plain.fit(np.ones([2, 4]), np.ones([2, 2]), verbose=0)
    plain.train_on_batch(np.ones([2, 4]), np.ones([2, 2]))
    assert len(seen) == 2


def test_models_are_looked_at_before_they_train():
    seen = []

    def look(model):
        seen.append(model)

    _internals.before_training(look)
    try:
        plain = model()
        plain.fit(np.ones([2, 4]), np.ones([2, 2]), verbose=0)
        assert seen == [plain]
    finally:
        _internals.models._before_training.remove(look)


@pytest.mark.parametrize("name", ["_lookup_dependency", "_checkpoint_dependencies"])
def test_checkpoints_ask_trackable_objects(name):
    """GradientAccumulator's window overrides these: there are no public hooks."""
    assert hasattr(tf.Module, name)


def test_what_an_optimizer_was_built_for():
    plain = model()
    plain.optimizer.build(plain.trainable_variables)
    for optimizer in (plain.optimizer, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())):
        if not optimizer.built:
            optimizer.build(plain.trainable_variables)
        found = _internals.variables_of_optimizer(optimizer)
        assert all(one is other for one, other in zip(found, plain.trainable_variables))
        assert len(found) == 2


def test_whether_a_tape_records():
    assert not _internals.is_recording()
    with tf.GradientTape() as tape:
        assert _internals.is_recording()
        with tape.stop_recording():
            assert not _internals.is_recording()
    assert not _internals.is_recording()

"""Each private name of TensorFlow that macrobatch uses, and of Keras on TensorFlow alone, is still
there, and means what it is taken for.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from support.loops import on_replicas
from tensorflow.python.eager import context

from macrobatch import _internals


def model():
    built = keras.Sequential([keras.Input([4]), keras.layers.Dense(2)])
    built.compile("sgd", "mse")
    return built


def test_methods_that_keras_calls():
    assert callable(getattr(model(), _internals.BUILDING))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    assert all(hasattr(each, _internals.REDUCING) for each in (scaled, scaled.inner_optimizer))


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


def test_compilation():
    seen = []

    def noted():
        seen.append(_internals.is_in_xla(tf.compat.v1.get_default_graph()))
        return tf.constant(1)

    compiled = tf.function(noted, jit_compile=True)
    tf.function(noted)()
    compiled()
    assert seen[0] is False
    assert seen[-1] is True
    found = [_internals.is_compiled(each) for each in (compiled, tf.function(noted), noted)]
    assert found == [True, False, False]

    @tf.function(jit_compile=True)
    def of_random_size():
        return tf.zeros([tf.random.uniform([], 1, 3, tf.int32)])

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        of_random_size()
    assert _internals.is_of_unknown_shape(caught.value)


def test_autograph():
    def branching(x):
        if x > 0:
            return x
        return -x

    convert = _internals.autograph_converted(branching, _internals.autograph_status())
    assert float(tf.function(convert, autograph=False)(tf.constant(-2.0))) == 2.0


def test_whether_a_tape_records():
    assert not _internals.is_recording()
    with tf.GradientTape() as tape:
        assert _internals.is_recording()
        with tape.stop_recording():
            assert not _internals.is_recording()
    assert not _internals.is_recording()


def test_means_are_divided_by_the_number_of_replicas_in_one_place(monkeypatch):
    module = __import__(keras.losses.Loss.__module__, fromlist=["loss"])
    monkeypatch.setattr(module, "scale_loss_for_distribution", lambda value: value / 2)
    monkeypatch.setattr(module, "unscale_loss_for_distribution", lambda value: value * 2)

    def found():
        loss = keras.losses.MeanSquaredError()(tf.ones([2, 1]), tf.zeros([2, 1]))
        return float(loss), float(module.unscale_loss_for_distribution(tf.constant(1.0)))

    assert found() == (0.5, 2.0)
    with _internals.without_replica_scaling():
        assert found() == (1.0, 2.0)
    with _internals.without_replica_unscaling():
        assert found() == (0.5, 1.0)
    assert found() == (0.5, 2.0)


def test_keras_divides_a_mean_by_the_number_of_replicas():
    """Why losses inside strategy.run are to be averaged from reduction=None."""
    x = tf.ones([4, 1], tf.float64)

    def function(x):
        mean = keras.losses.MeanSquaredError()
        each = keras.losses.MeanSquaredError(reduction=None)
        return mean(0 * x, x), tf.reduce_mean(each(0 * x, x))

    means, averages = on_replicas(function, x, (2, 2))
    assert ([float(m) for m in means], [float(a) for a in averages]) == ([0.5, 0.5], [1.0, 1.0])


def test_writes_of_variables():
    seen, variable, of_keras = [], tf.Variable([1.0]), keras.Variable([1.0])

    def instead(write, variable, *args, **kwargs):
        seen.append(variable)
        return write(variable, *args, **kwargs)

    with _internals.with_writes(instead):
        for write in (variable.assign, variable.assign_add, variable.assign_sub):
            write([1.0])
        variable.scatter_nd_update([[0]], [1.0])
        of_keras.assign([2.0])
    assert [each is variable for each in seen] == [True] * 4 + [False]


def test_checkpoints_ask_trackable_objects():
    """GradientAccumulator's window overrides these: there are no public hooks."""
    assert callable(tf.Module._lookup_dependency)
    assert isinstance(tf.Module._checkpoint_dependencies, property)


def test_copies_have_lists_of_their_own_for_checkpoints():
    plain = model()
    tf.train.Checkpoint(model=plain).save_counter  # noqa: B018 - makes TensorFlow's lists
    other = _internals.copy_of_model(plain)
    before = {name: repr(value) for name, value in vars(plain).items()}
    other.train_function = tf.function(lambda: None)
    assert {name: repr(value) for name, value in vars(plain).items()} == before


def test_data_as_fit_takes_it():
    x, y = np.ones([5, 2]), np.zeros([5], "int64")
    data = _internals.data_of_fit(x, y=y, batch_size=2, class_weight={0: 3.0})
    assert data.num_batches == 3
    first = next(iter(data.get_tf_dataset()))
    assert [tuple(leaf.shape) for leaf in first] == [(2, 2), (2,), (2,)]
    np.testing.assert_array_equal(first[2], [3.0, 3.0])


def test_generators_of_tensorflow():
    def drawn():
        return tf.random.get_global_generator().uniform([2]).numpy().tolist()

    keras.utils.set_random_seed(1)
    drawn()
    of_operations = context.context()._rng
    before = of_operations.getstate()
    with _internals.same_generators_of_tensorflow():
        first = drawn()
        tf.random.uniform([2])
        assert of_operations.getstate() != before
    assert of_operations.getstate() == before
    assert drawn() == first

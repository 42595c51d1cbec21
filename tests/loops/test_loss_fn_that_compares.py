"""Examples that meet in value_and_gradients are found, where Python can see them."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import thorough_for
from test_accumulator_everywhere import mirrored

from macrobatch import ExactnessWarning, value_and_gradients

X = np.random.default_rng(0).normal(size=[24, 5])


class Centred(layers.Layer):
    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def model_of(*inner):
    return keras.Sequential([keras.Input([5]), layers.Dense(4), *inner])


def contrastive(z):
    z = tf.math.l2_normalize(z, -1)
    return tf.reduce_logsumexp(tf.matmul(z, z, transpose_b=True), 1)


def said_of(loss_fn, variables, mode="eager", size=6, **options):
    """What is said of a function, of which two steps are made. The second has nothing to say."""

    def step(x):
        return value_and_gradients(loss_fn, variables, x, micro_batch_size=size, **options)[0]

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(tf.constant(X))
    assert all(each.category is ExactnessWarning for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("size", [1, 6])
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_in_which_examples_meet(mode, size):
    model = model_of()
    (message,) = said_of(lambda x: contrastive(model(x)), model.trainable_variables, mode, size)
    assert message.startswith("Examples meet in loss_fn. ")
    assert "forward=" in message


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_layer_in_which_examples_meet(mode):
    model = model_of(Centred(name="culprit"), layers.Dense(2))

    def loss_fn(x):
        return tf.reduce_mean(tf.square(model(x))), {"aux": x}

    (message,) = said_of(loss_fn, model.trainable_variables, mode, has_aux=True)
    assert message.startswith("Examples meet in these layers, which loss_fn calls: 'culprit'. ")


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_loss_of_the_whole_batch_may_compare_and_forward_may_not(mode):
    def loss_fn(outputs, x):
        return contrastive(outputs)

    for inner in ([], [Centred(name="culprit")]):
        model = model_of(*inner)
        said = said_of(loss_fn, model.trainable_variables, mode, forward=lambda x, m=model: m(x))
        starts = ["Examples meet in these layers, which forward calls: 'culprit'. "] * len(inner)
        assert [message[: len(start)] for message, start in zip(said, starts)] == starts
        assert len(said) == len(starts)


class ByNumber(layers.Layer):
    def call(self, x):
        return x / keras.ops.cast(keras.ops.shape(x)[0], x.dtype)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("inner", [[], [layers.Dropout(0.5)]])
def test_what_depends_on_how_many_examples_there_are(mode, inner):
    size = 12

    def of_number(model):
        return lambda x: tf.reduce_mean(tf.square(model(x)), 1) / len(x)

    model = model_of(*inner)
    (message,) = said_of(of_number(model), model.trainable_variables, mode, size)
    assert message.startswith("loss_fn depends on how many examples a micro-batch has, ")

    model = model_of(*inner, ByNumber(name="culprit"), layers.Dense(2))
    forward = {"forward": lambda x: model(x, training=True)}
    said = said_of(lambda z, x: contrastive(z), model.trainable_variables, mode, size, **forward)
    assert [message[:28] for message in said] == ["forward depends on how many "]
    assert "(because of these layers: 'culprit')" in said[0]


@thorough_for("compiled")
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_what_is_by_example_is_silent(mode):
    model = model_of(layers.Dropout(0.5), layers.GaussianNoise(0.1), layers.LayerNormalization())

    def loss_fn(x):
        weights = tf.cast(x > 0, x.dtype)  # whose number differs from micro-batch to micro-batch
        return tf.square(x) * tf.reduce_sum(model(x, training=True), 1, keepdims=True), weights

    assert said_of(loss_fn, model.trainable_variables, mode) == []


def test_a_compiled_function_calls_no_python():
    model = model_of()
    loss_fn = lambda x: contrastive(model(x))  # noqa: E731
    assert said_of(loss_fn, model.trainable_variables, "compiled") == []


def test_a_batch_that_is_not_cut_is_silent():
    model = model_of()
    assert said_of(lambda x: contrastive(model(x)), model.trainable_variables, size=24) == []


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_no_verdict_where_draws_are_not_put_back(mode):
    model = model_of()

    def loss_fn(x):
        return tf.square(model(x + tf.random.normal([5], dtype=x.dtype)))

    (message,) = said_of(loss_fn, model.trainable_variables, mode)
    assert message.startswith("It is not known whether examples meet")


def test_no_verdict_where_the_loss_is_not_finite():
    model = model_of()

    def loss_fn(x):
        return tf.math.log(-tf.abs(model(x)))

    (message,) = said_of(loss_fn, model.trainable_variables, "eager")
    assert "NaN or infinite" in message


def test_a_function_of_tensors_of_its_graph_is_silent():
    """It cannot be called outside of the graph."""
    model = model_of()

    @tf.function
    def step(x):
        largest = tf.reduce_max(x)
        return value_and_gradients(
            lambda x: tf.square(model(x)) * largest,
            model.trainable_variables,
            x,
            micro_batch_size=6,
        )[0]

    step(tf.constant(X))


def test_weights_move_after_the_trial():
    """In a graph, whatever is written waits for Python."""
    model, variable = model_of(), tf.Variable(1.0, dtype=tf.float64)
    optimizer = keras.optimizers.SGD(0.5)
    calls = []

    def loss_fn(x):
        if tf.executing_eagerly():
            calls.append(float(variable))
        return tf.square(model(x)) * variable

    @tf.function
    def step(x):
        trained = model.trainable_variables
        _, gradients = value_and_gradients(loss_fn, trained, x, micro_batch_size=6)
        optimizer.apply(gradients, trained)
        with tf.control_dependencies(gradients):
            variable.assign(3.0)

    step(tf.constant(X))
    assert set(calls) == {1.0}


def test_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        model = model_of()

    def loss_fn(x):
        return contrastive(model(x))

    @tf.function
    def step(x):
        return strategy.run(
            lambda x: value_and_gradients(
                loss_fn, model.trainable_variables, x, micro_batch_size=6
            )[0],
            args=(x,),
        )

    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X).rebatch(24))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ExactnessWarning)
        step(next(iter(batches)))
    found = [str(each.message) for each in caught if each.category is ExactnessWarning]
    assert [message[:25] for message in found] == ["Examples meet in loss_fn."]

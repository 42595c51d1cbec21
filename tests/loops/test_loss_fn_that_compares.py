"""The check of value_and_gradients whether examples interact: of which functions it says what."""

import re
import warnings
from typing import Callable, NamedTuple, Optional, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import mirrored, thorough
from support.interaction import ByNumber, Centred
from support.loops import accumulated, made_in, on_replicas

from macrobatch import ExactnessWarning

X = tf.constant(np.random.default_rng(0).normal(size=[24, 5]))


def model_of(*inner):
    return keras.Sequential([keras.Input([5]), layers.Dense(4), *inner])


def contrastive(z):
    z = tf.math.l2_normalize(z, -1)
    return tf.reduce_logsumexp(tf.matmul(z, z, transpose_b=True), 1)


def weighted(x, z):
    """With weights whose number differs from micro-batch to micro-batch."""
    return tf.square(x) * tf.reduce_sum(z, 1, keepdims=True), tf.cast(x > 0, x.dtype)


def said_by(step):
    """What two calls say of a function. The second has nothing to say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(X)
    assert all(each.category is ExactnessWarning for each in caught)
    return [str(each.message) for each in caught]


class Case(NamedTuple):
    loss_fn: Callable  # of a model
    said: Optional[str] = None  # what the warning begins with, a pattern; nothing is said
    inner: Callable[[], Sequence] = list  # layers of the model
    forward: Optional[Callable] = None  # of a model
    size: int = 6
    has_aux: bool = False

    def said_in(self, mode):
        model = model_of(*self.inner())
        step = accumulated(
            self.loss_fn(model),
            model.trainable_variables,
            self.size,
            has_aux=self.has_aux,
            forward=self.forward and self.forward(model),
        )
        if mode != "eager":
            step = tf.function(step, jit_compile=mode == "compiled")
        return said_by(lambda x: step(x)[0])


def dropout():
    return [layers.Dropout(0.5)]


def centred():
    return [Centred(name="culprit"), layers.Dense(2)]


def by_number():
    return [ByNumber(name="culprit"), layers.Dense(2)]


def by_place():
    """Only in its last examples it differs from a run of these alone."""
    places = layers.Lambda(
        lambda x: x + keras.ops.arange(x.shape[0], dtype=x.dtype)[:, None], name="culprit"
    )
    return [places, layers.Dense(2)]


def by_example():
    return [layers.Dropout(0.5), layers.GaussianNoise(0.1), layers.LayerNormalization()]


# The model, and a loss of the whole batch that may compare.
FORWARD = {
    "loss_fn": lambda model: lambda z, x: contrastive(z),
    "forward": lambda model: lambda x: model(x, training=True),
}
LOSS = Case(lambda model: lambda x: contrastive(model(x)), r"Examples meet in loss_fn\. .*forward=")
NUMBER = Case(
    lambda model: lambda x: tf.reduce_mean(tf.square(model(x)), 1) / len(x),
    "loss_fn depends on how many examples a micro-batch has, ",
    size=12,
)
NUMBER_IN_FORWARD = Case(
    said=r"forward depends on how many .*\(because of these layers: 'culprit'\)",
    inner=by_number,
    size=12,
    **FORWARD,
)
CASES = {
    "loss": LOSS,
    "loss-of-one": LOSS._replace(size=1),
    "not-cut": LOSS._replace(size=24, said=None),
    "layer": Case(
        lambda model: lambda x: (tf.reduce_mean(tf.square(model(x))), {"aux": x}),
        r"Examples meet in these layers, which loss_fn calls: 'culprit'\. ",
        inner=centred,
        has_aux=True,
    ),
    "forward": Case(**FORWARD),
    "layer-in-forward": Case(
        said=r"Examples meet in these layers, which forward calls: 'culprit'\. ",
        inner=lambda: centred()[:1],
        **FORWARD,
    ),
    "number": NUMBER,
    "number-behind-dropout": NUMBER._replace(inner=dropout),
    "number-in-forward": NUMBER_IN_FORWARD,
    "place-in-forward": NUMBER_IN_FORWARD._replace(inner=by_place),
    "number-in-forward-behind-dropout": NUMBER_IN_FORWARD._replace(
        inner=lambda: dropout() + by_number()
    ),
    "by-example": Case(
        lambda model: lambda x: weighted(x, model(x, training=True)), inner=by_example
    ),
    # Its draws cannot be put back.
    "drawing": Case(
        lambda model: lambda x: tf.square(model(x + tf.random.normal([5], dtype=x.dtype))),
        "It is not known whether examples meet",
    ),
    "not-finite": Case(lambda model: lambda x: tf.math.log(-tf.abs(model(x))), ".*NaN or infinite"),
}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_said(case, mode):
    found, said = CASES[case].said_in(mode), CASES[case].said
    assert len(found) == (said is not None)
    assert all(re.match(said, message, re.DOTALL) for message in found)


@pytest.mark.parametrize("case", ["loss", pytest.param("by-example", marks=thorough)])
def test_a_compiled_function_calls_no_python(case):
    assert CASES[case].said_in("compiled") == []


def test_a_function_of_tensors_of_its_graph_is_silent():
    """It cannot be called outside of the graph."""
    model = model_of()

    @tf.function
    def step(x):
        largest = tf.reduce_max(x)
        return accumulated(
            lambda x: tf.square(model(x)) * largest, model.trainable_variables, size=6
        )(x)[0]

    assert said_by(step) == []


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
        _, gradients = accumulated(loss_fn, trained, 6)(x)
        optimizer.apply(gradients, trained)
        with tf.control_dependencies(gradients):
            variable.assign(3.0)

    step(X)
    assert set(calls) == {1.0}


def test_replicas():
    model = made_in(mirrored(2), model_of)
    step = accumulated(lambda x: contrastive(model(x)), model.trainable_variables, 6)

    def loss(x):
        return step(x)[0]

    (message,) = said_by(lambda x: on_replicas(loss, x, (12, 12)))
    assert message.startswith("Examples meet in loss_fn.")

"""Layers that trace what they call, or map a function over examples: calls in there have no numbers
that could be looked at. The layers around them are named all the same.
"""

import keras
import numpy as np
import pytest
from builders import data
from keras import layers, ops
from support import slow_on
from support.interaction import Centred

import macrobatch

X = data(16, 5, 3)
Y = X[:, :2, 0]


class Mapped(layers.Layer):
    """A layer that calls another for one example at a time."""

    def build(self, shape):
        self.dense = layers.Dense(4)
        self.dense.build((1, shape[1] * shape[2]))

    def call(self, x):
        return ops.vectorized_map(lambda row: self.dense(ops.reshape(row, (1, -1)))[0], x)


KINDS = {
    "cells": lambda: layers.RNN(layers.GRUCell(3), name="inner"),
    "map": lambda: Mapped(name="inner"),
}


def model_of(kind, *others):
    model = keras.Sequential([keras.Input([5, 3]), KINDS[kind](), *others, layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.examples_meet
def test_a_layer_in_which_examples_meet_is_named():
    """Behind a function that is mapped, too: test_interaction.py."""
    model = macrobatch.accumulate(model_of("cells", Centred(name="culprit")), 4)
    with pytest.warns(macrobatch.ExactnessWarning, match="meet in these layers: 'culprit'"):
        model.train_on_batch(X, Y)


@slow_on("jax", "tensorflow")
def test_verify_names_it_too():
    model = model_of("cells", Centred(name="culprit"))
    (cause,) = macrobatch.verify(model, X, Y, micro_batch_size=4).causes
    assert (cause.kind, cause.names) == ("examples_meet", ("culprit",))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layer_that_is_not_finite_is_named(kind):
    model = macrobatch.accumulate(model_of(kind), 4, nonfinite="raise")
    x = np.where(np.arange(16)[:, None, None] == 5, np.nan, X)
    # Where nothing is traced, the cell is the first.
    with pytest.raises(ValueError, match=r"example 5, .* not finite is '(inner|gru_cell)"):
        model.train_on_batch(x, Y)

"""The update: an optimizer makes of our gradients what it makes of the same ones in plain Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_cases import OPTIMIZERS

from macrobatch._tensorflow import update

SHAPES = [(4, 3), (3,)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer(name):
    random = np.random.default_rng(0)
    starts = [random.normal(size=shape) for shape in SHAPES]
    ends = []
    for apply in (lambda optimizer, *of: optimizer.apply(*of), update.apply_gradients):
        variables = [keras.Variable(start, dtype="float64") for start in starts]
        optimizer = OPTIMIZERS[name]()
        optimizer.build(variables)
        draws = np.random.default_rng(1)
        for _ in range(3):
            gradients = [tf.constant(draws.normal(size=shape)) for shape in SHAPES]
            apply(optimizer, gradients, variables)
        ends.append([np.array(each.value) for each in (*variables, *optimizer.variables)])
    assert any(np.abs(start - end).max() > 1e-3 for start, end in zip(starts, ends[0]))
    for plain, ours in zip(*ends):
        np.testing.assert_allclose(ours, plain, rtol=1e-10, atol=1e-10)

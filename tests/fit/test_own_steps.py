"""Models with a train step of their own: the updates of plain `fit` on the whole batch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit.step_cases import CASES
from support import MODES, assert_same_history

import macrobatch


def state_of(model):
    """All variables of a model, its metrics and its optimizers."""
    optimizers = getattr(model, "optimizers", ()) or [model.optimizer]
    variables = [*model.variables, *model.metrics_variables]
    variables += [variable for optimizer in optimizers for variable in optimizer.variables]
    return {variable.path: variable.numpy() for variable in variables}


def trained(build, data, mode, cut=None, epochs=2, dtype=None, **fit):
    keras.utils.set_random_seed(7)
    model = build(dict(mode))
    if cut:
        macrobatch.accumulate(model, **cut)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(20)
    keras.utils.set_random_seed(3)
    history = model.fit(dataset, epochs=epochs, shuffle=False, verbose=0, **fit).history
    return model, history


@functools.lru_cache(maxsize=None)
def reference(name):
    """What plain Keras comes to, in a graph."""
    model, history = trained(*CASES[name], {})
    return list(state_of(model).values()), history


def assert_as_plain(name, mode, **cut):
    values, history = reference(name)
    model, other = trained(*CASES[name], mode, cut or {"micro_batch_size": 3})
    found = state_of(model)
    assert len(found) == len(values)
    for value, (path, own) in zip(values, found.items()):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10, err_msg=path)
    assert_same_history(history, other)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_steps(name, mode):
    assert_as_plain(name, MODES[mode])

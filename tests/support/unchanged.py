"""Nothing is lost where something fails: all numbers that training may change are as before."""

import contextlib

import numpy as np
import pytest

import support
from support import BACKEND, array


def state_of(model):
    """Weights, slots, statistics, seeds, metrics and counters, by their names."""
    optimizer = [] if model.optimizer is None else model.optimizer.variables
    variables = [*model.variables, *model.metrics_variables, *optimizer]
    found = {}
    for v in variables:
        copies = support.strategy.experimental_local_results(v.value)
        found[v.path, id(v)] = [array(copy) for copy in copies]
    if BACKEND == "torch":
        found.update((f"buffer {name}", array(each)) for name, each in model.named_buffers())
        for v in model.trainable_weights:
            gradient = v.value.grad
            found[f"gradient of {v.path}"] = None if gradient is None else array(gradient)
    return found


def assert_kept(expected, found):
    """Asserts that a state is as it was. There may be more variables, which a batch has made."""
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=str(name))


@contextlib.contextmanager
def unchanged(model, error, match):
    """A context that raises this error, and changes nothing of the model."""
    before = state_of(model)
    with pytest.raises(error, match=match):
        yield
    assert_kept(before, state_of(model))

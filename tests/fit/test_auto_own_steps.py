"""micro_batch_size="auto" for train steps as people write them: a batch that runs out of memory is
run again from the state before it, whatever the step had written by then.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit.step_cases import CASES
from fit.test_own_steps import reference, state_of, trained
from support import MODES, assert_same_history, thorough
from support.memory import ran_out


class Exhausted:
    """Lets a Dense layer run out of memory, after some calls, with more than some examples."""

    def __init__(self, monkeypatch, most, skipped):
        self.most, self.skipped, self.calls = most, skipped, 0
        plain = keras.layers.Dense.call

        def call(layer, inputs, *args, **kwargs):
            outputs, size = plain(layer, inputs, *args, **kwargs), tf.shape(inputs)[0]
            if tf.executing_eagerly():
                self.check(size)
                return outputs
            with tf.control_dependencies([tf.py_function(self.check, [size], tf.int32)]):
                return tf.identity(outputs)

        monkeypatch.setattr(keras.layers.Dense, "call", call)

    def check(self, size):
        self.calls += 1
        if self.calls > self.skipped and size > self.most:
            raise ran_out(size)
        return size


@pytest.mark.filterwarnings("ignore:BatchNormalization:macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize(
    "name", [name if name == "gan" else pytest.param(name, marks=thorough) for name in CASES]
)
def test_a_batch_that_runs_out_is_run_again(name, mode, room, monkeypatch, caplog):
    values, history = reference(name)
    Exhausted(monkeypatch, most=5, skipped=6)
    model, found = trained(*CASES[name], MODES[mode], {"micro_batch_size": "auto"})
    for value, (path, own) in zip(values, state_of(model).items()):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10, err_msg=path)
    del found["micro_batch_size"]
    assert_same_history(history, found)
    assert "ran out" in caplog.text

"""The private names of Keras' trainer on JAX that macrobatch uses."""

import inspect

import keras
from jax_support import double_precision  # noqa: F401 - a fixture
from keras import layers

from macrobatch import _internals


def model():
    made = keras.Sequential([keras.Input([2]), layers.Dense(1)])
    made.compile("sgd", "mse", steps_per_execution=2)
    return made


def test_a_function_runs_a_step_several_times():
    function = _internals.step_by_step(model(), lambda state, data: (data, state + data))
    assert function(1, iter([2, 3, 4])) == (3, 6)


def test_a_state_that_is_kept_is_put_back():
    plain = model()
    kernel = plain.trainable_variables[0]
    expected = kernel.numpy() + 1
    _internals.keep_state(
        plain, ["trainable_variables"], [[v.value + 1 for v in plain.trainable_variables]]
    )
    plain.jax_state_sync()
    assert (kernel.numpy() == expected).all()


def test_keras_calls_the_method_call_on_jax():
    calls = []

    class Watched(keras.Model):
        def call(self, inputs, training=False):
            calls.append(inspect.stack()[1].function)
            return inputs

    found = _internals.predictions(Watched(), 3.0, True)
    assert found == 3.0
    assert calls == ["predictions"]

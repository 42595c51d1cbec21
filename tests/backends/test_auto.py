"""micro_batch_size="auto": sizes that are found while training, and batches that are run again.

Memory runs out where a layer says so, with the error that the backend has for it. test_memory.py
has real limits.
"""


import keras
import numpy as np
import pytest
from keras import layers
from support import BACKEND, assert_same

import macrobatch
from macrobatch._sizes import limit

x = np.random.RandomState(0).randn(60, 4)
y = np.random.RandomState(1).randn(60, 1)


def ran_out(size):
    """The error of the backend."""
    if BACKEND == "torch":
        return RuntimeError(f"DefaultCPUAllocator: can't allocate memory: no room for {size}")
    return MemoryError(f"RESOURCE_EXHAUSTED: no room for {size}")  # a JaxRuntimeError outside


class Room(layers.Layer):
    """Runs out of memory where a micro-batch has more than some number of elements."""

    most = 10**9
    ran: list = None  # the examples in each micro-batch
    supports_masking = True

    def call(self, inputs):
        if BACKEND == "torch":
            return inputs if inputs.device.type == "meta" else self.checked(inputs)
        import jax

        @jax.custom_jvp
        def checked(values):
            shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
            return jax.pure_callback(self.checked, shape, values)

        checked.defjvp(lambda values, tangents: (checked(*values), tangents[0]))
        return checked(inputs)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)

    def checked(self, inputs):
        size = int(np.prod(inputs.shape))
        if size > Room.most:
            raise ran_out(size)
        Room.ran.append(inputs.shape[0])
        return inputs


@pytest.fixture(autouse=True)
def an_error(monkeypatch):
    """Running out of memory is an error, as on a GPU."""
    monkeypatch.setattr(limit, "running_out_is_an_error", lambda on_gpu: True)
    monkeypatch.setattr(Room, "most", 10**9)
    monkeypatch.setattr(Room, "ran", [])


def narrow(monkeypatch, most):
    monkeypatch.setattr(Room, "most", most)
    Room.ran.clear()


def dense(*more):
    keras.utils.set_random_seed(1)
    inputs = keras.Input([4])
    outputs = layers.Dense(5, "tanh")(Room()(inputs))
    for layer in more:
        outputs = layer(outputs)
    return keras.Model(inputs, layers.Dense(1)(outputs))


def compiled(model, **options):
    model.compile(**{"optimizer": keras.optimizers.Adam(0.05), "loss": "mse", **options})
    return model


def fitted(model, *data, **options):
    keras.utils.set_random_seed(5)
    options = {"batch_size": 24, "epochs": 3, "shuffle": False, "verbose": 0, **options}
    return model.fit(*(data or (x, y)), **options).history


def plain(build=dense, *data, **options):
    model = compiled(build(), **options)
    fitted(model, *data)
    return model


MODES = [{}, {"metrics": ["mae"], "loss": "mae"}]
if BACKEND == "jax":
    MODES += [{"run_eagerly": True}, {"steps_per_execution": 2}]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_a_batch_that_runs_out_is_run_again(options, monkeypatch, caplog):
    expected = plain(**options)
    narrow(monkeypatch, 4 * 5)
    model = macrobatch.accumulate(compiled(dense(), **options))
    history = fitted(model)
    assert_same(expected, model)
    assert set(history["micro_batch_size"]) <= {1, 2, 4}
    (line,) = [r.message for r in caplog.records if "ran out" in r.message]
    assert "micro_batch_size=24, 16, 8, and was run again with 4" in line
    assert max(Room.ran) == 4
    assert int(model.optimizer.iterations.value) == 9

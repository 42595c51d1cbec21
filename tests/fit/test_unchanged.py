"""A step that fails has changed nothing: whatever fails, in any mode, on any backend."""

import keras
import numpy as np
import pytest
from builders import X, Y
from keras import layers, ops
from support import BACKEND, MODES, thorough
from support.unchanged import assert_kept, state_of

import macrobatch

MESSAGE = "this value is too large"


def guarded(tensor, value):
    """The tensor, where no value is above 100."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        limit = tf.cast(100, value.dtype)
        with tf.control_dependencies([tf.debugging.assert_less(value, limit, MESSAGE)]):
            return tf.identity(tensor)
    if BACKEND == "jax":
        import jax

        shape = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        return jax.pure_callback(on_host, shape, tensor, value)
    if value.device.type != "meta":
        on_host(None, value.detach())
    return tensor * 1.0


def on_host(tensor, value):
    if value.max() > 100:
        raise RuntimeError(MESSAGE)
    return tensor


class Failing(layers.Layer):
    """Fails in the forward or the backward pass where an input is above 100; or while it is traced.

    JAX traces a layer for a micro-batch of another size, here of 2 examples.
    """

    def __init__(self, where):
        super().__init__()
        self.where = where

    def call(self, inputs):
        if self.where == "trace" and inputs.shape[0] == 2:
            raise RuntimeError(MESSAGE)

        @ops.custom_gradient
        def identity(x):
            def gradient(*args, upstream=None):
                upstream = args[0] if upstream is None else upstream
                return guarded(upstream, x) if self.where == "backward" else upstream

            return guarded(x, x) if self.where == "forward" else x, gradient

        return identity(inputs)


def mse(y, y_pred):
    return ops.mean((y - y_pred) ** 2, axis=-1)


def failing_mse(y, y_pred):
    return mse(guarded(y, y), y_pred)


def with_buffer():
    """A module of torch that writes a buffer."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros([]))

        def forward(self, inputs):
            self.calls += 1
            return inputs

    class Wrapped(layers.TorchModuleWrapper):
        def compute_output_spec(self, inputs):
            return keras.KerasTensor(inputs.shape, inputs.dtype)

    return Wrapped(Module())


def model_with(where, **options):
    inputs = keras.Input([4])
    # Without a weight before it, the backward pass of the layer would not be needed.
    hidden = Failing(where)(layers.Dense(4, kernel_initializer="identity")(inputs))
    for layer in (layers.BatchNormalization(), layers.Dropout(0.5, seed=3), layers.Dropout(0.5)):
        hidden = layer(hidden)
    if BACKEND == "torch":
        hidden = with_buffer()(hidden)
    model = keras.Model(inputs, layers.Dense(2)(hidden))
    loss = failing_mse if where == "loss" else mse
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["mae"], **options)
    model.optimizer.build(model.trainable_variables)
    return model


def state_with_draws_of(model):
    if BACKEND != "torch":
        return state_of(model)
    import torch

    return {**state_of(model), "next draws": torch.get_rng_state().numpy()}


class Keep(keras.callbacks.Callback):
    """Keeps the state before each batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.state = state_with_draws_of(self.model)


def batches(where, example):
    """Batches of eight, with a fault at an example."""
    x, y = X.copy(), Y.copy()
    (y if where == "loss" else x)[example] = 1000.0
    for start in (0, 8):
        size = 6 if where == "trace" and start <= example < start + 8 else 8
        yield x[start : start + size], y[start : start + size]


# XLA on TensorFlow leaves out what raises. torch does not compile what may be lost.
FAILS_IN = {
    "tensorflow": {"graph": {}, "eager": {"run_eagerly": True}},
    "jax": {**MODES, "three steps": {"steps_per_execution": 3}},
    "torch": {"eager": {}},
}[BACKEND]
SETTINGS = {
    "plain": {},
    "whole batch": {"whole_batch_loss": True},
    "skip": {"nonfinite": "skip"},
    "auto": {"micro_batch_size": "auto"},
}
QUICK = {
    "tensorflow": ["backward-graph-plain", "backward-eager-whole batch"],
    "jax": ["forward-compiled-plain", "trace-compiled-plain"],
    "torch": [
        f"{where}-eager-{setting}" for where in ("forward", "backward") for setting in SETTINGS
    ],
}[BACKEND]


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize(
    ("where", "mode", "setting"),
    [
        pytest.param(*each, id="-".join(each), marks=() if "-".join(each) in QUICK else thorough)
        for where in ("forward", "backward", "loss", *(["trace"] if BACKEND == "jax" else []))
        for mode in FAILS_IN
        for setting in (SETTINGS if where != "trace" else ["plain"])
        for each in [(where, mode, setting)]
    ],
)
def test_a_step_that_fails_changes_nothing(where, mode, setting):
    """In the first micro-batch of the first batch, and in the last one of the second."""
    for example in (0, 15):
        model = model_with(where, **FAILS_IN[mode])
        macrobatch.accumulate(model, **{"micro_batch_size": 4, **SETTINGS[setting]})
        keep = Keep()
        with pytest.raises(Exception, match=MESSAGE):
            model.fit(batches(where, example), shuffle=False, verbose=0, callbacks=[keep])
        if mode != "three steps" or example == 0:  # of which no callback sees the first
            assert_kept(keep.state, state_with_draws_of(model))
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        assert int(model.optimizer.iterations) == (0 if example == 0 else 1)

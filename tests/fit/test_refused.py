"""What accumulate and fit refuse, with the reason. Nothing has changed then."""

import keras
import numpy as np
import pytest
from builders import X, Y, compiled, data, dense, fit
from keras import layers, losses, ops, optimizers
from support import BACKEND, MODES, only_on, thorough
from support.unchanged import unchanged

import macrobatch

# The modes in which numbers can be looked at: XLA would leave that out.
UNCOMPILED = [mode for mode in MODES if "compiled" not in mode]


def model_of(layer, dtype=None, **shape):
    inputs = keras.Input(**shape, dtype=dtype)
    return keras.Model(inputs, layer(inputs))


def stateful():
    return model_of(layers.LSTM(2, stateful=True, name="memory"), batch_shape=(8, 4, 1))


def writing():
    return model_of(layers.SpectralNormalization(layers.Dense(2, name="own")), shape=(4, 1))


def overwritten():
    model = dense()
    model.layers[1].kernel.overwrite_with_gradient = True
    return model


def embedding():
    return model_of(layers.Embedding(9, 2), shape=[None], dtype="int32")


class OfFixedSize(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(4)

    def call(self, inputs):
        return ops.reshape(self.head(inputs), [8, -1])


class Selecting(losses.Loss):
    def call(self, y, y_pred):
        return ops.reshape((y - y_pred) ** 2, [-1])[:5]


def mean(y, y_pred):
    return ops.mean(y_pred, -1)


def by_optimizer(wrap):
    own = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    return dense, "gradient_accumulation_steps=2", {"optimizer": wrap(own)}


def weight(value, match):
    cut = {"micro_batch_size": 3, "micro_batch_weight": lambda x, y, w: value}
    return dense, f"micro_batch_weight.*{match}", {"cut": cut}


def lengths(value):
    cut = {"micro_batch_size": 3, "sequence_axis": 1, "lengths": lambda x, y, w: value}
    match = "lengths= must be a function that returns"
    return embedding, match, {"cut": cut, "x": np.ones([8, 3], "int32"), "y": np.ones([8, 3, 2])}


SEQUENCES = {"x": X[..., None], "loss": mean}
FINITE, NUMBER = "return a finite number", "must return one number"
CASES = {
    "a stateful layer": (stateful, "'memory' is stateful", SEQUENCES),
    "a kernel that is written": (writing, "must not write a trained.*own/kernel", SEQUENCES),
    "a kernel that is overwritten": (overwritten, "dense.*/kernel.*overwrite_with_gradient", {}),
    "a fixed size": (OfFixedSize, "fixed batch size.*8 values for 4", {"cut": 4, "loss": mean}),
    "an optimizer": by_optimizer(lambda own: own),
    "an optimizer in an optimizer": by_optimizer(optimizers.LossScaleOptimizer),
    "a loss that selects": (dense, "examples as first dimension", {"loss": Selecting}),
    "weight nan": weight(np.float64("nan"), FINITE),
    "weight inf": weight(np.float64("inf"), FINITE),
    "weight -1": weight(np.float64(-1.0), FINITE),
    "weight None": weight(None, NUMBER),
    "weight in a string": weight("3", NUMBER),
    "weights": weight(np.ones(2), "one scalar"),
    "lengths None": lengths(None),
    "lengths in a string": lengths("3"),
}
if hasattr(optimizers, "MultiOptimizer"):
    CASES["several optimizers"] = by_optimizer(
        lambda own: optimizers.MultiOptimizer(lambda variable: own)
    )


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if mode == "eager" or "loss" in name else thorough)
        for name in CASES
        for mode in UNCOMPILED
    ],
)
def test_what_fit_refuses(name, mode):
    build, match, options = CASES[name]
    options = {**options, **MODES[mode]}
    x, y = options.pop("x", X), options.pop("y", Y)
    model = build()
    model(x[:8])
    compiled(model, options.pop("cut", 3), **options)
    with unchanged(model, Exception, match):
        fit(model, x, y)


def test_parts_of_different_lengths():
    model = compiled(dense(), **MODES["eager"])
    # JAX and torch have errors of their own for them.
    match = "must have the same number of examples" if BACKEND == "tensorflow" else "8"
    with unchanged(model, Exception, match):
        model.train_on_batch(X[:8], Y[:7])
    with unchanged(model, ValueError, "Received: a scalar"):
        model.train_on_batch({"x": X, "temperature": np.float64(1.0)}, Y)


@only_on("tensorflow")  # Others have errors of their own for them.
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("mode", UNCOMPILED)
def test_weights_that_keras_would_refuse(size, mode):
    """Losses have shape (B, 4), weights (B,): in a micro-batch of 1 or 4 they would broadcast."""
    model = compiled(model_of(layers.Dense(1), shape=(4, 2)), size, **MODES[mode])
    with unchanged(model, Exception, "sample_weight of shape"):
        fit(model, data(8, 4, 2), data(8, 4, 1), sample_weight=np.ones(8))


@only_on("jax", "torch")  # On TensorFlow steps of the user's are cut.
def test_an_own_train_step():
    class Own(keras.Model):
        def train_step(self, *args):
            return {}

    with pytest.raises(ValueError, match=r"overrides train_step.*compute_loss"):
        macrobatch.accumulate(Own())


@only_on("jax")
def test_nnx(monkeypatch):
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match="KERAS_NNX_ENABLED"):
        macrobatch.accumulate(dense(), 3)


@only_on("jax")
def test_what_is_refused_leaves_an_accumulated_model_as_it_is():
    """Others have no setting that is refused as late; TensorFlow has train steps for it."""
    model = macrobatch.accumulate(model_of(layers.Dense(1), shape=(None, 4)), 3)
    before = macrobatch.settings_of(model), dict(vars(model))
    with pytest.raises(ValueError, match=r"sequence_axis=1 and whole_batch_loss=True"):
        macrobatch.accumulate(model, 3, sequence_axis=1, whole_batch_loss=True)
    assert (macrobatch.settings_of(model), dict(vars(model))) == before

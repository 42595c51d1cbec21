"""What accumulate and fit refuse, with the reason. Nothing has changed then."""

import keras
import numpy as np
import pytest
from builders import X, Y, data, dense
from keras import layers, losses, ops, optimizers
from support import BACKEND, MODES, only_on, thorough_for
from support.unchanged import unchanged

import macrobatch

if BACKEND == "tensorflow":
    import tensorflow as tf

    ERRORS = (ValueError, tf.errors.InvalidArgumentError)
else:
    ERRORS = ValueError

# The modes in which numbers can be looked at: XLA would leave that out.
UNCOMPILED = [mode for mode in MODES if "compiled" not in mode]
EAGERLY = {} if BACKEND == "jax" else {"run_eagerly": True}


def refused(model, match, x=X, y=Y, cut=3, **fit):
    """Training raises, and nothing has changed."""
    macrobatch.accumulate(model, **(cut if isinstance(cut, dict) else {"micro_batch_size": cut}))
    with unchanged(model, ERRORS, match):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **fit)


def compiled(model, loss="mse", optimizer="sgd", **options):
    model.compile(optimizer, loss, **options)
    return model


# Models


def overwritten():
    model = dense()
    model.layers[1].kernel.overwrite_with_gradient = True
    return model


def model_of(layer, **shape):
    inputs = keras.Input(**shape)
    return keras.Model(inputs, layer(inputs))


class OfFixedSize(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(4)

    def call(self, inputs):
        return ops.reshape(self.head(inputs), [8, -1])


def mean(y, y_pred):
    return ops.mean(y_pred, -1)


MODELS = {
    "stateful": (
        lambda: model_of(layers.LSTM(2, stateful=True, name="memory"), batch_shape=(8, 4, 1)),
        "'memory' is stateful",
    ),
    "writes its kernel": (
        lambda: model_of(layers.SpectralNormalization(layers.Dense(2, name="own")), shape=(4, 1)),
        "must not write a trained variable.*own/kernel",
    ),
    "overwritten with gradients": (overwritten, "dense.*/kernel.*overwrite_with_gradient"),
    "of a fixed size": (OfFixedSize, "a layer has a fixed batch size.*8 values for 4"),
}


@pytest.mark.eager
@pytest.mark.parametrize("name", MODELS)
def test_models(name):
    build, match = MODELS[name]
    x = X if name in ("overwritten with gradients", "of a fixed size") else X[..., None]
    model = compiled(build(), loss=mean, **EAGERLY)
    model(x[:8])
    refused(model, match, x, cut=4)


WRAPPED = {"alone": lambda own: own, "scaled": optimizers.LossScaleOptimizer}
if hasattr(optimizers, "MultiOptimizer"):
    WRAPPED["one of several"] = lambda own: optimizers.MultiOptimizer(lambda variable: own)


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_accumulation_by_the_optimizer_too(wrap):
    own = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    refused(compiled(dense(), optimizer=wrap(own)), "gradient_accumulation_steps=2")


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


# Batches


def test_parts_of_different_lengths():
    model = macrobatch.accumulate(compiled(dense(), **EAGERLY), 3)
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
    model = compiled(model_of(layers.Dense(1), shape=(4, 2)), **MODES[mode])
    x, y = data(8, 4, 2), data(8, 4, 1)
    refused(model, "sample_weight of shape", x, y, size, sample_weight=np.ones(8))


@pytest.mark.parametrize("mode", UNCOMPILED)
def test_a_loss_that_selects_values(mode):
    class Selecting(losses.Loss):
        def call(self, y, y_pred):
            return ops.reshape((y - y_pred) ** 2, [-1])[:5]

    model = compiled(dense(), Selecting(), **MODES[mode])
    refused(model, "examples as first dimension")


# What functions of the user return

FINITE, NUMBER = "return a finite number", "must return one number"
WEIGHTS = {
    "nan": (np.float64("nan"), FINITE),
    "inf": (np.float64("inf"), FINITE),
    "-1": (np.float64(-1.0), FINITE),
    "None": (None, NUMBER),
    "a string": ("3", NUMBER),
    "values": (np.ones(2), "one scalar"),
}


@thorough_for("graph")
@pytest.mark.parametrize("mode", UNCOMPILED)
@pytest.mark.parametrize("wrong", WEIGHTS)
def test_the_weight_of_a_micro_batch(wrong, mode):
    weight, match = WEIGHTS[wrong]
    cut = {"micro_batch_size": 3, "micro_batch_weight": lambda x, y, w: weight}
    refused(compiled(dense(), **MODES[mode]), f"micro_batch_weight.*{match}", cut=cut)


@pytest.mark.eager
@pytest.mark.parametrize("wrong", [None, "3"])
def test_lengths(wrong):
    inputs = keras.Input([None], dtype="int32")
    model = compiled(keras.Model(inputs, layers.Embedding(9, 2)(inputs)))
    cut = {"micro_batch_size": 3, "sequence_axis": 1, "lengths": lambda x, y, w: wrong}
    match = "lengths= must be a function that returns"
    refused(model, match, np.ones([8, 3], "int32"), np.ones([8, 3, 2]), cut)


@only_on("jax")
def test_what_is_refused_leaves_an_accumulated_model_as_it_is():
    """Others have no setting that is refused as late; TensorFlow has train steps for it."""
    model = macrobatch.accumulate(model_of(layers.Dense(1), shape=(None, 4)), 3)
    before = macrobatch.settings_of(model), dict(vars(model))
    with pytest.raises(ValueError, match=r"sequence_axis=1 and whole_batch_loss=True"):
        macrobatch.accumulate(model, 3, sequence_axis=1, whole_batch_loss=True)
    assert (macrobatch.settings_of(model), dict(vars(model))) == before

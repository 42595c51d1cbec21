"""Faults that are known and not yet mended, as they show to users. A mend takes the mark away."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import BACKEND, array, check, only_on, several_devices, train
from support.inside import make_available
from support.interaction import contrastive
from support.memory import MIB, Room, limit_for

import macrobatch
from macrobatch import ExactnessWarning

random = np.random.default_rng(0)
X, Y = random.normal(size=[32, 4]), random.normal(size=[32, 1])
NOT_RAISED = pytest.fail.Exception


def fault(reason, on=("tensorflow", "jax", "torch"), raises=AssertionError):
    """A mark: the test fails on these backends, in this way."""
    return pytest.mark.xfail(BACKEND in on, reason=reason, raises=raises, strict=True)


def linear(units=1):
    return keras.Sequential([keras.Input([4]), layers.Dense(units)])


def accumulated(model, size=8, loss="mse", compiled=(), **cut):
    model.compile(keras.optimizers.SGD(0.01), loss, **dict(compiled))
    return macrobatch.accumulate(model, size, **cut)


# Silently wrong


@fault("Keras' layer takes the batch size for the number of steps", on=["tensorflow"])
def test_time_distributed_over_sequences_of_any_length():
    def build():
        inputs = keras.Input([None], dtype="int32")
        steps = layers.TimeDistributed(layers.Dense(2))(layers.Embedding(9, 3)(inputs))
        return keras.Model(inputs, layers.Dense(1)(steps))

    real = np.arange(6) < np.arange(1, 9)[:, None]
    tokens, labels = random.integers(1, 9, [8, 6]) * real, random.normal(size=[8, 6, 1])
    cut, fit = {"micro_batch_size": 1, "sequence_axis": 1}, {"sample_weight": real.astype(float)}
    with contextlib.suppress(ValueError):  # It may be refused.
        check(build, tokens, labels, cut=cut, fit=fit)


@only_on("jax")
@fault("a batch that is one micro-batch is cut over the devices all the same")
def test_a_batch_of_one_micro_batch_on_several_devices():
    with several_devices(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Nothing is being accumulated.
        check(lambda: linear(3), X, Y, loss=contrastive, micro_batch_size=32, batch_size=32)


class DrawingOfNumPy(layers.Layer):
    def call(self, x):
        return x * np.random.uniform(0.5, 1.5)  # noqa: NPY002 - as people draw


@fault("JAX has no check that both passes come to the same", on=["jax"], raises=NOT_RAISED)
def test_passes_that_differ():
    model = keras.Sequential([keras.Input([4]), DrawingOfNumPy(), layers.Dense(1)])
    accumulated(model, whole_batch_loss=True)
    with pytest.raises(ValueError, match="both times"):
        model.train_on_batch(X, Y)


@only_on("tensorflow", "torch")  # On JAX, Keras itself raises.
@fault("dropout draws anew where activations are computed again")
def test_rematerialisation():
    with keras.RematScope(mode="full"):
        parts = [layers.Dense(6, use_bias=False), layers.Dropout(0.5, seed=1)]
        block = keras.Sequential([*parts, layers.Dense(1, use_bias=False)])
        model = keras.Sequential([keras.Input([4]), block])
    model.compile(keras.optimizers.SGD(1e-6), lambda y, y_pred: y_pred, run_eagerly=True)
    macrobatch.accumulate(model, 8)
    before = [array(weight) for weight in model.trainable_weights]
    try:
        loss = model.train_on_batch(X, Y)
    except (ValueError, ExactnessWarning):  # It may be said.
        return
    steps = [start - array(end) for start, end in zip(before, model.trainable_weights)]
    # The loss is a product of both weights: each gradient times its weight comes to the loss.
    for weight, step in zip(before, steps):
        np.testing.assert_allclose((weight * step).sum() / 1e-6, loss, rtol=1e-4)


@pytest.mark.examples_meet
@fault("values of losses are compared, not gradients", raises=ExactnessWarning)
def test_a_loss_whose_gradients_are_apart():
    def loss(y, y_pred):
        return ops.square(y - y_pred) + ops.stop_gradient(ops.max(y_pred))

    model = accumulated(linear(), loss=loss)
    assert macrobatch.verify(model, X, Y).exact is True
    model.train_on_batch(X, Y)


# Lost: weights, sizes


@fault("what is said comes before the state is kept", on=["jax"], raises=TypeError)
def test_warnings_that_are_errors_lose_nothing():
    models = linear(), linear()
    models[1].set_weights(models[0].get_weights())
    for model in models:
        model.compile("sgd", "mse")
    models[0].fit(X, Y, batch_size=32, verbose=0)
    macrobatch.accumulate(models[1], 64)
    with pytest.raises(UserWarning, match="Nothing is being accumulated"):
        models[1].fit(X, Y, batch_size=32, verbose=0)
    for one, other in zip(models[0].weights, models[1].weights):
        np.testing.assert_allclose(array(one), array(other))


@fault("sizes are rehearsed in the middle of training", raises=(AssertionError, ValueError))
@pytest.mark.parametrize("has_limit", [False, True])
def test_a_size_found_before_that_runs_out_later(has_limit, counted, monkeypatch, tmp_path):
    make_available(monkeypatch, limit_for(100))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    limit = {"memory_limit": limit_for(100)} if has_limit else {}
    eager = {"run_eagerly": True} if BACKEND == "tensorflow" else {}

    def trained():  # With dropout a size is settled at once.
        parts = [Room(), layers.Dropout(0.5, seed=1), layers.Dense(1)]
        model = keras.Sequential([keras.Input([4]), *parts])
        accumulated(model, "auto", compiled=eager, **limit)
        model.train_on_batch(X[:16], Y[:16])
        return model

    trained()
    model = trained()
    assert macrobatch.settings_of(model).size_in_use == 16
    counted.base += 99 * MIB  # Others have taken nearly all.
    Room.narrow(4 * 8)
    for _ in range(2):
        model.train_on_batch(X[:16], Y[:16])
        assert macrobatch.settings_of(model).size_in_use == 8


# Silence, and words that mislead


@fault("the tolerance rises, and only an exact update says why")
def test_a_tolerance_that_rises_is_explained():
    def narrow(x):
        return ops.cast(ops.cast(x, "float32"), x.dtype)

    def loss(y, y_pred):
        return ops.square(y - y_pred + interacts * ops.mean(y_pred))

    model = keras.Sequential([keras.Input([4]), layers.Lambda(narrow), layers.Dense(1)])
    for interacts in (0.0, 1.0):  # noqa: B007 - the loss reads it
        model.compile("sgd", loss)
        report = macrobatch.verify(model, X, Y, micro_batch_size=8)
        assert report.tolerance > 1e-9
        assert "precision" in [cause.kind for cause in report.causes]


@fault("wrong types are ValueErrors", raises=ValueError)
@pytest.mark.parametrize(
    "wrong",
    [
        {"micro_batch_size": 8.0},
        {"micro_batch_size": 8, "micro_batch_weight": 1},
        {"micro_batch_size": 8, "whole_batch_loss": "yes"},
        {"micro_batch_tokens": "many", "sequence_axis": 1},
        {"memory_limit": [6]},
        {"model": "model", "micro_batch_size": 8},
    ],
    ids=lambda wrong: [*wrong][-1],
)
def test_wrong_types_are_type_errors(wrong):
    with pytest.raises(TypeError):
        macrobatch.accumulate(**{"model": linear(), **wrong})


@fault("nothing says what the arguments of others are called here")
@pytest.mark.parametrize("wrong", [{"batch_size": 8}, {"accumulation_steps": 4}])
def test_arguments_of_others_get_a_hint(wrong):
    with pytest.raises(TypeError) as refused:
        macrobatch.accumulate(linear(), **wrong)
    assert "micro_batch_size" in str(refused.value)
    assert "fit" in str(refused.value)


@only_on("tensorflow", "jax")  # On torch it is Keras that raises.
@fault("shapes are those of a micro-batch", on=["tensorflow"])
def test_sample_weights_of_a_wrong_shape():
    model = accumulated(linear())
    with pytest.raises(Exception, match="shape") as refused:
        model.train_on_batch(X, Y, np.ones([32, 3]))
    assert "(32, 3)" in str(refused.value)


@pytest.mark.examples_meet
@fault("the data, the learning rate and the loss are named, and not the weights")
def test_a_weight_that_is_not_finite_is_named():
    model, weights = accumulated(linear()), np.ones(32)
    weights[5] = np.nan
    with pytest.warns(ExactnessWarning) as warned:
        model.train_on_batch(X, Y, weights)
    assert "sample_weight" in str(warned.pop(ExactnessWarning).message)


@only_on("jax")
@fault("a compiled size is a power of two, above the batch")
def test_a_size_that_takes_all_is_no_larger_than_the_batch(caplog):
    model = accumulated(linear(), "auto")
    model.fit(X[:12], Y[:12], batch_size=12, epochs=4, verbose=0)
    assert "micro_batch_size=16 for batches of 12" not in caplog.text


# Found with examples of keras.io


class OfInnerLosses(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [keras.Input([4]), layers.Dense(3, activity_regularizer="l2"), layers.Dense(1)]
        )

    def call(self, x):
        return self.inner(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + sum(self.inner.losses)


@fault("plain Keras has no losses there, and accumulated there are", on=["jax"])
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")  # of a scalar loss
def test_a_loss_that_reads_losses_of_an_inner_model():
    (plain, _), (other, _) = (
        train(OfInnerLosses, X, Y, cut=cut, batch_size=8) for cut in (None, {"micro_batch_size": 4})
    )
    for one, two in zip(plain.weights, other.weights):
        np.testing.assert_allclose(array(one), array(two), rtol=1e-10)


class Routed(layers.Layer):
    """A layer that knows how many examples there are."""

    def call(self, x):
        return ops.reshape(x, (32, 4))


def squeezed(y, y_pred):
    return ops.square(ops.squeeze(y - y_pred))


@fault("errors do not say that a batch was cut")
@pytest.mark.parametrize(
    ("layer", "loss", "size"),
    [
        (Routed, "mse", 8),
        pytest.param(layers.Identity, squeezed, 31, marks=only_on("tensorflow")),
    ],
)
def test_errors_of_code_that_does_not_know_micro_batches(layer, loss, size):
    model = keras.Sequential([layer(), layers.Dense(1)])
    accumulated(model, size, loss)
    with pytest.raises(Exception) as failed:  # noqa: PT011 - each backend has its own
        model.train_on_batch(X, Y)
    notes = getattr(failed.value, "__notes__", [])
    assert "micro-batch" in "\n".join([str(failed.value), *notes])

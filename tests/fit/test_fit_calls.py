"""Calls of fit, by the arguments that they have: those of a `fit` of the model's own, callbacks."""

import functools

import keras
import numpy as np
import pytest

import macrobatch

X, Y = np.ones([8, 2]), np.ones([8, 1])
pytestmark = pytest.mark.eager


class Passing(keras.Model):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class Renaming(keras.Model):
    def fit(self, data, *args, **kwargs):
        return super().fit(*data, *args, **kwargs)


class Choosing(keras.Model):
    def fit(self, x, y):
        return super().fit(x, y, verbose=0)


@functools.lru_cache(maxsize=None)
def built(kind=keras.Model):
    """A model that finds its size in its first fit."""
    inputs = keras.Input([2])
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    return macrobatch.accumulate(model)


class Counting(keras.callbacks.Callback):
    epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1


@pytest.mark.parametrize(
    ("kind", "fit"),
    [
        (keras.Model, lambda model, own: model.fit(X, Y, callbacks=own, verbose=0)),
        (Passing, lambda model, own: model.fit(X, Y, callbacks=[own], verbose=0)),
        (Passing, lambda model, own: model.fit(X, Y, 8, 1, 0, (own,))),
        (Renaming, lambda model, own: model.fit((X, Y), callbacks=[own], verbose=0)),
    ],
    ids=["keras", "by name", "by position", "renaming"],
)
def test_callbacks(kind, fit):
    own = Counting()
    assert set(fit(built(kind), own).history) == {"loss", "micro_batch_size"}
    assert own.epochs == 1


@pytest.mark.parametrize(
    ("kind", "names"), [(Passing, {"loss", "micro_batch_size"}), (Choosing, {"loss"})]
)
def test_no_callbacks(kind, names):
    assert set(built(kind).fit(X, Y).history) == names


def test_a_list_of_callbacks_is_as_it_was():
    model, own = built(), Counting()
    callbacks = keras.callbacks.CallbackList([own], add_history=True, model=model, epochs=1)
    before = list(callbacks.callbacks)
    history = model.fit(X, Y, verbose=0, callbacks=callbacks).history
    assert set(history) == {"loss", "micro_batch_size"}
    assert callbacks.callbacks == before

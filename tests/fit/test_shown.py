"""What a long run shows: on a terminal, and in TensorBoard."""

import contextlib
import io
import math
import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import macrobatch
from macrobatch._keras.installed import accumulation_of
from macrobatch._shown.line import Clock, Line, Place, text

# What a terminal shows with: the cursor is kept, and long lines are cut off.
SHOWN = re.compile("\x1b7\x1b\\[\\?7l( - micro-batch [^\x1b]*)\x1b\\[K\x1b\\[\\?7h\x1b8")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


class Waiting(keras.layers.Layer):
    """Waits until a terminal has shown the next text, or for some seconds."""

    def __init__(self, terminal, texts):
        super().__init__(trainable=False)
        self._terminal, self._texts = terminal, iter(texts)

    def _wait(self, x):
        text, end = next(self._texts, None), time.monotonic() + 10
        while text and text not in self._terminal.getvalue() and time.monotonic() < end:
            time.sleep(0.005)
        return x

    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(self._wait, [x], x.dtype), x.shape)


X, Y = np.arange(20.0).reshape(10, 2), np.ones([10, 1])
ALL = [f" - micro-batch {i}/4" for i in (1, 2, 3, 4)]


def trained(terminal, texts, kind=keras.Model, verbose=1, callbacks=None, **options):
    inputs = keras.Input([2], dtype="float64")
    outputs = keras.layers.Dense(1, dtype="float64", kernel_initializer="ones")(inputs)
    if terminal is not None:  # no gradient goes through a function of Python's
        outputs = outputs + 0.0 * Waiting(terminal, texts)(inputs)[:, :1]
    model = kind(inputs, outputs)
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    macrobatch.accumulate(model, micro_batch_size=3, **options)
    accumulation_of(model).line = Line(accumulation_of(model)._place, 0.0, 0.001)
    with contextlib.redirect_stdout(terminal) if terminal else contextlib.nullcontext():
        model.fit(X, Y, batch_size=10, verbose=verbose, callbacks=callbacks, shuffle=False)
    return model


def test_each_micro_batch_is_shown_behind_keras_own_line(terminal):
    model = trained(terminal, ALL)
    shown = SHOWN.findall(terminal.getvalue())
    assert [text for text in ALL if any(each.startswith(text) for each in shown)] == ALL
    assert any(each.endswith("s left") for each in shown)
    # What is behind the cursor is erased before Keras writes, and nothing comes after it.
    rest = SHOWN.sub("", terminal.getvalue())
    assert "micro-batch" not in rest
    assert rest.index("\x1b[K") < rest.index("1/1")
    expected = trained(None, [], verbose=0)
    for one, other in zip(model.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(one, other, rtol=1e-10)


class OwnStep(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("kind", "options", "last"),
    [
        (keras.Model, {"whole_batch_loss": True}, " - micro-batch 4/4, pass 2 of 2"),
        (OwnStep, {}, " - micro-batch 4/4"),
    ],
)
def test_other_loops(terminal, kind, options, last):
    trained(terminal, [None] * 7 + [last] if options else [None] * 3 + [last], kind, **options)
    assert last in terminal.getvalue()


@pytest.mark.parametrize("verbose", [0, 2])
def test_nothing_is_shown_where_keras_shows_no_line(terminal, verbose):
    trained(terminal, [], verbose=verbose)
    assert "micro-batch" not in terminal.getvalue()


def test_without_a_terminal_nothing_is_added(monkeypatch, capsys):
    model = trained(None, [])
    assert accumulation_of(model).progress is None
    assert "micro-batch" not in capsys.readouterr().out


def test_time_that_is_left():
    clock = Clock()
    seen = [(0.0, Place(0, 0)), (10.0, Place(0, 0)), (12.0, Place(1, 4)), (13.0, Place(1, 4))]
    seen += [(16.0, Place(3, 4)), (17.0, Place(0, 4)), (18.0, Place(1, 4))]
    left = [clock.left(place, now) for now, place in seen]
    assert [None if math.isnan(each) else each for each in left] == [None, None, 6, 5, 2, None, 3]
    assert clock.left(Place(1, 4), 30.0) == 0.0
    assert text(Place(11, 64), 45.2) == " - micro-batch 12/64, 45s left"
    assert text(Place(11, 64), 125) == " - micro-batch 12/64, 2:05 left"
    assert text(Place(11, 64), 3725) == " - micro-batch 12/64, 1:02:05 left"
    assert text(Place(64, 64, 1, 2), math.nan) == " - micro-batch 64/64, pass 1 of 2"


def scalars_in(folder):
    """What the event files of a folder have: the values of each name."""
    found = {}
    for path in folder.glob("events.out.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                array = tf.make_ndarray(value.tensor)
                if array.dtype.kind == "f":
                    found.setdefault(value.tag, []).append(float(array))
    return found


@pytest.mark.filterwarnings("ignore:.*not finite:UserWarning")
def test_tensorboard_has_the_numbers_of_updates(tmp_path):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    macrobatch.accumulate(model, micro_batch_size=3, nonfinite="skip")
    x = X / 20
    x[4] = np.nan
    board, noise = keras.callbacks.TensorBoard(tmp_path), macrobatch.GradientNoiseScale(every=1)
    callbacks = [noise, board]
    history = model.fit(
        x, Y, batch_size=5, epochs=2, verbose=0, callbacks=callbacks, validation_data=(X, Y)
    )
    found = scalars_in(tmp_path / "train")
    assert found["epoch_micro_batch_size"] == [3, 3]
    assert found["epoch_skipped_examples"] == [1, 1]
    assert len(found["epoch_update_time"]) == 2
    assert min(found["epoch_update_time"]) > 0
    assert found["epoch_noise_scale"] == pytest.approx(history.history["noise_scale"])
    assert found["epoch_gradient_norm"] == pytest.approx(history.history["gradient_norm"])
    # Other callbacks see what they see without macrobatch, and TensorBoard is as it was.
    assert "update_time" not in history.history
    assert "on_epoch_end" not in vars(board)


def test_tensorboard_has_a_size_that_is_found(tmp_path):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    macrobatch.accumulate(model, micro_batch_size="auto")
    board = keras.callbacks.TensorBoard(tmp_path)
    history = model.fit(X, Y, batch_size=5, verbose=0, callbacks=[board, board]).history
    found = scalars_in(tmp_path / "train")["epoch_micro_batch_size"]
    assert found == history["micro_batch_size"] * 2  # each time that Keras calls it
    assert "on_epoch_end" not in vars(board)

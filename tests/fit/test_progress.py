"""What a long run shows: on a terminal, and in TensorBoard.

Time is what tests say it is. In each micro-batch a layer waits until the terminal shows a text.
"""

import contextlib
import io
import re
import time

import keras
import numpy as np
import pytest
from support import BACKEND, array, only_on

import macrobatch

pytestmark = only_on("tensorflow", "torch")  # JAX has the loop in one compiled function.
on_tensorflow = only_on("tensorflow")

# What a terminal shows with: the cursor is kept, and long lines are cut off.
SHOWN = re.compile("\x1b7\x1b\\[\\?7l( - micro-batch [^\x1b]*)\x1b\\[K\x1b\\[\\?7h\x1b8")


class Terminal(io.StringIO):
    """A terminal, and the time there."""

    now, is_terminal = 0.0, True

    def isatty(self):
        return self.is_terminal

    def wait(self, text, seconds=10.0):
        """Waits until a text is shown, or for some seconds."""
        end = time.monotonic() + seconds
        while text not in self.getvalue() and time.monotonic() < end:
            time.sleep(0.005)


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(time, "perf_counter", lambda: terminal.now)
    return terminal


class Calling(keras.layers.Layer):
    """Calls the next of some functions in each micro-batch of a fit."""

    functions = iter(())

    def _next(self, x):
        next(self.functions, lambda: None)()
        return x

    def call(self, x):
        if BACKEND == "torch":
            return self._next(x)
        import tensorflow as tf

        # No gradient goes through a function of Python's.
        called = tf.numpy_function(self._next, [x], x.dtype)
        return x + 0.0 * tf.ensure_shape(tf.stop_gradient(called), x.shape)


X, Y = np.arange(20.0).reshape(10, 2), np.ones([10, 1])


def trained(terminal, functions, own_step=False, verbose=1, **options):
    kind = keras.Model
    if own_step:
        from fit.step_cases import Guide as kind
    calling, inputs = Calling(), keras.Input([2])
    model = kind(inputs, calling(keras.layers.Dense(1, kernel_initializer="ones")(inputs)))
    model.compile(keras.optimizers.SGD(1e-3), "mse", jit_compile=False)
    macrobatch.accumulate(model, micro_batch_size=3, **options)
    if BACKEND == "torch":  # so that nothing but the loop runs the layer
        model.train_on_batch(X, Y)
    calling.functions = iter(functions)
    with contextlib.redirect_stdout(terminal):
        model.fit(X, Y, batch_size=10, verbose=verbose, shuffle=False)
    return model


def test_each_micro_batch_is_shown_behind_keras_own_line(terminal):
    """And how long the rest takes, if micro-batches go on to take as long."""
    # What is shown, and the time in the micro-batch after it: it is the average so far that counts.
    steps = [
        ("1/4", 15),
        ("2/4, 45s left", 125),
        ("3/4, 2:05 left", 11175),
        ("4/4, 1:02:05 left", 11200),
    ]

    def shows(text, then):
        terminal.now = max(terminal.now, 3)  # Shorter updates have Keras' line alone.
        terminal.wait(f" - micro-batch {text}\x1b")
        terminal.now = then

    functions = [lambda step=step: shows(*step) for step in steps]
    model = trained(terminal, functions)
    shown = SHOWN.findall(terminal.getvalue())
    assert [text for text, _ in steps if f" - micro-batch {text}" in shown] == [t for t, _ in steps]
    # What is behind the cursor is erased before Keras writes, and nothing comes after it.
    rest = SHOWN.sub("", terminal.getvalue())
    assert "micro-batch" not in rest
    assert rest.index("\x1b[K") < rest.index("1/1")
    expected = trained(Terminal(), [], verbose=0)
    for one, other in zip(model.variables, expected.variables):
        np.testing.assert_allclose(array(one), array(other), rtol=1e-10)


PASS = ", pass 2 of 2" if BACKEND == "tensorflow" else ""  # Torch counts micro-batches alone.


@pytest.mark.parametrize(
    ("options", "calls", "text"),
    [
        ({"whole_batch_loss": True}, 8, f"4/4{PASS}"),
        pytest.param({"own_step": True}, 4, "4/4", marks=on_tensorflow),
    ],
)
def test_other_loops(terminal, options, calls, text):
    def last():
        terminal.now = 3
        terminal.wait(f" - micro-batch {text}")

    trained(terminal, [lambda: None] * (calls - 1) + [last], **options)
    assert f" - micro-batch {text}" in terminal.getvalue()


@pytest.mark.parametrize(
    ("verbose", "is_terminal", "kind"),
    [(0, True, "xterm"), (2, True, "xterm"), (1, False, "xterm"), (1, True, "dumb")],
)
def test_nothing_is_shown_where_keras_shows_no_line(
    terminal, monkeypatch, verbose, is_terminal, kind
):
    def first():
        terminal.now = 3
        terminal.wait("micro-batch", 0.4)

    monkeypatch.setenv("TERM", kind)
    terminal.is_terminal = is_terminal
    trained(terminal, [first], verbose=verbose)
    assert "micro-batch" not in terminal.getvalue()


def board_of(tmp_path, x, size, **options):
    """The history of a fit with TensorBoard, and what its event files have, by name."""
    import tensorflow as tf

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    macrobatch.accumulate(model, size, **options)
    board, noise = keras.callbacks.TensorBoard(tmp_path), macrobatch.GradientNoiseScale(every=1)
    fit = {"batch_size": 5, "epochs": 2, "verbose": 0, "validation_data": (X, Y)}
    history = model.fit(x, Y, callbacks=[noise, board], **fit).history
    assert "on_epoch_end" not in vars(board)  # It is as it was.
    found = {}
    for path in (tmp_path / "train").glob("events.out.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                number = tf.make_ndarray(value.tensor)
                if number.dtype.kind == "f":
                    found.setdefault(value.tag, []).append(float(number))
    return history, found


@on_tensorflow
@pytest.mark.filterwarnings("ignore:.*not finite:UserWarning")
def test_tensorboard_has_the_numbers_of_updates(tmp_path):
    x = X / 20
    x[4] = np.nan
    history, found = board_of(tmp_path, x, 3, nonfinite="skip")
    assert found["epoch_micro_batch_size"] == [3, 3]
    assert found["epoch_skipped_examples"] == [1, 1]
    assert len(found["epoch_update_time"]) == 2
    assert min(found["epoch_update_time"]) > 0
    for name in ("noise_scale", "gradient_norm"):
        assert found[f"epoch_{name}"] == pytest.approx(history[name])
    # Other callbacks see what they see without macrobatch.
    assert "update_time" not in history


@on_tensorflow
def test_tensorboard_has_a_size_that_is_found(tmp_path):
    history, found = board_of(tmp_path, X / 20, "auto")
    assert found["epoch_micro_batch_size"] == history["micro_batch_size"]

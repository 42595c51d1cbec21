"""How far an update is, on a terminal, with Keras on torch."""

import contextlib
import io
import time

import keras
import numpy as np

import macrobatch
from macrobatch._keras.installed import accumulation_of
from macrobatch._shown.line import Line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_each_micro_batch_is_shown(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal, texts = Terminal(), iter([f" - micro-batch {i}/4" for i in (1, 2, 3, 4)])

    class Waiting(keras.layers.Layer):
        waits = False

        def call(self, inputs):
            text, end = next(texts, "") if self.waits else "", time.monotonic() + 10
            while text not in terminal.getvalue() and time.monotonic() < end:
                time.sleep(0.002)
            return inputs

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1), Waiting()])
    model.compile("sgd", "mse")
    x, y = np.ones([10, 2]), np.ones([10, 1])
    macrobatch.accumulate(model, micro_batch_size=3)
    model.train_on_batch(x, y)  # so that nothing but the loop runs the layer
    model.layers[-1].waits = True
    accumulation = accumulation_of(model)
    accumulation.line = Line(accumulation.line._read, 0.0, 0.001)
    with contextlib.redirect_stdout(terminal):
        model.fit(x, y, batch_size=10)
    for index in (1, 2, 3, 4):
        assert f" - micro-batch {index}/4" in terminal.getvalue()

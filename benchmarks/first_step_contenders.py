"""Contenders that call fit() and evaluate() for the first time: plain, or accumulated."""

import contextlib
import functools
import time
from typing import NamedTuple

import tensorflow as tf
from first_models import Clock, build, data
from keras_contenders import versions  # noqa: F401 (contender.py asks for it)

import macrobatch


def training(description):
    ways = {"first": FirstCall, "whole": WholeCalls}
    return ways[description["way"]](**description["options"])


class Call(NamedTuple):
    """A call of a method: whether it was outside of any graph, and its processor time."""

    is_eager: bool
    seconds: float


@contextlib.contextmanager
def noted(owner, name):
    """Notes the calls of a method of a class, in a list."""
    calls = []
    method = getattr(owner, name)

    @functools.wraps(method)
    def noting(*args, **kwargs):
        is_eager, start = tf.executing_eagerly(), time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            calls.append(Call(is_eager, time.process_time() - start))

    setattr(owner, name, noting)
    try:
        yield calls
    finally:
        setattr(owner, name, method)


class FirstCall:
    def __init__(self, call, model, batch, accumulate=None):
        self.model = build(model)
        # Of arrays, every fit() would make graphs of its own.
        self.batches = tf.data.Dataset.from_tensor_slices(data(model, batch)).batch(batch)
        if accumulate is not None:
            macrobatch.accumulate(self.model, **accumulate)
        self.call = getattr(self.model, call)

    def first(self):
        """Processor time and forward traces of the first call, and graphs of a second one."""
        clock = Clock()
        with noted(type(self.model), "call") as calls:
            start = time.process_time()
            self.call(self.batches, callbacks=[clock], verbose=0)
        # Whatever is traced, the model or an optimizer or a part of a loop, becomes a graph.
        with noted(tf.__internal__.FuncGraph, "__init__") as graphs:
            self.call(self.batches, callbacks=[Clock()], verbose=0)
        seconds = clock.end - start
        # Only the trial calls the model outside of any graph, and hardly does anything else.
        trial = sum(call.seconds for call in calls if call.is_eager)
        return {
            "seconds": seconds,
            "share of the trial": trial / seconds,
            "traces": len(calls),
            "graphs again": len(graphs),
        }


class WholeCalls:
    """As most users begin: fit() and then evaluate(), of arrays, from the call to its return."""

    def __init__(self, model, batch, accumulate=None):
        self.model, self.data, self.batch = build(model, "sgd"), data(model, batch), batch
        if accumulate is not None:
            macrobatch.accumulate(self.model, **accumulate)

    def first(self):
        return {"fit": self.seconds(self.model.fit), "evaluate": self.seconds(self.model.evaluate)}

    def seconds(self, call):
        start = time.process_time()
        call(*self.data, batch_size=self.batch, verbose=0)
        return time.process_time() - start

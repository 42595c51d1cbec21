"""Contenders that call fit() and evaluate() for the first time: plain, or accumulated."""

import contextlib
import functools
import time

import keras
import numpy as np
import tensorflow as tf
from keras_contenders import versions  # noqa: F401 (contender.py asks for it)

import macrobatch
from macrobatch._fit.meeting import Meeting

layers = keras.layers

SIDE, CLASSES = 32, 10
LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 6, 64, 4, 1000, 32
DROPOUT = 0.1


def training(description):
    ways = {"first": FirstCall, "whole": WholeCalls}
    return ways[description["way"]](**description["options"])


# Models, built but never called, and their data


def build(name, optimizer="adam"):
    """The model, and the way it is compiled."""
    keras.utils.set_random_seed(0)
    if name.endswith("transformer"):
        made = transformer(mask=name.startswith("masked"))
        # Keras gives a mask to weighted metrics only.
        metrics = {"weighted_metrics": ["accuracy"]}
    else:
        of_name = {
            "mobilenet": keras.applications.MobileNetV3Small,
            "resnet": keras.applications.ResNet50,
        }
        made = of_name[name](input_shape=(SIDE, SIDE, 3), weights=None, classes=CLASSES)
        metrics = {"metrics": ["accuracy"]}
    made.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False, **metrics)
    return made


def transformer(mask):
    """Gives each token of a sequence a class."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask)(tokens)
    for _ in range(LAYERS):
        # MultiHeadAttention takes the mask off its inputs, so it gets none that is used again.
        normed = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=DROPOUT)(normed, normed)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(DROPOUT)(layers.Dense(WIDTH)(hidden))])
    return keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(x))


def data(name, examples):
    """The arrays of one batch."""
    random = np.random.default_rng(0)
    if name.endswith("transformer"):
        real = np.arange(SEQUENCE) < random.integers(1, SEQUENCE + 1, (examples, 1))
        x = random.integers(1, VOCABULARY, (examples, SEQUENCE), dtype="int32") * real
    else:
        x = random.random((examples, SIDE, SIDE, 3), dtype="float32")
    shape = x.shape if x.ndim == 2 else examples
    return x, random.integers(0, CLASSES, shape, dtype="int32")


# Counts and times


@contextlib.contextmanager
def counted(owner, name):
    """Counts the calls of a method of a class; the list has an item for each of them."""
    calls = []
    method = getattr(owner, name)

    @functools.wraps(method)
    def counting(*args, **kwargs):
        calls.append(name)
        return method(*args, **kwargs)

    setattr(owner, name, counting)
    try:
        yield calls
    finally:
        setattr(owner, name, method)


@contextlib.contextmanager
def timed(owner, name):
    """The processor time of the calls of a method of a class: an item for each of them."""
    times = []
    method = getattr(owner, name)

    @functools.wraps(method)
    def timing(*args, **kwargs):
        start = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            times.append(time.process_time() - start)

    setattr(owner, name, timing)
    try:
        yield times
    finally:
        setattr(owner, name, method)


class Clock(keras.callbacks.Callback):
    """Notes the processor time of this process, all threads of it, when a batch has ended."""

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.process_time()

    on_test_batch_end = on_train_batch_end


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
        with counted(type(self.model), "call") as traces, timed(Meeting, "try_once") as trials:
            start = time.process_time()
            self.call(self.batches, callbacks=[clock], verbose=0)
        # Whatever is traced, the model or an optimizer or a part of a loop, becomes a graph.
        with counted(tf.__internal__.FuncGraph, "__init__") as graphs:
            self.call(self.batches, callbacks=[Clock()], verbose=0)
        seconds = clock.end - start
        return {
            "seconds": seconds,
            "share of the trial": sum(trials) / seconds,
            "traces": len(traces),
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

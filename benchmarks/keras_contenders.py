"""Contenders with Keras: plain, accumulating in three ways, and the floor.

Runs with Keras 3, and with Keras 2 on TensorFlow 2.12 for gradient-accumulator.
"""

import os
import sys
import threading

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
import workloads
from keras_models import compiled

if keras.__version__ >= "3":
    import macrobatch
else:
    import gradient_accumulator


def versions():
    found = {"TensorFlow": tf.__version__, "Keras": keras.__version__}
    if keras.__version__ >= "3":
        return {**found, "macrobatch": macrobatch.__version__}
    return {**found, "gradient-accumulator": "0.5.2"}


def training(description):
    """The contender of this description."""
    ways = {
        "floor": Floor,
        "plain": plain_training,
        "macrobatch": macrobatch_training,
        "noise": noise_training,
        "shown": shown_training,
        "keras": keras_accumulation,
        "gradient-accumulator": gradient_accumulator_training,
    }
    return ways[description["way"]](**description["options"])


# Contenders. step() makes one update.


class Fit:
    """Steps as fit() takes them, without its callbacks: from an iterator, which is always ready."""

    def __init__(
        self, compiled_model, model, batch, micro_batches=1, batches=1, steps_per_execution=1, **_
    ):
        self.model, self.calls = compiled_model, micro_batches * batches // steps_per_execution
        batches = dataset(*workloads.data(model, batch), micro_batches)
        if model == "padded transformer":  # as of padded_batch, which knows no longest sequence
            batches = batches.map(lambda *batch: tuple(map(of_any_length, batch)))
        self.batches, self.iterator = batches, iter(batches)
        compiled_model.make_train_function()

    def step(self):
        for _ in range(self.calls):
            self.model.train_function(self.iterator)

    def save_weights(self, path):
        np.save(path, np.concatenate([w.ravel() for w in self.model.get_weights()]))


def dataset(x, y, micro_batches):
    """The batch again and again, in one piece or in micro-batches."""
    if micro_batches > 1:
        parts = [t.reshape(micro_batches, -1, *t.shape[1:]) for t in (x, y)]
        made = tf.data.Dataset.from_tensor_slices(tuple(parts))
    else:
        made = tf.data.Dataset.from_tensors((x, y))
    options = tf.data.Options()
    options.autotune.enabled = False
    return made.repeat().with_options(options)


def of_any_length(tokens):
    return tf.compat.v1.placeholder_with_default(tokens, [tokens.shape[0], None])


def plain_training(**options):
    return Fit(compiled(**options), **options)


def macrobatch_training(accumulate, **options):
    return Fit(macrobatch.accumulate(compiled(**options), **accumulate), **options)


def shown_training(on_terminal, **options):
    """A fit in each step. On a terminal, loops say how far they are, and a thread may show it."""
    if on_terminal:
        sys.stdout, os.environ["TERM"] = pseudo_terminal(), "xterm"
    fit = macrobatch_training(**options)
    fit.step = lambda: fit.model.fit(fit.batches, steps_per_epoch=fit.calls, verbose=1)
    return fit


def pseudo_terminal():
    """A terminal, in front of which somebody sits and reads."""
    ours, theirs = os.openpty()

    def read():
        while os.read(ours, 2**16):
            pass

    threading.Thread(target=read, daemon=True).start()
    return open(theirs, "w")


def noise_training(every, accumulate, **options):
    """Ten updates in a step, of which one of `every` is measured for the gradient noise scale."""
    fit = macrobatch_training(accumulate, **options)
    fit.calls = 10
    if every:
        noise = macrobatch.GradientNoiseScale(every=every)
        noise.set_model(fit.model)
        noise.on_train_begin()
    return fit


def keras_accumulation(micro_batches, **options):
    return Fit(compiled(steps=micro_batches, **options), micro_batches=micro_batches, **options)


def gradient_accumulator_training(micro_batches, **options):
    def make(inputs, outputs):
        return gradient_accumulator.GradientAccumulateModel(
            micro_batches, inputs=inputs, outputs=outputs
        )

    return Fit(compiled(make=make, **options), micro_batches=micro_batches, **options)


class Floor:
    """What no accumulation can do without: all forward and backward passes, and one update.

    The gradients of all micro-batches but the last are computed and thrown away.
    """

    def __init__(self, batch, micro_batches, unrolled=False, jit_compile=False, **options):
        self.model = compiled(jit_compile=jit_compile, **options)
        self.variables = [variable.value for variable in self.model.trainable_variables]
        self.size, self.others = batch // micro_batches, micro_batches - 1
        self.unrolled = unrolled
        data = [tf.constant(t) for t in workloads.data(options["model"], batch)]
        passes = self.last_of_compiled_passes if jit_compile else self.last_of_passes
        step = tf.function(lambda *data: self.update(passes(*data)), jit_compile=jit_compile)
        self.step = lambda: step(*data)

    def update(self, gradients):
        self.model.optimizer.apply(gradients, self.model.trainable_variables)

    def gradients(self, x, y, index):
        def micro_batch(t):
            start = [index * self.size] + [0] * (t.shape.rank - 1)
            return tf.slice(t, start, [self.size, *t.shape[1:]])

        x, y = micro_batch(x), micro_batch(y)
        with tf.GradientTape() as tape:
            loss = self.model.compute_loss(x, y, self.model(x, training=True))
        return tape.gradient(loss, self.variables)

    def last_of_passes(self, x, y):
        def next_index(index):
            """Not before all gradients are there: so TensorFlow cannot leave them out."""
            gradients = self.gradients(x, y, index)
            with tf.control_dependencies(tf.nest.flatten(gradients, expand_composites=True)):
                return index + 1

        last = tf.constant(0)
        if self.unrolled:
            for _ in range(self.others):
                last = next_index(last)
        else:
            last = tf.while_loop(
                lambda index: index < self.others, next_index, [last], parallel_iterations=1
            )
        return self.gradients(x, y, tf.reshape(last, []))

    def last_of_compiled_passes(self, x, y):
        # XLA knows no control dependencies, and drops from a barrier what nobody uses behind it.
        # So the loop hands the gradients on, and only those of the last pass are used.
        from tensorflow.compiler.tf2xla.ops import gen_xla_ops  # it has no public name

        def next_pass(index, _):
            dense = [tf.convert_to_tensor(each) for each in self.gradients(x, y, index)]
            index, *dense = gen_xla_ops.xla_optimization_barrier([index, *dense])
            return index + 1, dense

        start = [tf.zeros(variable.shape) for variable in self.variables]
        return tf.while_loop(
            lambda index, _: index <= self.others, next_pass, (tf.constant(0), start)
        )[1]

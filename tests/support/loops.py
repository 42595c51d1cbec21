"""What tests of loops of one's own share: the ways to call a step, and the gradient of one tape."""

import functools

import keras
import numpy as np
import tensorflow as tf
from test_accumulator_everywhere import mirrored

from macrobatch import value_and_gradients

MODES = ["eager", "graph", "unknown size", "compiled", "compiled, unknown size"]


def call(mode, function, batch):
    """Calls a function of a batch: eagerly, in a graph that may know its size, or compiled."""
    if mode == "eager":
        return function(batch)
    signature = None
    if "unknown" in mode:
        signature = [tf.nest.map_structure(_unknown_size, batch)]
    return tf.function(function, signature, jit_compile="compiled" in mode)(batch)


def _unknown_size(tensor):
    if tf.is_tensor(tensor) and not isinstance(tensor, tf.Tensor):
        return tf.type_spec_from_value(tensor)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def accumulated(loss_fn, variables, size=3, **options):
    """A function of a batch: its loss and gradients, from micro-batches."""

    def step(batch):
        return value_and_gradients(loss_fn, variables, batch, micro_batch_size=size, **options)

    return step


def of_one_tape(loss_fn, variables, batch):
    """The loss of a batch and its gradients, from what loss_fn returns for all of it."""
    with tf.GradientTape() as tape:
        returned = loss_fn(batch)
        losses, weights = returned if isinstance(returned, tuple) else (returned, None)
        if weights is None:
            loss = tf.reduce_mean(losses)
        else:
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
    return loss, tape.gradient(loss, variables)


def check(mode, loss_fn, variables, batch, size=3, tolerance=1e-10):
    """Micro-batches come to what one tape over the whole batch comes to."""
    found = call(mode, accumulated(loss_fn, variables, size), batch)
    assert_close(found, of_one_tape(loss_fn, variables, batch), tolerance)


def updated(function, optimizer, variables):
    """A function of a batch that makes an update from its loss and gradients."""

    def step(batch):
        loss, gradients = function(batch)
        # Keras takes rows that come twice, or from several replicas, for different ones.
        optimizer.apply([dense(gradient) for gradient in gradients], variables)
        return loss

    return step


def squares_of(model):
    """A loss_fn for batches of (x, y), with the losses of layers."""
    mse = keras.losses.MeanSquaredError(reduction=None)

    def loss_fn(batch):
        return mse(batch[1], model(batch[0], training=True)) + sum(model.losses)

    return loss_fn


def dense(gradient):
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def assert_close(actual, expected, tolerance=1e-10, of_zero=None):
    """Asserts that nests are the same, values that should be 0 up to `of_zero`."""
    of_zero = tolerance if of_zero is None else of_zero
    actual, expected = tf.nest.flatten(actual), tf.nest.flatten(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        if a is None or b is None:
            assert a is b
        else:
            np.testing.assert_allclose(dense(a), dense(b), rtol=tolerance, atol=of_zero)


# Replicas


def made_in(strategy, build):
    with strategy.scope():
        return build()


def on_replicas(function, batch, sizes, graph=True):
    """Calls a function on two replicas, each with its part of the batch."""
    strategy = mirrored(2)
    starts = np.cumsum([0, *sizes])
    parts = [
        tf.nest.map_structure(lambda t, a=a, b=b: t[a:b], batch) for a, b in zip(starts, starts[1:])
    ]
    distributed = tf.nest.map_structure(
        lambda *values: strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        ),
        *parts,
    )

    results = (_in_graph(function) if graph else _run(function))(distributed)
    return tf.nest.map_structure(strategy.experimental_local_results, results)


def check_on_replicas(step, expected, batch, sizes, graph=True):
    """Each replica has the loss of the whole batch, and their gradients sum to its gradients."""

    def function(batch):
        loss, gradients = step(batch)
        return loss, _without_none(gradients)

    losses, gradients = on_replicas(function, batch, sizes, graph)
    for loss in losses:
        np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
    sums = [tf.add_n([dense(part) for part in parts]) for parts in gradients]
    assert_close(sums, _without_none(expected[1]), of_zero=1e-13)


def _without_none(gradients):
    return [gradient for gradient in tf.nest.flatten(gradients) if gradient is not None]


def _run(function):
    return lambda batch: mirrored(2).run(function, args=(batch,))


@functools.lru_cache(maxsize=1)
def _in_graph(function):
    """Kept for the next call of the same function: it is traced once."""
    return tf.function(_run(function))

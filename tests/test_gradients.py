import numpy as np
import pytest
import tensorflow as tf

from macrobatch import _gradients, _split


def run(mode, x, table, size):
    """Sums a dense, a sparse and an absent gradient, counts micro-batches, keeps the last sum."""

    def step(micro_batch, state):
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.gather(table, micro_batch) ** 2)
        rows = tape.gradient(loss, table)
        dense = tf.cast(tf.reduce_sum(micro_batch), tf.float32) * tf.ones([2])
        return [dense, None, rows], state + 1, tf.reduce_sum(micro_batch)

    def whole():
        examples = _split.examples_in(x)
        return _gradients.sum_over_micro_batches(step, x, examples, size, tf.constant(0))

    if mode == "eager":
        return whole()
    return tf.function(whole, jit_compile=mode == "compiled")()


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
@pytest.mark.parametrize(("size", "count", "last"), [(2, 4, 6), (3, 3, 6), (7, 1, 21), (9, 1, 21)])
def test_the_loop(mode, size, count, last):
    x = tf.constant([0, 1, 2, 3, 4, 5, 6])
    table = tf.reshape(tf.range(40.0), [20, 2])
    (dense, absent, rows), state, latest = run(mode, x, table, size)
    np.testing.assert_allclose(dense, [21, 21])
    assert absent is None
    assert isinstance(rows, tf.IndexedSlices) == (mode != "compiled")
    expected = np.where(np.arange(20)[:, None] < 7, 2 * table.numpy(), 0)
    np.testing.assert_allclose(tf.convert_to_tensor(rows), expected)
    assert int(state) == count
    assert int(latest) == last


def test_the_step_is_traced_once():
    traces = []

    @tf.function
    def whole(x):
        def step(micro_batch, state):
            traces.append(micro_batch.shape)
            return [tf.reduce_sum(micro_batch, 0)], state, ()

        return _gradients.sum_over_micro_batches(step, x, _split.examples_in(x), 3, ())

    np.testing.assert_allclose(whole(tf.ones([7, 2]))[0][0], [7, 7])
    assert len(traces) == 1

import numpy as np
import pytest
import tensorflow as tf

from macrobatch._batches import split as _split
from macrobatch._tensorflow import loop as _loop


def run(mode, x, table, size, signature=None):
    """Sums a dense, a sparse and an absent gradient, counts micro-batches, keeps the last sum."""

    def step(micro_batch, state):
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.gather(table, micro_batch) ** 2)
        rows = tape.gradient(loss, table)
        dense = tf.cast(tf.reduce_sum(micro_batch), tf.float32) * tf.ones([2])
        aux = {"each": micro_batch * 2, "count": tf.size(micro_batch), "none": None}
        aux["empty"] = tf.zeros([tf.size(micro_batch), 0])
        return _loop.Part([dense, None, rows], state + 1, tf.reduce_sum(micro_batch), aux)

    def whole(x):
        examples = _split.examples_in(x)
        micro_batches = _split.MicroBatches(x, examples, size)
        pruned = mode == "pruned"
        return _loop.sum_over_micro_batches(step, micro_batches, tf.constant(0), pruned=pruned)

    if mode == "eager":
        return whole(x)
    return tf.function(whole, signature, jit_compile=mode == "compiled")(x)


@pytest.mark.parametrize("mode", ["eager", "graph", "pruned", "large sums", "compiled"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("size", "count", "last"), [(2, 4, 6), (3, 3, 6), (7, 1, 21), (9, 1, 21)])
def test_the_loop(mode, known, size, count, last, monkeypatch):
    if mode == "large sums":  # then the first micro-batch is outside of the loop
        monkeypatch.setattr(_loop, "LARGE_SUMS", 0)
    x = tf.constant([0, 1, 2, 3, 4, 5, 6])
    signature = None if known else [tf.TensorSpec([None], tf.int32)]
    table = tf.reshape(tf.range(40.0), [20, 2])
    (dense, absent, rows), state, latest, aux = run(mode, x, table, size, signature)
    np.testing.assert_allclose(dense, [21, 21])
    assert absent is None
    assert isinstance(rows, tf.IndexedSlices) == (mode != "compiled")
    expected = np.where(np.arange(20)[:, None] < 7, 2 * table.numpy(), 0)
    np.testing.assert_allclose(tf.convert_to_tensor(rows), expected)
    assert int(state) == count
    assert int(latest) == last
    np.testing.assert_array_equal(aux["each"], x * 2)
    np.testing.assert_array_equal(aux["count"], np.diff([*range(0, 7, size), 7]))
    assert aux["none"] is None
    assert aux["empty"].shape == [7, 0]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_ragged_and_sparse_values_of_all_micro_batches(mode):
    def step(micro_batch, state):
        dense = micro_batch.to_tensor()  # as wide as the longest of this micro-batch
        nested = tf.stack([micro_batch, micro_batch * 10], axis=1)
        return _loop.Part([], state, aux=[micro_batch, nested, tf.sparse.from_dense(dense)])

    def whole(x):
        micro_batches = _split.MicroBatches(x, _split.examples_in(x), 2)
        return _loop.sum_over_micro_batches(step, micro_batches, ()).aux

    x = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    ragged, nested, sparse = (whole if mode == "eager" else tf.function(whole))(x)
    assert ragged.to_list() == x.to_list()
    assert nested.to_list() == [[row, [10 * n for n in row]] for row in x.to_list()]
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), x.to_tensor())


def test_the_step_is_traced_once():
    traces = []

    @tf.function
    def whole(x):
        def step(micro_batch, state):
            traces.append(micro_batch.shape)
            return _loop.Part([tf.reduce_sum(micro_batch, 0)], state)

        micro_batches = _split.MicroBatches(x, _split.examples_in(x), 3)
        return _loop.sum_over_micro_batches(step, micro_batches, ())

    np.testing.assert_allclose(whole(tf.ones([7, 2]))[0][0], [7, 7])
    assert len(traces) == 1

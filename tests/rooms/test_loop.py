import numpy as np
import pytest
import tensorflow as tf
from support import thorough_for

from macrobatch._batches import in_order
from macrobatch._tensorflow import loop as loops
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._types import Part


def micro_batches_of(x, size):
    x, examples = in_order.checked(x, ENGINE)
    return in_order.InOrder(x, examples, size, ENGINE)


def run(mode, x, table, size, signature=None):
    """Sums a dense, a sparse and an absent gradient, counts micro-batches, keeps the last sum."""

    def step(micro_batch, values, counts, how):
        with tf.GradientTape() as tape:
            tape.watch(table)
            loss = tf.reduce_sum(tf.gather(table, micro_batch) ** 2)
        rows = tape.gradient(loss, table)
        dense = tf.cast(tf.reduce_sum(micro_batch), tf.float32) * tf.ones([2])
        aux = {"each": micro_batch * 2, "count": tf.size(micro_batch), "none": None}
        aux["empty"] = tf.zeros([tf.size(micro_batch), 0])
        written = [values[0] + 1, None]
        return Part(
            [dense, None, rows],
            [tf.size(micro_batch)],
            written,
            [],
            tf.reduce_sum(micro_batch),
            aux,
        )

    def whole(x):
        loop = Loop(step, micro_batches_of(x, size), lambda: [tf.constant(0), tf.constant(7)])
        counts = None if mode == "eager" else loop.counts()
        return loop.run([]), counts

    if mode == "eager":
        return whole(x)
    return tf.function(whole, signature, autograph=False, jit_compile=mode == "compiled")(x)


@thorough_for(
    "2-4-6-False-compiled",
    "2-4-6-True-compiled",
    "2-4-6-True-graph",
    "2-4-6-True-large sums",
    "3-3-6-False-compiled",
    "7-1-21-False-compiled",
    "7-1-21-True-large sums",
    "9-1-21-False-compiled",
)
@pytest.mark.parametrize("mode", ["eager", "graph", "large sums", "compiled"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("size", "count", "last"), [(2, 4, 6), (3, 3, 6), (7, 1, 21), (9, 1, 21)])
def test_the_loop(mode, known, size, count, last, monkeypatch):
    if mode == "large sums":  # then the first micro-batch is outside of the loop
        monkeypatch.setattr(loops, "LARGE_SUMS", 0)
    x = tf.constant([0, 1, 2, 3, 4, 5, 6])
    signature = None if known else [tf.TensorSpec([None], tf.int32)]
    table = tf.reshape(tf.range(40.0), [20, 2])
    part, counts = run(mode, x, table, size, signature)
    (dense, absent, rows), (counted,), (state, unchanged), _, latest, aux = part
    assert int(counted) == 7
    assert counts is None or int(counts[0]) == 7
    assert unchanged is None
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
    def step(micro_batch, values, counts, how):
        dense = micro_batch.to_tensor()  # as wide as the longest of this micro-batch
        nested = tf.stack([micro_batch, micro_batch * 10], axis=1)
        return Part([], aux=[micro_batch, nested, tf.sparse.from_dense(dense)])

    def whole(x):
        return Loop(step, micro_batches_of(x, 2)).run([]).aux

    x = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    ragged, nested, sparse = (whole if mode == "eager" else tf.function(whole, autograph=False))(x)
    assert ragged.to_list() == x.to_list()
    assert nested.to_list() == [[row, [10 * n for n in row]] for row in x.to_list()]
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), x.to_tensor())


def test_the_step_is_traced_once():
    traces = []

    @tf.function(autograph=False)
    def whole(x):
        def step(micro_batch, values, counts, how):
            traces.append(micro_batch.shape)
            return Part([tf.reduce_sum(micro_batch, 0)], [tf.shape(micro_batch)[0]])

        loop = Loop(step, micro_batches_of(x, 3))
        return loop.run(loop.counts())

    np.testing.assert_allclose(whole(tf.ones([7, 2]))[0][0], [7, 7])
    assert len(traces) == 1


def test_the_step_is_traced_again_for_what_it_finds():
    """A variable that a run has written is a value of the next trace."""
    known = []

    @tf.function(autograph=False)
    def whole(x):
        def step(micro_batch, values, counts, how):
            if not known:
                known.append("seed")
                return Part([], written=[tf.constant(1)])
            return Part([], written=[values[0] + 1])

        loop = Loop(
            step,
            micro_batches_of(x, 3),
            lambda: [tf.constant(10) for _ in known],
            lambda values: len(values) == len(known),
        )
        return loop.run([]).written

    assert [int(value) for value in whole(tf.ones([7]))] == [13]


def test_counting_leaves_out_what_counts_do_not_depend_on():
    """Also where it may fail, which a tf.function would keep."""
    ran = []

    def note(x):
        ran.append(1)
        return x

    @tf.function(autograph=False)
    def whole(x):
        def step(micro_batch, values, counts, how):
            predictions = tf.numpy_function(note, [micro_batch], tf.float32)
            with tf.control_dependencies([tf.debugging.Assert(tf.size(predictions) > 0, ["none"])]):
                loss = tf.reduce_sum(predictions)
            seed = values[0] + 1
            return Part(
                [loss], [tf.reduce_sum(micro_batch) + tf.cast(values[0], tf.float32)], [seed]
            )

        loop = Loop(step, micro_batches_of(x, 3), lambda: [tf.constant(0)])
        return loop.counts()

    # The seed that counts depend on goes from one micro-batch to the next: 0 + 1 + 2.
    assert float(whole(tf.ones([7]))[0]) == 7 + 3
    assert ran == []

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support import thorough_for

from macrobatch._batches import in_order
from macrobatch._tensorflow import graph
from macrobatch._tensorflow.engine import ENGINE


def cut(batch, size):
    batch, examples = in_order.checked(batch, ENGINE)
    return in_order.InOrder(batch, examples, size, ENGINE)


def pieces(batch, size):
    micro_batches = cut(batch, size)
    for run in micro_batches.runs:
        for index in range(int(run.count)):
            yield micro_batches.get(run, index)


def batch_of(examples):
    rows = [list(range(i % 4)) for i in range(examples)]
    return {
        "dense": tf.random.normal([examples, 3]),
        "nested": (tf.range(examples), None),
        "ragged": tf.ragged.constant(rows, dtype=tf.int32),
        "sparse": tf.sparse.from_dense(tf.constant(np.arange(examples * 2).reshape(-1, 2) % 3)),
    }


@settings(max_examples=40, deadline=None)
@given(examples=st.integers(1, 23), size=st.integers(1, 25))
def test_micro_batches_make_up_the_batch(examples, size):
    batch = batch_of(examples)
    micro_batches = list(pieces(batch, size))
    sizes = [int(ENGINE.examples(micro_batch)) for micro_batch in micro_batches]
    assert sum(sizes) == examples
    assert all(s == min(size, examples) for s in sizes[:-1])
    dense = tf.concat([m["dense"] for m in micro_batches], 0)
    np.testing.assert_array_equal(dense, batch["dense"])
    ragged = tf.concat([m["ragged"] for m in micro_batches], 0)
    assert ragged.to_list() == batch["ragged"].to_list()
    sparse = tf.sparse.concat(0, [m["sparse"] for m in micro_batches])
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), tf.sparse.to_dense(batch["sparse"]))
    assert all(m["nested"][1] is None for m in micro_batches)


@thorough_for("1-False-False")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("examples", [1, 6, 8])
def test_micro_batches_in_a_graph(compiled, known, examples):
    spec = tf.TensorSpec([examples if known else None, 2], tf.float32)

    @tf.function(input_signature=[spec], autograph=False, jit_compile=compiled)
    def totals(x):
        assert graph.in_xla() == compiled
        found = tf.zeros([2])
        micro_batches = cut(x, 3)
        for run in micro_batches.runs:
            found = tf.while_loop(
                lambda index, _, run=run: index < run.count,
                lambda index, found, run=run: (
                    index + 1,
                    found + tf.reduce_sum(micro_batches.get(run, index), 0),
                ),
                (tf.constant(0), found),
            )[1]
        return found

    x = tf.random.normal([examples, 2])
    np.testing.assert_allclose(totals(x), tf.reduce_sum(x, 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((tf.zeros([3, 2]), tf.zeros([4])), r"same number of examples.*\(3, 2\).*\(4,\)"),
        ((tf.zeros([3, 2]), tf.constant(1.0)), "Received: a scalar"),
        ((tf.zeros([0, 2]), None), "at least one example"),
        ((None, None), "at least one tensor"),
    ],
)
def test_batches_that_cannot_be_cut(batch, message):
    with pytest.raises(ValueError, match=message):
        in_order.checked(batch, ENGINE)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (0, 0)])
def test_batches_that_cannot_be_cut_known_only_at_run_time(compiled, sizes):
    spec = tf.TensorSpec([None], tf.float32)

    @tf.function(input_signature=[spec, spec], autograph=False, jit_compile=compiled)
    def examples(x, y):
        return in_order.checked((x, y), ENGINE)[1] + 0

    assert int(examples(tf.zeros([5]), tf.zeros([5]))) == 5
    # XLA has no assertions; what it says instead names the check.
    message = "differ_in_examples|is_empty" if compiled else "number of examples|one example"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        examples(tf.zeros([sizes[0]]), tf.zeros([sizes[1]]))


def test_one_part_that_knows_its_size_is_enough():
    """A ragged or sparse part of a batch of fixed size does not know it."""

    @tf.function(autograph=False)
    def sizes(ragged, sparse, dense):
        batch, examples = in_order.checked((ragged, sparse, dense), ENGINE)
        assert examples == 6
        micro_batches = in_order.InOrder(batch, examples, 3, ENGINE)
        return ENGINE.examples(micro_batches.get(micro_batches.runs[0], 0))

    batch = batch_of(6)
    assert sizes(batch["ragged"], batch["sparse"], batch["dense"]) == 3
    specs = [tf.RaggedTensorSpec([None, None], tf.int32), tf.SparseTensorSpec([None, 2], tf.int64)]
    traced = sizes.get_concrete_function(*specs, tf.TensorSpec([6, 3]))
    short = tf.ragged.constant([[1], [2]], dtype=tf.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of examples"):
        traced(short, batch["sparse"], batch["dense"])

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from macrobatch._tensorflow import sums as _sums

ROWS, WIDTH = 5, 3


@st.composite
def slices(draw):
    indices = draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=8))
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(len(indices), WIDTH))
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([ROWS, WIDTH]))


gradients = st.one_of(
    st.none(),
    slices(),
    st.integers(0, 99).map(
        lambda seed: tf.constant(np.random.default_rng(seed).normal(size=(ROWS, WIDTH)))
    ),
)


def as_array(gradient):
    return np.zeros([ROWS, WIDTH]) if gradient is None else np.array(_sums.dense(gradient))


@settings(max_examples=60, deadline=None)
@given(left=gradients, right=gradients)
def test_sums_of_any_two_kinds(left, right):
    total = _sums.add(left, right)
    np.testing.assert_allclose(as_array(total), as_array(left) + as_array(right), rtol=1e-12)
    assert (total is None) == (left is None and right is None)
    both_sparse = all(g is None or isinstance(g, tf.IndexedSlices) for g in (left, right))
    assert isinstance(total, tf.IndexedSlices) == (both_sparse and total is not None)


@settings(max_examples=60, deadline=None)
@given(gradient=slices())
def test_merged_rows_are_unique_and_sum_up(gradient):
    merged = _sums.merge_rows(gradient)
    indices = merged.indices.numpy()
    assert len(set(indices)) == len(indices)
    assert set(indices) == set(gradient.indices.numpy())
    np.testing.assert_allclose(as_array(merged), as_array(gradient), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_narrow_gradients_are_summed_in_float32(dtype):
    assert _sums.wide(dtype) == tf.float32
    assert _sums.wide(tf.float64) == tf.float64
    gradient = tf.ones([2], dtype)
    total = _sums.start(gradient, 1000)
    for index in range(1000):
        total = _sums.push(total, gradient * tf.constant(0.001, dtype), index)
    assert total.dtype == tf.float32
    np.testing.assert_allclose(total, 1000 * tf.cast(tf.constant(0.001, dtype), tf.float32), 1e-4)


def test_a_sum_over_more_rows_than_the_table_has_is_dense():
    gradient = tf.IndexedSlices(
        tf.ones([2, WIDTH]), tf.constant([0, 1]), tf.constant([ROWS, WIDTH])
    )
    assert isinstance(_sums.start(gradient, 2), _sums.Rows)
    assert isinstance(_sums.start(gradient, 3), tf.Tensor)

"""The arithmetic of the gradient noise scale, on numbers."""

import math

import numpy as np
import pytest
from keras import ops

from macrobatch._keras import noise
from macrobatch._keras.noise import SIZE, Squares, advanced, logs_of, pair


def of(*values):
    return Squares(*(ops.convert_to_tensor(value, "float64") for value in values))


def state_after(*found, decay=0.9, measured=True):
    state = ops.zeros([SIZE], "float64")
    for each in found:
        state = advanced(state, ops.convert_to_tensor(measured), each, decay)
    return ops.convert_to_numpy(state)


@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [7, 7, 7, 2], [1, 5]])
def test_the_pair_has_no_bias(sizes):
    """Gradients of examples have mean (1, 2) and variance 4 + 9; a regulariser adds (1, 0)."""
    rng, updates, weights = np.random.default_rng(0), 4000, np.array(sizes) / sum(sizes)
    drawn = [rng.normal(size=[updates, size, 2]) * [2, 3] + [1, 2] for size in sizes]
    gradients = np.stack([each.mean(1) for each in drawn])
    whole = np.tensordot(weights, gradients, 1)
    apart = np.tensordot(weights, (gradients**2).sum(2), 1)
    squared = [(value**2).sum(1) for value in (whole, whole + np.array([1, 0]))]
    found = np.stack(pair(of(len(sizes), sum(sizes), apart, *squared)))
    mean, error = found.mean(1), found.std(1) / math.sqrt(updates)
    assert (error < [0.5, 0.3]).all()
    assert (np.abs(mean - [13, 2**2 + 2**2]) < 3 * error).all()


def test_the_ratio_is_one_of_averages():
    first, second = of(3, 6, 10, 4, 4), of(5, 10, 7, 3, 5)
    pairs = [(18, 4 - 3), (10, 5 - 1)]
    weights = [0.9 * 0.1, 0.1]
    expected = [sum(w * p[i] for w, p in zip(weights, pairs)) for i in range(2)]
    state = state_after(first, second)
    np.testing.assert_allclose(state, [2, math.sqrt(5), 10, 0.19, *expected], rtol=1e-12)
    logs = logs_of(ops.convert_to_tensor(state))
    np.testing.assert_allclose(logs["noise_scale"], expected[0] / expected[1], rtol=1e-6)
    np.testing.assert_allclose(logs["gradient_norm"], math.sqrt(5), rtol=1e-6)
    assert noise.examples_of(state) == 10


@pytest.mark.parametrize(
    "found",
    [(1, 6, 4, 4, 4), (3, 6, math.inf, 4, 4), (3, 6, math.nan, math.nan, math.nan)],
    ids=["not cut", "infinite", "nan"],
)
def test_what_tells_nothing_does_not_count(found):
    good, bad = of(3, 6, 10, 4, 4), of(*found)
    np.testing.assert_array_equal(state_after(good, bad)[3:], state_after(good)[3:])
    assert np.isnan(logs_of(ops.convert_to_tensor(state_after(bad)))["noise_scale"])


def test_updates_that_are_not_measured_are_counted_only():
    found = state_after(of(0, 6, 0, 0, 0), measured=False)
    np.testing.assert_array_equal(found, [1, 0, 6, 0, 0, 0])


def test_noise_without_a_signal_is_infinite():
    found = state_after(of(3, 6, 10, 1, 1))
    assert np.isinf(logs_of(ops.convert_to_tensor(found))["noise_scale"])

"""Losses in fit() against the formula, written out with NumPy: what is trained and what is told."""

from contextlib import nullcontext as silence

import keras
import numpy as np
import pytest
from keras import layers, losses, ops
from support import BACKEND, array, thorough, train

import macrobatch

X = np.random.default_rng(0).normal(size=(6, 4, 2))
Y = np.random.default_rng(1).normal(size=(6, 4, 2))
MASK = np.arange(4) < np.array([4, 1, 0, 0, 2, 3])[:, None]
WEIGHTS = np.random.default_rng(2).uniform(size=(6, 4))
# JAX takes a second to compile each of them.
on_jax = thorough if BACKEND == "jax" else ()


class Shift(layers.Layer):
    """Adds a number that is trained. Examples may be masked, by a column of the inputs."""

    def __init__(self, masked=False):
        super().__init__()
        self.masked, self.supports_masking = masked, True

    def build(self, shape):
        self.shift = self.add_weight(shape=[], initializer="zeros")

    def call(self, inputs):
        return inputs[..., :2] + self.shift

    def compute_mask(self, inputs, mask=None):
        return ops.cast(inputs[..., 2], "bool") if self.masked else None

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)


def shifted(masked=False, outputs=1, function=None):
    inputs = keras.Input([4, 3])
    results = [Shift(masked)(inputs) for _ in range(outputs)]
    if function is not None:
        results = [Adds(function)(result) for result in results]
    return keras.Model(inputs, results[0] if outputs == 1 else results)


class Adds(layers.Layer):
    """Gives add_loss a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.supports_masking = function, True

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


def one_update(build, y=Y, size=2, eager=True, fit=None, **compiled):
    """The shift after one update at a rate of 1, so the gradient, and the loss that is told."""
    eagerly = {"run_eagerly": True} if eager and BACKEND != "jax" else {}
    model, history = train(
        build,
        np.concatenate([X, MASK[..., None]], -1),
        y,
        cut={"micro_batch_size": size},
        optimizer=lambda: keras.optimizers.SGD(1.0),
        fit=fit,
        moved=False,
        **eagerly,
        **compiled,
    )
    return [-float(array(weight)) for weight in model.trainable_weights], history["loss"][0]


def formula(reduction, mask=1.0, weights=1.0):
    """A loss and its gradient, as Keras' documentation has the loss."""
    factors = mask * weights * np.ones(Y.shape[:2])
    elements = np.sum(mask) if np.ndim(mask) else factors.size
    whole = {
        "sum_over_batch_size": elements,
        "mean_with_sample_weight": factors.sum(),
        "sum": 1.0,
    }[reduction]
    value = (((X - Y) ** 2).mean(-1) * factors).sum() / whole
    return value, ((2 * (X - Y)).mean(-1) * factors).sum() / whole


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("mask", [False, pytest.param(True, marks=on_jax)])
@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=on_jax)])
def test_micro_batches_add_up_to_the_formula(reduction, mask, weights):
    (gradient,), loss = one_update(
        lambda: shifted(mask),
        loss=losses.MeanSquaredError(reduction=reduction),
        fit={"sample_weight": WEIGHTS} if weights else None,
    )
    expected = formula(reduction, MASK if mask else 1.0, WEIGHTS if weights else 1.0)
    np.testing.assert_allclose([loss, gradient], expected, rtol=1e-10)


def test_no_reduction_is_trained_as_a_sum_and_told_as_a_mean():
    loss = losses.MeanSquaredError(reduction=None)
    (gradient,), told = one_update(shifted, loss=loss)
    np.testing.assert_allclose(gradient, formula("sum")[1])
    np.testing.assert_allclose(told, formula("sum_over_batch_size")[0])


def per_example(y, y_pred):
    return ops.mean((y - y_pred) ** 2, axis=(1, 2))


class Vector(losses.Loss):
    """One value for each example."""

    def call(self, y, y_pred):
        return per_example(y, y_pred)


def test_a_scalar_beside_a_vector_counts_once_per_example():
    """Keras adds the values of all losses, and so a scalar to each value of a vector."""
    (vector, scalar), told = one_update(
        lambda: shifted(outputs=2),
        [Y, Y],
        loss=[Vector(reduction=None), losses.MeanSquaredError()],
        loss_weights=[1.0, 3.0],
    )
    value, gradient = formula("sum_over_batch_size")
    np.testing.assert_allclose([vector, scalar], [6 * gradient, 6 * 3.0 * gradient])
    np.testing.assert_allclose(told, 4.0 * value)


def test_a_scalar_beside_values_for_each_position_is_refused():
    each = [losses.MeanSquaredError(reduction=None), losses.MeanSquaredError()]
    with pytest.raises(ValueError, match=r"one value for each example.*Give each loss"):
        one_update(lambda: shifted(outputs=2), [Y, Y], loss=each)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_loss_may_be_a_number():
    (gradient, nothing), told = one_update(
        lambda: shifted(outputs=2),
        [Y, Y],
        loss=[losses.MeanSquaredError(), lambda y, y_pred: 0.0],
    )
    assert nothing == 0.0
    np.testing.assert_allclose([told, gradient], formula("sum_over_batch_size"))


def test_a_loss_with_a_call_of_its_own_is_taken_for_what_it_returns():
    class Own(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.mean((y_true - y_pred) ** 2)

    with pytest.warns(macrobatch.ExactnessWarning, match="one scalar for the batch"):
        (gradient,), told = one_update(shifted, loss=Own())
    np.testing.assert_allclose([told, gradient], formula("sum_over_batch_size"))


def test_what_is_divided_by_nothing_is_0():
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    (gradient,), told = one_update(
        lambda: shifted(masked=True), loss=loss, fit={"sample_weight": 0.0 * WEIGHTS}
    )
    assert (gradient, told) == (0.0, 0.0)


# Values that layers give to add_loss, whether they are means over examples, and their gradients.
ADDED = {
    "scalar": (lambda x: ops.mean(x**2), True, (2 * X).mean()),
    "per example": (lambda x: ops.sum(x**2, (1, 2)), False, (2 * X).sum()),
    "one penalty": (lambda x: ops.reshape(ops.mean(x**2), [1]), True, (2 * X).mean()),
    "a mean for each feature": (lambda x: ops.mean(x**2, (0, 1)), True, 2 * (2 * X).mean()),
}


def nothing(y, y_pred):
    """A loss of 0 for each example."""
    return 0.0 * ops.sum(y_pred, (1, 2))


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param(kind, size, marks=() if size == 2 else on_jax)
        for kind in ADDED
        for size in (1, 2, 3)
    ],
)
def test_added_values_are_of_examples_only_if_there_are_more_for_more_examples(kind, size):
    """Micro-batches of 2 are as large as there are features, those of 1 as a penalty."""
    function, is_mean, expected = ADDED[kind]
    warned = pytest.warns(macrobatch.ExactnessWarning, match="add_loss") if is_mean else silence()
    with warned:
        (gradient,), _ = one_update(lambda: shifted(function=function), size=size, loss=nothing)
    np.testing.assert_allclose(gradient, expected)


class DrawnMask(layers.Layer):
    """Masks positions at random, or by the last column of its inputs."""

    def __init__(self, drawn):
        super().__init__()
        self.drawn = drawn
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs):
        column = inputs[..., 2]
        if self.drawn:
            column = ops.cast(
                keras.random.uniform(ops.shape(column), seed=self.seeds) < 0.5, "float64"
            )
        return ops.concatenate([inputs[..., :2], column[..., None]], -1)


def test_denominators_are_counted_with_the_seeds_of_each_micro_batch():
    """Several losses with masks: their denominators are counted before the losses, in a graph."""

    def build(drawn):
        inputs = keras.Input([4, 3])
        results = [Shift(masked=True)(DrawnMask(drawn)(inputs)) for _ in range(2)]
        return keras.Model(inputs, results)

    seeds = keras.random.SeedGenerator(5)
    drawn = [array(keras.random.uniform([2, 4], seed=seeds)) < 0.5 for _ in range(3)]
    mask = np.concatenate(drawn)
    assert len({each.sum() for each in drawn}) > 1
    gradients, told = one_update(lambda: build(True), [Y, Y], eager=False, loss=["mse", "mse"])
    value, gradient = formula("sum_over_batch_size", mask)
    np.testing.assert_allclose([told, *gradients], [2 * value, gradient, gradient], rtol=1e-10)

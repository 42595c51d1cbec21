"""The terms of compiled losses: numerators, denominators, and what is reported.

On any backend of Keras: test_seam.py runs this file on NumPy, without TensorFlow.
"""

import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from macrobatch._engine import Engine
from macrobatch._keras import probes, report
from macrobatch._keras.losses import (
    Count,
    MicroBatch,
    Terms,
)
from macrobatch._keras.model import ModelStep
from macrobatch._keras.probes import activity_losses_are_means, mask_padding
from macrobatch._types import Whole

Y_TRUE = np.random.default_rng(0).normal(size=(6, 4, 2))
Y_PRED = np.random.default_rng(1).normal(size=(6, 4, 2))
MASK = np.arange(4) < np.array([4, 1, 0, 0, 2, 3])[:, None]
WEIGHTS = np.random.default_rng(2).uniform(size=(6, 4))
CUTS = [(0, 2), (2, 3), (3, 6)]


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def compiled(*all_losses, **options):
    """A compiled loss of one output, or of several."""
    inputs = keras.Input([4, 2])
    outputs = [layers.Identity(name=f"out{i}")(inputs) for i in range(len(all_losses))]
    model = keras.Model(inputs, outputs[0] if len(outputs) == 1 else outputs)
    model.compile(loss=all_losses[0] if len(outputs) == 1 else list(all_losses), **options)
    y, y_pred = ops.convert_to_tensor(Y_TRUE), ops.convert_to_tensor(Y_PRED)
    several = len(outputs) > 1
    model._compile_loss(
        [y] * len(outputs) if several else y, [y_pred] * len(outputs) if several else y_pred
    )
    return model._compile_loss


def terms_of(loss, start, stop, mask=False, weights=False, outputs=1, examples_of_all=6):
    prediction = ops.convert_to_tensor(Y_PRED[start:stop])
    if mask:
        keras.src.backend.set_keras_mask(prediction, ops.convert_to_tensor(MASK[start:stop]))
    micro_batch = MicroBatch(stop - start, examples_of_all, None, lambda w: 1.0)
    found = Terms(micro_batch, [], Engine(), set())
    sample_weight = ops.convert_to_tensor(WEIGHTS[start:stop]) if weights else None
    y = ops.convert_to_tensor(Y_TRUE[start:stop])
    if outputs > 1:
        found.add_compiled(loss, [y] * outputs, [prediction] * outputs, sample_weight)
    else:
        found.add_compiled(loss, y, prediction, sample_weight)
    return found


def whole(parts):
    """The trained and the reported value of the whole batch, from the terms of its parts."""
    terms, counts = parts[0].terms, parts[0].counts
    denominators = [sum(float(p.counts[i].own) for p in parts) for i in range(len(counts))]
    trained = 0.0
    for i, term in enumerate(terms):
        value = sum(float(p.terms[i].numerator) for p in parts) * term.weight
        if term.counted is not None:
            value /= denominators[term.counted] + counts[term.counted].padding
        trained += value
    numerators = [sum(float(p.terms[i].reported) for p in parts) for i in range(len(terms))]
    values = report.values_of(terms, counts, numerators, denominators, 0.0)
    return trained, float(values.loss)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight", "sum"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_parts_add_up_to_the_formula(reduction, mask, weights):
    """The formula of Keras' documentation, written out with NumPy."""
    loss = compiled(losses.MeanSquaredError(reduction=reduction))
    found, reported = whole([terms_of(loss, *cut, mask, weights) for cut in CUTS])
    values = ((Y_TRUE - Y_PRED) ** 2).mean(-1)
    factors = (WEIGHTS if weights else 1.0) * (MASK if mask else 1.0) * np.ones_like(values)
    elements = MASK.sum() if mask else values.size
    expected = {
        "sum_over_batch_size": (values * factors).sum() / elements,
        "mean_with_sample_weight": (values * factors).sum() / factors.sum(),
        "sum": (values * factors).sum(),
    }[reduction]
    tolerance = 1e-6 if mask_padding() else 1e-12
    np.testing.assert_allclose(found, expected, rtol=tolerance)
    np.testing.assert_allclose(reported, expected, rtol=tolerance)


def test_only_what_is_masked_or_weighted_is_counted():
    loss = compiled(losses.MeanSquaredError())
    assert terms_of(loss, 0, 2).counts == []
    assert terms_of(loss, 0, 2, weights=True).counts == []
    (count,) = terms_of(loss, 0, 2, mask=True).counts
    assert float(count.own) == MASK[:2].sum()
    by_weights = compiled(losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    (count,) = terms_of(by_weights, 0, 2, weights=True).counts
    np.testing.assert_allclose(float(count.own), WEIGHTS[:2].sum())


def test_no_reduction_is_trained_as_a_sum_and_reported_as_a_mean():
    loss = compiled(losses.MeanSquaredError(reduction=None))
    trained, reported = whole([terms_of(loss, *cut) for cut in CUTS])
    values = ((Y_TRUE - Y_PRED) ** 2).mean(-1)
    np.testing.assert_allclose([trained, reported], [values.sum(), values.mean()])


def test_a_scalar_beside_a_vector_counts_once_per_example():
    """Keras adds the values of all losses, and so a scalar to each value of a vector."""

    def per_example(y, y_pred):
        return ops.mean((y - y_pred) ** 2, axis=(1, 2))

    class Vector(losses.Loss):
        def call(self, y, y_pred):
            return per_example(y, y_pred)

    vector = Vector(reduction=None)
    loss = compiled(vector, losses.MeanSquaredError(), loss_weights=[1.0, 3.0])
    trained, reported = whole([terms_of(loss, *cut, outputs=2) for cut in CUTS])
    values = ((Y_TRUE - Y_PRED) ** 2).mean((1, 2))
    np.testing.assert_allclose(trained, (values + 3.0 * values.mean()).sum())
    np.testing.assert_allclose(reported, values.mean() + 3.0 * values.mean())


def test_a_scalar_beside_values_for_each_position_is_refused():
    loss = compiled(losses.MeanSquaredError(reduction=None), losses.MeanSquaredError())
    with pytest.raises(ValueError, match=r"one value for each example.*'out0': 2.*Give each loss"):
        terms_of(loss, 0, 3, outputs=2)


def test_a_loss_may_be_a_number():
    loss = compiled(losses.MeanSquaredError(), lambda y, y_pred: 0.0)
    trained, _ = whole([terms_of(loss, *cut, outputs=2) for cut in CUTS])
    np.testing.assert_allclose(trained, ((Y_TRUE - Y_PRED) ** 2).mean())


def test_a_loss_with_a_call_of_its_own_is_taken_for_what_it_returns():
    class Own(losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return ops.mean((y_true - y_pred) ** 2)

    (term,) = terms_of(compiled(Own()), 0, 6).terms
    assert term.is_scalar


def test_what_is_divided_by_nothing_is_0():
    loss = compiled(losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    found = terms_of(loss, 2, 4, mask=True)
    assert float(found.counts[0].own) == float(found.terms[0].numerator) == 0.0
    value = report.values_of(found.terms, found.counts, [ops.zeros([])], [ops.zeros([])], 0.0)
    assert float(value.loss) == 0.0


def test_activity_losses_are_what_they_are_taken_for():
    layer = layers.ActivityRegularization(l2=1.0)
    with keras.StatelessScope(collect_losses=True) as scope:
        layer(ops.ones([5, 2]))
    assert float(scope.losses[0]) == (2.0 if activity_losses_are_means() else 10.0)


# Values that layers give to add_loss


class Adds(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


ADDED = {
    "scalar": (lambda x: ops.mean(x**2), True),
    "per example": (lambda x: ops.sum(x**2, 1), False),
    "one penalty": (lambda x: ops.reshape(ops.mean(x**2), [1]), True),
    "a mean for each feature": (lambda x: ops.mean(x**2, 0), True),
}


@pytest.mark.parametrize("kind", list(ADDED))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_added_values_are_of_examples_only_if_there_are_more_for_more_examples(kind, size):
    """Micro-batches of 2 are as large as there are features, those of 1 as a penalty."""
    function, is_mean = ADDED[kind]
    x = np.random.default_rng(3).normal(size=(6, 2))
    inputs = keras.Input([2])
    model = keras.Model(inputs, Adds(function)(inputs))
    model.compile("sgd", lambda y, y_pred: 0.0 * ops.sum(y_pred, 1))
    parts = []
    for start in range(0, 6, size):
        rows = ops.convert_to_tensor(x[start : start + size])
        step = ModelStep(model, True, Engine())
        outcome = step((rows, rows, None), step.values(), Whole(6, ops.zeros([0])))
        parts.append(float(outcome.losses[0]))
    expected = (x**2).mean() if kind in ("scalar", "one penalty") else None
    expected = (x**2).sum() if kind == "per example" else expected
    expected = (x**2).mean(0).sum() if kind == "a mean for each feature" else expected
    np.testing.assert_allclose(sum(parts), expected)
    assert bool(step.inexact) == is_mean


def test_counts_have_no_padding_of_their_own():
    assert Count(1.0).padding == 0.0


def test_a_probe_in_float32_finds_what_one_in_float64_finds():
    found = []
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        for probe in (probes._pads_masks, probes.activity_losses_are_means):
            probe.cache_clear()
        found.append((probes.mask_padding(), probes.activity_losses_are_means()))
    assert found[0] == found[1]

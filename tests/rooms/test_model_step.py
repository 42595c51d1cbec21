"""A model as a function: nothing is read or written but values. On any backend of Keras, see
test_seam.py.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

from macrobatch._engine import Engine
from macrobatch._keras import report
from macrobatch._keras.model import ModelStep
from macrobatch._keras.whole_batch import Outputs, WholeBatchStep
from macrobatch._types import Whole

X = np.random.default_rng(0).normal(size=(6, 4))
Y = np.random.default_rng(1).normal(size=(6, 2))


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


def step_of(**options):
    model = keras.Sequential(
        [keras.Input([4]), layers.Dense(3, kernel_regularizer="l2"), layers.Dropout(0.5)]
    )
    model.add(layers.Dense(2))
    options.setdefault("loss", "mse")
    model.compile("sgd", metrics=["mae"], **options)
    batch = (ops.convert_to_tensor(X), ops.convert_to_tensor(Y), None)
    return model, batch, ModelStep(model, True, Engine())


def everything(model):
    variables = [*model.variables, *model.metrics_variables]
    return {v.path: np.array(v) for v in variables}


def test_a_run_changes_nothing_until_it_is_written():
    model, batch, step = step_of()
    step(batch, step.values(), Whole(6, ops.zeros([0])))  # makes the metrics
    step = ModelStep(model, True, Engine())
    before = everything(model)
    outcome = step(batch, step.values(), Whole(6, ops.zeros([0])))
    for path, value in everything(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    penalty = step.regularization()
    written = outcome.written[1:]
    told = report.told(
        step, penalty, outcome.reported, outcome.counts, written, outcome.logs, 6, Engine()
    )
    for path, value in everything(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    told.write()
    step.written.write(written, outcome.moments)
    assert int(model.layers[1].seed_generator.state[1]) == 1
    expected = float(outcome.losses[0]) + float(penalty)
    np.testing.assert_allclose(float(told.logs["loss"]), expected)
    np.testing.assert_allclose(float(model.get_metrics_result()["loss"]), expected)


def test_regularization_is_apart():
    model, _, step = step_of()
    expected = 0.01 * (np.array(model.layers[0].kernel) ** 2).sum()
    np.testing.assert_allclose(float(step.regularization()), expected)


def test_a_run_shows_what_is_written():
    _, batch, step = step_of()
    values = step.values()
    step(batch, values, Whole(6, ops.zeros([0])))
    assert not step.fits(values)  # The metric was made.
    outcome = step(batch, step.values(), Whole(6, ops.zeros([0])))
    variables = step.written.variables
    changed = {
        v.path.split("/")[-1] for v, w in zip(variables, outcome.written[1:]) if w is not None
    }
    assert changed == {"seed_generator_state", "total", "count"}
    assert step.inexact == []
    assert step.counts == []
    assert step.written.dropped
    assert not step.written.drew


def test_without_dropout():
    _, batch, step = step_of()
    run = [step(batch, step.values(), Whole(6, ops.zeros([0])), drops=False) for _ in range(2)]
    assert float(run[0].losses[0]) == float(run[1].losses[0])
    predictions = step.model(batch[0], training=False)
    expected = ((np.array(predictions) - Y) ** 2).mean()
    np.testing.assert_allclose(float(run[0].losses[0]), expected)


def test_counts_that_are_not_known_leave_the_parts_apart():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model, (x, y, _), step = step_of(loss=loss)
    weights = ops.convert_to_tensor(np.arange(6.0))
    whole = Whole(6, guesses=[])
    rest, counted = step((x, y, weights), step.values(), whole, drops=False).losses
    assert float(rest) == 0.0
    assert [float(guess) for guess in whole.guesses] == [15.0]
    values = ((np.array(model(x)) - Y) ** 2).mean(-1)
    np.testing.assert_allclose(float(counted), (values * np.arange(6)).sum() / 15)


def test_no_loss():
    _, batch, step = step_of(loss=None)
    step.model.layers[0].kernel.regularizer = None
    with pytest.raises(ValueError, match="No loss to compute"):
        step(batch, step.values(), Whole(6, ops.zeros([0])))


@pytest.mark.parametrize(
    ("weight", "match"),
    [
        (float("nan"), "finite number, 0 or more"),
        (float("inf"), "finite number, 0 or more"),
        (-1.0, "finite number, 0 or more"),
        (None, "one number for a micro-batch. Received: None"),
        ("8", "one number for a micro-batch. Received: '8'"),
        (np.ones(2), "one scalar for a micro-batch"),
    ],
)
def test_weights_of_micro_batches_are_checked(weight, match):
    model, batch, _ = step_of()
    step = ModelStep(model, True, Engine(), lambda x, y, sample_weight: weight)
    with pytest.raises(ValueError, match=match):
        step(batch, step.values(), Whole(6, ops.zeros([1])))


def test_the_loss_of_the_whole_batch():
    """Forward passes of micro-batches, one after the other, and then the loss of all."""
    model, batch, _ = step_of()
    model.layers[0].kernel.regularizer = None  # Keras on NumPy cannot add losses up
    step = WholeBatchStep(model, True, Engine())
    step(batch, step.values(), Whole(6))  # makes the metrics
    step, before = WholeBatchStep(model, True, Engine()), everything(model)
    values, passes = step.values(), []
    for part in ((batch[0][:4], batch[1][:4], None), (batch[0][4:], batch[1][4:], None)):
        passes.append(step.forward(part, values, 6))
        written = passes[-1].written
        values = [old if new is None else new for new, old in zip(written, values)]
    y_pred = ops.concatenate([each.outputs.y_pred for each in passes], 0)
    found = step.loss((None, *batch[1:]), Outputs(y_pred, [None], []), [], values, 6)
    for path, value in everything(model).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    expected = ((np.array(y_pred) - Y) ** 2).mean()
    np.testing.assert_allclose(float(found.loss), expected)
    np.testing.assert_allclose(float(found.logs["mae"]), np.abs(np.array(y_pred) - Y).mean())
    step.write(written, passes[-1].moments, found)
    assert int(model.layers[1].seed_generator.state[1]) == 2  # one draw for each micro-batch
    np.testing.assert_allclose(float(model.get_metrics_result()["loss"]), expected)

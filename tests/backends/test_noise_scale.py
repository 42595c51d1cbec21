"""GradientNoiseScale on the backend of this environment: against gradients by hand."""

import math

import keras
import noise_by_hand
import numpy as np
import pytest
from keras import layers
from noise_by_hand import scaled, tagger
from support import BACKEND, MODES, array, several_devices, thorough

import macrobatch

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[10, 4]), RNG.normal(size=[10, 1])


def slow_on_jax(test):
    """Leaves a test to `make test-all` where it mostly compiles, and others like it run."""
    return thorough(test) if BACKEND == "jax" else test


def regularised():
    dense = layers.Dense(3, "tanh", kernel_regularizer=keras.regularizers.L2(0.3))
    return keras.Sequential([keras.Input([4]), dense, layers.Dense(1)])


def compiled(build, optimizer=keras.optimizers.SGD, **options):
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(optimizer(), "mse", **options)
    return model


@pytest.mark.parametrize(
    "mode", [m if i == 0 else pytest.param(m, marks=thorough) for i, m in enumerate(MODES)]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:jit_compile=True has no effect")
def test_as_written_out(mode):
    model = macrobatch.accumulate(compiled(tagger, scaled, **MODES[mode]), 3)
    noise = macrobatch.GradientNoiseScale(every=2, decay=0.5)
    noise_by_hand.check(model, noise, [0, 3, 6, 9, 10])


@pytest.mark.skipif(BACKEND != "jax", reason="devices of JAX")
def test_all_devices_count():
    with several_devices():
        model = macrobatch.accumulate(compiled(tagger, scaled), 3)
        noise = macrobatch.GradientNoiseScale(every=2, decay=0.5)
        noise_by_hand.check(model, noise, [0, 3, 5, 8, 10])


@slow_on_jax
def test_training_stays_as_it_was():
    """Of five updates, every second one is measured; all are counted, and each fit starts anew."""
    ends, histories = [], []
    measured = macrobatch.GradientNoiseScale(every=2, decay=0.5)
    for callbacks in ([], [measured]):
        model = macrobatch.accumulate(compiled(regularised, keras.optimizers.Adam), 2)
        fit = {"batch_size": 5, "epochs": 3, "shuffle": False, "verbose": 0}
        history = model.fit(X, Y, callbacks=callbacks, **fit).history
        scales = [history.pop(name, None) for name in ("noise_scale", "gradient_norm")]
        ends.append([array(v) for v in [*model.variables, *model.optimizer.variables]])
        histories.append(history)
    # XLA rounds each program in its own way, in the last digit.
    for left, right in zip(*ends):
        np.testing.assert_allclose(left, right, rtol=1e-12)
    np.testing.assert_allclose(histories[0]["loss"], histories[1]["loss"], rtol=1e-12)
    assert all(scale > 0 for scale in scales[0])
    state = array(measured.meter().state)
    # An average of 1 tells how often there was something.
    np.testing.assert_allclose(state[[0, 2, 3]], [6, 5, 1 - 0.5**3])
    assert "oise scale" in measured.advice()


def test_measures_only_in_its_own_fit(capsys):
    """Also if that is interrupted: the next one has the plain step, and its logs."""
    model = macrobatch.accumulate(compiled(regularised), 5)
    interrupt = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    measured = macrobatch.GradientNoiseScale()
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=10, verbose=0, callbacks=[measured, interrupt])
    assert list(model.fit(X, Y, batch_size=10, verbose=0).history) == ["loss"]
    model.fit(X, Y, batch_size=10, verbose=2, callbacks=[measured])
    assert "radient noise scale" in capsys.readouterr().out
    assert array(measured.meter().state)[0] == 1
    assert list(model.fit(X, Y, batch_size=10, verbose=0).history) == ["loss"]


@pytest.mark.filterwarnings("ignore:The loss or the gradient of")
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_batches_that_tell_nothing():
    """One that is not cut, and one that is left out as a whole."""
    model = macrobatch.accumulate(compiled(regularised), 10, nonfinite="skip")
    measured = macrobatch.GradientNoiseScale()
    x = np.concatenate([X, X * np.nan])
    fit = {"batch_size": 10, "shuffle": False, "verbose": 0, "callbacks": [measured]}
    logs = model.fit(x, np.concatenate([Y, Y]), **fit).history
    assert math.isnan(logs["noise_scale"][0])
    assert logs["gradient_norm"][0] > 0
    assert logs["skipped_examples"] == [10]
    assert array(measured.meter().state)[0] == 1


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (None, "which is not accumulated"),
        ({"whole_batch_loss": True}, "whole_batch_loss=True"),
        ({"sequence_axis": 1}, "sequence_axis=1"),
    ],
)
def test_what_cannot_be_measured_is_refused(cut, message):
    def of_any_length():
        table = layers.Embedding(9, 3, mask_zero=True)
        return keras.Sequential([keras.Input([None]), table, layers.Dense(1)])

    model = compiled(of_any_length if cut and "sequence_axis" in cut else regularised)
    if cut is not None:
        macrobatch.accumulate(model, 3, **cut)
    before = [array(v) for v in model.variables]
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0, callbacks=[macrobatch.GradientNoiseScale()])
    for left, right in zip(before, model.variables):
        np.testing.assert_array_equal(left, array(right))

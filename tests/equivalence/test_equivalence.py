"""Weights after several updates equal those of plain Keras on whole batches, to 1e-10."""

import importlib

import keras
import loss_cases
import model_cases
import pytest
import support
from builders import OneBesideNone, X, Y, data, dense
from case import parameters
from keras import optimizers
from support import BACKEND, MODES, assert_same, build_pair, check, thorough_for

import macrobatch

own_cases = importlib.import_module(f"{BACKEND}_cases")


@pytest.mark.parametrize(
    ("case", "mode"), parameters(loss_cases.CASES, model_cases.CASES, own_cases.CASES)
)
def test_case(case, mode, monkeypatch):
    case.check(mode, monkeypatch)


@thorough_for("compiled", "graph")
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_one(mode):
    with pytest.warns(UserWarning, match="Nothing is being accumulated"):
        check(dense, data(3, 4), data(3, 2), batch_size=1, micro_batch_size=4, **MODES[mode])


ROUNDING = {"mixed_float16": 2e-3, "mixed_bfloat16": 1e-2, "bfloat16": 3e-2, "float16": 3e-3}


@thorough_for("True", "mixed_float16", "False-bfloat16", "False-float16")
@pytest.mark.parametrize("policy", ROUNDING)
@pytest.mark.parametrize("replicas", [False, True] if BACKEND == "tensorflow" else [False])
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_mixed_precision_is_as_close_as_its_rounding(replicas, policy, monkeypatch):
    if replicas:
        monkeypatch.setattr(support, "strategy", support.mirrored(2))
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    plain, accumulated = build_pair(dense)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        with (support.strategy if model is accumulated else support.OneDevice()).scope():
            model.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same(plain, accumulated, tolerance=ROUNDING[policy])


def test_inputs_of_which_one_is_none():
    plain, accumulated = build_pair(OneBesideNone)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        model.compile(optimizers.SGD(0.1), "mse")
    for start in (0, 8):
        x, y = {"some": [X[start : start + 8]], "nothing": None}, Y[start : start + 8]
        try:
            plain.train_on_batch(x, y)
        except AttributeError:
            pytest.skip("this Keras does not take None among its inputs")
        accumulated.train_on_batch(x, y)
    assert_same(plain, accumulated)

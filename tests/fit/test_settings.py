"""settings_of: what a model was asked to accumulate with, and what is in force."""

import keras
import numpy as np
import pytest
from support import BACKEND, array, build_pair, mirrored, slow_on

import macrobatch

X, Y = np.random.RandomState(0).randn(12, 4), np.random.RandomState(1).randn(12, 1)


def model_of(**options):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def test_a_model_that_is_not_accumulated_has_no_settings():
    model = model_of()
    assert macrobatch.settings_of(model) is None
    macrobatch.release(macrobatch.accumulate(model, 3))
    assert macrobatch.settings_of(model) is None


def test_all_that_was_asked_for_is_there():
    def weight(x, y, sample_weight):
        return 1.0

    model = macrobatch.accumulate(model_of(), 3, micro_batch_weight=weight, nonfinite="skip")
    settings = macrobatch.settings_of(model)
    assert settings[:4] == (3, None, None, None)
    assert settings[4:] == (weight, False, None, "skip", 3, 1)
    asked = settings.arguments()
    assert asked == {"micro_batch_size": 3, "micro_batch_weight": weight, "nonfinite": "skip"}


def test_arguments_make_another_model_of_the_same_kind():
    one, two = build_pair(model_of)
    macrobatch.accumulate(one, 3, whole_batch_loss=True)
    macrobatch.accumulate(two, **macrobatch.settings_of(one).arguments())
    assert macrobatch.settings_of(two) == macrobatch.settings_of(one)
    for model in (one, two):
        model.fit(X, Y, batch_size=6, verbose=0, shuffle=False)
    for left, right in zip(one.weights, two.weights):
        np.testing.assert_array_equal(array(left), array(right))


def test_the_size_that_auto_has_found():
    model = macrobatch.accumulate(model_of(), memory_limit="20GiB")
    before = macrobatch.settings_of(model)
    assert before.micro_batch_size == "auto"
    assert before.memory_limit == "20GiB"
    assert before.size_in_use is None
    history = model.fit(X, Y, batch_size=6, verbose=0).history
    size = macrobatch.settings_of(model).size_in_use
    assert size == history["micro_batch_size"][-1]
    assert 1 <= size <= 8  # compiled sizes are powers of two


@slow_on("jax", "torch")
def test_sizes_are_powers_of_two_only_where_they_are_compiled():
    model = macrobatch.accumulate(model_of())
    for is_compiled, size in ((True, 16), (False, 12)):
        model.compile("sgd", "mse", jit_compile=is_compiled)
        assert model.fit(X, Y, batch_size=12, verbose=0).history["micro_batch_size"] == [size]


def test_sizes_in_tokens():
    model = keras.Sequential([keras.Input([None, 4]), keras.layers.Dense(1)])
    macrobatch.accumulate(model, micro_batch_tokens=64, sequence_axis=1)
    settings = macrobatch.settings_of(model)
    assert settings.micro_batch_size is None
    assert (settings.micro_batch_tokens, settings.size_in_use) == (64, 64)


@pytest.mark.skipif(BACKEND == "torch", reason="one device")
def test_devices(monkeypatch):
    if BACKEND == "tensorflow":
        with mirrored(2).scope():
            model = model_of()
    else:
        devices = keras.distribution.list_devices()[:2]
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        model = model_of()
    try:
        macrobatch.accumulate(model, 3)
        assert macrobatch.settings_of(model).devices == 2
    finally:
        if BACKEND == "jax":
            keras.distribution.set_distribution(None)

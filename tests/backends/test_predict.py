"""predict on an accumulated model, on JAX and torch: cut, with the results of the whole batch."""

import keras
import numpy as np
import pytest
from support import BACKEND, MODES

import macrobatch
from macrobatch._keras.installed import accumulation_of

X = np.random.default_rng(0).normal(size=[23, 3])


class Watching(keras.layers.Layer):
    """Notes with how many examples it is called, or traced."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def call(self, x):
        self.sizes.append(x.shape[0])
        return x


def build():
    keras.utils.set_random_seed(7)
    inputs = keras.Input([3])
    hidden = keras.layers.Dense(4, activation="tanh")(Watching()(inputs))
    outputs = {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(2)(hidden)}
    return keras.Model(inputs, outputs)


def compiled_with(**options):
    model = build()
    model.compile("sgd", "mse", **options)
    return model


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12, err_msg=name)


def sizes_of(model):
    """The sizes that the layer has seen since the last call."""
    seen = [size for size in model.layers[1].sizes if size is not None]
    model.layers[1].sizes.clear()
    return seen


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [4, 50])
def test_same_results_in_the_same_order(mode, size):
    model = compiled_with(**MODES[mode])
    expected = model.predict(X, batch_size=10, verbose=0)
    macrobatch.accumulate(model, micro_batch_size=size)
    sizes_of(model)
    assert_equal(model.predict(X, batch_size=10, verbose=0), expected)
    sizes = sizes_of(model)
    assert max(sizes) == min(size, 10)
    if mode == "eager":
        assert sizes == {4: [4, 4, 2, 4, 4, 2, 3], 50: [10, 10, 3]}[size]
    assert_equal(model.predict_on_batch(X[:10]), {name: v[:10] for name, v in expected.items()})
    macrobatch.release(model)
    assert model.predict_function is None  # What is compiled would go on as it was.
    assert_equal(model.predict(X, batch_size=10, verbose=0), expected)
    assert max(sizes_of(model)) == 10


def test_sizes_that_are_found():
    model = compiled_with(run_eagerly=True)
    macrobatch.accumulate(model)
    sizes_of(model)
    model.predict(X, verbose=0)
    assert sizes_of(model) == [23]  # No size is known yet.
    model.fit(X, {"a": X[:, :1], "b": X[:, :2]}, batch_size=23, epochs=2, verbose=0)
    size = accumulation_of(model).cut.chosen.current
    sizes_of(model)
    model.predict(X, verbose=0)
    sizes = sizes_of(model)
    assert max(sizes) == min(size, 23)
    assert sum(sizes) == 23


def test_tokens():
    model = keras.Sequential([keras.Input([None], dtype="int32"), keras.layers.Embedding(9, 2)])
    model.compile("sgd", "mse")
    tokens = np.arange(56).reshape([8, 7]) % 9
    expected = model.predict(tokens, verbose=0)
    macrobatch.accumulate(model, micro_batch_tokens=20, sequence_axis=1)
    np.testing.assert_array_equal(model.predict(tokens, verbose=0), expected)


@pytest.mark.skipif(BACKEND == "torch", reason="one step is one execution there")
def test_several_steps_in_an_execution():
    model = compiled_with(steps_per_execution=2)
    expected = model.predict(X, batch_size=5, verbose=0)
    macrobatch.accumulate(model, micro_batch_size=2)
    assert_equal(model.predict(X, batch_size=5, verbose=0), expected)


def test_training_goes_on_after_a_prediction():
    targets = {"a": X[:, :1], "b": X[:, :2]}
    models = [compiled_with(), macrobatch.accumulate(compiled_with(), micro_batch_size=4)]
    for model in models:
        model.fit(X, targets, batch_size=10, shuffle=False, verbose=0)
        model.predict(X, batch_size=10, verbose=0)
        model.fit(X, targets, batch_size=10, shuffle=False, verbose=0)
    for one, other in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_an_own_predict_step_is_left_alone():
    class Own(keras.Model):
        def predict_step(self, *args):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(args[-1])
            sizes = keras.ops.full([1], x.shape[0])
            return (sizes, args[0][1]) if len(args) == 2 else sizes

    inputs = keras.Input([3])
    model = Own(inputs, inputs)
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, micro_batch_size=4)
    assert model.predict(X, batch_size=10, verbose=0).tolist() == [10, 10, 3]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
@pytest.mark.parametrize("mode", MODES)
def test_outputs_without_examples_are_refused(mode):
    class Mean(keras.layers.Layer):
        def call(self, x):
            return keras.ops.mean(x, 0, keepdims=True)

    inputs = keras.Input([3])
    hidden = keras.layers.Dense(2)(inputs)
    model = keras.Model(inputs, Mean()(hidden))
    model.compile("sgd", "mse", **MODES[mode])
    macrobatch.accumulate(model, micro_batch_size=4)
    before = model.get_weights()
    with pytest.raises(ValueError, match="each output must have the examples first"):
        model.predict(X, batch_size=10, verbose=0)
    for one, other in zip(before, model.get_weights()):
        np.testing.assert_array_equal(one, other)

"""What JAX compiles, on one device and on several: keras.distribution.DataParallel.

Each device has a part of the batch. Sums meet once.
"""

import contextlib
import re

import jax
import keras
import numpy as np
import pytest
from builders import compiled, data, masks_drawn, tokens
from keras import layers, ops, optimizers
from support import assert_same, assert_same_history, several_devices, thorough
from support.inside import make_running_out_an_error, skip_interaction_check

from macrobatch import accumulate, settings_of

if len(jax.devices()) != 2:
    pytest.skip("this process has other devices", allow_module_level=True)

X, Y = data(20, 4), data(20, 2, seed=1)
TOKENS, TAGS = tokens(20), data(20, 6, 2)


class Sizes(layers.Layer):
    """Notes how many examples it is traced with."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def call(self, inputs):
        self.seen.add(inputs.shape[0])
        return inputs


def dense():
    first = layers.Dense(5, "tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([4]), first, Sizes(), layers.Dense(2)])


def tagger():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(11, 3, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(2)(embedded))


def normalizing():
    return keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(2)])


class Noisy(keras.Model):
    """Compares examples, in a loss that draws numbers; a layer adds a mean; a weight of its own."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, activity_regularizer="l2")
        self.scale = self.add_weight(shape=[], initializer="ones", name="scale")
        self.seeds = keras.random.SeedGenerator(3)
        self.build([None, 4])

    def build(self, shape):
        self.head.build(shape)

    def call(self, inputs):
        return self.head(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        noise = keras.random.normal([10], dtype="float64", seed=self.seeds)
        scores = ops.matmul(y_pred, ops.transpose(y_pred)) * self.scale + noise
        return ops.mean(ops.logsumexp(scores, -1) * y[:, 0]) + sum(self.losses)


def fitted(build, x, y, cut=None, rate=0.1, loss="mse", metrics=()):
    keras.utils.set_random_seed(7)
    model = build()
    model.compile(optimizers.SGD(rate, momentum=0.9), loss, metrics=list(metrics))
    if cut:
        accumulate(model, **cut)
    return model, model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history


THREE = {"micro_batch_size": 3}
CASES = {
    "dense": (dense, X, Y, {"metrics": ["mae"]}),
    "tokens": (tagger, TOKENS, TAGS, {}),
    # The layer normalises micro-batches, so weights must stay: statistics are those of the batch.
    "statistics": (normalizing, X, Y, {"rate": 0.0}),
}


@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
@pytest.mark.parametrize("name", CASES)
def test_the_update_is_that_of_one_device(name):
    build, x, y, options = CASES[name]
    with several_devices():
        found, history = fitted(build, x, y, THREE, **options)
    plain, expected = fitted(build, x, y, **options)
    assert_same(plain, found)
    if name != "statistics":
        assert_same_history(expected, history)


def test_a_loss_sees_the_examples_of_all_devices():
    """In their order, with the same draws on each device; metrics count each example once."""
    cut = {**THREE, "whole_batch_loss": True}
    given = (Noisy, X, Y[:, :1], cut)
    with several_devices():
        found, history = fitted(*given, loss=None, metrics=["mae"])
    one, expected = fitted(*given, loss=None, metrics=["mae"])
    assert_same(one, found)
    assert_same_history(expected, history)


@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
@pytest.mark.parametrize(("size", "seen"), [(3, {3, 2}), (50, {5})])
def test_each_device_cuts_its_own_part(size, seen, monkeypatch):
    skip_interaction_check(monkeypatch)
    with several_devices():
        model = dense()
        model.compile("sgd", "mse")
        expected = model.predict(X, batch_size=14, verbose=0)
        accumulate(model, size)
        found = model.predict(X, batch_size=14, verbose=0)  # batches of 14 and of 6
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        model.fit(X, Y, batch_size=10, verbose=0)
        model.layers[1].seen.clear()
        model.train_function = None
        model.fit(X, Y, batch_size=10, verbose=0)
    assert model.layers[1].seen == seen


def test_devices_and_micro_batches_draw_numbers_of_their_own():
    with several_devices():
        masks, moved = masks_drawn(seed=1)
    assert len(set(masks)) == 4
    assert moved.tolist() == [0, 2]  # as many draws as a device has micro-batches


def test_weights_that_are_spread_are_refused():
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    spread = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    with spread.scope(), pytest.raises(ValueError, match=r"ModelParallel.*DataParallel"):
        accumulate(dense(), 3)


def test_sizes_that_are_found(monkeypatch, caplog):
    """A size is that of each device, which has five examples of a batch."""
    make_running_out_an_error(monkeypatch)

    def narrow(y_true, y_pred):
        if y_pred.shape[0] == 5:
            raise MemoryError("no room for five")
        return ops.mean(ops.square(y_true - y_pred), -1)

    expected, _ = fitted(dense, X, Y)
    with several_devices():
        model, history = fitted(dense, X, Y, {"micro_batch_size": "auto"}, loss=narrow)
    assert history["micro_batch_size"] == [4, 4]
    assert settings_of(model).size_in_use == 4
    assert "a batch of 5 ran out of memory with micro_batch_size=8" in caplog.text
    assert_same(expected, model)


# What is compiled


@pytest.fixture
def functions(monkeypatch):
    """What JAX compiles from now on, and how often it runs."""
    found, of_jax = {}, jax.jit

    def jit(function, **options):
        made = of_jax(function, **options)

        def call(*args, **kwargs):
            _, times = found.get(made, (None, 0))
            found[made] = made.lower(*args, **kwargs), times + 1
            return made(*args, **kwargs)

        return call

    monkeypatch.setattr(jax, "jit", jit)
    return found


def test_sums_meet_after_the_loop_and_no_data_is_moved(functions):
    with several_devices():
        compiled(tagger(), 2, metrics=["mae"]).train_on_batch(TOKENS, TAGS)
    text = "\n".join(each.compile().as_text() for each, _ in functions.values())
    assert not re.findall(r"(all-gather|all-to-all|collective-permute)[-a-z]*\(", text)
    loops = re.findall(r"body=%?([\w.\-]+)", text)
    assert loops
    for name in loops:
        body = re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S).group()
        assert "all-reduce" not in body
    assert 1 <= len(re.findall(r"= .*all-reduce(?:-start)?\(", text)) <= 4


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=thorough)])
def test_memory_does_not_grow_with_the_number_of_micro_batches(devices, functions):
    """What is compiled takes the temporaries of a micro-batch, however many there are.

    On one device a micro-batch is compiled, on several a loop over them.
    """
    inner = [layers.Dense(64, "tanh") for _ in range(4)]
    scope = several_devices() if devices == 2 else contextlib.nullcontext()

    def memory_of(examples):
        rows = np.zeros([examples, 64])
        functions.clear()
        model.train_on_batch(rows, rows)
        return [(times, each.compile().memory_analysis()) for each, times in functions.values()]

    with scope:
        model = compiled(keras.Sequential([keras.Input([64]), *inner]), 8)
        memory_of(24)  # makes the metrics
        few, many = memory_of(32), memory_of(512)
    if devices == 1:
        _, of_micro_batch = max(many, key=lambda pair: pair[0])
        assert of_micro_batch.alias_size_in_bytes > 0  # The sums stay in their place.
    few, many = (max(memory.temp_size_in_bytes for _, memory in found) for found in (few, many))
    row = 64 * 8 * 2  # x and y
    assert many <= few + 0.1 * row * 512

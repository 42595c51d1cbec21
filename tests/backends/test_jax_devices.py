"""keras.distribution.DataParallel on JAX: each device has a part of the batch, sums meet once."""

import re

import keras
import numpy as np
import pytest
from jax_support import (
    accumulate,
    assert_same,
    assert_same_history,
    data,
    double_precision,  # noqa: F401 - a fixture
    jax,
)
from keras import layers, ops

if len(jax.devices()) != 2:
    pytest.skip("this process has other devices", allow_module_level=True)

X, Y = data(20, 4), data(20, 2, seed=1)


@pytest.fixture
def two_devices():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    yield
    keras.distribution.set_distribution(None)


def tokens():
    generator = np.random.default_rng(3)
    x = generator.integers(1, 9, size=(20, 6))
    for row, end in zip(x, generator.integers(1, 7, size=20)):
        row[end:] = 0
    return x


def dense():
    first = layers.Dense(5, "tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([4]), first, layers.Dense(2)])


def tagger():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(9, 3, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(2)(embedded))


def normalizing():
    return keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(2)])


def fitted(build, x, y, rate=0.1, **options):
    keras.utils.set_random_seed(7)
    model = build()
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", metrics=options.pop("m", []))
    if options.pop("accumulated"):
        accumulate(model, micro_batch_size=3)
    return model, model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0).history


@pytest.mark.parametrize("build", [dense, tagger])
def test_the_update_is_that_of_one_device(build, two_devices):
    x, y = (X, Y) if build is dense else (tokens(), data(20, 6, 2))
    metrics = ["mae"] if build is dense else []
    found, history = fitted(build, x, y, accumulated=True, m=metrics)
    keras.distribution.set_distribution(None)
    plain, expected = fitted(build, x, y, accumulated=False, m=metrics)
    assert_same(plain, found)
    assert_same_history(expected, history)


@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
@pytest.mark.parametrize("size", [3, 50])
def test_predictions_are_those_of_one_device(size, two_devices):
    keras.utils.set_random_seed(7)
    model = dense()
    model.compile("sgd", "mse")
    expected = model.predict(X, batch_size=14, verbose=0)
    accumulation = accumulate(model, micro_batch_size=size)
    found = model.predict(X, batch_size=14, verbose=0)  # batches of 14 and of 6
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    model.fit(X, Y, batch_size=10, verbose=0)
    # Each device has 5 examples of a batch.
    assert accumulation.count().totals() == (2, {3: 8, 50: 4}[size])


@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
def test_moving_statistics_are_those_of_the_whole_batch(two_devices):
    found, _ = fitted(normalizing, X, Y, rate=0.0, accumulated=True)
    keras.distribution.set_distribution(None)
    plain, _ = fitted(normalizing, X, Y, rate=0.0, accumulated=False)
    assert_same(plain, found)


def test_devices_and_micro_batches_draw_numbers_of_their_own(two_devices):
    drop = layers.Dropout(0.5, seed=1)
    model = keras.Sequential([keras.Input([64]), drop, layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(1.0), lambda y_true, y_pred: y_pred)
    accumulation = accumulate(model, micro_batch_size=1)
    seed = drop.seed_generator.state.numpy()
    drawn = []
    for row in range(4):  # the gradient is the mean of what was not dropped
        x = np.zeros([4, 64])
        x[row] = 1.0
        drop.seed_generator.state.assign(seed)
        before = model.get_weights()[0]
        model.train_on_batch(x, np.zeros([4, 1]))
        drawn.append(tuple(np.round(before - model.get_weights()[0], 6).ravel() > 0))
    assert len(set(drawn)) == 4
    assert accumulation.cut.size == 1
    after = drop.seed_generator.state.numpy()
    assert after[0] == seed[0]
    assert after[1] == seed[1] + 2  # as many draws as a device has micro-batches


def test_sums_meet_after_the_loop_and_no_data_is_moved(two_devices):
    model = tagger()
    model.compile("sgd", "mse", metrics=["mae"])
    accumulation = accumulate(model, micro_batch_size=2)
    x, y = tokens(), data(20, 6, 2)
    model.train_on_batch(x, y)
    text = jax.jit(accumulation.steps.found).lower(_state(model), _spread(x, y)).compile().as_text()
    assert not re.findall(r"(all-gather|all-to-all|collective-permute)[-a-z]*\(", text)
    loops = re.findall(r"body=%?([\w.\-]+)", text)
    assert loops
    for name in loops:
        body = re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S).group()
        assert "all-reduce" not in body
    gradients = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert len(re.findall(r"= .*all-reduce(?:-start)?\(", text)) <= 4, gradients


def _state(model):
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([v.value for v in variables] for variables in groups)


def _spread(*arrays):
    distribution = keras.distribution.distribution()
    return tuple(
        jax.device_put(a, distribution.get_data_layout(a.shape).backend_layout) for a in arrays
    )


def test_weights_that_are_spread_are_refused():
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"])
    layout = keras.distribution.LayoutMap(mesh)
    spread = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    message = r"ModelParallel.*DataParallel"
    with spread.scope(), pytest.raises(ValueError, match=message):
        accumulate(dense())


class Noisy(keras.Model):
    """Compares examples, in a loss that draws numbers; a layer adds a mean; a weight of its own."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3, activity_regularizer="l2")
        self.scale = self.add_weight(shape=[], initializer="ones", name="scale")
        self.seeds = keras.random.SeedGenerator(3)

    def build(self, shape):
        self.head.build(shape)

    def call(self, inputs):
        return self.head(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        noise = keras.random.normal([20], dtype="float64", seed=self.seeds)
        scores = ops.matmul(y_pred, ops.transpose(y_pred)) * self.scale + noise
        return ops.mean(ops.logsumexp(scores, -1) * y[:, 0]) + sum(self.losses)


def test_a_loss_sees_the_examples_of_all_devices(two_devices):
    """In their order, with the same draws on each device; metrics count each example once."""
    found = []
    for distribution in (keras.distribution.distribution(), None):
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(7)
        model = Noisy()
        model.build([None, 4])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), metrics=["mae"])
        accumulate(model, micro_batch_size=3, whole_batch_loss=True)
        logs = [model.train_on_batch(X, Y[:, :1], return_dict=True) for _ in range(3)]
        found.append((model, logs[-1]))
    assert_same(found[1][0], found[0][0])
    for name, value in found[1][1].items():
        np.testing.assert_allclose(found[0][1][name], value, rtol=1e-10)


def test_sizes_that_are_found(two_devices, monkeypatch, caplog):
    """A size is that of each device, which has five examples of a batch."""
    monkeypatch.setattr("macrobatch._jax.auto.Auto.host_raises", True)
    monkeypatch.setattr("macrobatch._sizes.limit.running_out_is_an_error", lambda on_gpu: True)
    monkeypatch.setenv("MACROBATCH_CACHE", "0")

    def narrow(y_true, y_pred):
        if y_pred.shape[0] == 5:
            raise MemoryError("no room for five")
        return keras.ops.mean(keras.ops.square(y_true - y_pred), -1)

    expected, _ = fitted(dense, X, Y, accumulated=False)
    keras.utils.set_random_seed(7)
    model = dense()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), narrow)
    accumulate(model, "auto")
    history = model.fit(X, Y, batch_size=10, epochs=2, shuffle=False, verbose=0).history
    assert history["micro_batch_size"] == [4, 4]
    assert "a batch of 5 ran out of memory with micro_batch_size=8" in caplog.text
    assert_same(expected, model)

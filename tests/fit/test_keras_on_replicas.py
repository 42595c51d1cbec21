"""What `accumulate` does on replicas besides ending where one device ends."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers, optimizers
from support import assert_same, check, thorough, thorough_for
from support.loops import made_in
from test_accumulator_everywhere import mirrored
from test_workers import HERE, environment
from worker_cases import Logs

import macrobatch
from macrobatch import _internals


@pytest.fixture(autouse=True)
def strategy(monkeypatch):
    monkeypatch.setattr(support, "strategy", mirrored(2))
    return mirrored(2)


def data(count=16, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4))
    return x, np.sin(x.sum(1, keepdims=True))


def mlp():
    return keras.Sequential([keras.Input([4]), layers.Dense(6, activation="tanh"), layers.Dense(1)])


def compiled(strategy, build=mlp, micro_batch_size=2, **arguments):
    def make():
        keras.utils.set_random_seed(7)
        model = build()
        settings = {"optimizer": optimizers.SGD(0.1), "loss": "mse", **arguments}
        model.compile(**{name: v() if callable(v) else v for name, v in settings.items()})
        return model

    return macrobatch.accumulate(made_in(strategy, make), micro_batch_size)


# One reduction


def reduced(model, strategy, batch):
    """How many numbers each collective of a train step sums, on the first replica."""
    model._maybe_symbolic_build(data_batch=batch)
    dataset = tf.data.Dataset.from_tensors(batch).unbatch().batch(len(batch[0]), True)
    types = strategy.experimental_distribute_dataset(dataset).element_spec
    step = tf.function(
        lambda batch: strategy.run(model.train_step, args=(batch,)), autograph=False
    )  # as Keras does
    graph = step.get_concrete_function(types).graph
    inside = [
        node.op
        for function in graph.as_graph_def().library.function
        for node in function.node_def
        if "Collective" in node.op
    ]
    assert not inside, "replicas meet inside a loop or a branch"
    found = [op for op in graph.get_operations() if op.type.startswith("CollectiveReduce")]
    sizes = sorted(op.inputs[0].shape.num_elements() for op in found)
    assert sizes[::2] == sizes[1::2], "replicas differ"
    return sizes[::2]


def clipped():
    return optimizers.Adam(0.1, global_clipnorm=0.1)


@thorough_for("SGD")
@pytest.mark.parametrize(
    ("optimizer", "micro_batch_size"),
    [pytest.param(optimizers.SGD, 8, marks=thorough), (optimizers.SGD, 1), (clipped, 4)],
)
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_gradients_are_reduced_once(optimizer, micro_batch_size, strategy):
    weights = 4 * 6 + 6 + 6 + 1
    model = compiled(
        strategy, micro_batch_size=micro_batch_size, optimizer=optimizer, metrics=["mae"]
    )
    # The number of examples; the term of the loss; the variables of two metrics; and all
    # gradients at once.
    assert reduced(model, strategy, data()) == [1, 1, 4, weights]


def normalizing():
    hidden = [layers.Dense(6), layers.BatchNormalization(), layers.BatchNormalization()]
    return keras.Sequential([keras.Input([4]), *hidden, layers.Dense(1)])


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_moments_of_all_layers_are_reduced_at_once(strategy):
    weights = 4 * 6 + 6 + 2 * (6 + 6) + 6 + 1
    sizes = reduced(compiled(strategy, normalizing), strategy, data())
    # The number of examples, the term of the loss, the variables of a metric; then of two layers
    # the squares, the counts and sums; and all gradients.
    assert sizes == [1, 1, 2, 12, 14, weights]


# Strategies


@thorough_for("one device")
@pytest.mark.parametrize("name", ["one device", "one replica"])
def test_strategies_with_one_replica(name, monkeypatch):
    one = {
        "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "one replica": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
    }[name]()
    monkeypatch.setattr(support, "strategy", one)
    x, y = data(19)
    validation = {"validation_data": data(7, seed=1)}
    check(mlp, x, y, metrics=lambda: ["mae"], fit=validation)


@thorough
def test_evaluate_and_predict(strategy):
    x, y = data(13)
    build = {"metrics": lambda: ["mae", keras.metrics.R2Score()]}
    ours = compiled(strategy, **build)
    plain = macrobatch.release(compiled(tf.distribute.get_strategy(), **build))
    ours.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    plain.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for batch_size in (1, 5, 13):
        np.testing.assert_allclose(
            ours.evaluate(x, y, batch_size=batch_size, verbose=0),
            plain.evaluate(x, y, batch_size=batch_size, verbose=0),
            rtol=1e-10,
        )
        np.testing.assert_allclose(
            ours.predict(x, batch_size=batch_size, verbose=0), plain.predict(x, verbose=0)
        )


def test_logs_of_each_batch(strategy):
    x, y = data(19)
    reports = []
    for where in (tf.distribute.get_strategy(), strategy):
        model = compiled(where, metrics=lambda: ["mae", keras.metrics.R2Score(name="r2")])
        reports.append(Logs())
        options = {"batch_size": 6, "shuffle": False, "verbose": 0, "callbacks": [reports[-1]]}
        (model if where is strategy else macrobatch.release(model)).fit(x, y, **options)
    for plain, ours in zip(*(report.seen for report in reports)):
        assert plain.keys() == ours.keys()
        for name in plain:
            assert np.shape(ours[name]) == np.shape(plain[name])
            np.testing.assert_allclose(ours[name], plain[name], rtol=1e-10)


def test_on_batch(strategy):
    """A sum, which would be twice as much if both replicas had the whole batch."""
    x, y = data(7)
    loss = {"loss": lambda: keras.losses.MeanSquaredError(reduction="sum")}
    ours = compiled(strategy, **loss)
    plain = macrobatch.release(compiled(tf.distribute.get_strategy(), **loss))
    for _ in range(2):
        np.testing.assert_allclose(ours.train_on_batch(x, y), plain.train_on_batch(x, y))
        np.testing.assert_allclose(ours.test_on_batch(x, y), plain.test_on_batch(x, y))
    assert_same(plain, ours)


@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_a_replica_without_examples_after_batches_of_another_kind(strategy):
    """In eager mode it learns from an earlier batch what is summed: from one of the same kind."""
    x, y = data(5)
    weights = np.arange(5.0)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    options = {"loss": lambda: loss, "run_eagerly": True}
    plain = macrobatch.release(compiled(tf.distribute.get_strategy(), **options))
    ours = compiled(strategy, **options)
    for model in (plain, ours):
        model.train_on_batch(x, y, sample_weight=weights)
        for _ in range(2):
            model.train_on_batch(x[:1], y[:1])
            model.train_on_batch(x[:1], y[:1], sample_weight=weights[1:2])
    assert_same(plain, ours)


@thorough
def test_a_distributed_dataset(strategy):
    x, y = data(20)
    plain = macrobatch.release(compiled(tf.distribute.get_strategy()))
    ours = compiled(
        strategy, build=lambda: keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
    )
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    plain.fit(dataset, epochs=2, shuffle=False, verbose=0)
    distributed = strategy.experimental_distribute_dataset(dataset)
    ours.fit(distributed, epochs=2, shuffle=False, verbose=0)
    assert_same(plain, ours)


@thorough
def test_averages_of_weights():
    def ema():
        return optimizers.Adam(0.1, use_ema=True, ema_momentum=0.8)

    check(mlp, *data(19), optimizer=ema)


def test_released(strategy):
    model = compiled(strategy)
    before = set(vars(model))
    macrobatch.release(model)
    installed = {"train_step", "test_step", "make_train_function", "make_test_function"}
    installed |= {"predict_step", "make_predict_function", "_maybe_symbolic_build", "fit"}
    assert before - set(vars(model)) == installed
    model.fit(*data(8), batch_size=8, verbose=0)


class Overridden(keras.Model):
    """A loss that is Keras' own, which on replicas divides it, or one that is nobody's."""

    def __init__(self, own):
        super().__init__()
        self.own, self.layer = own, layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.own:
            return tf.reduce_mean((y - y_pred) ** 2)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@thorough_for("True")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("own", [True, False])
def test_an_overridden_loss(own):
    check(lambda: Overridden(own), *data(19))


def test_a_mean_is_not_divided_where_it_has_a_share(strategy):
    """Fails if Keras' private function for it has another name."""

    def on_replica():
        value = tf.ones([2, 1], tf.float64)
        with _internals.without_replica_scaling():
            inside = keras.losses.MeanSquaredError()(0 * value, value)
        return inside, keras.losses.MeanSquaredError()(0 * value, value)

    inside, outside = strategy.run(on_replica)
    assert [float(v) for v in strategy.experimental_local_results(inside)] == [1.0, 1.0]
    assert [float(v) for v in strategy.experimental_local_results(outside)] == [0.5, 0.5]


class Rebuilds(layers.Layer):
    """Adds the loss of an autoencoder, by a loss of Keras', which on replicas divides it."""

    def call(self, x):
        self.add_loss(keras.losses.MeanSquaredError()(x, 0.5 * keras.ops.flip(x, -1)))
        return x


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_losses_inside_of_layers_and_metrics():
    def build():
        return keras.Sequential([keras.Input([4]), layers.Dense(6), Rebuilds(), layers.Dense(1)])

    def metric(y_true, y_pred):
        return keras.losses.MeanSquaredError(reduction="none")(y_true, y_pred)

    x, y = data(16)
    check(build, x, y, micro_batch_size=2, metrics=lambda: [keras.losses.Huber(), metric])


class Derived(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "twice": 2 * logs["loss"]}


def test_logs_that_are_no_metric(strategy):
    def build():
        inputs = keras.Input([4])
        return Derived(inputs, layers.Dense(1)(inputs))

    model = compiled(strategy, build)
    with pytest.warns(macrobatch.ExactnessWarning, match=r"no metric's result.*\['twice'\]"):
        model.fit(*data(8), batch_size=8, verbose=0)


class Largest(layers.Layer):
    """Keeps the largest input that it has seen."""

    def build(self, shape):
        self.largest = self.add_weight(
            shape=(),
            initializer=lambda shape, dtype: tf.fill(shape, tf.cast(-np.inf, dtype)),
            trainable=False,
        )

    def call(self, x):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(x)))
        return x


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_variables_that_are_infinite(strategy):
    """Each replica has its own value, of which one is infinite: it has had no examples."""
    model = compiled(
        strategy, lambda: keras.Sequential([keras.Input([4]), Largest(), layers.Dense(1)])
    )
    x, y = data(1)
    with pytest.warns(UserWarning, match="Nothing is being accumulated"):
        model.fit(x, y, batch_size=1, verbose=0)
    assert float(model.layers[0].largest.numpy()) == x.max()


# Eager mode


@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
def test_eagerly_with_a_replica_without_examples():
    check(mlp, *data(9), batch_size=4, micro_batch_size=1, run_eagerly=True, epochs=1)


def test_eagerly_with_a_generator(strategy):
    x, y = data(16)

    def generator():
        for start in (0, 8):
            yield x[start : start + 8], y[start : start + 8]

    plain = macrobatch.release(compiled(tf.distribute.get_strategy(), run_eagerly=True))
    unbuilt = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
    ours = compiled(
        strategy, lambda: keras.Sequential.from_config(unbuilt.get_config()), run_eagerly=True
    )
    for model in (plain, ours):
        model.fit(generator(), steps_per_epoch=2, shuffle=False, verbose=0)
    assert_same(plain, ours)


# Mixed precision


def test_variables_of_different_dtypes():
    def build():
        wide = layers.Dense(6, activation="tanh", dtype="float64")
        return keras.Sequential([keras.Input([4]), wide, layers.Dense(1, dtype="float32")])

    plain, ours = support.build_pair(build)
    macrobatch.accumulate(ours, 2)
    for model in (plain, ours):
        with model.distribute_strategy.scope():
            model.compile(optimizers.SGD(0.1), "mse")
        model.fit(*data(8), batch_size=8, shuffle=False, verbose=0)
    assert_same(plain, ours, tolerance=1e-6)


def test_sums_over_replicas_are_wide(strategy):
    """In bfloat16, 256 + 1 is 256: parts must not be rounded before they are summed."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    weights = []
    for where in (tf.distribute.get_strategy(), strategy):
        model = compiled(
            where,
            lambda: keras.Sequential(
                [keras.Input([1]), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
            ),
            loss=lambda: keras.losses.MeanAbsoluteError(reduction="sum"),
            micro_batch_size=1,
        )
        x = np.array([[256.0], [1.0], [-256.0], [0.0]])
        model.fit(x, np.ones([4, 1]), batch_size=4, shuffle=False, verbose=0)
        weights.append(float(model.layers[0].kernel.numpy().astype("float32").item()))
    assert weights[0] == weights[1] != 0


def test_a_gradient_that_is_not_finite_on_one_replica(strategy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(strategy)
    x, y = data(8)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    weights = [np.array(w.value) for w in model.trainable_weights]
    scale = float(model.optimizer.dynamic_scale.numpy())
    x[7] = 1e30  # the last example, which the second replica has
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for before, weight in zip(weights, model.trainable_weights):
        for part in strategy.experimental_local_results(weight.value):
            np.testing.assert_array_equal(part, before)
    parts = strategy.experimental_local_results(model.optimizer.dynamic_scale.value)
    assert [float(part.numpy()) for part in parts] == [scale / 2, scale / 2]


# BatchNormalization


def synchronized():
    return keras.Sequential(
        [keras.Input([4]), layers.BatchNormalization(synchronized=True), layers.Dense(1)]
    )


@thorough
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_synchronized_layers_see_a_micro_batch_of_each_replica(strategy):
    x, y = data(16)
    # Of each batch of 8, what both replicas have in memory at the same time.
    order = np.array([[0, 1, 4, 5, 2, 3, 6, 7], [8, 9, 12, 13, 10, 11, 14, 15]]).reshape(-1)
    ours = compiled(strategy, synchronized, micro_batch_size=2)
    one = compiled(tf.distribute.get_strategy(), synchronized, micro_batch_size=4)
    for model, rows in ((ours, np.arange(16)), (one, order)):
        dataset = tf.data.Dataset.from_tensor_slices((x[rows], y[rows]))
        dataset = dataset.batch(8, drop_remainder=True)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    assert_same(one, ours)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_synchronized_layers_need_batches_of_a_fixed_size(strategy):
    model = compiled(strategy, synchronized)
    before = [np.array(v.value) for v in model.variables]
    with pytest.raises(ValueError, match=r"drop_remainder=True"):
        model.fit(*data(19), batch_size=8, verbose=0)
    for variable, value in zip(model.variables, before):
        np.testing.assert_array_equal(np.array(variable.value), value)


# Errors


def test_a_model_made_outside_of_the_scope(strategy):
    model = mlp()
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 2)
    with strategy.scope(), pytest.raises(ValueError, match=r"inside `with strategy.scope\(\):`"):
        model.fit(*data(), batch_size=8, verbose=0)


@pytest.mark.parametrize("what", ["optimizer", "metrics"])
def test_parts_made_outside_of_the_scope(what, strategy):
    made = {"optimizer": optimizers.SGD(0.1), "metrics": [keras.metrics.AUC()]}[what]
    model = made_in(strategy, mlp)
    settings = {"optimizer": "sgd", "loss": "mse", what: made}
    with strategy.scope():
        model.compile(**settings)
    macrobatch.accumulate(model, 2)
    with pytest.raises(ValueError, match=r"inside `with strategy.scope\(\):`"):
        model.fit(*data(), batch_size=8, verbose=0)


@pytest.mark.parametrize(("setting", "value"), [("jit_compile", True), ("steps_per_execution", 2)])
def test_settings_that_replicas_cannot_have(setting, value, strategy):
    model = compiled(strategy, **{setting: value})
    for method in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match=f"{setting} cannot be used with several replicas"):
            method(*data(), batch_size=8, verbose=0)


def test_weights_overwritten_by_averages(strategy):
    ema = {"use_ema": True, "ema_overwrite_frequency": 2}
    model = compiled(strategy, optimizer=lambda: optimizers.SGD(0.1, **ema))
    with pytest.raises(ValueError, match="ema_overwrite_frequency"):
        model.fit(*data(), batch_size=8, verbose=0)


@thorough
def test_parameter_servers():
    command = [sys.executable, os.path.join(HERE, "parameter_servers.py")]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    assert output.count("Received: variables of a ParameterServerStrategy") == 3


def test_batches_that_are_single_micro_batches(strategy):
    model = compiled(strategy, micro_batch_size=4)
    with pytest.warns(UserWarning, match="micro_batch_size=4 on 2 replicas takes them all"):
        model.fit(*data(8), batch_size=8, verbose=0)

"""What `accumulate` does on replicas besides ending where one device ends."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from builders import fit, update_of_narrow_sums
from keras import layers, losses, ops, optimizers
from support import array, assert_same, check, thorough, thorough_for
from support.loops import made_in
from support.unchanged import unchanged
from test_workers import HERE, environment

import macrobatch

inexact = pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
# Half of a batch may be less than a micro-batch.
of_one = pytest.mark.filterwarnings("ignore:Nothing is being accumulated")


@pytest.fixture(autouse=True)
def strategy(monkeypatch):
    monkeypatch.setattr(support, "strategy", support.mirrored(2))
    return support.strategy


def data(count=16, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4))
    return x, np.sin(x.sum(1, keepdims=True))


def model_of(*hidden):
    return lambda: keras.Sequential([keras.Input([4]), *hidden, layers.Dense(1)])


def mlp():
    return model_of(layers.Dense(6, activation="tanh"))()


def unbuilt():
    return keras.Sequential([layers.Dense(6, activation="tanh"), layers.Dense(1)])


def compiled(strategy, build=mlp, micro_batch_size=2, **arguments):
    """An accumulated model, made in the scope of a strategy."""

    def make():
        keras.utils.set_random_seed(7)
        model = build()
        settings = {"optimizer": optimizers.SGD(0.1), "loss": "mse", **arguments}
        model.compile(**{name: v() if callable(v) else v for name, v in settings.items()})
        return model

    return macrobatch.accumulate(made_in(strategy, make), micro_batch_size)


def plain_and_ours(build=mlp, **arguments):
    """A plain model on one device, and an accumulated one on replicas."""
    plain = macrobatch.release(compiled(tf.distribute.get_strategy(), build, **arguments))
    return plain, compiled(support.strategy, build, **arguments)


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
    functions = graph.as_graph_def().library.function
    inside = [node.op for function in functions for node in function.node_def]
    assert not any("Collective" in op for op in inside), "replicas meet in a loop or a branch"
    found = [op for op in graph.get_operations() if op.type.startswith("CollectiveReduce")]
    sizes = sorted(op.inputs[0].shape.num_elements() for op in found)
    assert sizes[::2] == sizes[1::2], "replicas differ"
    return sizes[::2]


def clipped():
    return optimizers.Adam(0.1, global_clipnorm=0.1)


@of_one
@thorough_for("SGD-8")
@pytest.mark.parametrize(
    ("optimizer", "size"), [(optimizers.SGD, 8), (optimizers.SGD, 1), (clipped, 4)]
)
def test_gradients_are_reduced_once(optimizer, size, strategy):
    model = compiled(strategy, micro_batch_size=size, optimizer=optimizer, metrics=["mae"])
    # The number of examples; the term of the loss; the variables of two metrics; and all
    # gradients at once.
    assert reduced(model, strategy, data()) == [1, 1, 4, 4 * 6 + 6 + 6 + 1]


@inexact
def test_moments_of_all_layers_are_reduced_at_once(strategy):
    normalizing = [layers.Dense(6), layers.BatchNormalization(), layers.BatchNormalization()]
    sizes = reduced(compiled(strategy, lambda: model_of(*normalizing)()), strategy, data())
    weights = 4 * 6 + 6 + 2 * (6 + 6) + 6 + 1
    # The number of examples, the term of the loss, the variables of a metric; then of two layers
    # the squares, the counts and sums; and all gradients.
    assert sizes == [1, 1, 2, 12, 14, weights]


# Strategies


ONE = {
    "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    "one replica": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
}


@thorough_for("one device")
@pytest.mark.parametrize("name", ONE)
def test_strategies_with_one_replica(name, monkeypatch):
    monkeypatch.setattr(support, "strategy", ONE[name]())
    check(mlp, *data(19), metrics=lambda: ["mae"], fit={"validation_data": data(7, seed=1)})


@thorough
def test_evaluate():
    models = plain_and_ours(metrics=lambda: ["mae", keras.metrics.R2Score()])
    x, y = data(13)
    for model in models:
        fit(model, x, y)
    for size in (1, 5, 13):
        found = [model.evaluate(x, y, batch_size=size, verbose=0) for model in models]
        np.testing.assert_allclose(*found, rtol=1e-10)


class Logs(keras.callbacks.Callback):
    """Keeps the logs of each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: np.array(value) for name, value in logs.items()})


def test_logs_of_each_batch():
    models = plain_and_ours(metrics=lambda: ["mae", keras.metrics.R2Score(name="r2")])
    reports = [Logs(), Logs()]
    for model, report in zip(models, reports):
        fit(model, *data(19), batch_size=6, callbacks=[report])
    for plain, ours in zip(*(report.seen for report in reports)):
        assert plain.keys() == ours.keys()
        for name in plain:
            assert ours[name].shape == plain[name].shape
            np.testing.assert_allclose(ours[name], plain[name], rtol=1e-10)


def test_on_batch():
    """A sum, which would be twice as much if both replicas had the whole batch."""
    models = plain_and_ours(loss=lambda: losses.MeanSquaredError(reduction="sum"))
    for method in ("train_on_batch", "test_on_batch") * 2:
        np.testing.assert_allclose(*(getattr(model, method)(*data(7)) for model in models))
    assert_same(*models)


@of_one
def test_a_replica_without_examples_after_batches_of_another_kind():
    """In eager mode it learns from an earlier batch what is summed: from one of the same kind."""
    x, y = data(5)
    weights = np.arange(5.0)
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    models = plain_and_ours(loss=lambda: loss, run_eagerly=True)
    for model in models:
        model.train_on_batch(x, y, sample_weight=weights)
        for _ in range(2):
            model.train_on_batch(x[:1], y[:1])
            model.train_on_batch(x[:1], y[:1], sample_weight=weights[1:2])
    assert_same(*models)


@thorough
def test_a_distributed_dataset(strategy):
    dataset = tf.data.Dataset.from_tensor_slices(data(20)).batch(8)
    plain, ours = plain_and_ours(unbuilt)
    plain.fit(dataset, epochs=2, shuffle=False, verbose=0)
    distributed = strategy.experimental_distribute_dataset(dataset)
    ours.fit(distributed, epochs=2, shuffle=False, verbose=0)
    assert_same(plain, ours)


def test_released(strategy):
    model = compiled(strategy)
    before = set(vars(macrobatch.release(model)))
    macrobatch.release(macrobatch.accumulate(model, 2))
    assert set(vars(model)) == before
    assert not any("macrobatch" in type(method).__module__ for method in vars(model).values())
    fit(model, *data(8))


class Rebuilds(layers.Layer):
    """Adds the loss of an autoencoder, by a loss of Keras', which on replicas divides it."""

    def call(self, x):
        self.add_loss(losses.MeanSquaredError()(x, 0.5 * ops.flip(x, -1)))
        return x


@inexact
def test_losses_inside_of_layers_and_metrics():
    def metric(y_true, y_pred):
        return losses.MeanSquaredError(reduction="none")(y_true, y_pred)

    def build():
        return model_of(layers.Dense(6), Rebuilds())()

    check(build, *data(16), micro_batch_size=2, metrics=lambda: [losses.Huber(), metric])


class Derived(keras.Model):
    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**logs, "twice": 2 * logs["loss"]}


def test_logs_that_are_no_metric(strategy):
    def build():
        inputs = keras.Input([4])
        return Derived(inputs, layers.Dense(1)(inputs))

    with pytest.warns(macrobatch.ExactnessWarning, match=r"no metric's result.*\['twice'\]"):
        fit(compiled(strategy, build), *data(8))


class Largest(layers.Layer):
    """Keeps the largest input that it has seen."""

    def build(self, shape):
        self.largest = self.add_weight(
            shape=(),
            initializer=lambda shape, dtype: tf.fill(shape, tf.cast(-np.inf, dtype)),
            trainable=False,
        )

    def call(self, x):
        self.largest.assign(ops.maximum(self.largest, ops.max(x)))
        return x


@inexact
@of_one
def test_variables_that_are_infinite(strategy):
    """Each replica has its own value, of which one is infinite: it has had no examples."""
    model, (x, y) = compiled(strategy, lambda: model_of(Largest())()), data(1)
    fit(model, x, y)
    assert float(model.layers[0].largest.numpy()) == x.max()


# Eager mode


@of_one
def test_eagerly_with_a_replica_without_examples():
    check(mlp, *data(9), batch_size=4, micro_batch_size=1, run_eagerly=True)


def test_eagerly_with_a_generator():
    x, y = data(16)
    models = plain_and_ours(unbuilt, run_eagerly=True)
    for model in models:
        batches = ((x[start : start + 8], y[start : start + 8]) for start in (0, 8))
        model.fit(batches, steps_per_epoch=2, shuffle=False, verbose=0)
    assert_same(*models)


# Mixed precision


def test_variables_of_different_dtypes():
    def build():
        wide = layers.Dense(6, activation="tanh", dtype="float64")
        return keras.Sequential([keras.Input([4]), wide, layers.Dense(1, dtype="float32")])

    models = plain_and_ours(build)
    for model in models:
        fit(model, *data(8))
    assert_same(*models, tolerance=1e-6)


def test_sums_over_replicas_are_wide():
    """Parts must not be rounded before they are summed."""
    assert update_of_narrow_sums() == pytest.approx(0.1, rel=1e-2)


def test_a_gradient_that_is_not_finite_on_one_replica(strategy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model, (x, y) = compiled(strategy), data(8)
    fit(model, x, y)
    weights = [array(w.value) for w in model.trainable_weights]
    scale = float(model.optimizer.dynamic_scale.numpy())
    x[7] = 1e30  # the last example, which the second replica has
    fit(model, x, y)
    for before, weight in zip(weights, model.trainable_weights):
        for part in strategy.experimental_local_results(weight.value):
            np.testing.assert_array_equal(part, before)
    parts = strategy.experimental_local_results(model.optimizer.dynamic_scale.value)
    assert [float(part.numpy()) for part in parts] == [scale / 2, scale / 2]


# BatchNormalization


def synchronized():
    return model_of(layers.BatchNormalization(synchronized=True))()


@inexact
@thorough
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


@inexact
def test_synchronized_layers_need_batches_of_a_fixed_size(strategy):
    model = compiled(strategy, synchronized)
    with unchanged(model, ValueError, r"drop_remainder=True"):
        fit(model, *data(19))


# Errors


@pytest.mark.parametrize("what", ["model", "optimizer", "metrics"])
def test_what_is_made_outside_of_the_scope(what, strategy):
    made = {"optimizer": optimizers.SGD(0.1), "metrics": [keras.metrics.AUC()]}
    settings = {"optimizer": "sgd", "loss": "mse", **{k: v for k, v in made.items() if k == what}}
    if what == "model":
        model = mlp()
        model.compile(**settings)
    else:
        model = made_in(strategy, mlp)
        with strategy.scope():
            model.compile(**settings)
    macrobatch.accumulate(model, 2)
    with strategy.scope(), pytest.raises(ValueError, match=r"inside `with strategy.scope\(\):`"):
        fit(model, *data())


def overwriting():
    return optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)


SETTINGS = {
    "jit_compile": True,
    "steps_per_execution": 2,
    "optimizer": overwriting,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_replicas_cannot_have(name, strategy):
    model = compiled(strategy, **{name: SETTINGS[name]})
    refused = name if name != "optimizer" else "ema_overwrite_frequency"
    match = f"{refused} cannot be used with several replicas"
    with pytest.raises(ValueError, match=match):
        fit(model, *data())
    if name != "optimizer":
        with pytest.raises(ValueError, match=match):
            model.evaluate(*data(), batch_size=8, verbose=0)


@thorough
def test_parameter_servers():
    command = [sys.executable, os.path.join(HERE, "parameter_servers.py")]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment()).stdout
    assert output.count("Received: variables of a ParameterServerStrategy") == 3


def test_batches_that_are_single_micro_batches(strategy):
    with pytest.warns(UserWarning, match="micro_batch_size=4 on 2 replicas takes them all"):
        fit(compiled(strategy, micro_batch_size=4), *data(8))

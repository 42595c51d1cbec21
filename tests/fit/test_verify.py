"""verify: the verdict is right on exact models and on inexact ones, and nothing changes."""

import dataclasses
import json
import subprocess
import sys

import keras
import numpy as np
import pytest
import verify_models as models
from keras import layers, ops
from support import BACKEND, array, draws, everything, mirrored, only_on, slow_on, thorough
from verify_models import CASES, SIZE, X, Y, compiled, mlp

import macrobatch

on_tensorflow, slow_on_jax = only_on("tensorflow"), slow_on("jax")


def verified(model, batch=(X, Y), cut=SIZE, **options):
    return macrobatch.verify(model, *batch, **cut, **options)


def names(report):
    return {cause.kind: cause.names for cause in report.causes}


# What of the model is not that of the whole batch.
AFFECTS = {
    **dict.fromkeys(["schedule", "repeated_rows"], "nothing"),
    **{"metrics": "metrics", "precision": "rounding", "state": "statistics"},
}

# Each takes some seconds on JAX, which compiles each step: one of each kind is for every day.
SLOW = {
    "tensorflow": [
        *("masked-text", "convolution", "averages", "sum", "per-example-losses", "attention"),
        *("by-length", "graph", "two-outputs", "two-batch-norms", "norm-and-loss", "added"),
        *("contrastive", "own-loss", "sum-of-all"),
    ],
    "jax": [name for name in CASES if name not in ("graph", "mean", "own-loss")],
    "torch": [
        *("graph", "clipped", "regularized", "nested", "convolution", "frozen-batch-norm", "mean"),
        *("mean-over-tokens", "per-example-losses", "lion", "averages", "sum", "two-batch-norms"),
        *("layer-and-size", "seed-and-place", "loss-and-size", "sum-of-all", "norm-and-loss"),
    ],
}[BACKEND]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[thorough] if n in SLOW else []) for n in CASES]
)
def test_models(name):
    if name == "unseeded" and BACKEND == "jax":
        pytest.skip("a trace of JAX keeps what NumPy has drawn")
    case = CASES[name]
    if case.policy != "float64":
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(case.policy)
    report = verified(case.make(), case.batch, case.cut)
    assert report.exact is case.exact, str(report)
    assert names(report) == dict(case.causes), str(report)
    assert report.dtype == ("float32" if case.policy == "float32" else "float64")
    assert case.noted in "".join(report.notes)
    assert bool(report.notes) == bool(case.noted)
    for cause in report.causes:
        assert cause.explanation
        assert cause.advice
        assert cause.affects == AFFECTS.get(cause.kind, "update")
    if report.causes:
        assert case.advice in report.causes[-1].advice
        assert ("was tried" in report.causes[-1].advice) == bool(case.advice)


@slow_on_jax
def test_whole_batch_loss_as_the_way_out():
    case = CASES["dice"]
    model = macrobatch.accumulate(case.make(), **SIZE, whole_batch_loss=True)
    report = macrobatch.verify(model, *case.batch)
    assert report.exact is True
    assert report.settings == {**SIZE, "whole_batch_loss": True}


@on_tensorflow
def test_repeated_rows_are_plain_keras_being_off():
    report = verified(models.of_tokens(name="model"), (models.TEXT, Y))
    assert report.exact is True
    assert names(report) == {"repeated_rows": ("model/table/embeddings",)}
    assert "plain Keras is off by" in report.causes[0].explanation
    assert report.causes[0].affects == "nothing"


@slow_on_jax
def test_how_far_values_are_apart():
    """Metrics, the gradients of a package with a fault, and rounding that is measured."""
    found = verified(compiled(models.WithTracker())).metrics
    assert found["tracked"] > 1e-3
    assert found["loss"] < 1e-12
    found = verified(CASES["wrong-gradient"].make()).differences.values()
    assert all(abs(each.gradient - 1e-6) < 1e-9 for each in found)
    assert 1e-9 < verified(CASES["narrow-cast"].make()).tolerance < 1e-4
    report = verified(mlp(models.Unused(name="unused"), name="model"))
    assert report.differences["model/unused/unused"].largest == 0.0


@slow_on_jax
def test_a_schedule_that_counts_micro_batches():
    def kinds(updates, wrap=lambda optimizer: optimizer):
        optimizer = wrap(keras.optimizers.Adam(models.schedule(400)))
        return [*names(verified(mlp(optimizer=optimizer), updates=updates))]

    assert kinds(100) == ["schedule"]
    assert kinds(400) == kinds(None) == []
    assert kinds(101, keras.optimizers.LossScaleOptimizer) == ["schedule"]


# Nothing changes


def in_a_graph():
    return mlp(layers.Dropout(0.5), models.Sampling(), metrics=["mae"], eager=False)


def with_statistics():
    return mlp(layers.BatchNormalization(), layers.Dropout(0.5), metrics=["mae"])


def not_copied():
    norm = layers.BatchNormalization()
    return compiled(models.NotCopied(lambda t: norm(t, training=True)), metrics=["mae"])


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        pytest.param(with_statistics, SIZE, marks=slow_on_jax),
        pytest.param(not_copied, {}, marks=slow_on_jax),
        pytest.param(with_statistics, {}, marks=slow_on("tensorflow", "torch")),
        pytest.param(in_a_graph, {}, marks=thorough),
        pytest.param(in_a_graph, SIZE, marks=thorough),
        pytest.param(not_copied, SIZE, marks=thorough),
    ],
)
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_nothing_changes(build, settings):
    """Of a model that has trained, in the middle of its metrics, and is accumulated or not."""
    ends = []
    for verifies in (False, True):
        keras.utils.set_random_seed(5)
        keras.backend.clear_session()
        model = build()
        if not settings:
            macrobatch.accumulate(model, **SIZE)
        model.fit(X, Y, batch_size=7, verbose=0)
        before = everything(model)
        if verifies:
            report = macrobatch.verify(model, X, Y, **settings)
            assert report.exact is (build is in_a_graph)
            assert report.settings == SIZE
        assert everything(model) == before
        drawn = draws()
        history = model.fit(X, Y, batch_size=7, verbose=0, shuffle=False).history
        ends.append((drawn, history, [array(v).tolist() for v in model.variables]))
    assert ends[0] == ends[1]


@slow_on_jax
def test_a_model_that_was_never_trained_stays_unbuilt():
    model = compiled(keras.Sequential([layers.Dense(2), layers.Dense(1)]), metrics=["mae"])
    assert verified(model).exact is True
    assert not model.built
    assert not model.optimizer.built


@slow_on_jax
def test_a_failure_changes_nothing():
    model = models.built(compiled(models.OwnLoss()))
    before = everything(model)
    with pytest.raises(ValueError, match="same number"):
        verified(model, (X, Y[:3]))
    assert everything(model) == before


@slow_on_jax
@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ((X, models.numbers(2) * np.inf), "y"),
        ((np.where(np.arange(len(X))[:, None] == 5, np.nan, X), Y), "x"),
        ((X * 1e300, Y * 1e300), "loss"),
    ],
    ids=["targets", "one example", "overflow"],
)
def test_a_batch_that_is_not_finite(batch, where):
    model = models.built(compiled(models.OwnLoss()))
    before = everything(model)
    report = verified(model, batch)
    assert report.exact is None
    assert names(report) == {"not_finite": (where,)}
    assert str(report).startswith("COULD NOT TELL")
    assert everything(model) == before


# What goes in


@on_tensorflow
def test_the_first_batch_of_a_dataset():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    report = macrobatch.verify(mlp(), data, micro_batch_size=2)
    assert report.examples == 5
    assert report.exact is True


@on_tensorflow
def test_a_model_of_a_strategy_is_compared_on_one_device():
    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        with pytest.raises(ValueError, match=r"outside of strategy\.scope"):
            verified(model)
    report = verified(model)
    assert report.exact is True
    assert "on one device" in report.notes[0]


@slow_on_jax
def test_a_size_that_would_be_found_is_a_quarter_of_the_batch():
    report = macrobatch.verify(macrobatch.accumulate(mlp()), X, Y)
    assert report.exact is True
    assert report.settings["micro_batch_size"] == -(-len(X) // 4)


def test_what_cannot_be_verified():
    with pytest.raises(ValueError, match="must be compiled"):
        verified(keras.Sequential([layers.Dense(1)]))
    with pytest.raises(ValueError, match=r"sample_weight=8.*micro_batch_size=8"):
        macrobatch.verify(mlp(), X, Y, 8)
    with pytest.raises(ValueError, match="Only one of micro_batch_size"):
        macrobatch.verify(mlp(), X, Y, micro_batch_size=2, micro_batch_tokens=2)
    with pytest.raises(ValueError, match="Build it first"):
        verified(compiled(models.NotCopied(ops.tanh)))
    with pytest.raises(ValueError, match="Keras 3 model"):
        verified(None)


@slow_on_jax
def test_a_batch_of_one_micro_batch_shows_little():
    report = macrobatch.verify(mlp(), X, Y, micro_batch_size=20)
    assert report.exact is True
    assert "one micro-batch takes the whole batch" in report.notes[0]


class Changed(keras.Model):
    """Takes no arguments, and is changed after it was made."""

    def __init__(self):
        super().__init__()
        self.head, self.power = layers.Dense(1), 1

    def call(self, inputs):
        return self.head(inputs)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) ** self.power


@slow_on_jax
def test_a_copy_that_is_another_model_is_not_used():
    model = models.built(compiled(Changed()))
    assert verified(model).notes == []
    model.power = 2
    report = verified(model)
    assert "has another loss" in report.notes[0]
    assert report.exact is False


@slow_on_jax
def test_a_sequential_without_an_input_takes_sequences_of_any_length():
    parts = [layers.Embedding(20, 3, mask_zero=True), layers.LSTM(4), layers.Dense(1)]
    model = compiled(keras.Sequential(parts), optimizer="sgd")
    tokens = np.arange(1, 9) * (np.arange(8) < np.arange(1, 9)[:, None])
    cut = {"micro_batch_size": 2, "sequence_axis": 1}
    assert verified(model, (tokens, np.ones([8, 1])), cut).exact
    assert not model.built


# The report


@slow_on_jax
def test_the_report_as_json_and_as_a_table():
    report = verified(mlp(layers.BatchNormalization(name="norm"), name="small"))
    found = json.loads(report.to_json())
    assert found["exact"] is False
    assert found["causes"][0]["kind"] == "batch_normalization"
    assert found["causes"][0]["names"] == ["norm"]
    for path, difference in report.differences.items():
        assert found["differences"][path] == dataclasses.asdict(difference)
    lines = str(report).splitlines()
    assert lines[0] == "NOT EXACT"
    assert lines[1].startswith("small, a batch of 14 examples, micro_batch_size=4.")
    assert "1. batch normalization (norm): affects the update" in lines
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("small/norm/gamma ") for line in lines)
    assert all(line == line.rstrip() for line in lines)
    many = {f"variable {i}": difference for i in range(30)}
    report = dataclasses.replace(report, differences=many, statistics={}, causes=[])
    assert "(18 more, which differ less)" in str(report)
    assert len(str(report).splitlines()) < 22


STARTS = []


class Noted(keras.optimizers.Adam):
    """Notes from where it goes on."""

    def apply(self, grads, trainable_variables=None):
        STARTS.append([array(v) for v in self.variables])
        return super().apply(grads, trainable_variables)


@only_on("tensorflow", "torch")  # where a step can be looked at
def test_the_optimizer_goes_on_from_where_it_is():
    """The step is that of the user's next update: Adam's, with the moments it has."""
    model = mlp(optimizer=Noted(0.1))
    model.fit(X, Y, batch_size=14, epochs=3, verbose=0)
    STARTS.clear()
    assert verified(model).exact is True
    assert len(STARTS) >= 2
    for start in STARTS:
        for value, variable in zip(start, model.optimizer.variables):
            np.testing.assert_allclose(value, array(variable), rtol=1e-12)


class OwnStep(keras.Model):
    """A train step as people write it, whose loss may compare examples."""

    def __init__(self):
        super().__init__()
        self.head, self.compares = layers.Dense(1), False

    def call(self, inputs):
        return self.head(inputs)

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            if self.compares:
                y_pred = y_pred / ops.sum(ops.abs(y_pred))
            loss = ops.mean(ops.square(y - y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@on_tensorflow
@pytest.mark.eager
@pytest.mark.examples_meet
def test_a_train_step_of_the_users_own():
    model = OwnStep()
    model.compile("sgd")
    model(X)
    before = everything(model)
    assert verified(model).exact is True
    model.compares = True
    report = verified(model)
    assert report.exact is False
    assert [*names(report)] == ["own_train_step"]
    assert "Examples meet" in report.causes[0].explanation
    model.compares = False
    assert everything(model) == before


@on_tensorflow
def test_networks_that_are_built_are_all_the_weights_of_a_gan():
    """Nobody calls the model itself, so Keras says that it is not built."""
    from fit import step_cases

    model, batch = step_cases.gan({"run_eagerly": True}), (step_cases.X, step_cases.NOISE)
    with pytest.raises(ValueError, match="has no weights yet"):
        verified(model, batch)
    model.generator(step_cases.NOISE)
    model.discriminator(step_cases.X)
    assert verified(model, batch).exact is True


SCRIPT = """
import keras, numpy as np
from keras import layers

model = keras.Sequential([keras.Input([5]), layers.Dense(4, "tanh"), layers.Dense(1)])
model.compile("sgd", "mse")
random = np.random.default_rng(0)
model.fit(random.normal(size=[14, 5]), random.normal(size=[14, 1]), batch_size=14, epochs=3)
"""


@slow_on("tensorflow", "jax")
def test_the_command(tmp_path, monkeypatch):
    """As a user has it: float32, and no TensorFlow. float64 is switched on for the comparison."""
    monkeypatch.delenv("JAX_ENABLE_X64", raising=False)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "macrobatch", "verify", "--micro-batch-size=3", "--json"]
    ran = subprocess.run([*command, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert report["exact"] is True
    assert report["dtype"] == "float64"
    assert 0 < max(d["gradient"] for d in report["differences"].values()) < 1e-12

"""verify: the verdict is right on exact models and on inexact ones, and nothing changes."""

import dataclasses
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import verify_models as models
from fit import step_cases
from keras import layers, ops
from support import MODES, draws, everything, thorough, thorough_for
from test_accumulator_everywhere import mirrored
from verify_models import EXACT, INEXACT, REPAIRED, SIZE, X, Y, compiled, mlp

import macrobatch
from macrobatch._tensorflow import parts
from macrobatch._verify.causes import of_schedule
from macrobatch._verify.compare import Runs
from macrobatch._verify.report import Difference
from macrobatch._verify.subject import copied


def verified(model, batch, settings=None, **options):
    return macrobatch.verify(model, *batch, **(settings or SIZE), **options)


def kinds(report):
    return [cause.kind for cause in report.causes]


def parameters(names, slow):
    return [pytest.param(n, marks=[thorough] if n in slow else []) for n in names]


@thorough_for("attention", "by-length", "graph", "two-outputs")
@pytest.mark.parametrize("name", parameters(EXACT, models.SLOW))
def test_exact_models(name):
    report = verified(*EXACT[name]())
    assert report.exact is True, str(report)
    assert report.causes == []
    assert report.dtype == ("float32" if name == "not-copied" else "float64")
    assert bool(report.notes) == (name == "not-copied")


@thorough_for("added", "contrastive", "own-loss", "sum")
@pytest.mark.parametrize("name", parameters(INEXACT, ["two-batch-norms", "norm-and-loss"]))
def test_inexact_models(name):
    make, expected, *advice = INEXACT[name]
    report = verified(*make())
    assert report.exact is False
    assert {cause.kind: cause.names for cause in report.causes} == expected, str(report)
    assert all(cause.explanation and cause.advice for cause in report.causes)
    assert report.causes[-1].advice == (advice or [report.causes[-1].advice])[0]
    assert ("was tried" in report.causes[-1].advice) == (name in REPAIRED)


def test_whole_batch_loss_as_the_way_out():
    model, batch = INEXACT["dice"][0]()
    macrobatch.accumulate(model, **SIZE, whole_batch_loss=True)
    report = macrobatch.verify(model, *batch)
    assert report.exact is True
    assert report.settings == {**SIZE, "whole_batch_loss": True}


def test_whole_batch_loss_is_no_way_out_of_a_layer():
    settings = {**SIZE, "whole_batch_loss": True}
    report = verified(mlp(models.Balanced(name="balanced")), (X, Y), settings)
    assert report.exact is False
    assert [(c.kind, c.names) for c in report.causes] == [("scalar_loss", ("balanced",))]


def pooled_text(**options):
    """A mean over all positions, padding included."""
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.GlobalAveragePooling1D()(layers.Embedding(9, 3)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(hidden)), optimizer="sgd", **options)


def test_padding_that_matters():
    settings = {**SIZE, "sequence_axis": 1}
    report = verified(pooled_text(), (models.TEXT, Y), settings)
    assert report.exact is False
    assert kinds(report) == ["padding"]
    assert "depends on padding" in report.causes[0].explanation
    assert "exact, which was tried" in report.causes[0].advice
    assert verified(pooled_text(), (models.TEXT, Y)).exact is True


def test_repeated_rows_are_plain_keras_being_off():
    inputs = keras.Input([6], dtype="int32")
    table = layers.Embedding(9, 2, name="table")
    model = models.sequential(table, layers.Flatten(), layers.Dense(1), inputs=inputs, name="model")
    report = verified(model, (models.TEXT, Y))
    assert report.exact is True
    assert [(c.kind, c.names) for c in report.causes] == [
        ("repeated_rows", ("model/table/embeddings",))
    ]
    assert "plain Keras is off by" in report.causes[0].explanation


def test_a_metric_that_the_loss_updates():
    report = verified(compiled(models.WithTracker()), (X, Y))
    assert report.exact is True
    assert [(c.kind, c.names, c.affects) for c in report.causes] == [
        ("metrics", ("tracked",), "metrics")
    ]
    assert report.metrics["tracked"] > 1e-3
    assert report.metrics["loss"] < 1e-12


def test_a_metric_of_one_number_per_update():
    def largest(y_true, y_pred):
        return ops.max(y_pred)

    report = verified(mlp(metrics=[largest, "mae"]), (X, Y))
    assert report.exact is True
    assert [(c.kind, c.names) for c in report.causes] == [("metrics", ("largest",))]


def test_a_float32_layer_in_a_float64_model():
    report = verified(mlp(layers.Dense(4, dtype="float32", name="narrow")), (X, Y))
    assert report.exact is True
    assert [(c.kind, c.names, c.affects) for c in report.causes] == [
        ("precision", ("narrow",), "rounding")
    ]


class Narrow(layers.Dense):
    def call(self, inputs):
        inputs, kernel = (ops.cast(each, "float32") for each in (inputs, self.kernel))
        return ops.cast(ops.matmul(inputs, kernel), "float64")


def test_a_cast_to_float32_in_a_layer():
    report = verified(mlp(Narrow(4)), (X, Y))
    assert report.exact is True
    assert kinds(report) == ["precision"]
    assert 1e-9 < report.tolerance < 1e-4


def test_a_schedule_that_counts_micro_batches():
    model = mlp(optimizer=keras.optimizers.Adam(models.schedule(100 * 4)))
    assert kinds(verified(model, (X, Y), updates=100)) == ["schedule"]
    assert of_schedule(model.optimizer, 400, 4) == []
    assert of_schedule(model.optimizer, None, 4) == []
    scaled = keras.optimizers.LossScaleOptimizer(model.optimizer)
    assert len(of_schedule(scaled, 101, 4)) == 1


class Unseeded(layers.Layer):
    def call(self, inputs):
        return inputs + tf.random.normal(tf.shape(inputs), dtype=inputs.dtype)


def test_draws_that_cannot_be_replayed():
    report = verified(mlp(Unseeded()), (X, Y))
    assert report.exact is None
    assert kinds(report) == ["random"]
    assert "COULD NOT TELL" in str(report)


def test_a_difference_that_nothing_explains(monkeypatch):
    """As if the package had a fault: the verdict does not depend on knowing why."""
    plain = parts.whole_gradients

    def wrong(*args):
        return [gradient * (1 + 1e-6) for gradient in plain(*args)]

    monkeypatch.setattr(parts, "whole_gradients", wrong)
    report = verified(mlp(optimizer="sgd"), (X, Y))
    assert report.exact is False
    assert kinds(report) == ["unknown"]
    assert all(abs(d.gradient - 1e-6) < 1e-9 for d in report.differences.values())


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
        (with_statistics, SIZE),
        (not_copied, None),
        pytest.param(in_a_graph, None, marks=thorough),
        pytest.param(in_a_graph, SIZE, marks=thorough),
        pytest.param(with_statistics, None, marks=thorough),
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
        if settings is None:
            macrobatch.accumulate(model, **SIZE)
        model.fit(X, Y, batch_size=7, verbose=0)
        before = everything(model)
        if verifies:
            report = macrobatch.verify(model, X, Y, **(settings or {}))
            assert report.exact is (build is in_a_graph)
            assert report.settings == SIZE
        assert everything(model) == before
        drawn = draws()
        history = model.fit(X, Y, batch_size=7, verbose=0, shuffle=False).history
        ends.append((drawn, history, [np.array(v).tolist() for v in model.variables]))
    assert ends[0] == ends[1]


def test_a_model_that_was_never_trained_stays_unbuilt():
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    assert verified(model, (X, Y)).exact is True
    assert not model.built
    assert not model.optimizer.built
    assert not model._compile_metrics.built


def test_a_failure_changes_nothing():
    model = compiled(models.OwnLoss())
    model(X)
    before = everything(model)
    with pytest.raises(ValueError, match="same number"):
        verified(model, (X, Y[:3]))
    assert everything(model) == before


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ((X, models.numbers(2) * np.inf), ("y",)),
        ((np.where(np.arange(len(X))[:, None] == 5, np.nan, X), Y), ("x",)),
        ((X * 1e300, Y * 1e300), ("loss",)),
    ],
    ids=["targets", "one example", "overflow"],
)
def test_a_batch_that_is_not_finite(batch, names):
    model = compiled(models.OwnLoss())
    model(X)
    before = everything(model)
    report = verified(model, batch)
    assert report.exact is None
    assert kinds(report) == ["not_finite"]
    assert report.causes[0].names == names
    assert str(report).startswith("COULD NOT TELL")
    assert everything(model) == before


# What goes in


def test_the_first_batch_of_a_dataset():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(5)
    report = macrobatch.verify(mlp(), data, micro_batch_size=2)
    assert report.examples == 5
    assert report.exact is True


def test_a_model_of_a_strategy_is_compared_on_one_device():
    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        with pytest.raises(ValueError, match=r"outside of strategy\.scope"):
            verified(model, (X, Y))
    report = verified(model, (X, Y))
    assert report.exact is True
    assert "on one device" in report.notes[0]


def test_a_size_that_would_be_found_is_a_quarter_of_the_batch():
    report = macrobatch.verify(macrobatch.accumulate(mlp()), X, Y)
    assert report.exact is True
    assert report.settings["micro_batch_size"] == -(-len(X) // 4)


def test_what_cannot_be_verified():
    with pytest.raises(ValueError, match="must be compiled"):
        verified(keras.Sequential([layers.Dense(1)]), (X, Y))
    with pytest.raises(ValueError, match=r"sample_weight=8.*micro_batch_size=8"):
        macrobatch.verify(mlp(), X, Y, 8)
    with pytest.raises(ValueError, match="Only one of micro_batch_size"):
        macrobatch.verify(mlp(), X, Y, micro_batch_size=2, micro_batch_tokens=2)
    with pytest.raises(ValueError, match="Build it first"):
        verified(compiled(models.NotCopied(ops.tanh)), (X, Y))
    with pytest.raises(ValueError, match="Keras 3 model"):
        verified(None, (X, Y))


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


def test_a_copy_that_is_another_model_is_not_used():
    model = compiled(Changed())
    model(X)
    assert verified(model, (X, Y)).notes == []
    model.power = 2
    report = verified(model, (X, Y))
    assert "has another loss" in report.notes[0]
    assert report.exact is False


def double(inputs):
    return 2.0 * inputs


def test_functions_of_the_user_are_copied():
    report = verified(models.sequential(layers.Dense(1, activation=double)), (X, Y))
    assert report.exact is True
    assert report.notes == []


# The report


def test_the_report_as_json_and_as_a_table():
    report = verified(mlp(layers.BatchNormalization(name="norm"), name="small"), (X, Y))
    found = json.loads(report.to_json())
    assert found["exact"] is False
    assert found["causes"][0]["kind"] == "batch_normalization"
    assert found["causes"][0]["names"] == ["norm"]
    for path, difference in report.differences.items():
        assert found["differences"][path] == {
            "gradient": difference.gradient,
            "update": difference.update,
        }
    lines = str(report).splitlines()
    assert lines[0] == "NOT EXACT"
    assert lines[1].startswith("small, a batch of 14 examples, micro_batch_size=4.")
    assert "1. batch normalization (norm): affects the update" in lines
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("small/norm/gamma ") for line in lines)
    assert all(line == line.rstrip() for line in lines)


def test_a_table_of_many_variables_is_short():
    many = {f"variable {i}": Difference(1e-16 * i, 0.0) for i in range(30)}
    report = dataclasses.replace(verified(mlp(), (X, Y)), differences=many)
    assert "(18 more, which differ less)" in str(report)
    assert len(str(report).splitlines()) < 22


def test_an_optimizer_that_cannot_be_copied():
    class Own(keras.optimizers.SGD):
        def __init__(self, rate):
            super().__init__(rate)

    report = verified(mlp(optimizer=Own(0.1)), (X, Y))
    assert report.exact is True
    assert "The optimizer cannot be copied" in report.notes[0]


def test_the_optimizer_goes_on_from_where_it_is():
    """The step is that of the user's next update: Adam's, with the moments it has."""
    model = mlp(optimizer=keras.optimizers.Adam(0.1))
    model.fit(X, Y, batch_size=14, epochs=3, verbose=0)
    seen = []
    plain = Runs.distance

    def distance(self, one, other):
        seen.append(other.weights)
        return plain(self, one, other)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "distance", distance)
        assert verified(model, (X, Y)).exact is True
    model.train_on_batch(X, Y)
    for variable in model.trainable_variables:
        np.testing.assert_allclose(seen[0][variable.path], np.array(variable), rtol=1e-12)


def test_an_optimizer_that_makes_much_of_rounding():
    """Lion steps by the sign, also of a gradient that is 0 but for rounding."""
    batch = tf.constant(X), tf.constant(Y), None
    runs = Runs(copied(models.sequential(layers.Dense(1, name="head"), name="model"), batch))
    whole = runs.whole()
    path = "model/head/kernel"
    gradients, weights = whole.gradients[path].copy(), whole.weights[path].copy()
    gradients[0] = 1e-17
    one = whole._replace(gradients={**whole.gradients, path: gradients})
    other = one._replace(
        gradients={**one.gradients, path: gradients * [[-1], [1], [1], [1], [1]]},
        weights={**one.weights, path: weights + np.array([[0.1], [0], [0], [0], [0]])},
    )
    assert runs.distance(other, one).largest < 1e-9
    other = other._replace(
        weights={**one.weights, path: weights + np.array([[0], [0.1], [0], [0], [0]])}
    )
    assert runs.distance(other, one).largest > 1e-3


class Unused(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=[3], name="unused")

    def call(self, inputs):
        return inputs


def test_a_variable_without_gradient_has_none():
    report = verified(mlp(Unused(), name="model"), (X, Y))
    assert report.exact is True
    assert report.differences["model/unused/unused"].largest == 0.0


class OwnStep(keras.Model):
    """A train step as people write it, whose loss may compare examples."""

    def __init__(self):
        super().__init__()
        self.head, self.compares = layers.Dense(1), False

    def call(self, inputs):
        return self.head(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            if self.compares:
                y_pred = y_pred / ops.sum(ops.abs(y_pred))
            loss = ops.mean(ops.square(y - y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


@pytest.mark.eager
@pytest.mark.examples_meet
def test_a_train_step_of_the_users_own():
    model = OwnStep()
    model.compile("sgd")
    model(X)
    before = everything(model)
    assert verified(model, (X, Y)).exact is True
    model.compares = True
    report = verified(model, (X, Y))
    assert report.exact is False
    assert kinds(report) == ["own_train_step"]
    assert "Examples meet" in report.causes[0].explanation
    model.compares = False
    assert everything(model) == before


def test_networks_that_are_built_are_all_the_weights_of_a_gan():
    """Nobody calls the model itself, so Keras says that it is not built."""
    model, batch = step_cases.gan(MODES["eager"]), (step_cases.X, step_cases.NOISE)
    with pytest.raises(ValueError, match="has no weights yet"):
        verified(model, batch)
    model.generator(step_cases.NOISE)
    model.discriminator(step_cases.X)
    assert verified(model, batch).exact is True


def test_a_sequential_without_an_input_takes_sequences_of_any_length():
    model = keras.Sequential(
        [layers.Embedding(20, 3, mask_zero=True), layers.LSTM(4), layers.Dense(1)]
    )
    model.compile("sgd", "mse", run_eagerly=True)
    tokens = np.arange(1, 9) * (np.arange(8) < np.arange(1, 9)[:, None])
    report = macrobatch.verify(model, tokens, np.ones([8, 1]), micro_batch_size=2, sequence_axis=1)
    assert report.exact
    assert not model.built

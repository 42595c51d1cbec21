"""nonfinite="skip" ends where plain Keras ends on the same batches without the bad examples, and
nonfinite="raise" leaves everything as it was.
"""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import support
import tensorflow as tf
from keras import layers, ops
from support import MODES, assert_ended, assert_same_history, ended, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch import settings_of
from macrobatch._keras.installed import accumulation_of

SKIP = {"micro_batch_size": 3, "nonfinite": "skip"}
RAISE = {"micro_batch_size": 3, "nonfinite": "raise"}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(27, 4))
Y = np.sin(X.sum(1, keepdims=True))
WEIGHTS = RNG.uniform(0.5, 2.0, [27, 6])
TOKENS = RNG.integers(1, 9, (27, 6)) * (np.arange(6) < RNG.integers(1, 7, (27, 1)))
# In batches of 8: one of the first, a whole micro-batch and one more of the second, all of the
# third, one of the last, which is smaller.
BAD = [1, 11, 12, 13, 15, *range(16, 24), 25]

each_mode = pytest.mark.parametrize("mode", MODES)
in_graphs = pytest.mark.parametrize(
    "mode", ["graph", *(pytest.param(mode, marks=thorough) for mode in ("eager", "compiled"))]
)


def with_bad(array, value=np.nan, bad=BAD):
    array = array.copy()
    array[bad] = value
    return array


def cleaned(data, bad=BAD, size=8):
    """Batches without their bad examples, again and again, and how many there are."""
    count = len(tf.nest.flatten(data)[0])
    rows = [
        [i for i in range(start, min(start + size, count)) if i not in bad]
        for start in range(0, count, size)
    ]
    batches = [tf.nest.map_structure(lambda a, r=r: a[r], data) for r in rows if r]

    def forever():
        while True:
            yield from batches

    return forever, len(batches)


def batches_of(data, size=8, static=False):
    return tf.data.Dataset.from_tensor_slices(data).batch(size, drop_remainder=static)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss or the gradient of")
        yield


def check(build, data, clean, bad=BAD, cut=SKIP, scope=None, mode="graph", epochs=2, **options):
    """Trains with bad examples, and without them in plain Keras; both end the same."""
    forever, steps = cleaned(clean, bad)
    # In eager mode, Keras weighs losses of several outputs in another way.
    kwargs = {**options, **MODES["eager" if mode == "eager" else "graph"]}
    plain, expected = support.train(
        build, lambda: forever(), fit={"steps_per_epoch": steps}, epochs=epochs, **kwargs
    )
    model, history = support.train(
        build,
        lambda: batches_of(data),
        cut=cut,
        scope=scope,
        epochs=epochs,
        **options,
        **MODES[mode],
    )
    assert history.pop("skipped_examples") == [len(bad)] * epochs
    history.pop("micro_batch_size", None)
    assert_ended(ended(plain), model)
    assert_same_history(expected, history)
    return model


def mlp(*more):
    return keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            *more,
            layers.Dense(1),
        ]
    )


def adam():
    return keras.optimizers.Adam(0.1, clipnorm=0.5)


# Skipped


@thorough
def test_sizes_that_are_found(quiet):
    """Each run of a batch, or of a part of it, may be run again in smaller micro-batches."""
    cut = {"micro_batch_size": "auto", "nonfinite": "skip"}
    model = check(mlp, (with_bad(X), Y), (X, Y), cut=cut, optimizer=adam)
    assert settings_of(model).nonfinite == "skip"


@thorough_for("compiled", "eager")
@each_mode
def test_the_update_of_the_other_examples(mode, quiet):
    clean, bad, epochs = (X, Y, WEIGHTS[:, 0]), BAD, 2
    if mode != "graph":  # XLA compiles for each size, and takes its time.
        clean, bad, epochs = tuple(part[:16] for part in clean), [1, 9], 1
    data = with_bad(clean[0], np.inf, bad), *clean[1:]
    metrics = {"metrics": ["mae"], "weighted_metrics": lambda: [keras.metrics.MeanSquaredError()]}
    check(mlp, data, clean, bad, optimizer=adam, mode=mode, epochs=epochs, **metrics)


def two_outputs():
    """One output has a mask, the other one none. Gradients of the table are rows."""
    tokens, features = keras.Input([6], dtype="int32"), keras.Input([4])
    x = layers.Embedding(9, 3, mask_zero=True)(tokens)
    hidden = layers.Dense(3, activity_regularizer="l2")(features)
    tagged = layers.TimeDistributed(layers.Dense(2), name="tagged")(x)
    summed = layers.Add()([layers.GlobalAveragePooling1D()(x), hidden])
    return keras.Model([tokens, features], [tagged, layers.Dense(1, name="summed")(summed)])


@in_graphs
def test_several_outputs_masks_and_weights(mode, quiet):
    """Bad labels of one output, bad features, and bad weights."""
    positions = RNG.normal(size=(27, 6, 2))
    bad = [2, 3, 9, 26]
    clean = (TOKENS, X), (positions, Y), (WEIGHTS, WEIGHTS[:, 0])
    data = (
        (TOKENS, with_bad(X, bad=[2, 9])),
        (with_bad(positions, np.inf, [3]), Y),
        (WEIGHTS, with_bad(WEIGHTS[:, 0], bad=[26])),
    )
    check(two_outputs, data, clean, bad, loss=["mse", "mae"], loss_weights=[0.5, 2.0], mode=mode)


def tagger():
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 3, mask_zero=True)(tokens)))


@thorough_for("{'micro_batch_size': 3}")
@pytest.mark.parametrize(
    "cut",
    [{"micro_batch_size": 3}, pytest.param({"micro_batch_tokens": 12}, marks=thorough)],
    ids=str,
)
def test_sequences_by_length(cut, quiet):
    """The first batch has padding, which is then tried with the other examples."""
    labels = RNG.normal(size=(27, 6, 2))
    cut = {**cut, "sequence_axis": 1, "nonfinite": "skip"}
    check(tagger, (TOKENS, with_bad(labels)), (TOKENS, labels), cut=cut)


@pytest.mark.eager
def test_a_trial_that_showed_nothing_is_made_again(quiet):
    """A loss that depends on padding is refused, although all of the first batch is bad."""

    def mean_of_all(y_true, y_pred):
        return ops.mean(y_pred**2, axis=(1, 2)) * ops.mean(y_true, axis=(1, 2))

    tokens = keras.Input([None], dtype="int32")
    model = keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 3)(tokens)))
    model.compile("sgd", mean_of_all)
    macrobatch.accumulate(model, 3, sequence_axis=1, nonfinite="skip")
    labels = with_bad(np.ones([27, 6, 2]), bad=range(8))
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(TOKENS, labels, batch_size=8, shuffle=False, verbose=0)


def pairs(y_true, y_pred):
    return ops.mean((y_pred - ops.transpose(y_true)) ** 2, axis=-1)


@in_graphs
def test_losses_of_the_whole_batch(mode, quiet):
    cut = {**SKIP, "whole_batch_loss": True}
    check(mlp, (with_bad(X), Y), (X, Y), cut=cut, loss=pairs, metrics=["mae"], mode=mode)


@thorough_for("graph")
@in_graphs
def test_layers_that_draw_and_normalise(mode, quiet):
    """The step is that of a smaller batch: seeds, draws and statistics."""

    def build():
        return mlp(layers.Dropout(0.5, seed=1), layers.BatchNormalization())

    data = with_bad(X), Y
    with pytest.warns(macrobatch.ExactnessWarning, match="BatchNormalization"):
        forever, steps = cleaned((X, Y))
        other, _ = support.train(
            build, lambda: forever(), cut={"micro_batch_size": 3}, fit={"steps_per_epoch": steps},
            **MODES[mode],
        )  # fmt: skip
        model, _ = support.train(build, lambda: batches_of(data), cut=SKIP, **MODES[mode])
    assert_ended(ended(other), model)


@thorough
@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=thorough)])
def test_replicas(mode, quiet, monkeypatch):
    """Both have bad examples, or one, or there are no others."""
    strategy = mirrored(2)
    monkeypatch.setattr(support, "strategy", strategy)
    scope = strategy.scope()
    data, clean = (with_bad(X), Y), (X, Y)
    check(mlp, data, clean, optimizer=adam, scope=scope, metrics=["mae"], mode=mode, epochs=1)


class SparseInputs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, inputs):
        return self.dense(tf.sparse.to_dense(inputs[0]) + inputs[1].to_tensor(shape=[None, 4]))


def test_other_kinds_of_tensors(quiet):
    """Rows are taken out of sparse and ragged tensors too."""

    def trained(rows, y, **arguments):
        sparse = tf.sparse.from_dense(X[rows] * (TOKENS[rows, :4] > 0))
        ragged = tf.ragged.constant([list(X[i][: i % 4]) for i in rows], ragged_rank=1)
        keras.utils.set_random_seed(7)
        model = SparseInputs()
        model.dense.build([None, 4])
        model.built = True
        model.compile("sgd", "mse", run_eagerly=True)
        macrobatch.accumulate(model, 3, **arguments)
        model.train_on_batch((sparse, ragged), y[rows])
        return model

    skipping = trained(list(range(16)), with_bad(Y), nonfinite="skip")
    assert_ended(ended(trained([i for i in range(16) if i not in BAD], Y)), skipping)


def test_each_way_to_train(quiet):
    """Several steps at a time, with batches of one size; and train_on_batch."""
    data, sgd = (with_bad(X)[:16], Y[:16]), keras.optimizers.SGD(0.1, momentum=0.9)
    forever, steps = cleaned((X[:16], Y[:16]))
    plain, _ = support.train(mlp, lambda: forever(), fit={"steps_per_epoch": steps}, epochs=1)
    several, history = support.train(
        mlp, lambda: batches_of(data, static=True), cut=SKIP, epochs=1, steps_per_execution=2
    )
    assert_ended(ended(plain), several)
    assert history["skipped_examples"] == [5]
    keras.utils.set_random_seed(7)
    model = mlp()
    model.compile(sgd, "mse")
    macrobatch.accumulate(model, **SKIP)
    for start, count in [(0, 1), (8, 4)]:
        x, y = (part[start : start + 8] for part in data)
        model.reset_metrics()  # Keras 3.12 does not do so.
        assert model.train_on_batch(x, y, return_dict=True)["skipped_examples"] == count
    assert_ended(ended(plain), model)


def test_what_is_known_of_the_first_batch(quiet):
    """Parts of a batch of any size need no other trace, and are not taken for a small batch."""
    traces = []

    class Layer(layers.Layer):
        def call(self, x):
            traces.append(1)
            return x

    model = mlp(Layer())
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, **SKIP)
    clean, bad = batches_of((X[:12], Y[:12])), batches_of((with_bad(X)[11:27], Y[11:27]))
    model.fit(clean, shuffle=False, verbose=0)
    count = len(traces)
    model.fit(bad, shuffle=False, verbose=0)
    assert len(traces) == count


@pytest.mark.parametrize("mode", ["graph", "replicas"])
def test_a_batch_that_is_run_again_counts_once(quiet, mode):
    with mirrored(2).scope() if mode == "replicas" else contextlib.nullcontext():
        model = mlp()
        model.compile("sgd", "mse")
    macrobatch.accumulate(model, **SKIP)
    ran = accumulation_of(model).count()
    model.fit(batches_of((with_bad(X)[:24], Y[:24])), shuffle=False, verbose=0)
    assert ran.totals()[0] == 3


# Said


def test_warnings():
    """One for each fit, and one if there is no update. No update leaves everything as it was."""
    model = mlp()
    model.compile(adam(), "mse", metrics=["mae"])
    macrobatch.accumulate(model, **SKIP)
    x = with_bad(X, bad=[1, 5, 9])[:16]
    for _ in range(2):
        with pytest.warns(UserWarning, match="of examples 1, 5 is not .* batch of 8") as seen:
            model.fit(x, Y[:16], batch_size=8, epochs=2, shuffle=False, verbose=0)
        assert [warning.filename for warning in seen] == [__file__]
    before = ended(model)
    model.reset_metrics()  # Keras 3.12 does not do so.
    with pytest.warns(UserWarning, match="all 8 examples of the batch: no update was made"):
        logs = model.train_on_batch(X[:8] * np.nan, Y[:8], return_dict=True)
    assert_ended(before, model, 0)
    assert logs == {"loss": 0.0, "mae": 0.0, "skipped_examples": 8.0}


@pytest.mark.eager
def test_examples_that_are_bad_only_together():
    """The sum of two losses overflows, and each of them does not. No half of the group is bad."""
    model = keras.Sequential([keras.Input([4]), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanAbsoluteError(reduction="sum"))
    macrobatch.accumulate(model, **SKIP)
    for bad, said in [
        ([4, 5], "examples 3, 4, 5 together"),
        ([1, 4], "examples 0, 1, .* 7 together"),
    ]:
        y = with_bad(Y, 1.5e308, bad)
        with pytest.warns(UserWarning, match=said):
            model.train_on_batch(X[:8], y[:8])


# Refused


@thorough_for("graph")
@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_an_error_that_changes_nothing(mode):
    """Weights, slots, seeds, statistics and metrics."""
    model = mlp(layers.Dropout(0.5), layers.BatchNormalization())
    model.compile(adam(), "mse", metrics=["mae"], **MODES[mode])
    with pytest.warns(macrobatch.ExactnessWarning):
        macrobatch.accumulate(model, **RAISE).train_on_batch(X[:8], Y[:8])
    state = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [np.array(v) for v in state]
    with pytest.raises(ValueError, match=r"examples 1, 4 is not finite.*batch of 8 examples"):
        model.train_function(iter([(with_bad(X, bad=[1, 4])[:8], Y[:8])]))
    for value, variable in zip(before, state):
        np.testing.assert_array_equal(value, variable)
    model.train_function(iter([(X[:8], Y[:8])]))
    assert int(model.optimizer.iterations) == 2


class Root(layers.Layer):
    """The derivative of the root is infinite at 0, and the root of what is below is no number."""

    def call(self, x):
        return ops.sqrt(x)


PLACES = {
    "first layer whose output is not finite is 'root'[.]": (-1.0, 0.0),
    "'first' .not finite in the batch itself: x": (np.inf, 0.0),
    "the loss is the first .* .not finite in the batch itself: y": (1.0, np.nan),
    "only the gradient is not finite[.]": (0.0, 1.0),
}


def test_where_numbers_stop_being_finite():
    first = layers.Dense(2, kernel_initializer="ones", use_bias=False, name="first")
    model = keras.Sequential([keras.Input([1]), first, Root(name="root"), layers.Dense(1)])
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, **RAISE)
    for said, values in PLACES.items():
        x, y = np.ones([8, 1]), np.ones([8, 1])
        x[6], y[6] = values
        with pytest.raises(ValueError, match=f"In example 6, .*{said}"):
            model.train_on_batch(x, y)


def test_an_error_on_replicas():
    strategy = mirrored(2)
    with strategy.scope():
        model = mlp()
        model.compile("sgd", "mse")
    macrobatch.accumulate(model, **RAISE)
    before = ended(model)
    with pytest.raises(ValueError, match=r"examples 1, 6 is not finite.*In example 1, .*'dense"):
        model.fit(with_bad(X, bad=[1, 6]), Y, batch_size=8, shuffle=False, verbose=0)
    assert_ended(before, model, 0)


@pytest.mark.eager
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_examples_that_are_not_at_fault(nonfinite):
    """All of them would be taken for bad."""
    model = mlp()
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3, nonfinite=nonfinite)
    kernel = model.layers[0].kernel
    kernel.assign(np.full(kernel.shape, 1e200))
    with pytest.raises(ValueError, match="No example is at fault: the weight regularisers"):
        model.train_on_batch(X[:8], Y[:8])
    kernel.assign(np.full(kernel.shape, np.nan))
    with pytest.raises(ValueError, match=r"not finite before the batch: '.*dense.*/kernel'"):
        model.train_on_batch(X[:8], Y[:8])


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_statistics_that_are_not_finite_are_at_fault(nonfinite):
    model = keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(1)])
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3, nonfinite=nonfinite)
    before = model.layers[1].kernel.numpy()
    model.layers[0].moving_mean.assign([0.0, 1.0, np.nan, 0.0])
    with pytest.raises(ValueError, match=r"No example is at fault: .*'.*/moving_mean'"):
        model.train_on_batch(X[:8], Y[:8])
    np.testing.assert_array_equal(before, model.layers[1].kernel.numpy())


def test_statistics_of_which_some_are_never_finite():
    """A running maximum starts with minus infinity: that is no fault."""

    class Most(layers.Layer):
        def build(self, shape):
            start = lambda shape, dtype: keras.ops.full(shape, -np.inf, dtype)  # noqa: E731
            self.most = self.add_weight(shape=[], initializer=start, trainable=False)

        def call(self, inputs):
            return keras.ops.maximum(inputs, self.most)

    model = keras.Sequential([keras.Input([4]), Most(), layers.Dense(1)])
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3, nonfinite="skip")
    with pytest.warns(UserWarning, match="example 1 is not finite"):
        model.train_on_batch(with_bad(X, bad=[1])[:8], Y[:8])


@pytest.mark.eager
def test_a_dynamic_loss_scale():
    """As with GradientAccumulator: overflows are for the optimizer to see."""

    def scaled(scale):
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=scale)

    model = mlp()
    model.compile(scaled(8.0), "mse")
    with pytest.raises(ValueError, match=r'nonfinite="skip" would hide .* skips the update'):
        macrobatch.accumulate(model, **SKIP)
    model = mlp()
    macrobatch.accumulate(model, **SKIP)
    model.compile(scaled(8.0), "mse")
    with pytest.raises(ValueError, match='nonfinite="skip" would hide'):
        model.fit(X, Y, verbose=0)
    model = keras.Sequential([keras.Input([4]), layers.Dense(1)])
    model.compile(scaled(2.0**100), "mae")
    macrobatch.accumulate(model, **RAISE)
    before = np.array(model.weights[0])
    model.train_on_batch(X[:8] * 1e300, Y[:8])  # The gradient overflows, the loss does not.
    assert float(model.optimizer.dynamic_scale) == 2.0**99
    np.testing.assert_array_equal(before, model.weights[0])
    with pytest.raises(ValueError, match="example 1 is not finite"):
        model.train_on_batch(with_bad(X)[:8], Y[:8])
    assert float(model.optimizer.dynamic_scale) == 2.0**99


def test_what_it_does_not_go_with():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return {}

    model = mlp()
    with pytest.raises(ValueError, match=r"nonfinite must be one of \['propagate'.*'ignore'"):
        macrobatch.accumulate(model, 3, nonfinite="ignore")
    with pytest.raises(ValueError, match="nonfinite='skip' needs a train step that writes nothing"):
        macrobatch.accumulate(OwnStep(), **SKIP)
    with mirrored(2).scope():
        model = mlp(layers.BatchNormalization(synchronized=True, name="together"))
        model.compile("sgd", "mse")
    macrobatch.accumulate(model, **SKIP)
    error = pytest.raises(ValueError, match=r"same number of them on each replica.*'together'")
    with pytest.warns(macrobatch.ExactnessWarning), error:
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


@pytest.mark.eager
def test_settings():
    model = mlp()
    macrobatch.accumulate(model, **SKIP)
    assert settings_of(model).arguments() == SKIP
    model.compile("sgd", "mse")
    assert macrobatch.verify(model, X[:8], Y[:8]).exact
    macrobatch.release(model)
    assert list(model.train_on_batch(X[:8], Y[:8], return_dict=True)) == ["loss"]

"""nonfinite="skip" ends where plain Keras ends on the same batches without the bad examples, and
nonfinite="raise" leaves everything as it was.
"""

import contextlib
import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import support
from keras import layers, ops, tree
from support import (
    BACKEND,
    MODES,
    array,
    assert_ended,
    assert_same_history,
    ended,
    several_devices,
    slow_on,
    thorough,
)

import macrobatch
from macrobatch import settings_of

SKIP = {"micro_batch_size": 3, "nonfinite": "skip"}
RAISE = {"micro_batch_size": 3, "nonfinite": "raise"}
# In batches of 8: one of the first, a whole micro-batch and one more of the second, all of the
# third, one of the last, which is smaller. On JAX, what is left has one size: it compiles once.
COUNT, BAD = 27, [1, 11, 12, 13, 15, *range(16, 24), 25]
if BACKEND == "jax":
    COUNT, BAD = 24, [3, 4, 5, *range(8, 16), 17, 19, 23]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(COUNT, 4))
Y = np.sin(X.sum(1, keepdims=True))
WEIGHTS = RNG.uniform(0.5, 2.0, [COUNT, 6])
TOKENS = RNG.integers(1, 9, (COUNT, 6)) * (np.arange(6) < RNG.integers(1, 7, (COUNT, 1)))
PADDED = np.pad(TOKENS, [(0, 0), (0, 18)])  # On JAX, nothing is cut to less than 8.

FIRST, *OTHERS = MODES
in_all_modes, each_mode = (
    pytest.mark.parametrize("mode", [FIRST, *(pytest.param(m, marks=thorough) for m in others)])
    for others in (OTHERS, OTHERS if BACKEND == "tensorflow" else [])
)
on_several_devices = pytest.mark.skipif(BACKEND == "torch", reason="one device only")
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")


def with_bad(values, value=np.nan, bad=BAD):
    values = values.copy()
    values[bad] = value
    return values


def batches_of(data, bad=()):
    """Batches of all examples but some, again and again, and how many there are."""
    count = len(tree.flatten(data)[0])
    places = [range(start, min(start + 8, count)) for start in range(0, count, 8)]
    rows = [row for row in ([i for i in each if i not in bad] for each in places) if row]

    def forever():
        while True:
            for row in rows:
                # Keras on torch multiplies masks into weights in place: each batch is a copy.
                yield tree.map_structure(lambda values, row=row: values[row], data)

    return forever(), len(rows)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss or the gradient of")
        yield


def check(build, data, clean, bad=BAD, cut=SKIP, mode=None, epochs=2, on=None, **options):
    """Trains with bad examples, and without them in plain Keras; both end the same."""
    batches, steps = batches_of(clean, bad)
    # In eager mode, Keras weighs losses of several outputs in another way.
    how = {"epochs": epochs, **options, **(MODES[mode] if mode == "eager" else {})}
    plain, expected = support.train(build, lambda: batches, fit={"steps_per_epoch": steps}, **how)
    batches, steps = batches_of(data)
    with (on or contextlib.nullcontext)() as scope:
        how = {"epochs": epochs, **options, **MODES.get(mode, {}), "scope": scope}
        fit = {"steps_per_epoch": steps}
        model, history = support.train(build, lambda: batches, cut=cut, fit=fit, **how)
        assert_ended(ended(plain), model)
    assert history.pop("skipped_examples") == [len(bad)] * epochs
    history.pop("micro_batch_size", None)
    assert_same_history(expected, history)
    return model


def mlp(*more):
    dense = layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([4]), dense, *more, layers.Dense(1)])


def adam():
    return keras.optimizers.Adam(0.1, clipnorm=0.5)


def accumulated(*more, model=None, cut=SKIP, optimizer="sgd", **options):
    """A model that is accumulated, for single batches."""
    keras.utils.set_random_seed(7)
    model = model or mlp(*more)
    model.compile(optimizer, options.pop("loss", "mse"), **options)
    return macrobatch.accumulate(model, **cut)


def linear(*before):
    return keras.Sequential([keras.Input([4]), *before, layers.Dense(1)])


# Skipped


@thorough
def test_sizes_that_are_found(quiet):
    """Each run of a batch, or of a part of it, may be run again in smaller micro-batches."""
    cut = {"micro_batch_size": "auto", "nonfinite": "skip"}
    check(mlp, (with_bad(X), Y), (X, Y), cut=cut, optimizer=adam)


@in_all_modes
def test_the_update_of_the_other_examples(mode, quiet):
    clean, bad, epochs = (X, Y, WEIGHTS[:, 0]), BAD, 2
    if mode != FIRST:  # XLA compiles for each size, and takes its time.
        clean, bad, epochs = tuple(part[:16] for part in clean), [1, 9], 1
    if (BACKEND, mode) == ("torch", "compiled"):
        clean = clean[:2]  # With weights, a graph could lose masks: nothing is compiled.
    data = with_bad(clean[0], np.inf, bad), *clean[1:]
    metrics = {"metrics": ["mae"], "weighted_metrics": lambda: [keras.metrics.MeanSquaredError()]}
    model = check(mlp, data, clean, bad, optimizer=adam, mode=mode, epochs=epochs, **metrics)
    assert settings_of(model).arguments() == SKIP


def two_outputs():
    """One output has a mask, the other one none. Gradients of the table are rows."""
    tokens, features = keras.Input([6], dtype="int32"), keras.Input([4])
    x = layers.Embedding(9, 3, mask_zero=True)(tokens)
    hidden = layers.Dense(3, activity_regularizer="l2")(features)
    tagged = layers.TimeDistributed(layers.Dense(2), name="tagged")(x)
    summed = layers.Add()([layers.GlobalAveragePooling1D()(x), hidden])
    return keras.Model([tokens, features], [tagged, layers.Dense(1, name="summed")(summed)])


@each_mode
def test_several_outputs_masks_and_weights(mode, quiet):
    """Bad labels of one output, bad features, and bad weights."""
    positions, bad = RNG.normal(size=(COUNT, 6, 2)), [2, 3, 9, 15]
    clean = (TOKENS, X), (positions, Y), (WEIGHTS, WEIGHTS[:, 0])
    data = (
        (TOKENS, with_bad(X, bad=[2, 9])),
        (with_bad(positions, np.inf, [3]), Y),
        (WEIGHTS, with_bad(WEIGHTS[:, 0], bad=[15])),
    )
    clean, data = (tree.map_structure(lambda a: a[:16], each) for each in (clean, data))
    options = {"loss": ["mse", "mae"], "loss_weights": [0.5, 2.0], "mode": mode, "epochs": 1}
    check(two_outputs, data, clean, bad, **options)


def tagger(mask=True):
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 3, mask_zero=mask)(tokens)))


@slow_on("tensorflow")
@pytest.mark.parametrize(
    "cut",
    [{"micro_batch_size": 3}, pytest.param({"micro_batch_tokens": 24}, marks=thorough)],
    ids=str,
)
def test_sequences_by_length(cut, quiet):
    """The first batch has padding, which is then tried with the other examples."""
    labels = RNG.normal(size=(COUNT, 24, 2))
    cut = {**cut, "sequence_axis": 1, "nonfinite": "skip"}
    check(tagger, (PADDED, with_bad(labels)), (PADDED, labels), cut=cut)


@pytest.mark.eager
def test_a_trial_that_showed_nothing_is_made_again(quiet):
    """A loss that depends on padding is refused, although all of the first batch is bad."""

    def mean_of_all(y_true, y_pred):
        return ops.mean(y_pred**2, axis=(1, 2)) * ops.mean(y_true, axis=(1, 2))

    model = accumulated(
        model=tagger(mask=False), loss=mean_of_all, cut={**SKIP, "sequence_axis": 1}
    )
    labels = with_bad(np.ones([COUNT, 24, 2]), bad=range(8))
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(PADDED, labels, batch_size=8, shuffle=False, verbose=0)


def pairs(y_true, y_pred):
    return ops.mean((y_pred - ops.transpose(y_true)) ** 2, axis=-1)


@slow_on("jax")
@each_mode
def test_losses_of_the_whole_batch(mode, quiet):
    cut = {**SKIP, "whole_batch_loss": True}
    how = {"loss": pairs, "metrics": ["mae"], "mode": mode, "epochs": 1}
    check(mlp, (with_bad(X), Y), (X, Y), cut=cut, **how)


@slow_on("jax", "tensorflow")
@each_mode
@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
def test_layers_that_draw_and_normalise(mode, quiet):
    """The step is that of a smaller batch: seeds, draws and statistics."""

    def build():
        # Without a seed, torch draws from a generator that is no variable of the model.
        dropout = layers.Dropout(0.5, seed=1), layers.Dropout(0.3)
        return mlp(*dropout, layers.BatchNormalization())

    found = []
    for data, bad, nonfinite in [((X, Y), BAD, "propagate"), ((with_bad(X), Y), (), "skip")]:
        batches, steps = batches_of(data, bad)
        cut, fit = {**SKIP, "nonfinite": nonfinite}, {"steps_per_epoch": steps}
        run = support.train(build, lambda b=batches: b, cut=cut, fit=fit, **MODES[mode])
        found.append(run[0])
    assert_ended(ended(found[0]), found[1])


@on_several_devices
@slow_on("tensorflow")
@pytest.mark.parametrize("mode", [FIRST, *["eager"] * (BACKEND == "tensorflow")])
def test_several_devices(mode, quiet):
    """Both have bad examples, or one, or there are no others; what is left is odd."""
    metrics = {"metrics": ["mae"]} if BACKEND == "tensorflow" else {}
    how = {"optimizer": adam, "mode": mode, "epochs": 1, "on": several_devices, **metrics}
    check(mlp, (with_bad(X), Y), (X, Y), **how)


@on_tensorflow
def test_other_kinds_of_tensors(quiet):
    """Rows are taken out of sparse and ragged tensors too."""
    import tensorflow as tf

    class SparseInputs(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(1)

        def call(self, inputs):
            dense = tf.sparse.to_dense(inputs[0]), inputs[1].to_tensor(shape=[None, 4])
            return self.dense(sum(dense))

    def trained(rows, y, nonfinite):
        sparse = tf.sparse.from_dense(X[rows] * (TOKENS[rows, :4] > 0))
        ragged = tf.ragged.constant([list(X[i][: i % 4]) for i in rows], ragged_rank=1)
        keras.utils.set_random_seed(7)
        model = SparseInputs()
        model.dense.build([None, 4])
        model.built = True
        model = accumulated(model=model, run_eagerly=True, cut={**SKIP, "nonfinite": nonfinite})
        model.train_on_batch((sparse, ragged), y[rows])
        return model

    plain = trained([i for i in range(16) if i not in BAD], Y, "propagate")
    assert_ended(ended(plain), trained(list(range(16)), with_bad(Y), "skip"))


@slow_on("jax")
@pytest.mark.parametrize("way", ["train_on_batch", "several steps at a time"])
def test_each_way_to_train(way, quiet):
    if (BACKEND, way) == ("torch", "several steps at a time"):
        pytest.skip("one step is one execution there")
    bad = [1, 14] if BACKEND == "jax" else BAD
    x, y = with_bad(X, bad=[i for i in bad if i < 16])[:16], Y[:16]
    batches, steps = batches_of((X[:16], Y[:16]), bad)
    plain, _ = support.train(mlp, lambda: batches, fit={"steps_per_epoch": steps})
    if way != "train_on_batch":  # with batches of one size
        model, history = support.train(mlp, x, y, cut=SKIP, steps_per_execution=2)
        assert history["skipped_examples"] == [np.isnan(x[:, 0]).sum()]
    else:
        model = accumulated(optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        for start in (0, 8):
            batch = slice(start, start + 8)
            model.reset_metrics()  # Keras 3.12 does not do so.
            logs = model.train_on_batch(x[batch], y[batch], return_dict=True)
            assert logs["skipped_examples"] == np.isnan(x[batch, 0]).sum()
    assert_ended(ended(plain), model)


class Watching(layers.Layer):
    """Notes with how many examples it is called, or traced."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def call(self, x):
        self.sizes.append(x.shape[0])
        return x

    def seen(self):
        """The sizes since the last call."""
        sizes, self.sizes = self.sizes, []
        return sizes


@on_tensorflow
def test_what_is_known_of_the_first_batch(quiet):
    """Parts of a batch of any size need no other trace, and are not taken for a small batch."""
    watching = Watching()
    model = accumulated(watching)
    model.fit(X[:12], Y[:12], batch_size=8, shuffle=False, verbose=0)
    watching.seen()
    model.fit(with_bad(X)[11:], Y[11:], batch_size=8, shuffle=False, verbose=0)
    assert not watching.seen()


@pytest.mark.skipif(BACKEND != "jax", reason="nothing is compiled, or one graph for all sizes")
def test_parts_of_a_batch_are_not_compiled_for(quiet):
    """The batch without its bad examples is another shape. What is looked at is not."""
    watching = Watching()
    model = accumulated(watching, cut={**SKIP, "micro_batch_size": 4})
    x = X[:8].copy()
    model.train_on_batch(x, Y[:8])
    watching.seen()
    x[5] = np.nan
    model.train_on_batch(x, Y[:8])
    assert set(watching.seen()) == {4, 3}  # seven examples: a full micro-batch and a tail
    model.train_on_batch(x[::-1], Y[:8])
    assert not watching.seen()


SCRIPT = """
import keras, numpy as np
x = np.ones([16, 4])
x[[1, 12]] = np.nan
with {scope}:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x[:, :1] * 0, batch_size=8, shuffle=False, verbose=0)
"""


@on_tensorflow
@pytest.mark.parametrize(
    "scope",
    [
        "__import__('contextlib').nullcontext()",
        pytest.param("__import__('support').mirrored().scope()", marks=thorough),
    ],
    ids=["graph", "replicas"],
)
def test_a_batch_that_is_run_again_counts_once(scope, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(scope=scope))
    program = "import prepared; from macrobatch import cli; raise SystemExit(cli.main({}))"
    arguments = ["run", "--micro-batch-size", "3", "--nonfinite", "skip", str(script)]
    ended = subprocess.run(
        [sys.executable, "-c", program.format(arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "macrobatch: 2 batches, " in ended.stderr


# How bad examples are found


@slow_on("jax")
@pytest.mark.eager
@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
@pytest.mark.parametrize("size", [1, 7, 16])
def test_bad_examples_are_found_one_by_one(size):
    model = accumulated(cut={**RAISE, "micro_batch_size": size})
    for bad in ([0], [15], [5, 6], [0, 7, 8, 15], range(10)):
        match = f"of examples? {', '.join(map(str, bad))} is not finite.*batch of 16 examples"
        with pytest.raises(ValueError, match=match):
            model.train_on_batch(with_bad(X[:16], bad=list(bad)), Y[:16])


@pytest.mark.skipif(BACKEND == "jax", reason="parts are as large as the batch there")
@pytest.mark.parametrize(("bad", "most"), [(21, 64 + 2 * 8), (63, 64)])
def test_few_runs(bad, most, quiet):
    """Each micro-batch once, and then halves of the bad one. The last needs no look as a whole."""
    watching = Watching()
    model = accumulated(watching, run_eagerly=True, cut={**SKIP, "micro_batch_size": 8})
    x = np.resize(X, [64, 4])
    model.train_on_batch(x, x[:, :1])
    watching.seen()
    model.train_on_batch(with_bad(x, bad=[bad]), x[:, :1])
    assert 63 < sum(watching.seen()) - 64 - 63 <= most


@pytest.mark.eager
def test_examples_that_are_bad_only_together():
    """The sum of two losses overflows, and each of them does not. No half of the group is bad."""
    loss = keras.losses.MeanAbsoluteError(reduction="sum")
    model = accumulated(model=linear(), optimizer=keras.optimizers.SGD(0.01), loss=loss)
    cases = {r"examples (3, )?4, 5 together": [4, 5], r"examples 0, 1, .* 7 together": [1, 4]}
    if BACKEND == "jax":  # which looks at halves of the batch first
        cases.popitem()
    for said, bad in cases.items():
        with pytest.warns(UserWarning, match=said):
            model.train_on_batch(X[:8], with_bad(Y, 1.5e308, bad)[:8])


# Said


@pytest.mark.eager
def test_warnings():
    """One for each fit, and one if there is no update. No update leaves everything as it was."""
    model = accumulated(optimizer=adam(), metrics=["mae"])
    x = with_bad(X, bad=[1, 5, 9])[:16]
    for _ in range(2):
        with pytest.warns(UserWarning, match="of examples 1, 5 is not .* batch of 8") as seen:
            model.fit(x, Y[:16], batch_size=8, epochs=2, shuffle=False, verbose=0)
        said = [each for each in seen if "not finite" in str(each.message)]
        assert [each.filename for each in said] == [__file__]
    before = ended(model)
    model.reset_metrics()  # Keras 3.12 does not do so.
    with pytest.warns(UserWarning, match="all 8 examples of the batch: no update was made"):
        logs = model.train_on_batch(X[:8] * np.nan, Y[:8], return_dict=True)
    assert_ended(before, model, 0)
    assert logs == {"loss": 0.0, "mae": 0.0, "skipped_examples": 8.0}
    macrobatch.release(model)
    assert list(model.train_on_batch(X[:8], Y[:8], return_dict=True)) == ["loss", "mae"]


@slow_on("jax")
@pytest.mark.eager
@pytest.mark.examples_meet
def test_examples_that_meet_are_found_among_the_others(quiet):
    """Numbers that are not finite show nothing."""
    centred = layers.Lambda(lambda x: x - ops.mean(x, axis=0, keepdims=True), name="centred")
    model = accumulated(centred)
    with pytest.warns(macrobatch.ExactnessWarning, match="meet in these layers: 'centred'"):
        model.train_on_batch(with_bad(X, bad=range(4))[:8], Y[:8])


@pytest.mark.eager
@slow_on("jax")
def test_verify():
    assert macrobatch.verify(accumulated(), X[:8], Y[:8]).exact


# Refused


@slow_on("jax", "tensorflow")
@each_mode
@pytest.mark.filterwarnings("ignore:BatchNormalization normalises")
def test_an_error_that_changes_nothing(mode):
    """Weights, slots, seeds, statistics and metrics."""
    more = layers.Dropout(0.5), layers.BatchNormalization()
    model = accumulated(*more, optimizer=adam(), metrics=["mae"], cut=RAISE, **MODES[mode])
    model.train_on_batch(X[:8], Y[:8])
    model.reset_metrics()
    state = [*support.variables(model), *model.metrics_variables]
    before = [array(v) for v in state]
    with pytest.raises(ValueError, match=r"examples 1, 4 is not finite.*batch of 8 examples"):
        model.train_on_batch(with_bad(X, bad=[1, 4])[:8], Y[:8])
    for value, variable in zip(before, state):
        np.testing.assert_array_equal(value, array(variable))
    model.train_on_batch(X[:8], Y[:8])
    assert int(model.optimizer.iterations) == 2


# The derivative of the root is infinite at 0, and the root of what is below is no number.
PLACES = {
    "first layer whose output is not finite is 'root'[.]": (-1.0, 0.0),
    "'first' .not finite in the batch itself: x": (np.inf, 0.0),
    "the loss is the first .* .not finite in the batch itself: y": (1.0, np.nan),
    "only the gradient is not finite[.]": (0.0, 1.0),
}


def test_where_numbers_stop_being_finite():
    first = layers.Dense(2, kernel_initializer="ones", use_bias=False, name="first")
    root = layers.Lambda(ops.sqrt, name="root")
    model = keras.Sequential([keras.Input([1]), first, root, layers.Dense(1)])
    model = accumulated(model=model, cut=RAISE)
    before = ended(model)
    for said, values in PLACES.items():
        x, y = np.ones([8, 1]), np.ones([8, 1])
        x[6], y[6] = values
        with pytest.raises(ValueError, match=f"In example 6, .*{said}"):
            model.train_on_batch(x, y)
    assert_ended(before, model, 0)


@on_several_devices
@slow_on("jax")
def test_an_error_on_several_devices():
    with several_devices() as scope:
        with scope:
            model = accumulated(cut=RAISE)
        before = ended(model)
        match = r"examples 1, 6 is not finite.*In example 1, .*'dense"
        with pytest.raises(ValueError, match=match):
            model.fit(with_bad(X, bad=[1, 6]), Y, batch_size=8, shuffle=False, verbose=0)
        assert_ended(before, model, 0)


@pytest.mark.eager
@pytest.mark.parametrize("cut", [SKIP, RAISE], ids=["skip", "raise"])
def test_examples_that_are_not_at_fault(cut):
    """All of them would be taken for bad."""
    model = accumulated(cut=cut)
    kernel = model.layers[0].kernel
    kernel.assign(np.full(kernel.shape, 1e200))
    with pytest.raises(ValueError, match="No example is at fault: the weight regularisers"):
        model.train_on_batch(X[:8], Y[:8])
    kernel.assign(np.full(kernel.shape, np.nan))
    with pytest.raises(ValueError, match=r"not finite before the batch: '.*dense.*/kernel'"):
        model.train_on_batch(X[:8], Y[:8])


@pytest.mark.parametrize("cut", [SKIP, RAISE], ids=["skip", "raise"])
def test_statistics_that_are_not_finite_are_at_fault(cut):
    frozen = layers.BatchNormalization(trainable=False)
    model = accumulated(model=linear(frozen), cut=cut)
    before = array(model.layers[1].kernel)
    frozen.moving_mean.assign([0.0, 1.0, np.nan, 0.0])
    with pytest.raises(ValueError, match=r"No example is at fault: .*'.*/moving_mean'"):
        model.train_on_batch(X[:8], Y[:8])
    np.testing.assert_array_equal(before, array(model.layers[1].kernel))


def test_statistics_of_which_some_are_never_finite():
    """A running maximum starts with minus infinity: that is no fault."""

    class Most(layers.Layer):
        def build(self, shape):
            start = lambda shape, dtype: ops.full(shape, -np.inf, dtype)  # noqa: E731
            self.most = self.add_weight(shape=[], initializer=start, trainable=False)

        def call(self, inputs):
            return ops.maximum(inputs, self.most)

    with pytest.warns(UserWarning, match="example 1 is not finite"):
        accumulated(model=linear(Most())).train_on_batch(with_bad(X, bad=[1])[:8], Y[:8])


@pytest.mark.eager
def test_a_dynamic_loss_scale():
    """As with GradientAccumulator: overflows are for the optimizer to see."""

    def scaled(scale):
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=scale)

    with pytest.raises(ValueError, match=r'nonfinite="skip" would hide .* skips the update'):
        accumulated(optimizer=scaled(8.0))
    model = macrobatch.accumulate(mlp(), **SKIP)
    model.compile(scaled(8.0), "mse")
    with pytest.raises(ValueError, match='nonfinite="skip" would hide'):
        model.fit(X, Y, verbose=0)
    model = accumulated(model=linear(), optimizer=scaled(2.0**100), loss="mae", cut=RAISE)
    before = array(model.weights[0])
    model.train_on_batch(X[:8] * 1e300, Y[:8])  # The gradient overflows, the loss does not.
    assert float(model.optimizer.dynamic_scale) == 2.0**99
    np.testing.assert_array_equal(before, array(model.weights[0]))
    with pytest.raises(ValueError, match="example 1 is not finite"):
        model.train_on_batch(with_bad(X, bad=[1])[:8], Y[:8])
    assert float(model.optimizer.dynamic_scale) == 2.0**99


def test_what_it_can_be():
    with pytest.raises(ValueError, match=r"nonfinite must be one of \['propagate'.*'ignore'"):
        macrobatch.accumulate(mlp(), 3, nonfinite="ignore")


@on_tensorflow
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_what_it_does_not_go_with():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return {}

    with pytest.raises(ValueError, match="nonfinite='skip' needs a train step that writes nothing"):
        macrobatch.accumulate(OwnStep(), **SKIP)
    with support.mirrored(2).scope():
        model = accumulated(layers.BatchNormalization(synchronized=True, name="together"))
    with pytest.raises(ValueError, match=r"same number of them on each replica.*'together'"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)

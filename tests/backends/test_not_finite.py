"""nonfinite="skip" ends where plain Keras ends on the same batches without the bad examples, and
nonfinite="raise" leaves everything as it was.
"""

import warnings

import keras
import numpy as np
import pytest
import support
from keras import layers, ops, tree
from support import BACKEND, MODES, array, assert_ended, assert_same_history, ended, thorough

import macrobatch
from macrobatch import settings_of

SKIP = {"micro_batch_size": 3, "nonfinite": "skip"}
RAISE = {"micro_batch_size": 3, "nonfinite": "raise"}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4))
Y = np.sin(X.sum(1, keepdims=True))
WEIGHTS = RNG.uniform(0.5, 2.0, [24, 6])
TOKENS = RNG.integers(1, 9, (24, 6)) * (np.arange(6) < RNG.integers(1, 7, (24, 1)))
# In batches of 8: a whole micro-batch of the first, all of the second, some of the last. What is
# left has one size, for which JAX compiles once.
BAD = [3, 4, 5, *range(8, 16), 17, 19, 23]


def slow_on_jax(test):
    """Leaves a test to `make test-all` where it mostly compiles, and others like it run."""
    return thorough(test) if BACKEND == "jax" else test


def with_bad(values, value=np.nan, bad=BAD):
    values = values.copy()
    values[bad] = value
    return values


def batches_of(data, bad=(), size=8):
    """Batches of all examples but some, again and again, and how many there are."""
    count = len(tree.flatten(data)[0])
    places = [range(start, min(start + size, count)) for start in range(0, count, size)]
    rows = [[i for i in each if i not in bad] for each in places]
    # Keras on torch multiplies masks into weights in place: each batch is a copy.
    forever = (
        tree.map_structure(lambda a, r=r: a[r], data) for r in _again([r for r in rows if r])
    )
    return forever, sum(1 for each in rows if each)


def _again(items):
    while True:
        yield from items


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss or the gradient of")
        yield


def check(build, data, clean, bad=BAD, cut=SKIP, mode=None, epochs=2, **options):
    """Trains with bad examples, and without them in plain Keras; both end the same."""
    batches, steps = batches_of(clean, bad)
    plain, expected = support.train(
        build, lambda: batches, fit={"steps_per_epoch": steps}, epochs=epochs, **options
    )
    batches, steps = batches_of(data)
    model, history = support.train(
        build,
        lambda: batches,
        cut=cut,
        fit={"steps_per_epoch": steps},
        epochs=epochs,
        **options,
        **MODES.get(mode, {}),
    )
    assert history.pop("skipped_examples") == [len(bad)] * epochs
    assert_ended(ended(plain), model)
    assert_same_history(expected, history)
    return model


def mlp(*more):
    dense = layers.Dense(6, activation="tanh", kernel_regularizer="l2")
    return keras.Sequential([keras.Input([4]), dense, *more, layers.Dense(1)])


def adam():
    return keras.optimizers.Adam(0.1, clipnorm=0.5)


# Skipped


def test_the_update_of_the_other_examples(quiet):
    clean = X, Y, WEIGHTS[:, 0]
    data = with_bad(X, np.inf), *clean[1:]
    metrics = {"metrics": ["mae"], "weighted_metrics": lambda: [keras.metrics.MeanSquaredError()]}
    model = check(mlp, data, clean, optimizer=adam, **metrics)
    assert settings_of(model).arguments() == SKIP


@pytest.mark.parametrize("mode", [pytest.param(m, marks=thorough) for m in list(MODES)[1:]])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call")
def test_other_modes(mode, quiet):
    clean, bad = (X[:16], Y[:16]), [1, 9]
    data = with_bad(X[:16], bad=bad), Y[:16]
    check(mlp, data, clean, bad, optimizer=adam, mode=mode, epochs=1, metrics=["mae"])


def two_outputs():
    """One output has a mask, the other one none."""
    tokens, features = keras.Input([6], dtype="int32"), keras.Input([4])
    x = layers.Embedding(9, 3, mask_zero=True)(tokens)
    hidden = layers.Dense(3, activity_regularizer="l2")(features)
    tagged = layers.Dense(2, name="tagged")(x)
    summed = layers.Add()([layers.GlobalAveragePooling1D()(x), hidden])
    return keras.Model([tokens, features], [tagged, layers.Dense(1, name="summed")(summed)])


def test_several_outputs_masks_and_weights(quiet):
    """Bad labels of one output, bad features, and bad weights."""
    positions, bad = RNG.normal(size=(24, 6, 2)), [2, 3, 9, 15]
    clean = (TOKENS, X), (positions, Y), (WEIGHTS, WEIGHTS[:, 0])
    data = (
        (TOKENS, with_bad(X, bad=[2, 9])),
        (with_bad(positions, np.inf, [3]), Y),
        (WEIGHTS, with_bad(WEIGHTS[:, 0], bad=[15])),
    )
    clean, data = (tree.map_structure(lambda a: a[:16], each) for each in (clean, data))
    options = {"loss": ["mse", "mae"], "loss_weights": [0.5, 2.0]}
    check(two_outputs, data, clean, bad, epochs=1, **options)


def tagger():
    tokens = keras.Input([None], dtype="int32")
    return keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 3, mask_zero=True)(tokens)))


def test_sequences_by_length(quiet):
    """The first batch has padding, which is then tried with the other examples."""
    labels, padded = RNG.normal(size=(24, 24, 2)), np.pad(TOKENS, [(0, 0), (0, 18)])
    check(tagger, (padded, with_bad(labels)), (padded, labels), cut={**SKIP, "sequence_axis": 1})


def test_a_trial_that_showed_nothing_is_made_again(quiet):
    """A loss that depends on padding is refused, although all of the first batch is bad."""

    def mean_of_all(y_true, y_pred):
        return ops.mean(y_pred**2, axis=(1, 2)) * ops.mean(y_true, axis=(1, 2))

    tokens = keras.Input([None], dtype="int32")
    model = keras.Model(tokens, layers.Dense(2)(layers.Embedding(9, 3)(tokens)))
    model.compile("sgd", mean_of_all)
    macrobatch.accumulate(model, 3, sequence_axis=1, nonfinite="skip")
    labels = with_bad(np.ones([24, 24, 2]), bad=range(8))
    padded = np.pad(TOKENS, [(0, 0), (0, 18)])  # On JAX, nothing is cut to less than 8.
    with pytest.raises(ValueError, match="depends on padding"):
        model.fit(padded, labels, batch_size=8, shuffle=False, verbose=0)


def pairs(y_true, y_pred):
    return ops.mean((y_pred - ops.transpose(y_true)) ** 2, axis=-1)


@slow_on_jax
def test_losses_of_the_whole_batch(quiet):
    cut = {**SKIP, "whole_batch_loss": True}
    check(mlp, (with_bad(X), Y), (X, Y), cut=cut, loss=pairs, metrics=["mae"], epochs=1)


@slow_on_jax
def test_layers_that_draw_and_normalise(quiet):
    """The step is that of a smaller batch: seeds, draws and statistics."""

    def build():
        # Without a seed, torch draws from a generator that is no variable of the model.
        dropout = layers.Dropout(0.5, seed=1), layers.Dropout(0.3)
        return mlp(*dropout, layers.BatchNormalization())

    found = []
    for data, bad, nonfinite in [((X, Y), BAD, "propagate"), ((with_bad(X), Y), (), "skip")]:
        batches, steps = batches_of((data[0][:8], data[1][:8]), bad)
        with pytest.warns(macrobatch.ExactnessWarning, match="BatchNormalization"):
            model, _ = support.train(
                build,
                lambda batches=batches: batches,
                cut={**SKIP, "nonfinite": nonfinite},
                fit={"steps_per_epoch": steps},
            )
        found.append(model)
    assert_ended(ended(found[0]), found[1])


@slow_on_jax
def test_train_on_batch(quiet):
    bad, found = [1, 14], []
    plainly, _ = batches_of((X[:16], Y[:16]), bad)
    skipping, _ = batches_of((with_bad(X, bad=bad)[:16], Y[:16]))
    for given, counts in [(plainly, None), (skipping, [1, 1])]:
        keras.utils.set_random_seed(7)
        model = mlp()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        if counts:
            macrobatch.accumulate(model, **SKIP)
        for place in range(2):
            logs = model.train_on_batch(*next(given), return_dict=True)
            assert logs.get("skipped_examples") == (counts[place] if counts else None)
        found.append(model)
    assert_ended(ended(found[0]), found[1])


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
        said = [each for each in seen if "not finite" in str(each.message)]
        assert [each.filename for each in said] == [__file__]
    before = ended(model)
    with pytest.warns(UserWarning, match="all 8 examples of the batch: no update was made"):
        logs = model.train_on_batch(X[:8] * np.nan, Y[:8], return_dict=True)
    assert_ended(before, model, 0)
    assert logs == {"loss": 0.0, "mae": 0.0, "skipped_examples": 8.0}
    macrobatch.release(model)
    assert list(model.train_on_batch(X[:8], Y[:8], return_dict=True)) == ["loss", "mae"]


@slow_on_jax
@pytest.mark.examples_meet
def test_examples_that_meet_are_found_among_the_others(quiet):
    """Numbers that are not finite show nothing."""

    class Centred(layers.Layer):
        def call(self, x):
            return x - ops.mean(x, axis=0, keepdims=True)

    model = mlp(Centred(name="centred"))
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, **SKIP)
    with pytest.warns(macrobatch.ExactnessWarning, match="meet in these layers: 'centred'"):
        model.train_on_batch(with_bad(X, bad=range(4))[:8], Y[:8])


def test_examples_that_are_bad_only_together():
    """The sum of two losses overflows, and each of them does not. No half of the group is bad."""
    model = keras.Sequential([keras.Input([4]), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanAbsoluteError(reduction="sum"))
    macrobatch.accumulate(model, **SKIP)
    with pytest.warns(UserWarning, match=r"examples (3, )?4, 5 together"):
        model.train_on_batch(X[:8], with_bad(Y, 1.5e308, [4, 5])[:8])


# Refused


@slow_on_jax
def test_an_error_that_changes_nothing():
    """Weights, slots, seeds, statistics and metrics."""
    model = mlp(layers.Dropout(0.5), layers.BatchNormalization())
    model.compile(adam(), "mse", metrics=["mae"])
    with pytest.warns(macrobatch.ExactnessWarning):
        macrobatch.accumulate(model, **RAISE).train_on_batch(X[:8], Y[:8])
    state = [*model.variables, *model.optimizer.variables]
    before = [array(v) for v in state]
    with pytest.raises(ValueError, match=r"examples 1, 4 is not finite.*batch of 8 examples"):
        model.fit(with_bad(X, bad=[1, 4])[:8], Y[:8], batch_size=8, shuffle=False, verbose=0)
    for value, variable in zip(before, state):
        np.testing.assert_array_equal(value, array(variable))
    model.train_on_batch(X[:8], Y[:8])
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
    before = ended(model)
    for said, values in PLACES.items():
        x, y = np.ones([8, 1]), np.ones([8, 1])
        x[6], y[6] = values
        with pytest.raises(ValueError, match=f"In example 6, .*{said}"):
            model.train_on_batch(x, y)
    assert_ended(before, model, 0)


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
    before = array(model.layers[1].kernel)
    model.layers[0].moving_mean.assign([0.0, 1.0, np.nan, 0.0])
    with pytest.raises(ValueError, match=r"No example is at fault: .*'.*/moving_mean'"):
        model.train_on_batch(X[:8], Y[:8])
    np.testing.assert_array_equal(before, array(model.layers[1].kernel))


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


def test_a_dynamic_loss_scale():
    """As on TensorFlow: overflows are for the optimizer to see."""

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
    before = array(model.weights[0])
    model.train_on_batch(X[:8] * 1e300, Y[:8])  # The gradient overflows, the loss does not.
    assert float(model.optimizer.dynamic_scale) == 2.0**99
    np.testing.assert_array_equal(before, array(model.weights[0]))
    with pytest.raises(ValueError, match="example 1 is not finite"):
        model.train_on_batch(with_bad(X, bad=[1])[:8], Y[:8])
    assert float(model.optimizer.dynamic_scale) == 2.0**99

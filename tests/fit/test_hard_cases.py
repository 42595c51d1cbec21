"""What users and adversaries have stumbled over in fit()."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support import MODES, TRIAL, assert_same, build_pair, check, thorough, thorough_for

import macrobatch


def data(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


X, Y = data(20, 4), data(20, 2)


def dense():
    return keras.Sequential([keras.Input([4]), layers.Dense(2)])


def compiled(model, size=3, **options):
    model.compile("sgd", "mse", **options)
    return macrobatch.accumulate(model, size)


# Losses


def two_outputs():
    inputs = keras.Input([4])
    return keras.Model(
        inputs, [layers.Dense(2, name="a")(inputs), layers.Dense(2, name="b")(inputs)]
    )


@thorough_for("graph")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_an_output_whose_loss_is_a_number(mode):
    losses = ["mse", lambda y, y_pred: 0.0]
    check(two_outputs, X, [Y, Y], loss=losses, plain={}, **MODES[mode])


def slow():
    return keras.optimizers.SGD(1e-3)


class PerExample(keras.losses.Loss):
    def call(self, y, y_pred):
        return ops.mean(ops.square(y - y_pred), -1)


@thorough_for("compiled")
@pytest.mark.parametrize("mode", list(MODES))
def test_a_loss_without_reduction_beside_a_mean(mode):
    """Keras adds the mean to the value of each example."""
    losses = [PerExample(reduction=None), "mse"]
    check(
        two_outputs,
        X,
        [Y, Y],
        loss=losses,
        optimizer=lambda: keras.optimizers.SGD(1e-3),
        **MODES[mode],
        plain={},
    )


class Adds(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


@thorough_for("eager", "one penalty and a tail of one-graph")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
@pytest.mark.parametrize(
    "function",
    [lambda x: ops.reshape(ops.mean(x**2), [1]), lambda x: ops.mean(x**2, 0)],
    ids=["one penalty and a tail of one", "as many features as examples"],
)
def test_added_values_that_happen_to_be_as_many_as_examples(function, mode):
    def build():
        inputs = keras.Input([4])
        return keras.Model(inputs, layers.Dense(2)(Adds(function)(layers.Dense(4)(inputs))))

    for size in (1, 4):
        check(build, X, Y, batch_size=9, micro_batch_size=size, **MODES[mode])


@thorough_for("False--1.0", "False-inf", "False-nan")
@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_bad_weight_of_a_micro_batch_changes_nothing(weight, eagerly):
    model = dense()
    model.compile("sgd", "mse", run_eagerly=eagerly)
    macrobatch.accumulate(model, 3, micro_batch_weight=lambda x, y, w: tf.constant(weight))
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"^micro_batch_weight must return a finite number"):
        model.fit(X, Y, verbose=0)
    for left, right in zip(before, model.get_weights()):
        np.testing.assert_array_equal(left, right)


@pytest.mark.eager
@pytest.mark.parametrize("wrong", [None, "3"])
def test_what_functions_of_the_user_return_is_checked(wrong):
    model = dense()
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3, micro_batch_weight=lambda x, y, w: wrong)
    with pytest.raises(ValueError, match="micro_batch_weight must return one number"):
        model.fit(X, Y, verbose=0)
    tokens = keras.Sequential([keras.Input([None], dtype="int32"), layers.Embedding(9, 2)])
    tokens.compile("sgd", "mse")
    macrobatch.accumulate(tokens, 3, sequence_axis=1, lengths=lambda x, y, w: wrong)
    with pytest.raises(ValueError, match="lengths= must be a function that returns"):
        tokens.fit(np.ones([8, 3], "int32"), np.ones([8, 3, 2]), verbose=0)


# Batches


@pytest.mark.eager
@thorough_for("ragged")
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_a_batch_of_fixed_size_whose_first_part_does_not_know_it(kind):
    values = tf.constant(np.round(np.abs(X)))
    inputs = (
        tf.RaggedTensor.from_tensor(values) if kind == "ragged" else tf.sparse.from_dense(values)
    )

    class First(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, pair):
            first, second = pair
            first = (
                first.to_tensor(shape=[None, 4]) if kind == "ragged" else tf.sparse.to_dense(first)
            )
            return self.dense(first + second)

    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        model = First()
        model.compile(keras.optimizers.SGD(0.01), "mse")
        dataset = tf.data.Dataset.from_tensor_slices(((inputs, X), Y)).batch(8, drop_remainder=True)
        if accumulated:
            macrobatch.accumulate(model, 4)
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for left, right in zip(*results):
        np.testing.assert_allclose(left, right, rtol=1e-10)


def test_an_unbatched_dataset():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"If the dataset yields single examples, batch it"):
        compiled(dense()).fit(dataset, shuffle=False, verbose=0)
    labels = tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))
    with pytest.raises(ValueError, match=r"If the dataset yields single examples, batch it"):
        compiled(dense()).fit(labels, shuffle=False, verbose=0)


def test_a_layer_with_a_fixed_batch_size_is_among_the_suspects():
    class Fixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(4)

        def call(self, inputs):
            return tf.reshape(self.head(inputs), [8, -1])

    model = Fixed()
    model.compile("sgd", lambda y_true, y_pred: ops.mean(y_pred, -1))
    macrobatch.accumulate(model, 4)
    with pytest.raises(ValueError, match=r"a layer has a fixed batch size.*8 values for 4"):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)


@pytest.mark.parametrize("eagerly", [False, True])
def test_labels_stay_whole_in_the_batch_that_happens_to_be_as_wide(eagerly):
    """Labels of shape (examples, 3), and batches of tokens 5, 3, 3 and 4 wide."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(9, 4, mask_zero=True)
            self.pool, self.head = layers.GlobalAveragePooling1D(), layers.Dense(3)

        def call(self, tokens):
            return self.head(self.pool(self.table(tokens)))

    def batches():
        for width in (5, 3, 3, 4):
            lengths = 1 + np.arange(6) % width
            lengths[0] = width
            tokens = np.where(np.arange(width) < lengths[:, None], 1 + np.arange(width) % 8, 0)
            yield tokens.astype("int32"), data(6, 3)

    specs = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.float64))
    dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(4))
    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        model = Model()
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=eagerly)
        if accumulated:
            macrobatch.accumulate(model, 2, sequence_axis=1)
        history = model.fit(dataset, shuffle=False, verbose=0).history
        results.append([*model.get_weights(), history["loss"]])
    for left, right in zip(*results):
        np.testing.assert_allclose(left, right, rtol=1e-10)


# One step


class Counting(layers.Layer):
    """Counts how often it is called: in eager mode, forward passes; in a graph, traces."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.supports_masking = True

    def call(self, inputs):
        self.calls += 1
        return inputs


@pytest.mark.examples_meet
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("outputs", [1, 2])
def test_eager_mode_runs_each_micro_batch_once(masked, outputs):
    def build():
        inputs = keras.Input([5, 2])
        hidden = layers.Masking()(inputs) if masked else inputs
        counting = Counting()
        hidden = counting(layers.Dense(3)(hidden))
        heads = [layers.Dense(2, name=f"h{i}")(hidden) for i in range(outputs)]
        model = keras.Model(inputs, heads if outputs > 1 else heads[0])
        model.counting = counting
        return model

    x, y = data(8, 5, 2), data(8, 5, 2)
    x[::2, 2:] = 0
    x[3, 1:] = 0
    _, accumulated = check(
        build, x, [y] * outputs if outputs > 1 else y, batch_size=8, run_eagerly=True
    )
    # When it was made, in one batch, and in the trial whether examples meet.
    assert accumulated.counting.calls == 1 + 3 + len(TRIAL)
    accumulated.counting.calls = 0
    accumulated.fit(x, [y] * outputs if outputs > 1 else y, batch_size=8, verbose=0)
    assert accumulated.counting.calls == 3
    accumulated.evaluate(x, [y] * outputs if outputs > 1 else y, batch_size=8, verbose=0)
    assert accumulated.counting.calls == 6


@pytest.mark.examples_meet
@pytest.mark.parametrize("masked", [False, True])
def test_a_model_is_traced_once(masked):
    """Plain Keras traces twice, because it makes variables while it traces."""
    counting = Counting()
    inputs = keras.Input([5, 2])
    hidden = counting(layers.Masking()(inputs) if masked else inputs)
    model = keras.Model(inputs, [layers.Dense(2, name=n)(hidden) for n in "ab"])
    model.compile("adam", "mse", metrics=[["mae"], ["mse"]])
    macrobatch.accumulate(model, 3)
    x, y = data(8, 5, 2), data(8, 5, 2)
    counting.calls = 0
    model.fit(x, [y, y], batch_size=8, verbose=0)
    assert counting.calls == 1 + len(TRIAL)
    model.evaluate(x, [y, y], batch_size=8, verbose=0)
    assert counting.calls == 2 + len(TRIAL)
    model.fit(x, [y, y], batch_size=8, epochs=2, verbose=0)
    model.evaluate(x, [y, y], batch_size=8, verbose=0)
    assert counting.calls == 2 + len(TRIAL)


# Around fit()


class Switch(keras.callbacks.Callback):
    """Calls a function after the first batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.function(self.model)


@pytest.mark.examples_meet
def test_accumulate_and_release_in_the_middle_of_fit():
    """They take effect at the next batch."""

    class Sizes(layers.Layer):
        seen = None

        def call(self, inputs):
            if inputs.shape[0] is not None:
                self.seen.append(inputs.shape[0])
            return inputs

    def build():
        sizes = Sizes()
        sizes.seen = []
        model = keras.Sequential([keras.Input([4]), sizes, layers.Dense(2)])
        sizes.seen.clear()  # what the model was built with
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.sizes = sizes
        return model

    plain, later = build_pair(build)
    plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    start = Switch(lambda model: macrobatch.accumulate(model, 3))
    later.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[start])
    assert later.sizes.seen == [8, 3, 3, 2, *TRIAL, 3, 1]
    assert_same(plain, later)
    later.sizes.seen.clear()
    later.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[Switch(macrobatch.release)])
    assert later.sizes.seen == [3, 3, 2, 8, 4]
    plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_same(plain, later)


@pytest.mark.eager
def test_a_model_with_an_accumulated_part_says_that_it_is_not_accumulated():
    inner = macrobatch.accumulate(dense(), 3)
    outer = keras.Sequential([keras.Input([4]), inner])
    outer.compile("sgd", "mse")
    with pytest.warns(UserWarning, match=r"not accumulated: its part .* has no effect"):
        outer.fit(X, Y, verbose=0)
    macrobatch.accumulate(outer, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outer.fit(X, Y, verbose=0)


@pytest.mark.examples_meet
def test_nothing_is_kept_of_models_that_are_gone():
    import weakref

    gone = []
    for _ in range(3):
        model = compiled(dense())
        model.fit(X, Y, batch_size=8, verbose=0)
        gone.append(weakref.ref(model))
        del model
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


@thorough
def test_sample_weights_that_come_later_are_cut():
    """What was not there in an earlier batch is not known to be no sequence."""
    x = np.where(np.arange(6) < np.array([6, 2, 1, 3, 2, 1])[:, None], 1 + np.arange(6), 0)
    y, weights = data(6, 6, 2), (x > 0).astype("float64")
    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        tokens = keras.Input([None], dtype="int32")
        hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
        model = keras.Model(tokens, layers.Dense(2)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if accumulated:
            macrobatch.accumulate(model, 2, sequence_axis=1)
        model.fit(x, y, batch_size=6, verbose=0, shuffle=False)
        model.fit(x, y, sample_weight=weights, batch_size=6, verbose=0, shuffle=False)
        results.append(model.get_weights())
    for left, right in zip(*results):
        np.testing.assert_allclose(left, right, rtol=1e-10)


def test_weights_that_come_later_in_eager_mode():
    """Then there are counts that were not there before."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    plain, accumulated = build_pair(dense)
    for model in (plain, accumulated):
        model.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
        if model is accumulated:
            macrobatch.accumulate(model, 3)
        for weights in (None, np.arange(20.0)):
            model.fit(X, Y, sample_weight=weights, batch_size=8, shuffle=False, verbose=0)
    assert_same(plain, accumulated)


class OwnCall(keras.losses.Loss):
    def __call__(self, y, y_pred, sample_weight=None):
        return ops.mean(ops.square(y - y_pred), -1)


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_a_loss_with_its_own_call_that_returns_a_vector(mode):
    """Keras trains on its sum."""
    check(dense, X, Y, loss=lambda: OwnCall(), optimizer=slow, **MODES[mode])


class MeanOfPositive(keras.Model):
    """A loss that is a mean over some of the labels, and 0 / 0 where there are none."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        there = ops.cast(y > 0, y_pred.dtype)
        return ops.sum(there * ops.square(y - y_pred)) / ops.sum(there)


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_a_micro_batch_without_weight_counts_nothing(mode):
    def build():
        inputs = keras.Input([4])
        return MeanOfPositive(inputs, layers.Dense(2)(inputs))

    y = np.abs(Y)
    y[:3] = -1.0
    y[8:11] = -1.0

    def positive(x, y, sample_weight):
        return ops.sum(ops.cast(y > 0, "float64"))

    check(build, X[:16], y[:16], micro_batch_weight=positive, **MODES[mode])


@pytest.mark.eager
@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_added_values_for_each_example_of_what_is_not_dense(kind):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, inputs):
            wide = (
                tf.sparse.to_dense(inputs)
                if kind == "sparse"
                else inputs.to_tensor(shape=[None, 4])
            )
            hidden = self.dense(wide)
            self.add_loss(tf.reduce_sum(hidden**2, 1))
            return hidden

    values = tf.constant(np.round(np.abs(X)))
    make = tf.RaggedTensor.from_tensor if kind == "ragged" else tf.sparse.from_dense
    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        model = Model()
        model.compile(slow(), "mse", run_eagerly=True)
        if accumulated:
            macrobatch.accumulate(model, 3)
        dataset = tf.data.Dataset.from_tensor_slices((make(values), Y)).batch(8)
        model.fit(dataset, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for left, right in zip(*results):
        np.testing.assert_allclose(left, right, rtol=1e-10)


@thorough
def test_labels_that_are_broadcast_tell_nothing_of_later_ones():
    x = np.where(np.arange(6) < np.array([6, 2, 1, 3, 2, 1])[:, None], 1 + np.arange(6), 0)
    y = data(6, 6, 1)
    results = []
    for accumulated in (False, True):
        keras.utils.set_random_seed(1)
        tokens = keras.Input([None], dtype="int32")
        hidden = layers.Embedding(9, 4, mask_zero=True)(tokens)
        model = keras.Model(tokens, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        if accumulated:
            macrobatch.accumulate(model, 2, sequence_axis=1)
        model.fit(x, y[:, :1], batch_size=6, verbose=0)
        model.fit(x, y, batch_size=6, verbose=0, shuffle=False)
        results.append(model.get_weights())
    for left, right in zip(*results):
        np.testing.assert_allclose(left, right, rtol=1e-10)

"""What users and adversaries have stumbled over in fit()."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from support import MODES, assert_same, build_pair, check

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


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", list(MODES))
def test_an_output_whose_loss_is_a_number(mode):
    losses = ["mse", lambda y, y_pred: 0.0]
    check(two_outputs, X, [Y, Y], loss=losses, **MODES[mode])


def slow():
    return keras.optimizers.SGD(1e-3)


class PerExample(keras.losses.Loss):
    def call(self, y, y_pred):
        return ops.mean(ops.square(y - y_pred), -1)


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
    )


class Adds(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", list(MODES))
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
        compiled(dense()).fit(dataset, verbose=0)
    labels = tf.data.Dataset.from_tensor_slices((X, Y[:, 0]))
    with pytest.raises(ValueError, match=r"If the dataset yields single examples, batch it"):
        compiled(dense()).fit(labels, verbose=0)


def test_a_layer_with_a_fixed_batch_size_is_among_the_suspects():
    inputs = keras.Input([4])
    flat = layers.Lambda(lambda x: tf.reshape(x, [8, -1]))(inputs)
    model = compiled(keras.Model(inputs, layers.Dense(2)(layers.Reshape([4])(flat))), 4)
    with pytest.raises(Exception, match=r"a layer has a fixed batch size|[Rr]eshape"):
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
    assert accumulated.counting.calls == 1 + 2 * 3  # when it was made, and in two epochs
    accumulated.counting.calls = 0
    accumulated.fit(x, [y] * outputs if outputs > 1 else y, batch_size=8, verbose=0)
    assert accumulated.counting.calls == 3
    accumulated.evaluate(x, [y] * outputs if outputs > 1 else y, batch_size=8, verbose=0)
    assert accumulated.counting.calls == 6


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
    assert counting.calls == 1
    model.evaluate(x, [y, y], batch_size=8, verbose=0)
    assert counting.calls == 2
    model.fit(x, [y, y], batch_size=8, epochs=2, verbose=0)
    model.evaluate(x, [y, y], batch_size=8, verbose=0)
    assert counting.calls == 2


# Around fit()


class Switch(keras.callbacks.Callback):
    """Calls a function after the first batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.function(self.model)


def test_accumulate_and_release_in_the_middle_of_fit():
    """They take effect at the next batch."""

    class Sizes(layers.Layer):
        seen = None

        def call(self, inputs):
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
    assert later.sizes.seen == [8, 3, 3, 2, 3, 1]
    assert_same(plain, later)
    later.sizes.seen.clear()
    later.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[Switch(macrobatch.release)])
    assert later.sizes.seen == [3, 3, 2, 8, 4]
    plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert_same(plain, later)


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


def test_accumulating_again_leaves_no_old_graphs():
    model = dense()
    model.compile("sgd", "mse")

    def graphs():
        gc.collect()
        return sum(isinstance(each, tf.__internal__.FuncGraph) for each in gc.get_objects())

    counts = []
    for _ in range(4):
        macrobatch.accumulate(model, 3)
        model.fit(X, Y, batch_size=8, verbose=0)
        counts.append(graphs())
    assert counts[-1] <= counts[1] + 2

"""How accumulate() and release() behave around fit()."""

import os
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers
from support import MODES, assert_same, build_pair, check, thorough, thorough_for, variables

import macrobatch


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, Y = data(16, 4), data(16, 2, seed=1)


def dense(*more):
    return keras.Sequential(
        [keras.Input([4]), layers.Dense(5, activation="tanh"), *more, layers.Dense(2)]
    )


def compiled(model, micro_batch_size=3, **kwargs):
    model.compile(optimizers.SGD(0.1, momentum=0.9), kwargs.pop("loss", "mse"), **kwargs)
    return macrobatch.accumulate(model, micro_batch_size)


def fit(model, x=X, y=Y, **kwargs):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **kwargs)


class Sizes(layers.Layer):
    """Notes the number of examples of each call that runs in a graph.

    The trial whether examples meet runs outside of any, and may have more of them.
    """

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, inputs):
        if not tf.executing_eagerly():
            tf.py_function(lambda t: self.seen.append(len(t)), [inputs], [])
        return inputs


# Coming and going


def test_before_and_after_compile_and_again_with_another_size():
    sizes = Sizes()
    model = keras.Sequential([keras.Input([4]), sizes, layers.Dense(2)])
    assert macrobatch.accumulate(model, 4) is model
    model.compile("sgd", "mse")
    fit(model)
    assert max(sizes.seen) == 4
    sizes.seen.clear()
    macrobatch.accumulate(model, 2)
    fit(model)
    assert max(sizes.seen) == 2
    sizes.seen.clear()
    assert macrobatch.release(model) is model
    fit(model)
    assert set(sizes.seen) == {8}


@pytest.mark.eager
def test_release_restores_the_plain_step():
    plain, released = build_pair(dense)
    for model in (plain, released):
        model.compile(optimizers.Adam(0.1), "mse")
    macrobatch.release(macrobatch.accumulate(released, 3))
    assert not {"train_step", "test_step", "make_train_function"} & vars(released).keys()
    macrobatch.release(plain)
    for model in (plain, released):
        fit(model)
    assert_same(plain, released)


@pytest.mark.parametrize("cut", [{"micro_batch_size": 3}, {"micro_batch_tokens": 9}])
def test_tokens_are_counted_without_predictions(cut):
    """Also where shapes are not known, which makes TensorFlow assert those of predictions."""
    sizes = Sizes()
    sizes.supports_masking = True
    tokens = keras.Input([None], dtype="int32")
    masked = layers.Embedding(9, 4, mask_zero=True)(tokens)
    model = keras.Model(tokens, layers.Dense(5)(sizes(masked)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    axis = 1 if "micro_batch_tokens" in cut else None
    macrobatch.accumulate(model, sequence_axis=axis, **cut)
    specs = tf.TensorSpec([None, None], tf.int32)
    x = np.array([[1, 2, 3], [1, 0, 0], [2, 0, 0], [5, 6, 0], [7, 0, 0], [1, 2, 0], [3, 0, 0]])
    batches = tf.data.Dataset.from_generator(
        lambda: [(x, x % 5)], output_signature=(specs, specs)
    ).apply(tf.data.experimental.assert_cardinality(1))
    model.fit(batches, shuffle=False, verbose=0)  # tries whether predictions depend on padding
    sizes.seen.clear()
    model.fit(batches, shuffle=False, verbose=0)
    assert sizes.seen == ([3, 3, 1] if axis is None else [3, 4])


@pytest.mark.eager
def test_recompiling_keeps_accumulating():
    plain, accumulated = build_pair(dense)
    compiled(accumulated)
    for model in (plain, accumulated):
        model.compile(optimizers.Adam(0.01), "mae")
        fit(model, epochs=2)
    assert_same(plain, accumulated)


def test_evaluation_and_prediction_are_cut_too():
    sizes = Sizes()
    model = compiled(keras.Sequential([keras.Input([4]), sizes, layers.Dense(2)]))
    plain = keras.Model(model.inputs, model.outputs)
    plain.compile(loss="mse")
    fit(model, validation_data=(X, Y))
    sizes.seen.clear()
    accumulated = model.evaluate(X, Y, batch_size=8, verbose=0)
    assert max(sizes.seen) == 3
    np.testing.assert_allclose(accumulated, plain.evaluate(X, Y, batch_size=8, verbose=0))
    sizes.seen.clear()
    model.predict(X, batch_size=8, verbose=0)
    assert max(sizes.seen) == 3


@pytest.mark.eager
def test_a_test_step_of_the_users_is_left_alone():
    class Own(keras.Sequential):
        def test_step(self, data):
            return {"mine": tf.constant(1.0)}

    model = compiled(Own([keras.Input([4]), layers.Dense(2)]))
    fit(model)
    assert model.evaluate(X, Y, verbose=0, return_dict=True) == {"mine": 1.0}


@pytest.mark.parametrize("first", [8, 4])
def test_one_warning_if_nothing_is_accumulated(first):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(first)
    model = compiled(dense(), micro_batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(dataset, epochs=3, shuffle=False, verbose=0)
    found = [w for w in caught if "Nothing is being accumulated" in str(w.message)]
    assert len(found) == (first == 4)
    for warning in found:
        assert "batch_size=" in str(warning.message)
        assert "dataset.rebatch(n)" in str(warning.message)


def test_a_small_last_batch_is_no_reason_to_warn():
    model = compiled(dense(), micro_batch_size=4, steps_per_execution=2)
    fit(model, X[:12], Y[:12])


def test_train_on_batch():
    plain, accumulated = build_pair(dense)
    compiled(accumulated)
    plain.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
    for _ in range(3):
        logs = [m.train_on_batch(X, Y, sample_weight=np.arange(16.0)) for m in (plain, accumulated)]
        np.testing.assert_allclose(*logs)
    tested = [m.test_on_batch(X, Y) for m in (plain, accumulated)]
    np.testing.assert_allclose(*tested)
    assert_same(plain, accumulated)


@thorough_for("compiled")
@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_one_trace_per_signature(mode):
    traces = []

    class Counting(layers.Layer):
        def call(self, inputs):
            if not tf.executing_eagerly():  # as in the trial whether examples meet
                traces.append(inputs.shape)
            return inputs

    model = keras.Sequential([keras.Input([4]), Counting(), layers.Dense(2)])
    # Without variables to create: when there are, tf.function traces the first call twice.
    model.compile(optimizers.SGD(0.1), "mse", **MODES[mode])
    macrobatch.accumulate(model, 3)
    dataset = tf.data.Dataset.from_tensor_slices((data(21, 4), data(21, 2))).batch(8)
    traces.clear()
    model.fit(dataset, shuffle=False, verbose=0)
    assert len(traces) == 1
    model.fit(dataset, epochs=3, shuffle=False, verbose=0)
    assert len(traces) == 1


# Models that do more


class OwnLoss(keras.Model):
    """A mean over examples, with a regulariser."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2) + keras.ops.sum(self.losses)


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_an_own_compute_loss(mode):
    def build():
        inputs = keras.Input([4])
        return OwnLoss(inputs, layers.Dense(2, kernel_regularizer="l2")(inputs))

    with pytest.warns(macrobatch.ExactnessWarning, match="overrides compute_loss"):
        check(build, X, Y, loss=None, **MODES[mode])


class TokenLoss(keras.Model):
    """A mean over the tokens that are not 0."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        mask = keras.ops.cast(y != 0, "float64")
        return keras.ops.sum(mask * (y - y_pred) ** 2) / keras.ops.sum(mask)


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_the_weight_of_a_micro_batch(mode):
    def build():
        inputs = keras.Input([4])
        return TokenLoss(inputs, layers.Dense(2)(inputs))

    y = Y * (data(16, 2, seed=5) > 0)
    y[:8, 0] = 1.0  # some token in every micro-batch

    def weight(x, y, sample_weight):
        assert sample_weight is None
        count = tf.reduce_sum(tf.cast(y != 0, tf.float64))
        # TensorFlow would round a number of Python to float32.
        return float(count) / 10 if mode == "eager" else count

    check(build, X, y, loss=None, micro_batch_weight=weight, **MODES[mode])


def test_the_weight_of_a_micro_batch_must_be_a_scalar():
    model = compiled(dense())
    macrobatch.accumulate(model, 3, micro_batch_weight=lambda x, y, w: y)
    with pytest.raises(ValueError, match="one scalar"):
        fit(model)


class OwnMetrics(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest = keras.metrics.Mean(name="largest")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(keras.ops.max(keras.ops.abs(y_pred), axis=-1))
        return {"twice_the_loss": 2 * logs["loss"], "own": self.largest.result()}


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_own_metrics(mode):
    def build():
        inputs = keras.Input([4])
        return OwnMetrics(inputs, layers.Dense(2)(inputs))

    # Compared in the same mode: eager Keras 3.12 rounds the loss to float32.
    check(build, X, Y, plain={}, **MODES[mode])


@pytest.mark.eager
def test_an_own_metrics_property():
    class Own(OwnMetrics):
        @property
        def metrics(self):
            return [self.largest]

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.largest.update_state(keras.ops.max(keras.ops.abs(y_pred), axis=-1))
            return self.get_metrics_result()

    def build():
        inputs = keras.Input([4])
        return Own(inputs, layers.Dense(2)(inputs))

    check(build, X, Y)


def test_no_trained_weights():
    model = dense()
    model.trainable = False
    compiled(model)
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        fit(model)


@pytest.mark.eager
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_an_own_compute_loss_of_several_outputs():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)

    def build():
        inputs = keras.Input([4])
        return Own(inputs, {"a": layers.Dense(2)(inputs), "b": layers.Dense(2)(inputs)})

    # Even sizes: metrics that compute_loss updates see micro-batches.
    check(build, X, {"a": Y, "b": -Y}, loss={"a": "mse", "b": "mae"}, micro_batch_size=4)


def test_methods_set_on_the_instance():
    def own_loss(x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y - y_pred))

    def before(model):
        model.compute_loss = own_loss

    with pytest.warns(macrobatch.ExactnessWarning, match="overrides compute_loss"):
        check(dense, X, Y, before=before)
    model = compiled(dense())
    macrobatch.release(model)
    model.test_step = lambda data: {"mine": tf.constant(1.0)}
    macrobatch.release(macrobatch.accumulate(model, 3))
    assert model.evaluate(X, Y, verbose=0, return_dict=True) == {"mine": 1.0}


def test_an_optimizer_with_its_own_apply_gradients():
    class Doubling(optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])

    check(dense, X, Y, optimizer=lambda: Doubling(0.1))


def test_masks_drawn_at_random_are_counted_as_they_are_drawn():
    class Drawn(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed = keras.random.SeedGenerator(3)
            self.supports_masking = True

        def call(self, inputs):
            return inputs * 1.0

        def compute_mask(self, inputs, previous_mask=None):
            return keras.random.uniform(tf.shape(inputs)[:2], seed=self.seed) > 0.5

    def ones(y_true, y_pred):
        return keras.ops.ones_like(y_pred[..., 0]) + 0 * y_pred[..., 0]

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.drawn = layers.Dense(2), Drawn()

        def call(self, inputs):
            return self.drawn(self.first(inputs))

    model = Subclassed()
    model.compile("sgd", ones)
    macrobatch.accumulate(model, 2)
    np.testing.assert_allclose(model.train_on_batch(data(16, 6, 2), data(16, 6, 2)), 1.0)


# What is refused


def refused(model, message, x=X, y=Y, error=ValueError, **kwargs):
    """Training raises, and nothing has changed."""
    before = [np.array(v) for v in model.variables]
    with pytest.raises(error, match=message):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **kwargs)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable)


def test_accumulation_by_the_optimizer_too():
    for wrap in (lambda o: o, optimizers.LossScaleOptimizer):
        model = dense()
        model.compile(wrap(optimizers.SGD(0.1, gradient_accumulation_steps=2)), "mse")
        refused(macrobatch.accumulate(model, 4), "gradient_accumulation_steps=2")


def test_accumulation_by_one_of_several_optimizers():
    multi = pytest.importorskip("keras").optimizers.__dict__.get("MultiOptimizer")
    if multi is None:
        pytest.skip("this Keras has no MultiOptimizer")
    own = optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = dense()
    model.compile(multi(lambda variable: own), "mse")
    refused(macrobatch.accumulate(model, 4), "gradient_accumulation_steps=2")


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_loss_that_selects_values(mode):
    class Selecting(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return tf.boolean_mask((y_true - y_pred) ** 2, y_true > 0)

    model = compiled(dense(), loss=Selecting(), **MODES[mode])
    errors = (ValueError, tf.errors.InvalidArgumentError)
    refused(model, "examples as first dimension", error=errors)


def test_stateful_layers():
    inputs = keras.Input(batch_shape=(8, 4, 1))
    recurrent = layers.LSTM(2, stateful=True, name="memory")
    model = compiled(keras.Model(inputs, recurrent(inputs)))
    refused(model, "'memory' is stateful", X[..., None], Y)


def test_a_layer_that_writes_its_kernel():
    layer = layers.SpectralNormalization(layers.Dense(2, name="normalized"))
    model = compiled(keras.Sequential([keras.Input([4]), layer]))
    refused(model, "must not write a trained variable.*normalized/kernel")


def test_variables_overwritten_with_their_gradient():
    model = compiled(dense())
    model.layers[0].kernel.overwrite_with_gradient = True
    refused(model, "dense.*/kernel.*overwrite_with_gradient")


def test_parts_of_different_lengths():
    def uneven():
        yield X[:8], Y[:7]

    signature = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 2], tf.float64))
    dataset = tf.data.Dataset.from_generator(uneven, output_signature=signature)
    model = compiled(dense())
    before = [np.array(v) for v in model.variables]
    with pytest.raises(ValueError, match=r"^All parts of a batch must have the same number"):
        model.fit(dataset, shuffle=False, verbose=0)
    with pytest.raises(ValueError, match="same number of examples"):
        model.train_on_batch(X[:8], Y[:7])
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable)


@pytest.mark.parametrize("mode", list(MODES))
def test_an_empty_batch(mode):
    signature = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 2], tf.float64))
    dataset = tf.data.Dataset.from_generator(
        lambda: iter([(X[:0], Y[:0])]), output_signature=signature
    )
    model = compiled(dense(), **MODES[mode])
    before = [np.array(v) for v in model.variables]
    message = "one example|is_empty"
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        model.fit(dataset, shuffle=False, verbose=0)
    for value, variable in zip(before, model.variables):
        np.testing.assert_array_equal(value, variable)


def test_a_scalar_input():
    model = compiled(dense())
    with pytest.raises(ValueError, match="Received: a scalar"):
        model.train_on_batch({"x": X, "temperature": np.float64(1.0)}, Y)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_weights_that_keras_would_refuse(size, mode):
    """Losses have shape (B, 4), weights (B,): in a micro-batch of 1 or 4 they would broadcast."""
    inputs = keras.Input([4, 2])
    model = compiled(keras.Model(inputs, layers.Dense(1)(inputs)), size, **MODES[mode])
    x, y = data(8, 4, 2), data(8, 4, 1)
    refused(model, r"sample_weight of shape", x, y, sample_weight=np.ones(8))


# Nothing changes if something fails


class Failing(layers.Layer):
    """Fails in the forward or the backward pass where an input is above 100."""

    def __init__(self, backward):
        super().__init__()
        self.backward = backward

    def call(self, inputs):
        def guarded(tensor, value):
            with tf.control_dependencies(
                [tf.debugging.assert_less(value, tf.cast(100, value.dtype), "too large")]
            ):
                return tf.identity(tensor)

        @tf.custom_gradient
        def in_backward(tensor):
            return tf.identity(tensor), lambda upstream: guarded(upstream, tensor)

        return in_backward(inputs) if self.backward else guarded(inputs, inputs)


def failing_loss(y_true, y_pred):
    with tf.control_dependencies(
        [tf.debugging.assert_less(y_true, tf.cast(100, y_true.dtype), "too large")]
    ):
        return keras.ops.mean((y_true - y_pred) ** 2, axis=-1)


@thorough_for("backward-eager", "forward-eager", "forward-graph", "loss-eager", "loss-graph")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_a_failure_changes_nothing(mode, where):
    model = keras.Sequential(
        [
            keras.Input([4]),
            # Without a weight before it, the layer's backward pass would not be needed.
            layers.Dense(4, kernel_initializer="identity"),
            Failing(where == "backward"),
            layers.Dense(5),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(2),
        ]
    )
    model.compile(optimizers.Adam(0.0), failing_loss, metrics=["mae"], **MODES[mode])
    macrobatch.accumulate(model, 3)
    fit(model, X, Y)  # builds everything, and changes seeds and moving statistics
    before = [np.array(v) for v in variables(model)]
    iterations = int(model.optimizer.iterations)
    for example in (8, 15):  # in the first micro-batch, and in the last
        x, y = X.copy(), Y.copy()
        (y if where == "loss" else x)[example] = 1000.0
        model.reset_metrics()  # as train_on_batch does first
        metrics = [np.array(v) for v in model.metrics_variables]
        with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
            model.train_on_batch(x[8:], y[8:])
        after = [*variables(model), *model.metrics_variables]
        for value, variable in zip([*before, *metrics], after):
            np.testing.assert_array_equal(value, variable, err_msg=variable.path)
        assert int(model.optimizer.iterations) == iterations


# Randomness


def test_each_micro_batch_draws_fresh_numbers_and_runs_can_be_repeated():
    ends = []
    for _ in range(2):
        keras.utils.set_random_seed(11)
        dropout = layers.Dropout(0.5)
        model = compiled(dense(dropout))
        fit(model)
        # Two batches of 8 in micro-batches of 3: six draws.
        assert int(dropout.seed_generator.state[1]) == 6
        ends.append(model.get_weights())
    for left, right in zip(*ends):
        np.testing.assert_array_equal(left, right)


def test_fresh_dropout_masks():
    class Keep(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seen = []

        def call(self, inputs):
            self.seen.append(inputs.numpy())
            return inputs

    keep = Keep()

    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.steps = [layers.Dropout(0.5), keep, layers.Dense(2)]

        def call(self, inputs, training=False):
            dropout, keep, last = self.steps
            return last(keep(dropout(inputs, training=training)))

    model = compiled(Subclassed(), 2, run_eagerly=True)
    model.train_on_batch(np.ones([4, 64]), np.ones([4, 2]))
    # The trial whether examples meet has all four at a time.
    first, second = [seen for seen in keep.seen if len(seen) == 2][-2:]
    assert (first != second).any()


@thorough_for("compiled", "eager")
@pytest.mark.parametrize("mode", list(MODES))
def test_the_global_seed_generator_advances(mode):
    class Noise(layers.Layer):
        def call(self, inputs, training=False):
            return inputs + keras.random.normal(keras.ops.shape(inputs), dtype="float64")

    keras.utils.set_random_seed(1)
    model = compiled(dense(Noise()), **MODES[mode])
    model.optimizer.learning_rate = 0.0
    losses = [model.train_on_batch(X, Y) for _ in range(3)]
    assert len({float(loss) for loss in losses}) == 3


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_other_variables_written_by_layers_are_carried_with_a_warning():
    class Counter(layers.Layer):
        def build(self, shape):
            self.calls = self.add_weight(
                shape=(), initializer="zeros", trainable=False, name="calls"
            )

        def call(self, inputs):
            self.calls.assign_add(1.0)
            return inputs

    counter = Counter()
    model = compiled(dense(counter))
    with pytest.warns(macrobatch.ExactnessWarning, match="written by the forward pass.*calls"):
        fit(model)
    assert float(counter.calls.value) == 6


# Scalar losses


@pytest.mark.parametrize("mode", ["graph", "eager", pytest.param("compiled", marks=thorough)])
def test_scalar_losses_enter_by_share_with_a_warning(mode):
    def scalar(y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2)

    with pytest.warns(macrobatch.ExactnessWarning, match=r"one scalar for the batch.*scalar"):
        check(dense, X, Y, loss=scalar, **MODES[mode])


@pytest.mark.examples_meet
@pytest.mark.parametrize("loss", [keras.losses.Dice, keras.losses.Tversky])
def test_dice_is_the_mean_over_micro_batches_by_share(loss):
    model = keras.Sequential([keras.Input([4]), layers.Dense(2, activation="sigmoid")])
    y = (Y > 0).astype("float64")
    predictions = model.predict(X, verbose=0)
    sizes = [6, 6, 4]
    cuts = np.cumsum(sizes)[:-1]
    values = [float(loss()(*p)) for p in zip(np.split(y, cuts), np.split(predictions, cuts))]
    both = pytest.warns(macrobatch.ExactnessWarning, match="Examples meet in these losses")
    with both, pytest.warns(macrobatch.ExactnessWarning, match="one scalar"):
        reported = compiled(model, 6, loss=loss()).train_on_batch(X, y)
    np.testing.assert_allclose(reported, np.average(values, weights=sizes), rtol=1e-6)


def test_dice_by_example_is_exact():
    check(
        lambda: keras.Sequential([keras.Input([4]), layers.Dense(2, activation="sigmoid")]),
        X,
        (Y > 0).astype("float64"),
        loss=lambda: keras.losses.Dice(axis=1),
    )


# Mixed precision


@pytest.mark.parametrize("mode", ["graph", "eager", "compiled"])
def test_an_overflow_skips_the_update_whole_and_halves_the_scale_once(mode):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(keras.Sequential([keras.Input([4]), layers.Dense(2)]), **MODES[mode])
    x = X.astype("float32")
    model.train_on_batch(x, Y)
    optimizer = model.optimizer
    assert isinstance(optimizer, optimizers.LossScaleOptimizer)
    before = [np.array(v) for v in variables(model)]
    scale = float(optimizer.dynamic_scale.value)
    x[-1] = np.inf  # in the last micro-batch only
    model.train_on_batch(x, Y)
    assert float(optimizer.dynamic_scale.value) == scale / 2
    for value, variable in zip(before, variables(model)):
        if variable.path.split("/")[-1] not in ("dynamic_scale", "step_counter"):
            np.testing.assert_array_equal(value, variable, err_msg=variable.path)


# Sparse gradients


class Spy(optimizers.SGD):
    """Notes the kinds of gradients it is given."""

    def apply(self, grads, trainable_variables=None):
        self.kinds = [type(gradient) for gradient in grads]
        self.rows = [getattr(gradient, "indices", None) for gradient in grads]
        return super().apply(grads, trainable_variables)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_sparse_gradients_reach_the_optimizer_sparse_and_merged(mode):
    model = keras.Sequential(
        [
            keras.Input([3], dtype="int32"),
            layers.Embedding(50, 4),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    spy = Spy(0.1)
    model.compile(spy, "mse", **MODES[mode])
    macrobatch.accumulate(model, 3)
    x = np.tile([[1, 2, 2]], [8, 1])
    model.train_on_batch(x, Y[:8])
    assert spy.kinds[0] is tf.IndexedSlices
    if mode == "eager":
        assert sorted(spy.rows[0].numpy()) == [1, 2]


MEMORY = """
import resource, sys
import keras, numpy as np, tensorflow as tf
import macrobatch

inputs = keras.Input([1], dtype="int32")
rows = keras.layers.Flatten()(keras.layers.Embedding(1_000_000, 64, "zeros")(inputs))
model = keras.Model(inputs, keras.layers.Dense(1)(rows))
# The optimizer writes rows only: one that makes the table dense would hide that others do.
model.compile(keras.optimizers.SGD(), "mse")
if sys.argv[1] == "accumulated":
    macrobatch.accumulate(model, 32)
x = np.random.default_rng(0).integers(0, 1_000_000, size=(256, 1))
for _ in range(2):
    model.train_on_batch(x, np.ones([256, 1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@thorough
def test_a_large_table_costs_the_rows_that_are_touched():
    peaks = {}
    for kind in ("plain", "accumulated"):
        run = subprocess.run(
            [sys.executable, "-c", MEMORY, kind],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"},
        )
        peaks[kind] = int(run.stdout.split()[-1])
    # A dense copy of the table would be 244 MiB; what is touched is 64 KiB.
    assert peaks["accumulated"] - peaks["plain"] < 60


# Callbacks and saving


@thorough
def test_callbacks(tmp_path):
    plain, accumulated = build_pair(dense)
    histories = []
    for name, model in (("plain", plain), ("accumulated", accumulated)):
        model.compile(optimizers.Adam(0.1), "mse")
        if model is accumulated:
            macrobatch.accumulate(model, 3)
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=1),
            keras.callbacks.ModelCheckpoint(tmp_path / f"{name}.keras", save_best_only=True),
            keras.callbacks.BackupAndRestore(tmp_path / f"{name}.backup"),
            keras.callbacks.TensorBoard(tmp_path / name, update_freq=1),
            keras.callbacks.ReduceLROnPlateau(patience=1),
        ]
        validation = (data(5, 4, seed=8), data(5, 2, seed=9))
        histories.append(fit(model, epochs=8, callbacks=callbacks, validation_data=validation))
    assert histories[0].history.keys() == histories[1].history.keys()
    np.testing.assert_allclose(histories[0].history["val_loss"], histories[1].history["val_loss"])
    assert_same(plain, accumulated)


@thorough
def test_a_training_that_is_interrupted_goes_on_where_it_was(tmp_path):
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    whole, interrupted = build_pair(dense)
    for model in (whole, interrupted):
        model.compile(optimizers.Adam(0.1), "mse")
        macrobatch.accumulate(model, 3)
    fit(whole, epochs=4)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyboardInterrupt):
        fit(interrupted, epochs=4, callbacks=[backup, Interrupt()])
    fit(interrupted, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup")])
    assert_same(whole, interrupted)


@thorough
def test_a_saved_model_is_a_plain_model(tmp_path):
    model = compiled(dense())
    fit(model)
    path = tmp_path / "model.keras"
    model.save(path)
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", model.predict(X, verbose=0))
    script = (
        "import sys, keras, numpy as np\n"
        "folder = sys.argv[1]\n"
        "model = keras.models.load_model(folder + '/model.keras')\n"
        "y = model.predict(np.load(folder + '/x.npy'), verbose=0)\n"
        "np.testing.assert_allclose(y, np.load(folder + '/y.npy'), rtol=1e-4)\n"
        "model.fit(np.load(folder + '/x.npy'), np.load(folder + '/y.npy'), verbose=0)\n"
        "assert 'macrobatch' not in sys.modules\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "train_step" not in vars(keras.models.load_model(path))
    assert "train_step" not in vars(keras.models.clone_model(model))

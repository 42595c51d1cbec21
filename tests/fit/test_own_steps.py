"""Models with a train step of their own: the updates of plain `fit` on the whole batch."""

import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from fit import step_cases
from fit.step_cases import CASES
from support import MODES, assert_same_history, thorough, thorough_for
from test_accumulator_everywhere import mirrored

import macrobatch


def state_of(model):
    """All variables of a model, its metrics and its optimizers."""
    optimizers = getattr(model, "optimizers", ()) or [model.optimizer]
    variables = [*model.variables, *model.metrics_variables]
    variables += [variable for optimizer in optimizers for variable in optimizer.variables]
    return {variable.path: variable.numpy() for variable in variables}


def trained(build, data, mode, cut=None, epochs=1, **fit):
    keras.utils.set_random_seed(7)
    model = build(dict(mode))
    if cut:
        macrobatch.accumulate(model, **cut)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(20)
    keras.utils.set_random_seed(3)
    history = model.fit(dataset, epochs=epochs, shuffle=False, verbose=0, **fit).history
    return model, history


@functools.lru_cache(maxsize=None)
def reference(name):
    """What plain Keras comes to."""
    model, history = trained(*CASES[name], MODES["eager"])
    return list(state_of(model).values()), history


def assert_as_plain(name, mode, **cut):
    values, history = reference(name)
    model, other = trained(*CASES[name], mode, cut or {"micro_batch_size": 3})
    found = state_of(model)
    assert len(found) == len(values)
    for value, (path, own) in zip(values, found.items()):
        np.testing.assert_allclose(own, value, rtol=0, atol=1e-10, err_msg=path)
    assert_same_history(history, other)


# In `make test` each of these stands for others like it.
QUICK = {
    "graph": ("values", "gan", "language", "clipped", "sharpness", "statistics"),
    "eager": ("interleaved", "adversarial"),
    "compiled": ("values",),
}


@thorough_for("interleaved-eager", "values-compiled")
@pytest.mark.filterwarnings("ignore:BatchNormalization:macrobatch.ExactnessWarning")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if name in QUICK[mode] else thorough)
        for name in CASES
        for mode in QUICK
    ],
)
def test_steps(name, mode):
    assert_as_plain(name, MODES[mode])


@pytest.mark.filterwarnings("ignore:Nothing is being accumulated")
@pytest.mark.parametrize(
    ("name", "mode", "size"),
    [
        ("clipped", "graph", 64),
        ("gan", "eager", 64),
        pytest.param("clipped", "graph", 1, marks=thorough),
    ],
)
def test_micro_batches_of_any_size(name, mode, size):
    assert_as_plain(name, MODES[mode], micro_batch_size=size)


def step_of(function, mode=None, optimizer=step_cases.adam, **attributes):
    """A compiled model with a train step of its own. A class among its attributes is called."""
    model = step_cases.functional(type("Own", (keras.Model,), {"train_step": function}))
    for name, value in attributes.items():
        setattr(model, name, value() if isinstance(value, type) else value)
    model.compile(optimizer(), "mse", **(mode or {}))
    return model


def gradients_of(model, data, function=tf.reduce_mean):
    x, y = data
    with tf.GradientTape() as tape:
        loss = function((model(x, training=True) - y) ** 2)
    return loss, tape.gradient(loss, model.trainable_variables)


def update(model, data, function=tf.reduce_mean):
    loss, gradients = gradients_of(model, data, function)
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss


def minimize(model, loss_of):
    """One update of a loss."""
    with tf.GradientTape() as tape:
        loss = loss_of()
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
    model.optimizer.apply(gradients, model.trainable_variables)
    return loss


def writes_examples(self, data):
    self.queue.assign(tf.reduce_mean(data[0], 0))
    return {"loss": update(self, data)}


def writes_tensorflow(self, data):
    self.steps.assign_add(1)
    return {"loss": update(self, data)}


def logs_after_the_update(self, data):
    update(self, data)
    return {"after": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}


def logs_gradients_of_examples(self, data):
    loss, gradients = gradients_of(self, data)
    self.optimizer.apply(gradients, self.trainable_variables)
    return {"both": loss * tf.linalg.global_norm(gradients)}


def metric_after_the_update(self, data):
    update(self, data)
    self.after.update_state(tf.reduce_mean((self(data[0]) - data[1]) ** 2))
    return {"loss": self.after.result()}


def area_after_the_update(self, data):
    update(self, data)
    self.area.update_state(data[1] > 0, tf.sigmoid(self(data[0])))
    return {"loss": self.area.result()}


def result_too_early(self, data):
    self.after.update_state(tf.reduce_mean((self(data[0]) - data[1]) ** 2))
    logs = {"early": self.after.result()}
    update(self, data)
    return logs


def resets_a_metric(self, data):
    loss = update(self, data)
    self.after.reset_state()
    self.after.update_state(loss)
    return {"loss": self.after.result()}


def no_gradient(self, data):
    return {"loss": tf.reduce_mean(self(data[0]))}


def gradient_of_weights_only(self, data):
    return {"loss": minimize(self, lambda: tf.add_n(self.losses))}


def gradient_in_a_condition(self, data):
    tf.cond(self.optimizer.iterations > 0, lambda: update(self, data), lambda: update(self, data))
    return {}


def gradient_in_a_function(self, data):
    return {"loss": tf.function(lambda data: update(self, data))(data)}


def gradient_of_a_gradient(self, data):
    with tf.GradientTape() as outer:
        loss, inner = gradients_of(self, data)
        kernel, *_ = self.trainable_variables
        moved = tf.tanh(data[0] @ (kernel - 0.1 * inner[0]))
        loss = tf.reduce_mean(moved**2)
    gradients = outer.gradient(loss, [kernel])
    self.optimizer.apply(gradients, [kernel])
    return {"loss": loss}


def jacobian(self, data):
    with tf.GradientTape() as tape:
        outputs = tf.reduce_mean(self(data[0]), 0)
    tape.jacobian(outputs, self.trainable_variables)
    return {"loss": update(self, data)}


def gradient_of_a_shared_tensor(self, data):
    shift = tf.zeros([4], data[0].dtype)
    with tf.GradientTape() as tape:
        tape.watch(shift)
        loss = tf.reduce_mean(self(data[0] + shift))
    shift = tape.gradient(loss, shift)
    return {"loss": update(self, (data[0] + shift, data[1]))}


def several_values_in_a_log(self, data):
    update(self, data)
    return {"values": tf.reduce_mean(data[0], 0)}


def metric_and_examples_in_a_log(self, data):
    loss = update(self, data)
    self.after.update_state(loss)
    return {"mixed": loss - self.after.result()}


def logs_without_names(self, data):
    return update(self, data)


def calls_value_and_gradients(self, data):
    weights = self.trainable_variables
    loss, gradients = macrobatch.value_and_gradients(
        lambda part: tf.reduce_mean((self(part[0]) - part[1]) ** 2, -1),
        weights,
        data,
        micro_batch_size=3,
    )
    self.optimizer.apply(gradients, weights)
    return {"loss": loss}


def cannot_be_traced(self, data):
    update(self, data)
    return {"loss": float(tf.reduce_mean(data[0]))}


def counts_batches(self, data):
    loss = update(self, data)
    self.own.update_state(loss)
    return {"loss": self.own.result()}


class Counting(keras.metrics.Metric):
    """A mean of batches, whatever their sizes."""

    def __init__(self):
        super().__init__(name="counting")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.batches = self.add_weight(name="batches", initializer="zeros")

    def update_state(self, value):
        self.total.assign_add(value)
        self.batches.assign_add(1.0)

    def result(self):
        return self.total / self.batches


def changes_gradients(change):
    def step(self, data):
        loss, gradients = gradients_of(self, data)
        gradients = [change(gradient, data, loss) for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    return step


def weighs_positions(self, data):
    weights = tf.constant([[1.0, 2.0]], tf.float64)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    x, y = data

    def weighted():
        return loss(y[..., None], self(x)[..., None], weights)

    return {"loss": minimize(self, weighted)}


REFUSED = {
    changes_gradients(
        lambda gradient, data, loss: (
            gradient / tf.cast(tf.shape(tf.transpose(data[0]))[1], loss.dtype)
        )
    ): "hands gradients to optimizer.apply that depend on the examples directly",
    weighs_positions: r"sample_weight of a Keras loss must have the examples first.*\(1, 2\)",
    changes_gradients(
        lambda gradient, data, loss: gradient / tf.cast(tf.shape(data[0])[0], loss.dtype)
    ): "hands gradients to optimizer.apply that depend on the examples directly",
    changes_gradients(
        lambda gradient, data, loss: gradient * loss
    ): "hands gradients to optimizer.apply.*multiplied by the loss",
    writes_examples: r"variable '.*queue'.*depends on the examples.*has_aux=True",
    writes_tensorflow: r"variables of TensorFlow.*steps.*keras\.Variable",
    logs_after_the_update: r"log 'after'.*weights after the last update.*evaluate",
    logs_gradients_of_examples: "log 'both'.*last gradient",
    metric_after_the_update: "metric 'after'.*weights after the last update",
    area_after_the_update: "metric 'area'.*weights after the last update",
    result_too_early: "'early' takes the result of a metric before the last call",
    resets_a_metric: "metric 'after'.*reset_state",
    counts_batches: r"metric 'counting'.*keras\.metrics\.Mean",
    no_gradient: r"no gradient of variables.*value_and_gradients",
    gradient_of_weights_only: "No gradient that the train_step takes depends on the batch",
    gradient_in_a_condition: r"tape\.gradient must be called by the train_step itself",
    gradient_in_a_function: r"tape\.gradient must be called by the train_step itself",
    gradient_of_a_gradient: "while a tape still records",
    jacobian: r"tape\.jacobian with respect to variables",
    gradient_of_a_shared_tensor: "does not depend on the examples",
    several_values_in_a_log: r"log 'values' must be a scalar.*\(4,\)",
    metric_and_examples_in_a_log: "log 'mixed' is made of the examples and of the result",
    logs_without_names: "logs as a dictionary",
    calls_value_and_gradients: r"needs the whole batch.*leave macrobatch\.accumulate out",
    cannot_be_traced: r"cannot be traced.*\.numpy\(\)",
}


@pytest.mark.parametrize("mode", ["graph", pytest.param("eager", marks=thorough)])
@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_what_cannot_be_right_is_refused(function, mode):
    model = step_of(
        function,
        MODES[mode],
        queue=keras.Variable(np.zeros(4), trainable=False, name="queue"),
        steps=tf.Variable(0, name="steps"),
        after=keras.metrics.Mean("after"),
        area=keras.metrics.AUC(5, name="area"),
        own=Counting,
    )
    macrobatch.accumulate(model, 3)

    def values():
        kept = [*model.weights, model.steps, *model.metrics_variables]
        return [np.array(each).tolist() for each in kept]

    before = values()
    with pytest.raises(ValueError, match=f"(?s){REFUSED[function]}"):
        model.fit(step_cases.X, step_cases.Y, batch_size=20, verbose=0)
    assert values() == before
    assert int(model.optimizer.iterations) == 0


def assert_same_training(build, data, cut, tolerance=1e-10, **fit):
    """Trains plainly and accumulated. Returns the accumulated model."""
    plain, history = trained(build, data, MODES["eager"], **fit)
    model, other = trained(build, data, {}, cut, **fit)
    for (path, value), own in zip(state_of(plain).items(), state_of(model).values()):
        np.testing.assert_allclose(own, value, rtol=0, atol=tolerance, err_msg=path)
    assert_same_history(history, other, tolerance)
    return model


def assert_trained_as_plain(step, optimizer=step_cases.adam):
    def build(mode):
        return step_of(step, mode, optimizer, own=keras.metrics.Mean)

    assert_same_training(build, CASES["guide"][1], {"micro_batch_size": 3})


def scaled(self, data):
    with tf.GradientTape() as tape:
        y_pred = self(data[0], training=True)
        loss = self.compute_loss(data[0], data[1], y_pred)
        scaled = self.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, self.trainable_variables)
    self.optimizer.apply(gradients, self.trainable_variables)
    return self.compute_metrics(data[0], data[1], y_pred) | {"loss": loss}


@pytest.mark.parametrize("dtype", ["float64", pytest.param("mixed_float16", marks=thorough)])
def test_a_loss_scale(dtype):
    def build(mode):
        model = step_of(scaled)
        optimizer = keras.optimizers.LossScaleOptimizer(step_cases.adam(), 128.0, 2)
        model.compile(optimizer, "mse", metrics=["mae"], **mode)
        return model

    if dtype != "float64":
        keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(dtype)
    tolerance = 1e-10 if dtype == "float64" else 2e-2
    model = assert_same_training(build, CASES["guide"][1], {"micro_batch_size": 3}, tolerance)
    assert float(model.optimizer.dynamic_scale) == 256.0  # after two of three updates


def test_a_sum_of_the_compiled_loss():
    assert_as_plain("decorated", MODES["eager"])


def tracks_two_kinds(self, data):
    loss, gradients = gradients_of(self, data)
    self.optimizer.apply(gradients, self.trainable_variables)
    self.own.update_state(loss)
    self.own.update_state(tf.linalg.global_norm(gradients))
    return {"both": self.own.result()}


def test_a_metric_of_the_examples_and_of_the_gradient():
    """What depends on no example goes into a metric once, also if others go in by share."""
    assert_trained_as_plain(tracks_two_kinds)


def mean_over_tokens(self, data):
    tokens, labels, real = data

    def mean():
        losses = keras.losses.sparse_categorical_crossentropy(labels, self(tokens), True)
        return tf.reduce_sum(losses * real) / tf.reduce_sum(real)

    loss = minimize(self, mean)
    self.own.update_state(loss)
    return {"loss": self.own.result(), "raw": loss}


@pytest.mark.eager
def test_a_mean_over_something_else():
    """With `micro_batch_weight`, also where a micro-batch has no weight at all."""

    def build(mode):
        inputs = keras.Input([6], dtype="int32")
        outputs = keras.layers.Dense(9)(keras.layers.Embedding(9, 3)(inputs))
        model = type("Own", (keras.Model,), {"train_step": mean_over_tokens})(inputs, outputs)
        model.own = keras.metrics.Mean()
        model.compile(step_cases.adam(), **mode)
        return model

    tokens = step_cases.TOKENS
    real = np.where(np.arange(45)[:, None] < 3, 0.0, tokens > 0)
    weight = {"micro_batch_weight": lambda x, y, weights: tf.reduce_sum(weights)}
    cut = {"micro_batch_size": 3, **weight}
    assert_same_training(build, (tokens, (tokens + 1) % 9, real), cut)


def draws(self, data):
    x = data[0]
    noise = keras.random.normal(tf.shape(x), dtype=x.dtype, seed=self.seeds)
    found = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            outputs = self(x) + 0.0 * sum(tf.reduce_sum(each) for each in found)
            loss = tf.reduce_mean(outputs * noise[:, :2])
        found.append(tape.gradient(loss, self.trainable_variables)[-1])
    self.optimizer.apply([found[0]], [self.trainable_variables[-1]])
    return {"difference": tf.reduce_max(tf.abs(found[0] - found[1])), "first": found[0][0]}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_micro_batch_draws_the_same_for_all_gradients(mode):
    model = step_of(draws, MODES[mode], seeds=keras.random.SeedGenerator(1))
    macrobatch.accumulate(model, 3)
    data = step_cases.X[:20], step_cases.Y[:20]
    history = model.fit(*data, batch_size=20, epochs=3, shuffle=False, verbose=0).history
    np.testing.assert_array_less(history["difference"], 1e-14)
    assert len(set(history["first"])) == 3  # but other numbers in each step
    assert int(model.seeds.state[1]) == 3


def test_micro_batches_draw_different_numbers():
    def equal_rows(self, data):
        noise = keras.random.normal([tf.shape(data[0])[0], 1], dtype="float64", seed=self.seeds)
        loss = update(self, data)
        return {"loss": loss, "mean": tf.reduce_mean(noise), "square": tf.reduce_mean(noise**2)}

    model = step_of(equal_rows, seeds=keras.random.SeedGenerator(1))
    macrobatch.accumulate(model, 1)
    logs = model.fit(step_cases.X, step_cases.Y, batch_size=45, verbose=0).history
    assert logs["square"][0] - logs["mean"][0] ** 2 > 0.3


def tf_random(self, data, draw=tf.random.normal):
    noise = tf.cast(draw(tf.shape(data[0])), data[0].dtype)
    update(self, (data[0] + noise, data[1]))
    return {"loss": update(self, (data[0] + noise, data[1]))}


normal = tf.function(tf.random.normal)


def tf_random_in_a_function(self, data):
    return tf_random(self, data, normal)


@pytest.mark.parametrize("step", [tf_random, tf_random_in_a_function])
@pytest.mark.examples_meet
def test_what_tf_random_draws_is_warned_of(step):
    model = macrobatch.accumulate(step_of(step, MODES["eager"]), 3)
    with pytest.warns(macrobatch.ExactnessWarning) as warned:
        model.fit(step_cases.X, step_cases.Y, batch_size=20, verbose=0)
    several, meeting = (str(warning.message) for warning in warned)
    assert "takes several gradients" in several
    assert "It is not known whether examples meet" in meeting


@pytest.mark.examples_meet
def test_a_function_that_reads_a_variable_draws_nothing():
    """TensorFlow calls it by a stateful operation."""
    scale = tf.Variable(0.5, dtype=tf.float64)
    scaled = tf.function(lambda x: scale * x)

    def step(self, data):
        update(self, (scaled(data[0]), data[1]))
        return {"loss": update(self, data)}

    model = macrobatch.accumulate(step_of(step), 3)
    model.fit(step_cases.X, step_cases.Y, batch_size=20, verbose=0)


def test_batch_normalization_is_warned_of():
    model = macrobatch.accumulate(step_cases.statistics(MODES["eager"]), 3)
    with pytest.warns(macrobatch.ExactnessWarning, match="BatchNormalization"):
        model.fit(step_cases.X, step_cases.Y, batch_size=20, verbose=0)


def contrastive(self, data):
    def losses():
        one, two = (tf.math.l2_normalize(self(part), 1) for part in (data[0], data[0] + 0.1))
        likeness = tf.matmul(one, two, transpose_b=True)
        own = tf.range(tf.shape(one)[0])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(own, likeness)

    return {"loss": tf.reduce_mean(minimize(self, losses))}


def coupled_second_loss(self, data):
    def spread():
        outputs = self(data[0])
        return tf.reduce_mean((outputs - tf.reduce_mean(outputs, 0)) ** 2)

    update(self, data)
    return {"loss": minimize(self, spread)}


def not_finite(self, data):
    return {"loss": update(self, data, lambda x: tf.reduce_mean(tf.math.log(-x)))}


def summed(self, data):
    """Sums over the examples, one of them with a constant: what plain Keras takes them for."""
    x, y = data

    def loss_and_slope():
        with tf.GradientTape() as inner:
            inner.watch(x)
            total = tf.reduce_sum(self(x))
        slope = inner.gradient(total, x)
        return tf.reduce_sum((self(x) - y) ** 2 + tf.reduce_sum(slope**2, 1, keepdims=True)) / 64

    loss = minimize(self, loss_and_slope)
    self.own.update_state(loss)
    return {"loss": loss, "own": self.own.result()}


def summed_by_keras(self, data):
    loss = keras.losses.MeanSquaredError(reduction="sum")
    return {"loss": minimize(self, lambda: loss(data[1], self(data[0])))}


@pytest.mark.examples_meet
@pytest.mark.parametrize("step", [summed, summed_by_keras])
def test_a_loss_may_be_a_sum(step):
    assert_trained_as_plain(step)


@pytest.mark.eager
def test_gradients_may_depend_on_the_number_of_features():
    def step(self, data):
        loss, gradients = gradients_of(self, data)
        size = tf.cast(tf.shape(data[0])[1], loss.dtype)
        self.optimizer.apply([each / size for each in gradients], self.trainable_variables)
        return {"loss": loss}

    assert_trained_as_plain(step, optimizer=lambda: keras.optimizers.SGD(0.1))


def of_any_width(x):
    return tf.reshape(x, [tf.shape(x)[0], -1])


# Means over the examples, in which a sum comes last.
MEANS = {
    "number": lambda x: tf.reduce_sum(x / tf.cast(tf.shape(x)[0], x.dtype)),
    "numbers": lambda x: tf.reduce_sum(
        tf.reduce_sum(x, 1) / tf.fill(tf.shape(x)[:1], tf.cast(tf.shape(x)[0], x.dtype))
    ),
    "mean": lambda x: tf.reduce_sum(tf.reduce_mean(of_any_width(x), axis=0)),
    "time-major": lambda x: tf.reduce_sum(tf.reduce_mean(tf.transpose(of_any_width(x)), axis=1)),
    "ones": lambda x: tf.reduce_sum(x / tf.reduce_sum(tf.ones_like(x), 0, keepdims=True)),
}


@pytest.mark.examples_meet
@pytest.mark.parametrize("function", MEANS.values(), ids=MEANS)
def test_a_sum_that_is_divided_inside_is_a_mean(function):
    assert_trained_as_plain(lambda self, data: {"loss": update(self, data, function)})


def summed_and_more(self, data):
    return {"loss": update(self, data, lambda x: tf.reduce_sum(x) + tf.add_n(self.losses))}


def divided(self, data):
    loss = update(self, data, lambda x: tf.reduce_mean(x, 1) / tf.cast(tf.shape(x)[0], x.dtype))
    return {"loss": tf.reduce_mean(loss)}


def given_gradients(self, data):
    with tf.GradientTape() as tape:
        outputs = self(data[0])
    start = 2 * (outputs - data[1]) / tf.cast(tf.size(outputs), outputs.dtype)
    gradients = tape.gradient(outputs, self.trainable_variables, output_gradients=start)
    self.optimizer.apply(gradients, self.trainable_variables)
    return {"loss": tf.reduce_mean((outputs - data[1]) ** 2)}


def summed_with_dropout(self, data):
    def total():
        return tf.reduce_sum((self.dropout(self(data[0]), training=True) - data[1]) ** 2) + 1

    return {"loss": minimize(self, total)}


@pytest.mark.examples_meet
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (contrastive, r"Examples meet.*number 1.*forward="),
        (coupled_second_loss, r"Examples meet.*number 2.*forward="),
        (mean_over_tokens, "Examples meet.*micro_batch_weight="),
        (summed_and_more, "number 1.*is none.*Take a mean"),
        (summed_with_dropout, "number 1.*is none.*Take a mean"),
        (divided, "number 1.*not twice as much.*divide by no number"),
        (given_gradients, "number 1.*not twice as much.*divide by no number"),
        (not_finite, "It is not known.*NaN or infinite"),
    ],
)
def test_losses_that_are_no_means_over_examples_are_warned_of(function, message):
    own = {"dropout": keras.layers.Dropout(0.5), "own": keras.metrics.Mean}
    model = step_of(function, MODES["eager"], **own)
    data = step_cases.X, step_cases.Y
    if function is mean_over_tokens:
        data = step_cases.X, np.arange(45) % 2, step_cases.UNIFORM[:, 0]
    macrobatch.accumulate(model, 3)
    with pytest.warns(macrobatch.ExactnessWarning, match=f"(?s){message}"):
        model.fit(tf.data.Dataset.from_tensor_slices(data).batch(20), shuffle=False, verbose=0)


@pytest.mark.examples_meet
@pytest.mark.parametrize(
    ("value", "names"),
    [
        (lambda x: tf.reduce_max(x), "'largest'"),
        (lambda x: tf.shape(x)[0], "'value'"),
        (lambda x: tf.reduce_sum(x) + 1, "'value'"),
        (lambda x: tf.reduce_sum(x), None),
        (lambda x: tf.reduce_mean(x), None),
    ],
)
def test_logs_and_metrics_that_are_no_means_over_examples_are_warned_of(value, names):
    def reporting(self, data):
        loss = update(self, data)
        if names == "'largest'":
            self.own.update_state(value(data[0]))
            return {"loss": loss, "own": self.own.result()}
        return {"loss": loss, "value": value(data[0])}

    model = step_of(reporting, MODES["eager"], own=keras.metrics.Mean("largest"))
    macrobatch.accumulate(model, 3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        model.fit(step_cases.X, step_cases.Y, batch_size=20, shuffle=False, verbose=0)
    messages = [str(each.message) for each in warned]
    assert len(messages) == (0 if names is None else 1)
    assert all(f"no means over the examples: {names}" in message for message in messages)


class Latest(keras.metrics.Metric):
    """The last value of a batch, or the largest of all."""

    def __init__(self, largest):
        super().__init__(name="kept")
        self.largest, self.kept = largest, self.add_weight(name="kept", initializer="zeros")

    def update_state(self, value):
        self.kept.assign(tf.maximum(self.kept, value) if self.largest else value)

    def result(self):
        return self.kept + 0.0


@pytest.mark.examples_meet
@pytest.mark.parametrize("largest", [False, True])
def test_metrics_that_keep_what_a_batch_comes_to_are_warned_of(largest):
    def reporting(self, data):
        loss = update(self, data)
        self.own.update_state(loss)
        return {"kept": self.own.result()}

    model = step_of(reporting, MODES["eager"], own=Latest(largest))
    macrobatch.accumulate(model, 3)
    with pytest.warns(macrobatch.ExactnessWarning, match="no means over the examples: 'kept/kept'"):
        model.fit(step_cases.X, step_cases.Y, batch_size=20, shuffle=False, verbose=0)


class Evaluated(keras.Model):
    """A test step of its own, with a metric and a raw mean."""

    sizes = ()

    def test_step(self, data):
        x, y = data
        type(self).sizes = (*self.sizes, x.shape[0])
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        logs = self.compute_metrics(x, y, y_pred)
        return {**logs, "loss": loss}


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_an_own_test_step(mode):
    model = step_cases.functional(Evaluated)
    model.compile("sgd", "mse", metrics=["mae"], **MODES[mode])
    data = step_cases.X, step_cases.Y
    plain = model.evaluate(*data, batch_size=20, verbose=0, return_dict=True)
    macrobatch.accumulate(model, 3)
    Evaluated.sizes = ()
    cut = model.evaluate(*data, batch_size=20, verbose=0, return_dict=True)
    np.testing.assert_allclose([*cut.values()], [*plain.values()], rtol=1e-12)
    assert list(cut) == list(plain)
    # Whether the logs are means is tried with examples that are made up.
    assert set(Evaluated.sizes) <= {None, 1, 2, 3, 4, 8}


def test_an_own_test_step_that_reports_no_means_stays_whole():
    class Largest(keras.Model):
        def test_step(self, data):
            return {"largest": tf.reduce_max(self(data[0]))}

    model = step_cases.functional(Largest)
    model.compile("sgd", "mse")
    data = step_cases.X, step_cases.Y
    plain = model.evaluate(*data, batch_size=20, verbose=0)
    macrobatch.accumulate(model, 3)
    assert model.evaluate(*data, batch_size=20, verbose=0) == plain


def test_an_own_test_step_that_remembers_examples_stays_whole():
    class Remembering(keras.Model):
        def test_step(self, data):
            self.latest.assign(tf.reduce_max(data))
            return {"latest": self.latest + 0.0}

    model = step_cases.functional(Remembering)
    model.latest = keras.Variable(0.0, dtype="float64", trainable=False)
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 3)
    assert model.evaluate(step_cases.X, batch_size=45, verbose=0) == step_cases.X.max()


def test_an_own_test_step_that_takes_no_other_examples_stays_whole():
    """Whether its log is a mean cannot be tried with examples that are made up."""

    class Largest(keras.Model):
        def test_step(self, data):
            tf.debugging.assert_greater(tf.reduce_max(data[0]), tf.ones([], tf.float64))
            return {"largest": tf.reduce_max(self(data[0]))}

    model = step_cases.functional(Largest)
    model.compile("sgd", "mse", run_eagerly=True)
    data = step_cases.X, step_cases.Y
    plain = model.evaluate(*data, batch_size=45, verbose=0)
    macrobatch.accumulate(model, 3)
    assert model.evaluate(*data, batch_size=45, verbose=0) == plain


@thorough
def test_ways_to_train():
    """`train_on_batch`, several steps at a time, a step of the instance, and `release`."""
    x, y = CASES["guide"][1]

    def one_by_one(accumulated):
        model = step_of(lambda self, data: {"loss": update(self, data[:2])})
        if accumulated:
            macrobatch.accumulate(model, 3)
        for start in (0, 20, 40):
            model.train_on_batch(x[start : start + 20], y[start : start + 20])
        return model.get_weights()

    def several(accumulated):
        model = step_cases.functional(keras.Model)
        own = model.train_step = lambda data: {"loss": update(model, data)}
        model.compile(step_cases.adam(), steps_per_execution=2)
        if accumulated:
            macrobatch.accumulate(model, 3)
        model.fit(x[:40], y[:40], batch_size=20, shuffle=False, verbose=0)
        if accumulated:
            assert model.train_step is not own
            assert macrobatch.release(model).train_step is own
        return model.get_weights()

    for way in (one_by_one, several):
        found = []
        for accumulated in (False, True):
            keras.utils.set_random_seed(7)
            found.append(way(accumulated))
        for one, other in zip(*found):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


class Contrasting(keras.Model):
    """Two views of each example, which a teacher makes one of; examples are compared."""

    def __init__(self, cut):
        super().__init__()
        self.student, self.teacher = keras.layers.Dense(3), keras.layers.Dense(3, trainable=False)
        self.cut = cut

    def train_step(self, x):
        def forward(views):
            return self.student(views, training=True), self.teacher(views * 0.5)

        def loss_fn(outputs, views):
            logits = tf.matmul(outputs[0], outputs[1], transpose_b=True)
            own = tf.range(tf.shape(logits)[0])
            return tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)

        forward(x[:1])  # builds both
        variables = self.student.trainable_variables
        if self.cut:
            loss, gradients = macrobatch.value_and_gradients(
                loss_fn, variables, x, micro_batch_size=3, forward=forward
            )
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(loss_fn(forward(x), x))
            gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients, variables)
        for slow, fast in zip(self.teacher.variables, self.student.variables):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"loss": loss}


@thorough_for("False")
@pytest.mark.parametrize("eagerly", [False, True])
def test_a_step_that_compares_examples_and_cuts_its_batch_itself(eagerly):
    found = []
    for cut in (False, True):
        keras.utils.set_random_seed(7)
        model = Contrasting(cut)
        model.compile(step_cases.adam(), run_eagerly=eagerly)
        history = model.fit(step_cases.X, batch_size=20, shuffle=False, verbose=0).history
        found.append([*model.get_weights(), history["loss"]])
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-10)


def test_settings_that_do_not_go_with_an_own_step():
    inputs = keras.Input([None])
    model = step_cases.Guide(inputs, keras.layers.Identity()(inputs))
    step = macrobatch.accumulate(model, 3).train_step
    with pytest.raises(ValueError, match=r"sequence_axis=1.*value_and_gradients"):
        macrobatch.accumulate(model, 3, sequence_axis=1)
    with pytest.raises(ValueError, match=r"whole_batch_loss=True.*forward="):
        macrobatch.accumulate(model, 3, whole_batch_loss=True)
    assert model.train_step == step
    with mirrored(2).scope():
        model = step_cases.guide({})
    with pytest.raises(ValueError, match=r"2 replicas.*value_and_gradients"):
        macrobatch.accumulate(model, 3)


def test_a_step_that_decides_in_python():
    def sometimes(self, data):
        if int(self.optimizer.iterations if tf.executing_eagerly() else 0) < 2:
            return {"loss": update(self, data)}
        update(self, data)
        return {"loss": update(self, data)}

    model = step_of(sometimes)
    model.compile(step_cases.adam(), run_eagerly=True)
    macrobatch.accumulate(model, 3)
    with pytest.raises(ValueError, match=r"called tape\.gradient 2 times. Expected: 1 times"):
        model.fit(step_cases.X, step_cases.Y, batch_size=20, verbose=0)

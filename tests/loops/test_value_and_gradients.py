"""value_and_gradients against a tape over the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from keras import layers
from support import thorough_for
from support.loops import (
    MODES,
    accumulated,
    assert_close,
    call,
    check,
    of_one_tape,
    squares_of,
    updated,
)

import macrobatch
from macrobatch import value_and_gradients

NUMBERS = tf.range(5, dtype=tf.float64)
in_each_mode = pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
with_python = pytest.mark.parametrize("mode", ["eager", "graph"])


@pytest.fixture
def v():
    return tf.Variable(2.0, dtype=tf.float64)


def data(examples=7, tokens=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[examples, tokens, 3])
    y = rng.normal(size=[examples, tokens])
    weights = rng.uniform(size=[examples, tokens]) * rng.integers(0, 2, [examples, tokens])
    weights[0, 0] = 1.0
    return tuple(tf.constant(t) for t in (x, y, weights))


def table(examples=7, seed=0, dtype=tf.float64):
    """Rows of three numbers, and a target for each."""
    x, y, _ = data(examples, seed=seed)
    return tf.cast(x[:, 0], dtype), tf.cast(y[:, :1], dtype)


def linear():
    return [tf.Variable(np.linspace(-1, 1, 3)), tf.Variable(0.5, dtype=tf.float64)]


def token_losses(variables, x, y):
    kernel, bias = variables
    return (tf.linalg.matvec(x, kernel) + bias - y) ** 2


# What loss_fn returns.
FORMS = {
    "losses": lambda losses, _: losses,
    "losses per example": lambda losses, _: tf.reduce_sum(losses, 1),
    "losses and weights": lambda losses, weights: (losses, weights),
    "scalar": lambda losses, _: tf.reduce_mean(losses),
    "scalar and weight": lambda losses, weights: (
        tf.reduce_sum(losses * weights) / tf.reduce_sum(weights),  # may be 0 / 0
        tf.reduce_sum(weights),
    ),
}


def loss_of(form, variables):
    return lambda batch: FORMS[form](token_losses(variables, *batch[:2]), batch[2])


def check_form(form, mode, size, batch):
    variables = linear()
    check(mode, loss_of(form, variables), variables, batch, size)


@thorough_for("3-compiled", "1-compiled", "9-compiled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("form", "size"),
    [*((form, 3) for form in FORMS), *(("losses and weights", size) for size in (1, 7, 9))],
)
def test_each_form_of_loss_and_each_size(form, size, mode):
    """One by one, the batch at once, and more than there are."""
    check_form(form, mode, size, data())


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    mode=st.sampled_from(["eager", "graph"]),
    examples=st.integers(1, 9),
    tokens=st.integers(1, 4),
    size=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_any_batch(form, mode, examples, tokens, size, seed):
    check_form(form, mode, size, data(examples, tokens, seed))


@in_each_mode
def test_a_batch_without_any_weight_is_0(mode):
    x, y, weights = data()
    variables = linear()
    step = accumulated(loss_of("scalar and weight", variables), variables)
    assert_close(call(mode, step, (x, y, 0 * weights)), (0.0, [np.zeros(3), np.zeros([])]))


@in_each_mode
@pytest.mark.parametrize("start", [0, 3])
def test_a_micro_batch_without_any_weight_does_not_count(start, mode):
    """Its scalar is 0 / 0, and so are the gradients of it."""
    x, y, weights = data()
    there = np.ones_like(weights)
    there[start : start + 3] = 0
    check_form("scalar and weight", mode, 3, (x, y, weights * there))


@thorough_for("unknown size", "scalar and weight-compiled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["losses and weights", "scalar and weight"])
def test_weights_that_are_learned(form, mode):
    variables = linear()

    def loss_fn(batch):
        losses = token_losses(variables, *batch)
        return FORMS[form](losses, tf.exp(-losses * variables[1]))

    check(mode, loss_fn, variables, data()[:2])


def test_weights_beyond_the_range_of_float32(v):
    def loss_fn(x):
        return v * tf.reduce_mean(x), 1e60 * tf.cast(tf.size(x), tf.float64)

    assert_close(accumulated(loss_fn, v, 2)(NUMBERS + 1), (6.0, 3.0))


def test_a_python_number_is_not_rounded_to_float32(v):
    weights = iter([0.1, 0.3])
    step = accumulated(lambda x: (v * tf.reduce_mean(x), next(weights)), v, 2)
    loss, gradient = step(tf.constant([1.0, 1.0, 5.0, 5.0], tf.float64))
    expected = (0.1 * 1 + 0.3 * 5) / (0.1 + 0.3)
    np.testing.assert_allclose(gradient, expected, rtol=1e-15)
    np.testing.assert_allclose(loss, 2 * expected, rtol=1e-15)


# Loops


@thorough_for("compiled", "eager-Adam", "graph-Adam")
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [("eager", "SGD"), ("eager", "Adam"), ("graph", "Adam"), ("compiled", "Adam")],
)
def test_the_textbook_loop(mode, optimizer):
    def model():
        keras.utils.set_random_seed(1)
        hidden = layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        return keras.Sequential([keras.Input([4, 3]), hidden, layers.Dense(1)])

    plain, ours = model(), model()
    optimizers = [getattr(keras.optimizers, optimizer)(0.1) for _ in range(2)]
    weights = ours.trainable_variables
    step = updated(accumulated(squares_of(ours), weights), optimizers[1], weights)
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for seed, examples in enumerate([8, 8, 5, 8]):  # a smaller batch among them
        x, y, _ = data(examples, seed=seed)
        batch, weights = (x, y[..., None]), plain.trainable_variables
        loss, gradients = of_one_tape(squares_of(plain), weights, batch)
        optimizers[0].apply(gradients, weights)
        assert_close(step(batch), loss)
        assert_close(ours.variables, plain.variables)
    assert_close(optimizers[1].variables, optimizers[0].variables)


def test_in_a_train_step_of_a_model():
    """What the error for models with a train_step of their own recommends."""

    class Model(keras.Model):
        def train_step(self, batch):
            weights = self.trainable_variables
            step = updated(accumulated(squares_of(self), weights), self.optimizer, weights)
            return {"loss": step(batch)}

    x, y, _ = data(8)
    models = []
    for kind in (keras.Model, Model):
        keras.utils.set_random_seed(4)
        inputs = keras.Input([4, 3])
        model = kind(inputs, layers.Dense(1)(inputs))
        model.compile(keras.optimizers.Adam(0.1), "mse")
        model.fit(x, y[..., None], batch_size=5, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    assert_close(models[1].variables, models[0].variables)


class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(np.linspace(-1, 1, 3)[:, None])

    def __call__(self, x):
        return x @ self.kernel


def test_modules():
    model = Linear()
    check("eager", lambda x: model(x) ** 2, model.trainable_variables, table()[0])


@thorough_for("compiled")
@in_each_mode
def test_tf_keras(mode):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(4, "tanh"), tf_keras.layers.Dense(1, kernel_regularizer="l2")]
    )
    batch = table(dtype=tf.float32)
    model(batch[0])

    def loss_fn(micro_batch):
        x, y = micro_batch
        return tf_keras.losses.mse(y, model(x, training=True)) + sum(model.losses)

    check(mode, loss_fn, model.trainable_variables, batch, tolerance=1e-6)


@with_python
def test_loss_scaling(mode):
    mse = keras.losses.MeanSquaredError(reduction=None, dtype="float32")
    batch = table(32, dtype=tf.float32)

    def loop():
        """Of a model: its optimizer, its scaled loss, its weights."""
        keras.utils.set_random_seed(1)
        hidden = layers.Dense(16, "tanh", dtype="mixed_float16")
        model = keras.Sequential([keras.Input([3]), hidden, layers.Dense(1, dtype="float32")])
        inner = keras.optimizers.SGD(0.1)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**15)
        optimizer.build(model.trainable_variables)
        loss_fn = lambda b: optimizer.scale_loss(mse(b[1], model(b[0])))  # noqa: E731
        return optimizer, loss_fn, model.trainable_variables

    (textbook, plain, plain_weights), (optimizer, loss_fn, weights) = loop(), loop()

    def step(batch):
        _, gradients = accumulated(loss_fn, weights, 4)(batch)
        optimizer.apply(gradients, weights)
        return gradients

    step = step if mode == "eager" else tf.function(step)
    for _ in range(3):
        _, gradients = of_one_tape(plain, plain_weights, batch)
        textbook.apply(gradients, plain_weights)
        for ours, whole in zip(step(batch), gradients):
            np.testing.assert_allclose(ours, whole, rtol=0.02, atol=0.002 * np.abs(whole).max())
    # No step was skipped for an overflow that the whole batch would not have had.
    assert_close(optimizer.dynamic_scale, textbook.dynamic_scale)
    assert_close(optimizer.iterations, textbook.iterations)
    assert int(optimizer.iterations) == 3


def test_gradients_have_the_dtype_of_their_variables():
    v = tf.Variable(2.0, dtype=tf.float16)
    x = tf.constant(np.full([2048], 60.0), tf.float16)  # their sum is no float16
    loss, gradient = accumulated(lambda x: v * x, v, 1024)(x)
    assert (loss.dtype, gradient.dtype) == (tf.float32, tf.float16)
    assert (float(loss), float(gradient)) == (120.0, 60.0)


# Batches, variables and aux of any kind


def test_nests_of_batches_variables_and_aux():
    x, y, _ = data()
    variables = {"kernel": tf.Variable(np.ones(3)), "rest": (tf.Variable(0.5, dtype=tf.float64),)}
    seen = []

    def loss_fn(micro_batch):
        seen.append(set(micro_batch))
        prediction = tf.linalg.matvec(micro_batch["x"], variables["kernel"])
        prediction += variables["rest"][0]
        losses = (prediction - micro_batch["labels"][0]) ** 2
        return losses, {"losses": losses, "of": (tf.reduce_max(losses), None, 3)}

    batch = {"x": x, "labels": [y], "nothing": None}
    step = accumulated(loss_fn, variables, has_aux=True)
    results = [call(mode, step, batch) for mode in ("eager", "graph")]
    expected = of_one_tape(lambda batch: loss_fn(batch)[0], variables, batch)
    losses, _ = loss_fn(batch)
    for (value, got), gradients in results:
        assert_close((value, gradients), expected)
        assert isinstance(gradients["rest"], tuple)
        each = tf.stack([tf.reduce_max(losses[start : start + 3]) for start in (0, 3, 6)])
        assert_close(got, {"losses": losses, "of": (each, None, np.array([3, 3, 3]))})
    assert all(keys == {"x", "labels", "nothing"} for keys in seen)


@in_each_mode
def test_one_variable_is_a_nest(mode, v):
    step = accumulated(lambda part: v * tf.cast(part, tf.float64), v, 2)
    loss, gradient = call(mode, step, tf.range(5.0))
    assert (float(loss), float(gradient)) == (4.0, 2.0)


@thorough_for("graph", "unknown size")
@pytest.mark.parametrize("mode", ["eager", "graph", "unknown size"])
def test_ragged_and_sparse_batches(mode, v):
    rows = [[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]]
    ragged = tf.ragged.constant(rows, dtype=tf.float64)

    def loss_fn(micro_batch):
        ragged, sparse = micro_batch
        sums = tf.sparse.reduce_sum(sparse, axis=1)
        sums.set_shape([None])
        return (v * ragged) ** 2 + sums[:, None], ragged  # as many losses as there are numbers

    step = accumulated(loss_fn, v, 2, has_aux=True)
    (loss, aux), gradient = call(mode, step, (ragged, ragged.to_sparse()))
    numbers = np.concatenate([np.array(row) for row in rows])
    sums = np.concatenate([[sum(row)] * len(row) for row in rows if row])
    assert_close(loss, np.mean((2 * numbers) ** 2 + sums))
    assert_close(gradient, np.mean(2 * 2 * numbers**2))
    assert aux.to_list() == rows


def pieces(examples):
    """A batch with tensors of each kind."""
    rows = [list(range(i % 4)) for i in range(examples)]
    return {
        "dense": tf.random.normal([examples, 3]),
        "nested": (tf.range(examples), None),
        "ragged": tf.ragged.constant(rows, dtype=tf.int32),
        "sparse": tf.sparse.from_dense(tf.constant(np.arange(examples * 2).reshape(-1, 2) % 3)),
        "empty": tf.zeros([examples, 0]),
    }


@settings(max_examples=20, deadline=None, phases=[Phase.generate])
@given(
    examples=st.integers(1, 23),
    size=st.integers(1, 25),
    mode=st.sampled_from(["eager"] * 9 + ["graph"]),
)
def test_any_micro_batches_make_up_the_batch(examples, size, mode):
    """loss_fn returns each micro-batch as aux."""
    v, batch, sizes = tf.Variable(1.0), pieces(examples), []

    def loss_fn(micro_batch):
        sizes.append(micro_batch["dense"].shape[0])
        nested = tf.stack([micro_batch["ragged"], micro_batch["ragged"] * 10], axis=1)
        return v * micro_batch["dense"][:, 0], {**micro_batch, "twice ragged": nested}

    (_, aux), _ = call(mode, accumulated(loss_fn, v, size, has_aux=True), batch)
    for name in ("dense", "empty"):
        np.testing.assert_array_equal(aux[name], batch[name])
    np.testing.assert_array_equal(aux["nested"][0], range(examples))
    assert aux["nested"][1] is None
    rows = batch["ragged"].to_list()
    assert aux["ragged"].to_list() == rows
    assert aux["twice ragged"].to_list() == [[row, [10 * n for n in row]] for row in rows]
    np.testing.assert_array_equal(*map(tf.sparse.to_dense, (aux["sparse"], batch["sparse"])))
    if mode == "eager":  # What comes after them is the check whether examples interact.
        full, rest = divmod(examples, size)
        assert sizes[: full + bool(rest)] == [size] * full + [rest] * bool(rest)


def test_aux_of_all_runs(v):
    """Compiled, full micro-batches and the tail are two runs."""

    def loss_fn(x):
        return v * x, {"each": x * 2, "count": tf.size(x), "empty": tf.zeros([tf.size(x), 0])}

    x = tf.range(7, dtype=tf.float64)
    (_, aux), _ = call("compiled", accumulated(loss_fn, v, has_aux=True), x)
    np.testing.assert_array_equal(aux["each"], x * 2)
    np.testing.assert_array_equal(aux["count"], [3, 3, 1])
    assert aux["empty"].shape == [7, 0]


def test_one_part_that_knows_its_size_is_enough():
    """A ragged or sparse part of a batch of fixed size does not know it."""
    v, seen = tf.Variable(1.0), []

    def loss_fn(micro_batch):
        seen.append(micro_batch["dense"].shape[0])
        return v * micro_batch["dense"][:, 0]

    batch = {name: pieces(6)[name] for name in ("ragged", "sparse", "dense")}
    specs = {
        "ragged": tf.RaggedTensorSpec([None, None], tf.int32),
        "sparse": tf.SparseTensorSpec([None, 2], tf.int64),
        "dense": tf.TensorSpec([6, 3]),
    }
    step = tf.function(accumulated(loss_fn, v), input_signature=[specs])
    loss, _ = step(batch)
    assert_close(loss, tf.reduce_mean(batch["dense"][:, 0]), 1e-6)
    assert None not in seen
    short = tf.ragged.constant([[1], [2]], dtype=tf.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of examples"):
        step({**batch, "ragged": short})


@thorough_for("weights-compiled", "weights-unknown size")
@pytest.mark.parametrize("mode", ["eager", "graph", "unknown size", "compiled"])
@pytest.mark.parametrize("weigh", [None, tf.exp], ids=["mean", "weights"])
def test_absent_gradients_and_rows_that_come_once(weigh, mode):
    """Also where weights depend on the rows."""
    table = tf.Variable(np.linspace(-1, 1, 12).reshape(6, 2))
    variables = [table, tf.Variable(1.0, dtype=tf.float64)]
    tokens = tf.constant([[0, 1], [1, 1], [5, 0], [1, 5], [5, 5]])

    def loss_fn(tokens):
        losses = tf.reduce_sum(tf.gather(table, tokens) ** 2, -1)
        return losses if weigh is None else (losses, weigh(losses))

    loss, (rows, absent) = call(mode, accumulated(loss_fn, variables, 2), tokens)
    if mode != "compiled":
        assert isinstance(rows, tf.IndexedSlices)
        assert sorted(rows.indices.numpy()) == [0, 1, 5]  # each row once
    assert_close((loss, [rows, absent]), of_one_tape(loss_fn, variables, tokens))


# State


def normalized_model(dropout=0.5):
    keras.utils.set_random_seed(2)
    normalization = layers.BatchNormalization(momentum=0.9)
    inner = [layers.Dropout(dropout), normalization, layers.Dense(1)]
    return keras.Sequential([keras.Input([3]), *inner])


@thorough_for("compiled", "graph")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@in_each_mode
def test_seeds_and_moving_statistics_are_those_of_fit(mode):
    fitted, looped = normalized_model(), normalized_model()
    batch = table(8)
    how = {"eager": {"run_eagerly": True}, "compiled": {"jit_compile": True}}.get(mode, {})
    fitted.compile(keras.optimizers.SGD(0.1), "mse", **how)
    macrobatch.accumulate(fitted, 3)
    fitted.fit(*batch, batch_size=8, epochs=3, shuffle=False, verbose=0)
    weights = looped.trainable_variables
    step = updated(accumulated(squares_of(looped), weights), keras.optimizers.SGD(0.1), weights)
    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for _ in range(3):
        step(batch)
    assert_close(looped.variables, fitted.variables)


def test_moving_statistics_are_those_of_the_whole_batch():
    plain, ours = normalized_model(0.0), normalized_model(0.0)
    x, _ = table(8)
    step = accumulated(lambda x: ours(x, training=True), ours.trainable_variables)
    with pytest.warns(macrobatch.ExactnessWarning, match="BatchNormalization normalises") as caught:
        for _ in range(2):  # warned of once
            plain(x, training=True)
            step(x)
    assert len(caught) == 1
    assert_close(ours.non_trainable_variables, plain.non_trainable_variables)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@with_python
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_fails_has_changed_nothing(where, mode):
    model = normalized_model()
    x = tf.concat([table(8)[0], [[np.inf] * 3]], 0)  # in the last micro-batch
    before = [np.array(v) for v in model.variables]

    def loss_fn(x):
        def finite(value):
            return tf.debugging.check_numerics(value + 0 * tf.reduce_sum(x), "not finite")

        @tf.custom_gradient
        def checked(value):
            if where == "forward":
                return finite(value), lambda upstream: upstream
            return tf.identity(value), finite

        return checked(model(tf.where(tf.math.is_finite(x), x, 0.0), training=True))

    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        call(mode, accumulated(loss_fn, model.trainable_variables), x)
    assert_close(model.variables, before, 0)


@with_python
def test_metrics_and_other_variables_are_written_once_per_micro_batch(mode, v):
    metric, counter = keras.metrics.Mean(), tf.Variable(0)

    def loss_fn(x):
        metric.update_state(x)
        counter.assign_add(1)
        return v * x

    call(mode, accumulated(loss_fn, v, 2), NUMBERS)
    assert (float(metric.result()), float(metric.count), int(counter)) == (2.0, 5.0, 3)


def test_a_metric_that_is_made_in_every_call(v):
    def loss_fn(x):
        mean = keras.metrics.Mean()
        mean.update_state(x)
        return v * x, mean.result()

    (loss, means), _ = accumulated(loss_fn, v, 2, has_aux=True)(NUMBERS)
    assert_close((loss, means), (4.0, np.array([0.5, 2.5, 4.0])))


# Keras asks for the weights of a layer before they exist, and again to make them.
def drawn_anew(shape, dtype):
    return tf.random.normal(shape, dtype=dtype)


BUILT_LATE = {
    "drawn": lambda: layers.Dense(1, kernel_initializer=drawn_anew),
    "regularised": lambda: keras.Sequential([layers.Dense(1, kernel_regularizer="l2")]),
}


@with_python
@pytest.mark.parametrize("layer", BUILT_LATE)
def test_layers_that_are_built_in_loss_fn(layer, mode, v):
    layer = BUILT_LATE[layer]()

    def loss_fn(x):
        return layer(x * v)[:, 0] + sum(layer.losses)

    check(mode, loss_fn, v, table()[0])


# Graphs


def test_python_control_flow_on_tensors_in_a_graph(v):
    def loss_fn(x):
        total = tf.zeros_like(x)
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 3:
                total += v * x
        return total

    loss, _ = call("graph", accumulated(loss_fn, v, 2), NUMBERS)
    assert_close(loss, (2 + 3 + 4) * 2 * 3 / 5)


def test_python_control_flow_in_what_a_function_made_in_a_graph_calls(v):
    def doubled_if_large(x):
        if tf.reduce_sum(x) > 3:
            return 2 * v * x
        return v * x

    def step(x):
        return accumulated(lambda x: (doubled_if_large(x), tf.ones([len(x)])), v, 2)(x)

    loss, _ = call("unknown size", step, NUMBERS)
    assert_close(loss, (1 + 2 * (2 + 3 + 4)) * 2 / 5)


def test_a_graph_is_traced_once(v):
    traces, steps = [], []

    def loss_fn(x):
        if not tf.executing_eagerly():  # as the check whether examples interact does
            steps.append(x.shape)
        return v * x

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def step(x):
        traces.append(1)
        return accumulated(loss_fn, v, 2)(x)

    for examples in (1, 2, 5, 8):
        loss, _ = step(tf.ones([examples], tf.float64))
        assert float(loss) == 2.0
    assert len(traces) == len(steps) == 1


# What is refused

UNFIT = [
    (lambda x: tf.reduce_mean(x, keepdims=True), "examples of the micro-batch as first"),
    (lambda x: (x, x[:, None]), r"same shape\. Received: losses of shape \(2,\).*\(2, 1\)"),
    (lambda x: (x, 1.0), r"same shape\. Received: .*weights of shape \(\)"),
    (lambda x: (tf.reduce_mean(x), x), r"same shape\. Received: losses of shape \(\)"),
    (lambda x: (x, x, x), "loss_fn must return losses with the examples first.*has_aux=True"),
    (lambda x: None, "loss_fn must return losses with the examples first"),
    (lambda x: tf.cast(x, tf.int32), "floating-point dtype. Received: losses of dtype int32"),
    (lambda x: {"loss": x}, r"loss_fn must return losses.*Received: {loss: "),
]


@pytest.mark.parametrize(("returned", "message"), UNFIT)
@with_python
def test_losses_that_do_not_fit(mode, returned, message, v):
    with pytest.raises(ValueError, match=message):
        call(mode, accumulated(lambda x: returned(v * x), v, 2), tf.range(6, dtype=tf.float64))


UNFIT_WHEN_RUN = [
    ("unknown size", lambda x: tf.boolean_mask(x, x > 3), "losses for another number"),
    ("unknown size", lambda x: (x, tf.boolean_mask(x, x > 3)), "of the same shape"),
    ("compiled, unknown size", lambda x: (x, x[:1]), None),  # weights that broadcast
]


@pytest.mark.parametrize(("mode", "returned", "message"), UNFIT_WHEN_RUN)
def test_losses_that_do_not_fit_in_a_graph_that_knows_no_sizes(mode, returned, message, v):
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        call(mode, accumulated(lambda x: returned(v * x), v, 2), NUMBERS)


@with_python
@pytest.mark.parametrize(
    ("scalar", "weight"),
    [(True, np.inf), (True, np.nan), (True, -1.0), (False, np.inf), (False, np.nan)],
)
def test_weights_that_cannot_be_are_refused(mode, scalar, weight, v):
    def loss_fn(x):
        if scalar:
            return tf.reduce_mean(v * x), weight
        return v * x, tf.where(x > 2, tf.constant(weight, tf.float64), 1.0)

    message = "finite number, 0 or more" if scalar else "weights of losses must be finite"
    error = ValueError if mode == "eager" else tf.errors.InvalidArgumentError
    with pytest.raises(error, match=message):
        call(mode, accumulated(loss_fn, v, 2), NUMBERS)


SIX = tf.range(6, dtype=tf.float64)
RAGGED = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]], dtype=tf.float64)


def of_unknown_rank(x):
    return tf.py_function(lambda x: x, [x], tf.float64)


REFUSED = [
    ({"loss_fn": 3}, r"loss_fn must be a function.*Received: loss_fn=3"),
    (
        {"loss_fn": lambda x, y: x, "batch": (SIX, SIX)},
        r"one argument.*x, y = micro_batch.*of \(x, y\)",
    ),
    ({"variables": [SIX]}, r"variables must be a nest of variables.*EagerTensor"),
    ({"variables": []}, r"variables is empty.*build it first"),
    ({"micro_batch_size": 0}, r"positive integer.*micro_batch_size=0"),
    ({"has_aux": True}, r"With has_aux=True.*a pair"),
    ({"batch": (SIX, SIX[:3])}, "same number of examples"),
    (
        {"batch": tf.data.Dataset.from_tensor_slices(SIX).batch(2)},
        r"Received: a tf\.data\.Dataset.*one of its elements",
    ),
    (
        {"loss_fn": lambda x: (x, tf.ones([2, 1], tf.float64)), "batch": RAGGED},
        "ragged losses, and weights of type",
    ),
    ({"loss_fn": lambda x: (x, tf.ones_like(x)[:, :1]), "batch": RAGGED}, "same shape"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_wrong_arguments(changed, message, v):
    arguments = {"variables": v, "batch": SIX, "micro_batch_size": 2, **changed}
    arguments.setdefault("loss_fn", lambda x: v * tf.nest.flatten(x)[0])
    with pytest.raises(ValueError, match=message):
        value_and_gradients(**arguments)


def test_ragged_weights(v):
    loss, _ = accumulated(lambda r: (v * r, r), v, 2)(RAGGED)
    assert_close(loss, 2 * 30 / 10)


@pytest.mark.parametrize(
    ("returned", "message", "has_aux"),
    [
        (of_unknown_rank, r"known rank.*set_shape", False),
        (lambda x: (x, of_unknown_rank(x)), r"known ranks.*set_shape", True),
    ],
)
def test_tensors_of_unknown_rank(returned, message, has_aux, v):
    with pytest.raises(ValueError, match=message):
        call("graph", accumulated(lambda x: returned(v * x), v, 2, has_aux=has_aux), SIX)


def test_a_layer_that_writes_a_trained_variable():
    layer = layers.SpectralNormalization(layers.Dense(2))
    layer(tf.ones([1, 3]))
    step = accumulated(lambda x: layer(x, training=True), layer.trainable_variables, 2)
    with pytest.raises(ValueError, match="must not write a trained variable"):
        step(tf.ones([4, 3], tf.float64))

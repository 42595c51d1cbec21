"""value_and_gradients against a tape over the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from keras import layers
from support import thorough_for

import macrobatch
from macrobatch import value_and_gradients

MODES = ["eager", "graph", "unknown size", "compiled", "compiled, unknown size"]


def call(mode, function, batch):
    """Calls a function of a batch: eagerly, in a graph that may know its size, or compiled."""
    if mode == "eager":
        return function(batch)
    signature = None
    if "unknown" in mode:
        signature = [tf.nest.map_structure(_unknown_size, batch)]
    return tf.function(function, signature, jit_compile="compiled" in mode)(batch)


def _unknown_size(tensor):
    if tf.is_tensor(tensor) and not isinstance(tensor, tf.Tensor):
        return tf.type_spec_from_value(tensor)
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


def dense(gradient):
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def assert_close(actual, expected, tolerance=1e-10):
    for a, b in zip(tf.nest.flatten(actual), tf.nest.flatten(expected)):
        if a is None or b is None:
            assert a is b
        else:
            np.testing.assert_allclose(dense(a), dense(b), rtol=tolerance, atol=tolerance)


def data(examples=7, tokens=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=[examples, tokens, 3])
    y = rng.normal(size=[examples, tokens])
    weights = rng.uniform(size=[examples, tokens]) * rng.integers(0, 2, [examples, tokens])
    weights[0, 0] = 1.0
    return tuple(tf.constant(t) for t in (x, y, weights))


def linear():
    return [tf.Variable(np.linspace(-1, 1, 3)), tf.Variable(0.5, dtype=tf.float64)]


def token_losses(variables, x, y):
    kernel, bias = variables
    return (tf.linalg.matvec(x, kernel) + bias - y) ** 2


# What loss_fn returns for a micro-batch, and the loss of the whole batch that it stands for.
FORMS = {
    "losses": (lambda losses, _: losses, lambda losses, _: tf.reduce_mean(losses)),
    "losses per example": (
        lambda losses, _: tf.reduce_sum(losses, 1),
        lambda losses, _: tf.reduce_mean(tf.reduce_sum(losses, 1)),
    ),
    "losses and weights": (
        lambda losses, weights: (losses, weights),
        lambda losses, weights: tf.reduce_sum(losses * weights) / tf.reduce_sum(weights),
    ),
    "scalar": (lambda losses, _: tf.reduce_mean(losses), lambda losses, _: tf.reduce_mean(losses)),
    "scalar and weight": (
        lambda losses, weights: (
            tf.reduce_sum(losses * weights) / tf.reduce_sum(weights),  # may be 0 / 0
            tf.reduce_sum(weights),
        ),
        lambda losses, weights: tf.reduce_sum(losses * weights) / tf.reduce_sum(weights),
    ),
}


def check_form(form, mode, micro_batch_size, batch):
    returned, whole = FORMS[form]
    variables = linear()

    def loss_fn(micro_batch):
        x, y, weights = micro_batch
        return returned(token_losses(variables, x, y), weights)

    def accumulated(batch):
        return value_and_gradients(loss_fn, variables, batch, micro_batch_size=micro_batch_size)

    with tf.GradientTape() as tape:
        expected = whole(token_losses(variables, *batch[:2]), batch[2])
    assert_close(call(mode, accumulated, batch), (expected, tape.gradient(expected, variables)))


@thorough_for(
    "losses and weights-compiled",
    "losses and weights-compiled, unknown size",
    "losses per example-compiled",
    "losses per example-compiled, unknown size",
    "losses-compiled",
    "losses-compiled, unknown size",
    "scalar and weight-compiled",
    "scalar and weight-compiled, unknown size",
    "scalar-compiled",
    "scalar-compiled, unknown size",
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_loss(form, mode):
    check_form(form, mode, 3, data())


@thorough_for("1-compiled", "9-compiled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch_size", [1, 7, 9])
def test_each_size(micro_batch_size, mode):
    """One by one, the batch at once, and more than there are."""
    check_form("losses and weights", mode, micro_batch_size, data())


@settings(max_examples=25, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    mode=st.sampled_from(["eager", "graph"]),
    examples=st.integers(1, 9),
    tokens=st.integers(1, 4),
    micro_batch_size=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_any_batch(form, mode, examples, tokens, micro_batch_size, seed):
    check_form(form, mode, micro_batch_size, data(examples, tokens, seed))


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_a_batch_without_any_weight_is_0(mode):
    x, y, weights = data()
    variables = linear()
    returned, _ = FORMS["scalar and weight"]

    def accumulated(batch):
        return value_and_gradients(
            lambda b: returned(token_losses(variables, *b[:2]), b[2]),
            variables,
            batch,
            micro_batch_size=3,
        )

    assert_close(call(mode, accumulated, (x, y, 0 * weights)), (0.0, [np.zeros(3), np.zeros([])]))


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
@pytest.mark.parametrize("start", [0, 3])
def test_a_micro_batch_without_any_weight_does_not_count(start, mode):
    """Its scalar is 0 / 0, and so are the gradients of it."""
    x, y, weights = data()
    there = np.ones_like(weights)
    there[start : start + 3] = 0
    check_form("scalar and weight", mode, 3, (x, y, weights * there))


@thorough_for("compiled", "eager-Adam", "graph-Adam")
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [("eager", "SGD"), ("eager", "Adam"), ("graph", "Adam"), ("compiled", "Adam")],
)
def test_the_textbook_loop(mode, optimizer):
    def model():
        keras.utils.set_random_seed(1)
        regularizer = keras.regularizers.L2(0.01)
        hidden = layers.Dense(5, "tanh", kernel_regularizer=regularizer)
        return keras.Sequential([keras.Input([4, 3]), hidden, layers.Dense(1)])

    mse = keras.losses.MeanSquaredError(reduction=None)
    plain, accumulated = model(), model()
    textbook, ours = (getattr(keras.optimizers, optimizer)(0.1) for _ in range(2))
    weights = accumulated.trainable_variables

    def loss_fn(micro_batch):
        x, y = micro_batch
        return mse(y[..., None], accumulated(x, training=True)) + sum(accumulated.losses)

    def step(batch):
        loss, gradients = value_and_gradients(loss_fn, weights, batch, micro_batch_size=3)
        ours.apply(gradients, weights)
        return loss

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for seed, examples in enumerate([8, 8, 5, 8]):  # a smaller batch among them
        x, y, _ = data(examples, seed=seed)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mse(y[..., None], plain(x, training=True))) + sum(plain.losses)
        textbook.apply(tape.gradient(loss, plain.trainable_variables), plain.trainable_variables)
        assert_close(step((x, y)), loss)
        assert_close(accumulated.variables, plain.variables)
    assert_close(ours.variables, textbook.variables)


def test_nests_of_batches_variables_and_aux():
    x, y, _ = data()
    variables = {"kernel": tf.Variable(np.ones(3)), "rest": (tf.Variable(0.5, dtype=tf.float64),)}
    seen = []

    def loss_fn(micro_batch):
        seen.append(set(micro_batch))
        prediction = tf.linalg.matvec(micro_batch["x"], variables["kernel"])
        prediction += variables["rest"][0]
        losses = (prediction - micro_batch["labels"][0]) ** 2
        aux = {"prediction": prediction, "of": (tf.reduce_max(losses), None, 3)}
        return losses, aux

    def accumulated(batch):
        return value_and_gradients(loss_fn, variables, batch, micro_batch_size=3, has_aux=True)

    batch = {"x": x, "labels": [y], "nothing": None}
    results = [call(mode, accumulated, batch) for mode in ("eager", "graph")]
    with tf.GradientTape() as tape:
        losses, aux = loss_fn(batch)
        loss = tf.reduce_mean(losses)
    expected = tape.gradient(loss, variables)
    for (value, got), gradients in results:
        assert_close((value, gradients), (loss, expected))
        assert isinstance(gradients["rest"], tuple)
        assert_close(got["prediction"], aux["prediction"])
        greatest, nothing, three = got["of"]
        each = [tf.reduce_max(losses[start : start + 3]) for start in (0, 3, 6)]
        assert_close(greatest, tf.stack(each))
        assert nothing is None
        np.testing.assert_array_equal(three, [3, 3, 3])
    assert all(keys == {"x", "labels", "nothing"} for keys in seen)


@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_one_variable_is_a_nest(mode):
    v = tf.Variable(2.0, dtype=tf.float64)
    x = tf.range(5.0)
    loss, gradient = call(
        mode,
        lambda x: value_and_gradients(
            lambda part: v * tf.cast(part, tf.float64), v, x, micro_batch_size=2
        ),
        x,
    )
    assert (float(loss), float(gradient)) == (4.0, 2.0)


@thorough_for("graph", "unknown size")
@pytest.mark.parametrize("mode", ["eager", "graph", "unknown size"])
def test_ragged_and_sparse_batches(mode):
    rows = [[1.0], [2.0, 3.0], [], [4.0, 5.0, 6.0], [7.0]]
    ragged = tf.ragged.constant(rows, dtype=tf.float64)
    sparse = ragged.to_sparse()
    v = tf.Variable(2.0, dtype=tf.float64)

    def accumulated(batch):
        return value_and_gradients(loss_fn, v, batch, micro_batch_size=2, has_aux=True)

    def loss_fn(micro_batch):
        ragged, sparse = micro_batch
        sums = tf.sparse.reduce_sum(sparse, axis=1)
        sums.set_shape([None])
        return (v * ragged) ** 2 + sums[:, None], ragged  # as many losses as there are numbers

    (loss, aux), gradient = call(mode, accumulated, (ragged, sparse))
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

    def accumulated(batch):
        return value_and_gradients(loss_fn, v, batch, micro_batch_size=size, has_aux=True)

    (_, aux), _ = call(mode, accumulated, batch)
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


def test_aux_of_all_runs():
    """Compiled, full micro-batches and the tail are two runs."""
    v, x = tf.Variable(2.0, dtype=tf.float64), tf.range(7, dtype=tf.float64)

    def accumulated(x):
        def loss_fn(x):
            return v * x, {"each": x * 2, "count": tf.size(x), "empty": tf.zeros([tf.size(x), 0])}

        return value_and_gradients(loss_fn, v, x, micro_batch_size=3, has_aux=True)

    (_, aux), _ = call("compiled", accumulated, x)
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

    @tf.function(input_signature=[specs])
    def accumulated(batch):
        return value_and_gradients(loss_fn, v, batch, micro_batch_size=3)

    loss, _ = accumulated(batch)
    assert_close(loss, tf.reduce_mean(batch["dense"][:, 0]), 1e-6)
    assert None not in seen
    short = tf.ragged.constant([[1], [2]], dtype=tf.int32)
    with pytest.raises(tf.errors.InvalidArgumentError, match="same number of examples"):
        accumulated({**batch, "ragged": short})


@pytest.mark.parametrize("mode", ["eager", "graph", "unknown size", "compiled"])
def test_absent_and_sparse_gradients(mode):
    table = tf.Variable(np.arange(12.0).reshape(6, 2))
    unused = tf.Variable(1.0, dtype=tf.float64)
    tokens = tf.constant([[0, 1], [1, 1], [5, 0], [1, 5], [5, 5]])

    def loss_fn(tokens):
        return tf.reduce_sum(tf.gather(table, tokens) ** 2, -1)

    def accumulated(batch):
        return value_and_gradients(loss_fn, [table, unused], batch, micro_batch_size=2)

    if mode == "compiled":
        loss, (rows, absent) = call(mode, accumulated, tokens)
    else:
        loss, (rows, absent) = call(mode, accumulated, tokens)
        assert isinstance(rows, tf.IndexedSlices)
        assert sorted(rows.indices.numpy()) == [0, 1, 5]  # each row once
    assert absent is None
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(loss_fn(tokens))
    assert_close((loss, rows), (expected, tape.gradient(expected, table)))


def normalized_model(dropout=0.5):
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input([3]),
            layers.Dropout(dropout),
            layers.BatchNormalization(momentum=0.9),
            layers.Dense(1),
        ]
    )


@thorough_for("compiled", "graph")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_seeds_and_moving_statistics_are_those_of_fit(mode):
    fitted, looped = normalized_model(), normalized_model()
    x, y, _ = data(8)
    x, y = x[:, 0], y[:, :1]
    how = {"eager": {"run_eagerly": True}, "compiled": {"jit_compile": True}}.get(mode, {})
    fitted.compile(keras.optimizers.SGD(0.1), "mse", **how)
    macrobatch.accumulate(fitted, 3)
    fitted.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    optimizer = keras.optimizers.SGD(0.1)
    mse = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        loss, gradients = value_and_gradients(
            lambda b: mse(b[1], looped(b[0], training=True)),
            looped.trainable_variables,
            batch,
            micro_batch_size=3,
        )
        optimizer.apply(gradients, looped.trainable_variables)
        return loss

    if mode != "eager":
        step = tf.function(step, jit_compile=mode == "compiled")
    for _ in range(3):
        step((x, y))
    assert_close(looped.variables, fitted.variables)


def test_moving_statistics_are_those_of_the_whole_batch():
    plain, accumulated = normalized_model(0.0), normalized_model(0.0)
    x = data(8)[0][:, 0]
    plain(x, training=True)
    with pytest.warns(macrobatch.ExactnessWarning, match="BatchNormalization normalises") as caught:
        for _ in range(2):  # warned of once
            value_and_gradients(
                lambda x: accumulated(x, training=True),
                accumulated.trainable_variables,
                x,
                micro_batch_size=3,
            )
    plain(x, training=True)
    assert len(caught) == 1
    assert_close(accumulated.non_trainable_variables, plain.non_trainable_variables)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_fails_has_changed_nothing(where, mode):
    model = normalized_model()
    x = tf.concat([data(8)[0][:, 0], [[np.inf] * 3]], 0)  # in the last micro-batch
    before = [np.array(v) for v in model.variables]

    def finite(x, value):
        check = tf.debugging.Assert(tf.reduce_all(tf.math.is_finite(x)), ["not finite"])
        with tf.control_dependencies([] if check is None else [check]):
            return tf.identity(value)

    def loss_fn(x):
        @tf.custom_gradient
        def checked(value):
            if where == "forward":
                return finite(x, value), lambda upstream: upstream
            return tf.identity(value), lambda upstream: finite(x, upstream)

        return checked(model(tf.where(tf.math.is_finite(x), x, 0.0), training=True))

    def accumulated(x):
        return value_and_gradients(loss_fn, model.trainable_variables, x, micro_batch_size=3)

    with pytest.raises(tf.errors.InvalidArgumentError, match="not finite"):
        call(mode, accumulated, x)
    assert_close(model.variables, before, 0)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_metrics_of_keras_count_every_micro_batch_once(mode):
    metric = keras.metrics.Mean()
    v = tf.Variable(2.0, dtype=tf.float64)

    def loss_fn(x):
        metric.update_state(x)
        return v * x

    call(
        mode,
        lambda x: value_and_gradients(loss_fn, v, x, micro_batch_size=2)[0],
        tf.range(5, dtype=tf.float64),
    )
    assert float(metric.result()) == 2.0
    assert float(metric.count) == 5


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_other_variables_are_written_once_per_micro_batch(mode):
    v, counter = tf.Variable(2.0, dtype=tf.float64), tf.Variable(0)

    def loss_fn(x):
        counter.assign_add(1)
        return v * x

    call(
        mode,
        lambda x: value_and_gradients(loss_fn, v, x, micro_batch_size=2)[0],
        tf.range(5, dtype=tf.float64),
    )
    assert int(counter) == 3


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_layers_that_are_built_in_loss_fn(mode):
    v = tf.Variable(2.0, dtype=tf.float64)

    # Keras asks for the weights of a layer before they exist, and again to make them.
    def drawn_anew(shape, dtype):
        return tf.random.normal(shape, dtype=dtype)

    teacher = layers.Dense(1, kernel_initializer=drawn_anew)
    x = data()[0][:, 0]

    def accumulated(x):
        return value_and_gradients(
            lambda x: v * teacher(x)[:, 0], v, x, micro_batch_size=3, has_aux=False
        )

    _, gradient = call(mode, accumulated, x)
    assert_close(gradient, tf.reduce_mean(teacher(x)))


def test_a_metric_that_is_made_in_every_call():
    v = tf.Variable(2.0, dtype=tf.float64)

    def loss_fn(x):
        mean = keras.metrics.Mean()
        mean.update_state(x)
        return v * x, mean.result()

    x = tf.range(5, dtype=tf.float64)
    (loss, means), _ = value_and_gradients(loss_fn, v, x, micro_batch_size=2, has_aux=True)
    assert_close((loss, means), (4.0, np.array([0.5, 2.5, 4.0])))


def test_python_control_flow_on_tensors_in_a_graph():
    v = tf.Variable(2.0, dtype=tf.float64)

    def loss_fn(x):
        total = tf.zeros_like(x)
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 3:
                total += v * x
        return total

    @tf.function
    def accumulated(x):
        return value_and_gradients(loss_fn, v, x, micro_batch_size=2)

    loss, _ = accumulated(tf.range(5, dtype=tf.float64))
    assert_close(loss, (2 + 3 + 4) * 2 * 3 / 5)


def test_python_control_flow_in_what_a_function_made_in_a_graph_calls():
    v = tf.Variable(2.0, dtype=tf.float64)

    def doubled_if_large(x):
        if tf.reduce_sum(x) > 3:
            return 2 * v * x
        return v * x

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def accumulated(x):
        return value_and_gradients(
            lambda x: (doubled_if_large(x), tf.ones([len(x)])), v, x, micro_batch_size=2
        )

    loss, _ = accumulated(tf.range(5, dtype=tf.float64))
    assert_close(loss, (1 + 2 * (2 + 3 + 4)) * 2 / 5)


def test_a_graph_is_traced_once():
    v = tf.Variable(2.0, dtype=tf.float64)
    traces, steps = [], []

    def loss_fn(x):
        if not tf.executing_eagerly():  # as the check whether examples interact does
            steps.append(x.shape)
        return v * x

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def accumulated(x):
        traces.append(1)
        return value_and_gradients(loss_fn, v, x, micro_batch_size=2)

    for examples in (1, 2, 5, 8):
        loss, _ = accumulated(tf.ones([examples], tf.float64))
        assert float(loss) == 2.0
    assert len(traces) == len(steps) == 1


class Linear(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(np.linspace(-1, 1, 3)[:, None])

    def __call__(self, x):
        return x @ self.kernel


def test_modules():
    model, x = Linear(), data()[0][:, 0]
    loss, (gradient,) = value_and_gradients(
        lambda x: model(x) ** 2, model.trainable_variables, x, micro_batch_size=3
    )
    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(model(x) ** 2)
    assert_close((loss, gradient), (expected, tape.gradient(expected, model.kernel)))


@thorough_for("compiled")
@pytest.mark.parametrize("mode", ["eager", "graph", "compiled"])
def test_tf_keras(mode):
    tf_keras = pytest.importorskip("tf_keras")
    model = tf_keras.Sequential(
        [tf_keras.layers.Dense(4, "tanh"), tf_keras.layers.Dense(1, kernel_regularizer="l2")]
    )
    x, y, _ = data()
    x, y = tf.cast(x[:, 0], tf.float32), tf.cast(y[:, :1], tf.float32)
    model(x)

    def loss_fn(micro_batch):
        x, y = micro_batch
        return tf_keras.losses.mse(y, model(x, training=True)) + sum(model.losses)

    def accumulated(batch):
        return value_and_gradients(loss_fn, model.trainable_variables, batch, micro_batch_size=3)

    with tf.GradientTape() as tape:
        expected = tf.reduce_mean(loss_fn((x, y)))
    gradients = tape.gradient(expected, model.trainable_variables)
    assert_close(call(mode, accumulated, (x, y)), (expected, gradients), 1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_loss_scaling(mode):
    def model():
        keras.utils.set_random_seed(1)
        hidden = layers.Dense(16, "tanh", dtype="mixed_float16")
        return keras.Sequential([keras.Input([3]), hidden, layers.Dense(1, dtype="float32")])

    mse = keras.losses.MeanSquaredError(reduction=None, dtype="float32")
    x, y, _ = data(32)
    x, y = tf.cast(x[:, 0], tf.float32), tf.cast(y[:, :1], tf.float32)
    plain, accumulated = model(), model()
    optimizers = [
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**15)
        for _ in range(2)
    ]
    for optimizer, each in zip(optimizers, (plain, accumulated)):
        optimizer.build(each.trainable_variables)

    def step(batch):
        _, gradients = value_and_gradients(
            lambda b: optimizers[1].scale_loss(mse(b[1], accumulated(b[0]))),
            accumulated.trainable_variables,
            batch,
            micro_batch_size=4,
        )
        optimizers[1].apply(gradients, accumulated.trainable_variables)
        return gradients

    step = step if mode == "eager" else tf.function(step)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = optimizers[0].scale_loss(tf.reduce_mean(mse(y, plain(x))))
        gradients = tape.gradient(loss, plain.trainable_variables)
        optimizers[0].apply(gradients, plain.trainable_variables)
        for ours, whole in zip(step((x, y)), gradients):
            np.testing.assert_allclose(ours, whole, rtol=0.02, atol=0.002 * np.abs(whole).max())
    # No step was skipped for an overflow that the whole batch would not have had.
    assert_close(optimizers[1].dynamic_scale, optimizers[0].dynamic_scale)
    assert_close(optimizers[1].iterations, optimizers[0].iterations)
    assert int(optimizers[1].iterations) == 3


def test_gradients_have_the_dtype_of_their_variables():
    v = tf.Variable(2.0, dtype=tf.float16)
    x = tf.constant(np.full([2048], 60.0), tf.float16)  # their sum is no float16
    loss, gradient = value_and_gradients(lambda x: v * x, v, x, micro_batch_size=1024)
    assert (loss.dtype, gradient.dtype) == (tf.float32, tf.float16)
    assert (float(loss), float(gradient)) == (120.0, 60.0)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: tf.reduce_mean(x, keepdims=True), "examples of the micro-batch as first"),
        (lambda x: (x, x[:, None]), r"same shape\. Received: losses of shape \(2,\).*\(2, 1\)"),
        (lambda x: (x, 1.0), r"same shape\. Received: .*weights of shape \(\)"),
        (lambda x: (tf.reduce_mean(x), x), r"same shape\. Received: losses of shape \(\)"),
        (lambda x: (x, x, x), "loss_fn must return losses with the examples first.*has_aux=True"),
        (lambda x: None, "loss_fn must return losses with the examples first"),
        (lambda x: tf.cast(x, tf.int32), "floating-point dtype. Received: losses of dtype int32"),
    ],
)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_losses_that_do_not_fit(mode, returned, message):
    v = tf.Variable(2.0, dtype=tf.float64)

    def accumulated(x):
        return value_and_gradients(lambda x: returned(v * x), v, x, micro_batch_size=2)

    with pytest.raises(ValueError, match=message):
        call(mode, accumulated, tf.range(6, dtype=tf.float64))


def test_losses_that_do_not_fit_in_a_graph_that_knows_no_sizes():
    v = tf.Variable(2.0, dtype=tf.float64)

    def of(returned):
        def accumulated(x):
            return value_and_gradients(lambda x: returned(v * x), v, x, micro_batch_size=2)

        return call("unknown size", accumulated, tf.range(5, dtype=tf.float64))

    with pytest.raises(tf.errors.InvalidArgumentError, match="losses for another number"):
        of(lambda x: tf.boolean_mask(x, x > 3))
    with pytest.raises(tf.errors.InvalidArgumentError, match="of the same shape"):
        of(lambda x: (x, tf.boolean_mask(x, x > 3)))


def test_wrong_arguments():
    v, x = tf.Variable(2.0), tf.range(6.0)
    with pytest.raises(ValueError, match=r"loss_fn must be a function.*Received: loss_fn=3"):
        value_and_gradients(3, v, x, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"one argument.*x, y = micro_batch.*of \(x, y\)"):
        value_and_gradients(lambda x, y: x, v, (x, x), micro_batch_size=2)
    with pytest.raises(ValueError, match=r"variables must be a nest of variables.*EagerTensor"):
        value_and_gradients(lambda x: x, [v, tf.ones([])], x, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"positive integer.*micro_batch_size=0"):
        value_and_gradients(lambda x: x, v, x, micro_batch_size=0)
    with pytest.raises(ValueError, match=r"With has_aux=True.*a pair"):
        value_and_gradients(lambda x: v * x, v, x, micro_batch_size=2, has_aux=True)
    with pytest.raises(ValueError, match="same number of examples"):
        value_and_gradients(lambda b: v * b[0], v, (x, x[:3]), micro_batch_size=2)


def test_a_layer_that_writes_a_trained_variable():
    layer = layers.SpectralNormalization(layers.Dense(2))
    layer(tf.ones([1, 3]))
    with pytest.raises(ValueError, match="must not write a trained variable"):
        value_and_gradients(
            lambda x: layer(x, training=True),
            layer.trainable_variables,
            tf.ones([4, 3], tf.float64),
            micro_batch_size=2,
        )


def test_in_a_train_step_of_a_model():
    """What the error for models with a train_step of their own recommends."""

    class Model(keras.Model):
        def train_step(self, batch):
            loss, gradients = value_and_gradients(
                lambda b: mse(b[1], self(b[0], training=True)),
                self.trainable_variables,
                batch,
                micro_batch_size=3,
            )
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": loss}

    mse = keras.losses.MeanSquaredError(reduction=None)
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


@thorough_for("unknown size", "scalar and weight-compiled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["losses and weights", "scalar and weight"])
def test_weights_that_are_learned(form, mode):
    x, y, _ = data(7)
    variables = linear()

    def parts(x, y):
        losses = token_losses(variables, x, y)
        return losses, tf.exp(-losses * variables[1])

    def loss_fn(micro_batch):
        return FORMS[form][0](*parts(*micro_batch))

    def accumulated(batch):
        return value_and_gradients(loss_fn, variables, batch, micro_batch_size=3)

    with tf.GradientTape() as tape:
        expected = FORMS[form][1](*parts(x, y))
    assert_close(call(mode, accumulated, (x, y)), (expected, tape.gradient(expected, variables)))


def test_weights_beyond_the_range_of_float32():
    v = tf.Variable(2.0, dtype=tf.float64)
    x = tf.range(1, 6, dtype=tf.float64)
    loss, gradient = value_and_gradients(
        lambda x: (v * tf.reduce_mean(x), 1e60 * tf.cast(tf.size(x), tf.float64)),
        v,
        x,
        micro_batch_size=2,
    )
    assert_close((loss, gradient), (6.0, 3.0))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_regularised_layer_that_is_built_in_loss_fn(mode):
    w = tf.Variable(2.0, dtype=tf.float64)
    net = keras.Sequential([layers.Dense(1, kernel_regularizer="l2")])
    x = data()[0][:, 0]

    def loss_fn(x):
        return net(x * w)[:, 0] + sum(net.losses)

    loss, _ = call(mode, lambda x: value_and_gradients(loss_fn, w, x, micro_batch_size=3), x)
    assert_close(loss, tf.reduce_mean(loss_fn(x)))


def test_nothing_to_train():
    with pytest.raises(ValueError, match=r"variables is empty.*build it first"):
        value_and_gradients(lambda x: x, [], tf.range(3.0), micro_batch_size=2)


def test_things_that_are_no_batch_and_no_losses():
    v, x = tf.Variable(2.0), tf.range(6.0)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(2)
    with pytest.raises(ValueError, match=r"Received: a tf\.data\.Dataset.*one of its elements"):
        value_and_gradients(lambda x: v * x, v, dataset, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"loss_fn must return losses.*Received: {loss: "):
        value_and_gradients(lambda x: {"loss": v * x}, v, x, micro_batch_size=2)

    def of_unknown_rank(x):
        return tf.py_function(lambda x: x, [v * x], tf.float32)

    @tf.function
    def losses(x):
        return value_and_gradients(of_unknown_rank, v, x, micro_batch_size=2)

    @tf.function
    def aux(x):
        return value_and_gradients(
            lambda x: (v * x, of_unknown_rank(x)), v, x, micro_batch_size=2, has_aux=True
        )

    with pytest.raises(ValueError, match=r"known rank.*set_shape"):
        losses(x)
    with pytest.raises(ValueError, match=r"known ranks.*set_shape"):
        aux(x)


def test_weights_that_broadcast_are_refused_everywhere():
    v = tf.Variable(2.0, dtype=tf.float64)
    x = tf.range(6, dtype=tf.float64)

    def broadcast(x):
        return value_and_gradients(lambda x: (v * x, x[:1]), v, x, micro_batch_size=2)

    with pytest.raises(tf.errors.InvalidArgumentError):
        call("compiled, unknown size", broadcast, x)
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0]], dtype=tf.float64)
    with pytest.raises(ValueError, match="ragged losses, and weights of type"):
        value_and_gradients(
            lambda r: (v * r, tf.ones([2, 1], tf.float64)), v, ragged, micro_batch_size=2
        )
    with pytest.raises(ValueError, match="same shape"):
        value_and_gradients(
            lambda r: (v * r, tf.ones_like(r)[:, :1]), v, ragged, micro_batch_size=2
        )
    loss, _ = value_and_gradients(lambda r: (v * r, r), v, ragged, micro_batch_size=2)
    assert_close(loss, 2 * 30 / 10)

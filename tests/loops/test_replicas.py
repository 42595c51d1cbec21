"""Two replicas end where one device ends on the whole batch."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import thorough_for
from test_accumulator_everywhere import mirrored
from test_value_and_gradients import FORMS, assert_close, data, dense

import macrobatch
from macrobatch import value_and_gradients


def on_replicas(function, batch, sizes, graph=True):
    """Calls a function on two replicas, each with its part of the batch."""
    strategy = mirrored(2)
    starts = np.cumsum([0, *sizes])
    parts = [
        tf.nest.map_structure(lambda t, a=a, b=b: t[a:b], batch) for a, b in zip(starts, starts[1:])
    ]
    distributed = tf.nest.map_structure(
        lambda *values: strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        ),
        *parts,
    )

    results = (_in_graph(function) if graph else _run(function))(distributed)
    return tf.nest.map_structure(strategy.experimental_local_results, results)


def _run(function):
    return lambda batch: mirrored(2).run(function, args=(batch,))


@functools.lru_cache(maxsize=1)
def _in_graph(function):
    """Kept for the next call of the same function: it is traced once."""
    return tf.function(_run(function))


@pytest.fixture
def strategy():
    return mirrored(2)


def made_in(strategy, build):
    with strategy.scope():
        return build()


def linear():
    return [tf.Variable(np.linspace(-1, 1, 3)), tf.Variable(0.5, dtype=tf.float64)]


# All forms at one pair of sizes, one form at all of them.
FORMS_IN_GRAPHS = [(form, (6, 2), True) for form in FORMS]
SIZES_IN_GRAPHS = [("losses and weights", sizes, True) for sizes in [(1, 7), (8, 0)]]
EAGERLY = [("losses and weights", (6, 2), False), ("losses", (8, 0), False)]  # which is slow


@pytest.mark.parametrize(("form", "sizes", "graph"), [*FORMS_IN_GRAPHS, *SIZES_IN_GRAPHS, *EAGERLY])
def test_the_loss_is_whole_and_gradients_sum_to_the_whole(form, sizes, graph, strategy):
    kernel, bias = made_in(strategy, linear)
    batch = data(8)

    def losses_of(x, y):
        return (tf.linalg.matvec(x, kernel) + bias - y) ** 2

    def loss_fn(micro_batch):
        x, y, weights = micro_batch
        return FORMS[form][0](losses_of(x, y), weights)

    def function(batch):
        loss, (a, b) = value_and_gradients(loss_fn, [kernel, bias], batch, micro_batch_size=3)
        return loss, a, b

    losses, kernels, biases = on_replicas(function, batch, sizes, graph)
    plain = linear()
    with tf.GradientTape() as tape:
        values = (tf.linalg.matvec(batch[0], plain[0]) + plain[1] - batch[1]) ** 2
        expected = FORMS[form][1](values, batch[2])
    gradients = tape.gradient(expected, plain)
    assert_close(list(losses), [expected, expected])
    assert_close([tf.add_n(list(kernels)), tf.add_n(list(biases))], gradients)


def model():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input([3], dtype="int64"),
            layers.Embedding(9, 4),
            layers.Flatten(),
            layers.Dense(1, kernel_regularizer="l2"),
        ]
    )


@thorough_for("sizes0")
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0)])
def test_updates_of_keras(sizes, strategy):
    plain, textbook = model(), keras.optimizers.Adam(0.1)
    replicated, optimizer = made_in(strategy, lambda: (model(), keras.optimizers.Adam(0.1)))
    made_in(strategy, lambda: optimizer.build(replicated.trainable_variables))
    mse = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        def loss_fn(micro_batch):
            x, y = micro_batch
            return mse(y, replicated(x, training=True)) + sum(replicated.losses)

        loss, gradients = value_and_gradients(
            loss_fn, replicated.trainable_variables, batch, micro_batch_size=2
        )
        # Keras takes rows that come from several replicas for different ones.
        gradients = [dense(gradient) for gradient in gradients]
        optimizer.apply(gradients, replicated.trainable_variables)
        return loss

    rng = np.random.default_rng(0)
    for _ in range(3):
        x = tf.constant(rng.integers(0, 9, [8, 3]))
        y = tf.constant(rng.normal(size=[8, 1]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(mse(y, plain(x, training=True))) + sum(plain.losses)
        gradients = tape.gradient(loss, plain.trainable_variables)
        textbook.apply([dense(g) for g in gradients], plain.trainable_variables)
        losses = on_replicas(step, (x, y), sizes)
        assert_close(list(losses), [loss, loss])
    for ours, whole in zip(replicated.trainable_variables, plain.trainable_variables):
        for part in strategy.experimental_local_results(ours.value):
            assert_close(part, whole)


def normalized():
    keras.utils.set_random_seed(3)
    normalization = layers.BatchNormalization(momentum=0.9)
    return keras.Sequential([keras.Input([3]), normalization, layers.Dropout(0.5)])


@thorough_for("sizes0-False", "sizes1-False")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (0, 8)])
def test_moving_statistics_are_those_of_the_whole_batch(sizes, graph, strategy):
    plain, replicated = normalized(), made_in(strategy, normalized)
    x = data(8)[0][:, 0] + 100.0
    plain(x, training=True)

    def function(x):
        loss, _ = value_and_gradients(
            lambda x: replicated(x, training=True),
            replicated.trainable_variables,
            x,
            micro_batch_size=2,
        )
        return loss

    before = [np.array(v.value.numpy()) for v in replicated.variables if "seed" in v.path]
    on_replicas(function, x, sizes, graph)
    for name in ("moving_mean", "moving_variance"):
        ours, whole = (getattr(m.layers[0], name) for m in (replicated, plain))
        for part in strategy.experimental_local_results(ours.value):
            assert_close(part, whole)
    seeds = [v.value for v in replicated.variables if "seed" in v.path]
    for seed, start in zip(seeds, before):
        parts = [part.numpy() for part in strategy.experimental_local_results(seed)]
        np.testing.assert_array_equal(parts[0], parts[1])
        assert (parts[0] != start).any()


def synchronized():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [keras.Input([3]), layers.BatchNormalization(synchronized=True), layers.Dense(1)]
    )


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@pytest.mark.parametrize("graph", [True, False])
def test_synchronized_layers(graph, strategy):
    """Each sees a micro-batch of each replica at a time: examples 0, 1, 4, 5 and 2, 3, 6, 7."""
    one, replicated = synchronized(), made_in(strategy, synchronized)
    x = data(8)[0][:, 0]

    def step(model, micro_batch_size):
        def function(x):
            loss, gradients = value_and_gradients(
                lambda x: model(x, training=True) ** 2,
                model.trainable_variables,
                x,
                micro_batch_size=micro_batch_size,
            )
            return (loss, *gradients)

        return function

    losses, *parts = on_replicas(step(replicated, 2), x, (4, 4), graph)
    loss, *gradients = step(one, 4)(tf.gather(x, [0, 1, 4, 5, 2, 3, 6, 7]))
    assert_close(list(losses), [loss, loss])
    assert_close([tf.add_n(list(each)) for each in parts], gradients)


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
def test_synchronized_layers_on_replicas_with_different_numbers_of_examples(strategy):
    replicated = made_in(strategy, synchronized)

    def function(x):
        loss, _ = value_and_gradients(
            lambda x: replicated(x, training=True),
            replicated.trainable_variables,
            x,
            micro_batch_size=2,
        )
        return loss

    with pytest.raises(ValueError, match=r"the same number of examples.*\[5, 3\] examples"):
        on_replicas(function, data(8)[0][:, 0], (5, 3))


def test_rows_of_replicas_with_different_numbers_of_examples(strategy):
    """Of 6 examples a dense sum would be the smaller one, of 1 it would not."""
    plain, (table,) = (
        tf.Variable(np.ones([9, 2])),
        made_in(strategy, lambda: [tf.Variable(np.ones([9, 2]))]),
    )
    words = tf.constant([[1, 2], [3, 3], [5, 6], [7, 8], [0, 1], [1, 1], [2, 2]])

    def function(words):
        def loss_fn(words):
            return tf.reduce_sum(tf.gather(table, words) ** 2, [1, 2])

        return value_and_gradients(loss_fn, table, words, micro_batch_size=3)[1]

    parts = on_replicas(function, words, (6, 1))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.reduce_sum(tf.gather(plain, words) ** 2, [1, 2]))
    gradient = dense(tape.gradient(loss, plain))
    assert all(isinstance(part, tf.IndexedSlices) for part in parts)
    assert_close(tf.add_n([dense(part) for part in parts]), gradient)


def test_keras_divides_a_mean_by_the_number_of_replicas(strategy):
    """Why losses inside strategy.run are to be averaged from reduction=None."""
    x = tf.ones([4, 1], tf.float64)

    def function(x):
        mean = keras.losses.MeanSquaredError()
        each = keras.losses.MeanSquaredError(reduction=None)
        return mean(0 * x, x), tf.reduce_mean(each(0 * x, x))

    means, averages = on_replicas(function, x, (2, 2))
    assert_close(list(means), [0.5, 0.5])
    assert_close(list(averages), [1.0, 1.0])


def test_variables_made_outside_of_the_scope():
    v = tf.Variable(2.0, dtype=tf.float64)

    def function(x):
        return value_and_gradients(lambda x: v * x, v, x, micro_batch_size=2)[0]

    with pytest.raises(ValueError, match="must be made in the strategy's scope"):
        on_replicas(function, tf.range(4, dtype=tf.float64), (2, 2))


def accumulator_of(strategy):
    """A table and a kernel, updated by the negative of their gradients."""
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    with strategy.scope():
        table = tf.Variable(np.zeros([4, 1]), name="table")
        kernel = tf.Variable(np.zeros([2]), name="kernel")
        accumulator = macrobatch.GradientAccumulator(optimizer, [table, kernel], reduction="sum")
    return [table, kernel], accumulator


@pytest.mark.parametrize("saved", [False, True])
def test_a_replica_that_adds_nothing_to_a_window(saved, strategy, tmp_path):
    """What it added to the window before must not count, nor be saved as if it did."""
    variables, accumulator = accumulator_of(strategy)

    def add(value, replicas):
        def on_replica():
            if tf.distribute.get_replica_context().replica_id_in_sync_group in replicas:
                row = tf.constant([[value]], tf.float64)
                rows = tf.IndexedSlices(row, tf.constant([1]), tf.constant([4, 1]))
                accumulator.add([rows, tf.constant([value, 2 * value], tf.float64)])

        strategy.run(on_replica)

    add(10.0, [0, 1])
    accumulator.apply()
    add(1.0, [0])
    if saved:
        path = tf.train.Checkpoint(accumulator=accumulator).write(str(tmp_path / "window"))
        variables, accumulator = accumulator_of(tf.distribute.get_strategy())
        tf.train.Checkpoint(accumulator=accumulator).read(path).assert_consumed()
    accumulator.apply()
    table, kernel = (variable.numpy() for variable in variables)
    np.testing.assert_array_equal(table, [[0.0], [-21.0], [0.0], [0.0]])
    np.testing.assert_array_equal(kernel, [-21.0, -42.0])

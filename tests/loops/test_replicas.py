"""Two replicas end where one device ends on the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import mirrored, thorough_for
from support.loops import (
    accumulated,
    assert_close,
    check_on_replicas,
    made_in,
    of_one_tape,
    on_replicas,
    squares_of,
    updated,
)
from test_value_and_gradients import FORMS, data, linear, loss_of, table

import macrobatch

inexact = pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")


@pytest.fixture
def strategy():
    return mirrored(2)


# All forms at one pair of sizes, one form at all of them.
FORMS_IN_GRAPHS = [(form, (6, 2), True) for form in FORMS]
SIZES_IN_GRAPHS = [("losses and weights", sizes, True) for sizes in [(1, 7), (8, 0)]]
EAGERLY = [("losses and weights", (6, 2), False), ("losses", (8, 0), False)]  # which is slow


@pytest.mark.parametrize(("form", "sizes", "graph"), [*FORMS_IN_GRAPHS, *SIZES_IN_GRAPHS, *EAGERLY])
def test_the_loss_is_whole_and_gradients_sum_to_the_whole(form, sizes, graph, strategy):
    plain, ours = linear(), made_in(strategy, linear)
    expected = of_one_tape(loss_of(form, plain), plain, data(8))
    step = accumulated(loss_of(form, ours), ours)
    check_on_replicas(step, expected, data(8), sizes, graph)


def model():
    keras.utils.set_random_seed(3)
    inner = [layers.Embedding(9, 4), layers.Flatten(), layers.Dense(1, kernel_regularizer="l2")]
    return keras.Sequential([keras.Input([3], dtype="int64"), *inner])


@thorough_for("sizes0")
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0)])
def test_updates_of_keras(sizes, strategy):
    plain, textbook = model(), keras.optimizers.Adam(0.1)
    ours, optimizer = made_in(strategy, lambda: (model(), keras.optimizers.Adam(0.1)))
    weights, plain_weights = ours.trainable_variables, plain.trainable_variables
    made_in(strategy, lambda: optimizer.build(weights))
    step = updated(accumulated(squares_of(ours), weights, 2), optimizer, weights)
    reference = updated(
        lambda batch: of_one_tape(squares_of(plain), plain_weights, batch), textbook, plain_weights
    )
    rng = np.random.default_rng(0)
    for _ in range(3):
        batch = tf.constant(rng.integers(0, 9, [8, 3])), tf.constant(rng.normal(size=[8, 1]))
        loss = reference(batch)
        assert_close(list(on_replicas(step, batch, sizes)), [loss, loss])
    for variable, whole in zip(weights, plain_weights):
        for part in strategy.experimental_local_results(variable.value):
            assert_close(part, whole)


def normalized():
    keras.utils.set_random_seed(3)
    normalization = layers.BatchNormalization(momentum=0.9)
    return keras.Sequential([keras.Input([3]), normalization, layers.Dropout(0.5)])


def training(model, size=2):
    """A step that trains what the model makes of a batch to be 0."""
    return accumulated(lambda x: model(x, training=True) ** 2, model.trainable_variables, size)


@thorough_for("sizes0-False", "sizes1-False")
@inexact
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("sizes", [(5, 3), (8, 0), (0, 8)])
def test_moving_statistics_are_those_of_the_whole_batch(sizes, graph, strategy):
    plain, ours = normalized(), made_in(strategy, normalized)
    x = table(8)[0] + 100.0
    plain(x, training=True)
    seeds = [v.value for v in ours.variables if "seed" in v.path]
    before = [np.array(seed.numpy()) for seed in seeds]
    step = training(ours)
    on_replicas(lambda x: step(x)[0], x, sizes, graph)
    for name in ("moving_mean", "moving_variance"):
        variable, whole = (getattr(m.layers[0], name) for m in (ours, plain))
        for part in strategy.experimental_local_results(variable.value):
            assert_close(part, whole)
    for seed, start in zip(seeds, before):
        parts = [part.numpy() for part in strategy.experimental_local_results(seed)]
        np.testing.assert_array_equal(parts[0], parts[1])
        assert (parts[0] != start).any()


def synchronized():
    keras.utils.set_random_seed(3)
    normalization = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input([3]), normalization, layers.Dense(1)])


@inexact
@pytest.mark.parametrize("graph", [True, False])
def test_synchronized_layers(graph, strategy):
    """Each sees a micro-batch of each replica at a time: examples 0, 1, 4, 5 and 2, 3, 6, 7."""
    one, ours = synchronized(), made_in(strategy, synchronized)
    x, _ = table(8)
    expected = training(one, 4)(tf.gather(x, [0, 1, 4, 5, 2, 3, 6, 7]))
    check_on_replicas(training(ours), expected, x, (4, 4), graph)


@inexact
def test_synchronized_layers_on_replicas_with_different_numbers_of_examples(strategy):
    step = training(made_in(strategy, synchronized))
    with pytest.raises(ValueError, match=r"the same number of examples.*\[5, 3\] examples"):
        on_replicas(lambda x: step(x)[0], table(8)[0], (5, 3))


def test_rows_of_replicas_with_different_numbers_of_examples(strategy):
    """Of 6 examples a dense sum would be the smaller one, of 1 it would not."""

    def made():
        table = tf.Variable(np.ones([9, 2]))
        return (lambda words: tf.reduce_sum(tf.gather(table, words) ** 2, [1, 2])), table

    words = tf.constant([[1, 2], [3, 3], [5, 6], [7, 8], [0, 1], [1, 1], [2, 2]])
    step = accumulated(*made_in(strategy, made))
    check_on_replicas(step, of_one_tape(*made(), words), words, (6, 1))
    parts = on_replicas(lambda words: step(words)[1], words, (6, 1))
    assert all(isinstance(part, tf.IndexedSlices) for part in parts)


def test_variables_made_outside_of_the_scope():
    v = tf.Variable(2.0, dtype=tf.float64)
    step = accumulated(lambda x: v * x, v, 2)
    with pytest.raises(ValueError, match="must be made in the strategy's scope"):
        on_replicas(lambda x: step(x)[0], tf.range(4, dtype=tf.float64), (2, 2))


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

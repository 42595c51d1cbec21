"""GradientAccumulator with Keras 3, tf_keras, compiled functions, checkpoints and replicas.

What needs no more than TensorFlow 1.14 is in test_accumulator_everywhere.py.
"""

import functools
import os
import subprocess
import sys
import textwrap
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mirrored, thorough
from support.loops import assert_close, dense, made_in, of_one_tape, on_replicas

from macrobatch import GradientAccumulator

try:
    import tf_keras
except ImportError:
    tf_keras = None
else:
    tf_keras.backend.set_floatx("float64")


ONE = tf.constant(1.0, tf.float64)
in_graphs_too = pytest.mark.parametrize("graph", [False, True])
needs_tf_keras = pytest.mark.skipif(tf_keras is None, reason="tf_keras is not installed")


def sgd_and(*values, **arguments):
    """Variables, and an accumulator that updates them with a rate of 1."""
    variables = [tf.Variable(value, dtype=tf.float64) for value in values]
    return (*variables, GradientAccumulator(keras.optimizers.SGD(1.0), variables, **arguments))


def keras_optimizers(name, module, where):
    decay = module.optimizers.schedules.PiecewiseConstantDecay
    return {
        f"{name} SGD": lambda: where.SGD(0.1, momentum=0.9),
        f"{name} Adam": lambda: where.Adam(decay([1, 2], [0.1, 0.05, 0.01])),
        f"{name} clipped": lambda: where.Adam(0.1, global_clipnorm=0.3),
    }


OPTIMIZERS = {
    **keras_optimizers("keras", keras, keras.optimizers),
    "keras AdamW with EMA": lambda: keras.optimizers.AdamW(
        0.1, weight_decay=0.1, use_ema=True, ema_momentum=0.5
    ),
}
if tf_keras:
    legacy = tf_keras.optimizers.legacy
    OPTIMIZERS.update(keras_optimizers("tf_keras", tf_keras, tf_keras.optimizers))
    OPTIMIZERS.update(keras_optimizers("tf_keras legacy", tf_keras, legacy))


def model_for(optimizer):
    module = keras if optimizer.startswith("keras") else tf_keras
    keras.utils.set_random_seed(3)
    layers = module.layers
    inner = [layers.Embedding(7, 4), layers.GlobalAveragePooling1D(), layers.Dense(5, "tanh")]
    model = module.Sequential([*inner, layers.Dense(1)])
    model(tf.zeros([1, 2], tf.int64))
    return model


def data(examples, seed=0):
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.integers(0, 7, [examples, 3]))
    return x, tf.constant(rng.normal(size=[examples, 1]))


def gradients_of(model, x, y):
    def losses(x):
        return (model(x, training=True) - y) ** 2

    return of_one_tape(losses, model.trainable_variables, x)[1]


def all_dense(gradients):
    return [dense(gradient) for gradient in gradients]


def merged(gradients):
    rows, positions = tf.unique(gradients[0].indices)
    values = tf.math.unsorted_segment_sum(gradients[0].values, positions, tf.size(rows))
    return [tf.IndexedSlices(values, rows, gradients[0].dense_shape), *gradients[1:]]


def families():
    """Each optimizer in each mode. XLA takes seconds to compile each: one stands for the rest."""
    for optimizer in OPTIMIZERS:
        quick = ["graph"] if optimizer.endswith("Adam") else ["eager"]
        quick += ["compiled"] if optimizer == next(iter(OPTIMIZERS)) else []
        for mode in ("eager", "graph", "compiled"):
            marks = [] if mode in quick else pytest.mark.thorough
            yield pytest.param(optimizer, mode, marks=marks)


@pytest.mark.parametrize(("optimizer", "mode"), list(families()))
def test_each_family_of_optimizers(optimizer, mode):
    if mode == "compiled" and "legacy" in optimizer:
        pytest.skip("legacy optimizers make variables in their first step, which XLA cannot")
    plain, accumulated = model_for(optimizer), model_for(optimizer)
    textbook, ours = (OPTIMIZERS[optimizer]() for _ in range(2))
    accumulator = GradientAccumulator(ours, accumulated.trainable_variables, steps=3)

    def step(x, y):
        return accumulator.step(gradients_of(accumulated, x, y), weight=tf.shape(x)[0])

    # XLA needs sizes; a graph of any size is traced once.
    any_size = [tf.TensorSpec([None, *each.shape[1:]], each.dtype) for each in data(1)]
    if mode != "eager":
        signature = any_size if mode == "graph" else None
        step = tf.function(step, signature, jit_compile=mode == "compiled")
    for window in range(4):
        sizes = [2, 4, 1] if window < 3 else [3, 2]
        x, y = data(sum(sizes), seed=window)
        # Keras 3 takes rows that come twice for different ones; tf_keras does when it clips.
        summed = all_dense if optimizer.startswith("keras") else merged
        gradients = summed(gradients_of(plain, x, y))
        textbook.apply_gradients(zip(gradients, plain.trainable_variables))
        ends = np.cumsum(sizes)
        for start, end in zip(ends - sizes, ends):
            step(x[start:end], y[start:end])
    assert accumulator.flush()
    assert int(ours.iterations) == 4  # which schedules and Adam's t count
    assert_close(accumulated.trainable_variables, plain.trainable_variables)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_window(data):
    """Any number of micro-batches with any weights, each with some of the gradients."""
    shapes = [(), (3,), (2, 2)]
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    variables = [tf.Variable(rng.normal(size=shape)) for shape in shapes]
    starts = [np.array(v) for v in variables]
    optimizer = keras.optimizers.SGD(1.0)
    accumulator = GradientAccumulator(optimizer, variables)
    graph = data.draw(st.booleans())
    sums, total, some = [np.zeros(shape) for shape in shapes], 0.0, [False] * 3
    for _ in range(data.draw(st.integers(1, 5))):
        weight = data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 17.0]))
        there = data.draw(st.lists(st.booleans(), min_size=3, max_size=3).filter(any))
        gradients = [rng.normal(size=shape) if t else None for shape, t in zip(shapes, there)]

        tensors = [g if g is None else tf.constant(g) for g in gradients]
        add = functools.partial(accumulator.add, tensors, weight=weight)
        tf.function(add)() if graph else add()
        total += weight
        sums = [s if g is None else s + weight * g for s, g in zip(sums, gradients)]
        some = [a or b for a, b in zip(some, there)]
    assert accumulator.total_weight == pytest.approx(total)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Gradients do not exist")
        tf.function(accumulator.apply)() if graph else accumulator.apply()
    for variable, start, summed in zip(variables, starts, sums):
        expected = start - (summed / total if total else 0)
        np.testing.assert_allclose(variable, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_functions_with_other_gradients_share_a_window():
    """A graph fixes which gradients an update has; windows of two tasks differ."""
    variables = [tf.Variable(1.0, dtype=tf.float64) for _ in range(3)]
    optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
    accumulator = GradientAccumulator(optimizers[0], variables, steps=2)

    @tf.function
    def first_task():
        return accumulator.step([ONE, 2 * ONE, None], weight=1), variables[0].read_value()

    @tf.function
    def second_task():
        return accumulator.step([ONE, None, 4 * ONE], weight=1), variables[0].read_value()

    # When the first task was traced, the second head had had no gradient yet.
    windows = {
        (first_task, second_task): [ONE, ONE, 2 * ONE],
        (second_task, first_task): [ONE, ONE, 2 * ONE],  # its gradient must not be lost
        (second_task, second_task): [ONE, None, 4 * ONE],  # momentum does not move the first head
        (first_task, first_task): [ONE, 2 * ONE, None],
    }
    expected = [tf.Variable(1.0, dtype=tf.float64) for _ in range(3)]
    for tasks, gradients in windows.items():
        for task in tasks:
            _, value = task()
            assert float(value) == float(variables[0])  # a later read in the graph sees the update
        optimizers[1].apply_gradients(zip(gradients, expected))
        assert_close(variables, expected)


def test_a_sum_may_be_made_in_a_later_trace():
    v, w, accumulator = sgd_and(1.0, 1.0)

    @tf.function
    def add(both):
        accumulator.add([2 * ONE, 4 * ONE if both else None], weight=1)

    add(False)
    add(True)
    accumulator.apply()
    assert (float(v), float(w)) == (-1.0, -1.0)


def test_a_loop_in_a_graph():
    v, accumulator = sgd_and(0.0, steps=2)

    @tf.function
    def train(dataset):
        updates = 0
        for x in dataset:
            _, gradients = of_one_tape(lambda x: (v - x) ** 2 / 2, [v], x)
            if accumulator.step(gradients, weight=tf.size(x)):
                updates += 1
        accumulator.flush()
        return updates

    dataset = tf.data.Dataset.range(10).map(lambda x: tf.cast(x, tf.float64)).batch(2)
    assert int(train(dataset)) == 2
    assert float(v) == 8.5  # the mean of the last window


def test_inside_a_compiled_function_all_gradients_must_be_there():
    v, w, accumulator = sgd_and(1.0, 1.0, steps=1)
    for function in (
        lambda: accumulator.step([ONE, None], weight=1),
        lambda: accumulator.flush(),
        lambda: accumulator.apply(),
    ):
        with pytest.raises(ValueError, match=r"jit_compile=True, only step\(\) can apply"):
            tf.function(function, jit_compile=True)()
    tf.function(lambda: accumulator.add([ONE, None], weight=1), jit_compile=True)()
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        accumulator.apply()
    assert (float(v), float(w)) == (0.0, 1.0)


def test_what_a_compiled_function_cannot_check():
    _, accumulator = sgd_and(0.0, nonfinite="raise")
    add = tf.function(lambda: accumulator.add([ONE], weight=1), jit_compile=True)
    with pytest.raises(ValueError, match="cannot work inside a function with jit_compile=True"):
        add()


def test_narrow_gradients_are_summed_wide():
    v = tf.Variable(0.0, dtype=tf.float16)
    accumulator = GradientAccumulator(keras.optimizers.SGD(1.0), [v])
    for _ in range(150):
        accumulator.add([tf.constant(1.0, tf.float16)], weight=1001)  # a float16 ends at 65504
    assert accumulator.total_weight == 150150.0
    accumulator.apply()
    assert float(v) == -1.0


def test_variables_may_be_a_nest():
    variables = {"a": tf.Variable(1.0), "b": [tf.Variable(1.0)]}
    accumulator = GradientAccumulator(keras.optimizers.SGD(1.0), variables)
    accumulator.add({"a": tf.constant(1.0), "b": [tf.constant(2.0)]}, weight=1)
    accumulator.apply()
    assert (float(variables["a"]), float(variables["b"][0])) == (0.0, -1.0)


def rows_of(values, indices):
    return tf.IndexedSlices(tf.constant(values, tf.float64), tf.constant(indices))


def test_dense_and_sparse_gradients_of_one_variable():
    table, accumulator = sgd_and(np.zeros([3, 1]))
    accumulator.add([rows_of([[2.0], [4.0]], [1, 1])], weight=1)
    accumulator.add([tf.ones([3, 1], tf.float64)], weight=3)
    accumulator.apply()
    np.testing.assert_allclose(table, [[-0.75], [-2.25], [-0.75]])


# Optimizers


def loss_scaled(**arguments):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), **arguments)


def test_a_loss_scale_skips_the_window_and_is_halved_once():
    v = tf.Variable(1.0)
    optimizer = loss_scaled(initial_scale=8.0)
    accumulator = GradientAccumulator(optimizer, [v], steps=2)
    for gradient in (8.0, np.inf, 4.0, 12.0):
        scaled = gradient / 8.0 * optimizer.scale_loss(1.0)
        accumulator.step([tf.cast(scaled, tf.float32)], weight=1)
    assert float(optimizer.dynamic_scale) == 4.0
    assert float(v) == 0.0  # the mean of 4 and 12, unscaled: half of the first scale, twice


several_in_one = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)


def several(inner):
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner))


def nested(inner, **arguments):
    return keras.optimizers.LossScaleOptimizer(several(inner), **arguments)


class Wrapper(keras.optimizers.SGD):
    def __init__(self, optimizer):
        super().__init__()
        self._optimizer = optimizer


def accumulating(make=keras.optimizers.Adam):
    return make(gradient_accumulation_steps=4)


def in_a_circle():
    """Nobody does that, and nobody should wait for its end."""
    inner = Wrapper(Wrapper(accumulating()))
    inner._optimizer._optimizer._optimizer = inner
    return inner


def of_tf_keras(**arguments):
    optimizer = tf_keras.optimizers.SGD(1.0)
    return tf_keras.mixed_precision.LossScaleOptimizer(optimizer, **arguments)


BY_ITSELF, HIDDEN = "accumulates gradients by itself.*=4 on Adam", 'nonfinite="skip" would hide.*'


@pytest.mark.parametrize(
    ("make", "nonfinite", "message"),
    [
        (accumulating, "propagate", BY_ITSELF),
        (in_a_circle, "propagate", BY_ITSELF),
        pytest.param(lambda: nested(accumulating()), "propagate", BY_ITSELF, marks=several_in_one),
        pytest.param(  # which is known late
            lambda: keras.optimizers.MultiOptimizer(lambda _: accumulating()),
            "propagate",
            BY_ITSELF,
            marks=several_in_one,
        ),
        (loss_scaled, "skip", HIDDEN + "LossScaleOptimizer"),
        (lambda: Wrapper(loss_scaled()), "skip", HIDDEN + "Wrapper"),
        pytest.param(of_tf_keras, "skip", HIDDEN + "LossScaleOptimizer", marks=needs_tf_keras),
    ],
)
def test_optimizers_that_are_refused_at_any_depth(make, nonfinite, message):
    with pytest.raises(ValueError, match=message):
        GradientAccumulator(make(), [keras.Variable(1.0)], nonfinite=nonfinite)


def fixed_of_v1():
    v1 = tf.compat.v1
    fixed, optimizer = v1.mixed_precision, v1.train.GradientDescentOptimizer(1.0)
    return fixed.MixedPrecisionLossScaleOptimizer(optimizer, fixed.FixedLossScale(8.0))


def fixed_of_tf_keras():
    return of_tf_keras(dynamic=False, initial_scale=8.0)


@pytest.mark.parametrize(
    "make", [fixed_of_v1, pytest.param(fixed_of_tf_keras, marks=needs_tf_keras)]
)
def test_a_fixed_loss_scale_may_skip(make):
    GradientAccumulator(make(), [tf.Variable(1.0)], nonfinite="skip")


@pytest.mark.parametrize(
    "make",
    [
        tf.compat.v1.train.AdamOptimizer,
        pytest.param(lambda rate: tf_keras.optimizers.Adam(rate), marks=needs_tf_keras),
    ],
)
def test_variables_of_keras_3_with_other_optimizers(make):
    v, plain = keras.Variable(1.0, dtype="float64"), tf.Variable(1.0, dtype=tf.float64)
    make(0.5).apply_gradients([(3 * ONE, plain)])
    accumulator = GradientAccumulator(make(0.5), [v], steps=1)
    accumulator.step([3 * ONE], weight=1)
    assert_close([v], [plain])


# Memory and checkpoints across processes.


def run(program, *arguments):
    """Runs a program in a process of its own and returns what it prints."""
    environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@thorough
def test_rows_of_a_large_table_stay_rows():
    """A window over 1,000,000 x 64, of which a dense copy is 244 MiB, holds what it touches."""
    added = run(
        """
        import numpy as np, tensorflow as tf, macrobatch

        def peak():
            status = open("/proc/self/status").read()
            return int(status.split("VmHWM:")[1].split()[0]) / 1024

        table = tf.Variable(tf.zeros([1_000_000, 64]))
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.1)
        accumulator = macrobatch.GradientAccumulator(optimizer, [table])

        @tf.function
        def add(tokens):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.gather(table, tokens) ** 2)
            accumulator.add(tape.gradient(loss, [table]), weight=1)

        add(tf.constant([1, 2, 3]))
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        for seed in range(8):
            add(tf.constant(np.random.default_rng(seed).integers(0, 1000, [4096]), tf.int32))
        accumulator.apply()
        print(peak() - before)
        """
    )
    assert float(added) < 60


CONTINUED = """
    import sys, keras, numpy as np, tensorflow as tf, macrobatch

    keras.utils.set_random_seed(0)
    _, command, path = sys.argv
    model = keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Flatten(),
                              keras.layers.Dense(3)])
    model(tf.zeros([1, 2]))
    optimizer = keras.optimizers.Adam(0.1)
    accumulator = macrobatch.GradientAccumulator(optimizer, model.trainable_variables, steps=4)
    checkpoint = tf.train.Checkpoint(accumulator=accumulator)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        return accumulator.step(gradients, weight=tf.shape(x)[0])

    start = 0
    if command == "continue":
        # As if this process had gone another way before: it is all overwritten.
        for v in model.variables:
            v.assign(v + 1)
        checkpoint.restore(path).assert_consumed()
        assert accumulator.pending == 2, accumulator.pending
        start = 6
    for index in range(start, 11):
        if index == 6 and command == "save":
            print(checkpoint.save(path), file=sys.stderr)
        step(tf.constant(np.random.default_rng(index).integers(0, 9, [1 + index % 3, 2])))
    accumulator.flush()
    print([np.array(v).tobytes().hex() for v in [*model.variables, *optimizer.variables]])
"""


@thorough
def test_a_window_goes_on_in_another_process_bit_for_bit(tmp_path):
    saved = run(CONTINUED, "save", tmp_path / "window")
    continued = run(CONTINUED, "continue", tmp_path / "window-1")
    assert saved == continued
    assert len(saved) > 500


def small():
    model = model_for("keras SGD")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    accumulator = GradientAccumulator(optimizer, model.trainable_variables)
    return model, accumulator, tf.train.Checkpoint(accumulator=accumulator)


def test_a_restored_window_can_be_flushed_at_once(tmp_path):
    """And saving changes nothing."""
    not_saved, saved, restored = small(), small(), small()
    for model, accumulator, _ in (not_saved, saved):
        accumulator.add(gradients_of(model, *data(3)), weight=3)
    restored[2].restore(saved[2].save(tmp_path / "window")).assert_consumed()
    for model, accumulator, _ in (not_saved, saved, restored):
        assert (accumulator.pending, accumulator.total_weight) == (1, 3.0)
        assert accumulator.flush()
        assert_close(model.trainable_variables, not_saved[0].trainable_variables, 0)


@in_graphs_too
def test_restoring_forgets_what_was_added_since(graph, tmp_path):
    """Also of sums that did not exist when the checkpoint was made."""
    model, accumulator, checkpoint = small()
    path = checkpoint.save(tmp_path / "empty")

    def add(x, y):
        accumulator.add(gradients_of(model, x, y), weight=len(x))

    add = tf.function(add) if graph else add
    add(*data(5, seed=1))
    checkpoint.restore(path)
    assert (accumulator.pending, accumulator.total_weight) == (0, 0.0)
    plain = model_for("keras SGD")
    x, y = data(3)
    expected = keras.optimizers.SGD(0.1, momentum=0.9)
    expected.apply(all_dense(gradients_of(plain, x, y)), plain.trainable_variables)
    add(x, y)
    accumulator.apply()
    assert_close(model.trainable_variables, plain.trainable_variables)


def test_rows_that_are_restored_after_a_compiled_step(tmp_path):
    """The compiled function updates from dense sums only: it would not see the rows."""
    _, accumulator = sgd_and([0.0, 0.0])
    accumulator.add([rows_of([10.0], [0])], weight=1)
    path = tf.train.Checkpoint(accumulator=accumulator).save(tmp_path / "window")
    v, accumulator = sgd_and([0.0, 0.0], steps=2)
    step = tf.function(lambda g: accumulator.step([g], weight=1), jit_compile=True)
    gradient = tf.constant([1.0, 2.0], tf.float64)
    step(gradient)
    with pytest.raises(ValueError, match=r"checkpoint with such rows, after.*jit_compile=True"):
        tf.train.Checkpoint(accumulator=accumulator).restore(path)
    assert accumulator.pending == 1
    assert step(gradient)
    np.testing.assert_allclose(v, -gradient)


def test_a_checkpoint_of_more_variables(tmp_path):
    *_, accumulator = sgd_and(0.0, 0.0)
    accumulator.add([ONE, ONE], weight=1)
    path = tf.train.Checkpoint(accumulator=accumulator).save(tmp_path / "window")
    v, fewer = sgd_and(0.0)
    with pytest.raises((AssertionError, ValueError)):
        tf.train.Checkpoint(accumulator=fewer).restore(path).assert_consumed()
    assert float(v) == 0.0


# Replicas.


def replicated(make):
    """A variable on two replicas, and an optimizer for it."""
    return made_in(mirrored(2), lambda: (keras.Variable(1.0), make()))


def own_one():
    """A gradient of 1 of each replica: TensorFlow takes one tensor for the sum of all."""
    return tf.ones([], tf.float64)


def sums_on_replicas(v, optimizer, graph=False):
    """What an update from gradients of 1 on each of two replicas changes, with a rate of 1."""
    before = float(v.numpy())
    accumulator = GradientAccumulator(optimizer, [v], reduction="sum")

    def update():
        mirrored(2).run(lambda: accumulator.add([own_one()]))
        accumulator.apply()

    (tf.function(update) if graph else update)()
    return before - float(v.numpy())


def test_replicas_clip_the_reduced_gradient_and_sum_rows_over_replicas():
    def made():
        return model_for("keras SGD"), keras.optimizers.Adam(0.1, global_clipnorm=0.3)

    plain, textbook = made()
    model, optimizer = made_in(mirrored(2), made)
    accumulator = GradientAccumulator(optimizer, model.trainable_variables)

    def add(batch):
        accumulator.add(gradients_of(model, *batch), weight=tf.shape(batch[0])[0])

    apply = tf.function(accumulator.apply)
    for seed in range(3):
        batch = data(9, seed)
        textbook.apply(all_dense(gradients_of(plain, *batch)), plain.trainable_variables)
        on_replicas(add, batch, (5, 4))
        apply()
    assert_close(model.trainable_variables, plain.trainable_variables)


def test_a_strategy_of_one_device():
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    v, accumulator = made_in(strategy, lambda: sgd_and(1.0, steps=2))
    for gradient in (ONE, 3 * ONE):
        strategy.run(lambda g=gradient: accumulator.step([g], weight=1))
    assert float(v) == -1.0


def test_a_replica_that_refuses_while_another_waits():
    """The first of them waits in the making of sums, without the lock; no one waits for ever."""
    strategy = mirrored(2)
    v, accumulator = made_in(strategy, lambda: sgd_and(1.0))

    def add(last):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        accumulator.add([own_one()], weight=last if int(replica) else 1)

    with pytest.raises(ValueError, match="finite number, 0 or more"):
        strategy.run(add, (-1,))
    assert accumulator.pending == 0
    strategy.run(add, (3,))
    assert (accumulator.pending, accumulator.total_weight) == (2, 4.0)
    accumulator.apply()
    assert v.numpy() == 0.0


def test_replicas_with_an_optimizer_that_somebody_else_has_wrapped():
    """The wrapper has a __wrapped__ too, and reduces; gradients must not be summed twice.

    After it the optimizer reduces by itself again.
    """

    class Own(keras.optimizers.SGD):
        def _all_reduce_sum_gradients(self, pairs):
            return super()._all_reduce_sum_gradients(pairs)

    v, optimizers = replicated(lambda: [Own(1.0) for _ in range(3)])
    for optimizer in optimizers:  # wrapped before the first update, and again after it
        wrapped, calls = Own._all_reduce_sum_gradients, []

        @functools.wraps(wrapped)
        def wrapper(self, pairs, wrapped=wrapped, calls=calls):
            calls.append(1)
            return wrapped(self, pairs)

        Own._all_reduce_sum_gradients = wrapper
        assert sums_on_replicas(v, optimizer) == 2.0
        before = float(v.numpy())
        mirrored(2).run(lambda o=optimizer: o.apply([own_one()], [v]))
        assert (before - float(v.numpy()), len(calls)) == (2.0, 2)  # the wrapper is still there


class Reducing(keras.optimizers.SGD):
    def _all_reduce_sum_gradients(self, pairs):
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [g for g, _ in pairs])
        return list(zip(sums, [v for _, v in pairs]))


@pytest.mark.parametrize(
    ("make", "graph", "expected"),
    [
        (lambda: loss_scaled(initial_scale=2.0), False, 1.0),
        (lambda: loss_scaled(initial_scale=2.0), True, 1.0),
        pytest.param(lambda: several(Reducing(1.0)), False, 2.0, marks=several_in_one),
        pytest.param(
            lambda: nested(Reducing(1.0), initial_scale=1.0), False, 2.0, marks=several_in_one
        ),
    ],
)
def test_replicas_with_an_optimizer_in_an_optimizer(make, graph, expected):
    """The inner optimizer goes on in other threads, where it must not sum over replicas again."""
    assert sums_on_replicas(*replicated(make), graph) == expected


@several_in_one
def test_optimizers_that_replicas_refuse_at_any_depth():
    averaging = replicated(
        lambda: nested(keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=3))
    )
    with pytest.raises(ValueError, match=r"ema_overwrite_frequency cannot be used.*on SGD"):
        sums_on_replicas(*averaging)


# Several calls in one function.


def test_a_reset_that_is_traced_before_the_first_gradient():
    v, accumulator = sgd_and(0.0, steps=2)

    @tf.function
    def epoch(n):
        accumulator.reset()
        for _ in tf.range(n):
            accumulator.step([ONE], weight=1)

    epoch(3)
    epoch(3)
    assert float(v) == -2.0


def test_a_flush_that_is_traced_before_the_first_gradient():
    v, accumulator = sgd_and([0.0, 0.0])

    @tf.function
    def flush_and_add(gradient):
        accumulator.flush()
        accumulator.add([gradient], weight=1)
        return accumulator.pending, accumulator.optimizer.iterations.value + 0

    for i in range(100):
        pending, iterations = flush_and_add(tf.constant([float(i), 1.0], tf.float64))
        assert (int(pending), int(iterations)) == (1, i)
    accumulator.flush()
    np.testing.assert_allclose(v, [-sum(range(100)), -100.0])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_steps_with_other_gradients_in_one_function():
    v, w, accumulator = sgd_and(0.0, 0.0, steps=3)

    @tf.function
    def two_steps(x):
        accumulator.step([x, None], weight=1)
        accumulator.step([x, 2 * x], weight=1)
        return v.read_value()

    for _ in range(60):
        value = two_steps(tf.constant(1.0, tf.float64))
        assert float(value) == float(v)
    np.testing.assert_allclose([v, w], [-40.0, -40.0])


def test_rows_that_come_between_compiled_steps():
    v, accumulator = sgd_and([0.0, 0.0], steps=2)
    step = tf.function(lambda g: accumulator.step([g], weight=1), jit_compile=True)
    gradient = tf.constant([1.0, 2.0], tf.float64)
    step(gradient)
    accumulator.reset()
    accumulator.add([rows_of([10.0], [0])], weight=1)
    step(gradient)
    np.testing.assert_allclose(v, [-5.5, -1.0])


def test_compiled_rows_that_do_not_know_their_table():
    v, accumulator = sgd_and([0.0, 0.0, 0.0])

    @tf.function(jit_compile=True)
    def add(values, indices):
        accumulator.add([tf.IndexedSlices(values, indices)], weight=1)

    add(tf.constant([1.0, 2.0, 4.0], tf.float64), tf.constant([2, 0, 2]))
    accumulator.apply()
    np.testing.assert_allclose(v, [-2.0, 0.0, -5.0])


def test_a_gradient_whose_shape_is_wrong_when_the_graph_runs():
    v, w, accumulator = sgd_and(0.0, [0.0])
    signature = [tf.TensorSpec(None, tf.float64)]
    add = tf.function(lambda g: accumulator.add([ONE, g], weight=1), signature)
    add(tf.ones([1], tf.float64))
    for wrong in ([3], [1, 1], []):  # broadcasting must not make them equal
        with pytest.raises(tf.errors.InvalidArgumentError, match="must have the shape"):
            add(2 * tf.ones(wrong, tf.float64))
        assert (accumulator.pending, accumulator.total_weight) == (1, 1.0)
    accumulator.apply()
    assert (float(v), w.numpy().tolist()) == (-1.0, [-1.0])


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (lambda g, v: zip(g, v), "without the variables"),
        (lambda g, v: list(zip(g, v)), "without the variables.*Received: 4 gradients"),
        (lambda g, v: None, "pass tape.gradient.*Received: 1 gradients, None"),
    ],
)
def test_habits_from_apply_gradients(gradients, message):
    *variables, accumulator = sgd_and(0.0, 0.0)
    with pytest.raises(ValueError, match=message):
        accumulator.add(gradients([ONE, ONE], variables), weight=1)


def test_a_window_of_weight_0_is_an_update_with_gradients_of_0():
    v, accumulator = sgd_and(1.0, steps=1)
    assert accumulator.step([tf.constant(np.nan, tf.float64)], weight=0)
    assert (float(v), int(accumulator.optimizer.iterations)) == (1.0, 1)


def test_nothing_to_train_and_nothing_to_apply():
    with pytest.raises(ValueError, match=r"variables is empty.*build it first"):
        sgd_and()
    _, accumulator = sgd_and(0.0)
    accumulator.add([None], weight=1)
    with pytest.raises(ValueError, match=r"No variable got a gradient.*reset\(\)"):
        accumulator.flush()
    accumulator.reset()
    assert not accumulator.flush()

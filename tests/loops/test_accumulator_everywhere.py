"""GradientAccumulator, in tests that run on every TensorFlow from 1.14 on.

They use what all versions have: eager execution, tf.function, tf.keras and tf.compat.v1.train
optimizers, MirroredStrategy on two CPU devices.
"""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import macrobatch

TF1 = tf.__version__.startswith("1.")
if TF1:
    two_devices = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    tf.compat.v1.enable_eager_execution(two_devices)
    tf.compat.v1.logging.set_verbosity("ERROR")

train = tf.compat.v1.train
OPTIMIZERS = {
    "keras SGD": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "keras Adam": lambda: tf.keras.optimizers.Adam(0.1),
    "v1 SGD": lambda: train.GradientDescentOptimizer(0.125),
    "v1 momentum": lambda: train.MomentumOptimizer(0.1, 0.9),
    "v1 Adam": lambda: train.AdamOptimizer(0.1),
    "v1 Adagrad": lambda: train.AdagradOptimizer(0.1),
}


class Regression:
    """A table of vectors and a linear layer: a dense, a sparse and an unused variable."""

    def __init__(self):
        rng = np.random.RandomState(0)
        self.table = tf.Variable(rng.normal(size=[6, 3]), name="table")
        self.kernel = tf.Variable(rng.normal(size=[3]), name="kernel")
        self.unused = tf.Variable(1.5, dtype=tf.float64, name="unused")
        self.variables = [self.table, self.kernel, self.unused]

    def gradients(self, tokens, y):
        with tf.GradientTape() as tape:
            prediction = tf.reduce_sum(tf.gather(self.table, tokens) * self.kernel, 1)
            loss = tf.reduce_mean((prediction - y) ** 2)
        return tape.gradient(loss, self.variables)


def data(examples, seed=0):
    rng = np.random.RandomState(seed)
    return tf.constant(rng.randint(0, 6, size=[examples])), tf.constant(rng.normal(size=[examples]))


def whole_batch(windows, optimizer):
    """The textbook: an update from the gradient of each whole window."""
    # Keras 3 takes repeated rows for different ones, unlike all others.
    repeated_rows = TF1 or "keras" not in optimizer
    model, optimizer = Regression(), OPTIMIZERS[optimizer]()
    start = 0
    tokens, y = data(sum(map(sum, windows)))
    for window in windows:
        end = start + sum(window)
        gradients = model.gradients(tokens[start:end], y[start:end])
        if not repeated_rows:
            gradients[0] = tf.convert_to_tensor(gradients[0])
        pairs = [pair for pair in zip(gradients, model.variables) if pair[0] is not None]
        optimizer.apply_gradients(pairs)
        start = end
    return model


def numpy_of(model):
    return [variable.numpy() for variable in model.variables]


def assert_same(left, right, tolerance=1e-10):
    for a, b in zip(numpy_of(left), numpy_of(right)):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def micro_batches(windows):
    sizes = [size for window in windows for size in window]
    tokens, y = data(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    for start, end in zip([0, *ends], ends):
        yield tokens[start:end], y[start:end]


def selected(name, parameters, thorough):
    """Graphs take long to make: unless all are asked for, some windows stand for the rest."""
    if thorough or name != "test_windows_equal_their_whole_batches":
        return True
    return parameters["steps"] in ([1, 4] if parameters["graph"] else [2, 3, 5])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("graph", [False, True])
def test_windows_equal_their_whole_batches(optimizer, steps, graph):
    sizes = [3, 1, 4, 2, 2, 5, 1, 3, 1, 2, 4]  # uneven micro-batches, and a window left at the end
    windows = [sizes[i : i + steps] for i in range(0, len(sizes), steps)]
    model = Regression()
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS[optimizer](), model.variables, steps)
    traces = []

    def step(tokens, y):
        traces.append(1)
        gradients = model.gradients(tokens, y)
        return accumulator.step(gradients, weight=tf.shape(y)[0])

    if graph:
        signature = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.float64)]
        step = tf.function(step, input_signature=signature)
    applied = [bool(step(tokens, y)) for tokens, y in micro_batches(windows)]
    full = [i % steps == steps - 1 for i in range(len(sizes))]
    assert applied == full
    left = len(sizes) % steps
    assert accumulator.pending == left
    assert accumulator.total_weight == sum(sizes[len(sizes) - left :])
    assert accumulator.flush() == (left > 0)
    assert (accumulator.pending, accumulator.total_weight) == (0, 0)
    assert not accumulator.flush()
    if graph and optimizer in ("keras SGD", "keras Adam", "v1 SGD") and not TF1:
        assert len(traces) == 1  # the others make variables in their first step
    assert_same(model, whole_batch(windows, optimizer))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_the_loop_that_everybody_writes():
    """Full windows of equal micro-batches are where a sum divided by their number is right too."""
    windows = [[2, 2, 2]] * 3
    by_hand, model = Regression(), Regression()
    optimizers = [OPTIMIZERS["v1 SGD"]() for _ in range(2)]
    accumulator = macrobatch.GradientAccumulator(optimizers[1], model.variables, steps=3)
    sums = None
    for index, (tokens, y) in enumerate(micro_batches(windows)):
        dense = [tf.convert_to_tensor(g) for g in by_hand.gradients(tokens, y)[:2]]
        sums = dense if sums is None else [a + b for a, b in zip(sums, dense)]
        if index % 3 == 2:
            optimizers[0].apply_gradients(zip([s / 3.0 for s in sums], by_hand.variables[:2]))
            sums = None
        accumulator.step(model.gradients(tokens, y), weight=len(y.numpy()))
    assert_same(model, by_hand)


def test_gradients_that_are_sums():
    v = tf.Variable(1.0)
    optimizer = OPTIMIZERS["v1 SGD"]()
    accumulator = macrobatch.GradientAccumulator(optimizer, [v], reduction="sum")
    accumulator.add([tf.constant(2.0)])
    accumulator.add([tf.constant(3.0)])
    accumulator.apply()
    assert v.numpy() == 1 - 0.125 * 5
    with pytest.raises(ValueError, match=r'reduction="sum".*Received: weight=2'):
        accumulator.add([tf.constant(2.0)], weight=2)


def test_absent_gradients():
    never, sometimes, always = (tf.Variable(1.0) for _ in range(3))
    optimizer = OPTIMIZERS["v1 momentum"]()
    accumulator = macrobatch.GradientAccumulator(optimizer, [never, sometimes, always])
    one = tf.constant(1.0)
    accumulator.add([None, one, one], weight=1)
    accumulator.add([None, None, one], weight=3)  # the boundary loses nothing
    accumulator.apply()
    np.testing.assert_allclose([never.numpy(), sometimes.numpy(), always.numpy()], [1, 0.975, 0.9])
    accumulator.add([None, None, one], weight=1)
    accumulator.apply()  # momentum would move it, had it been updated with a gradient of 0
    np.testing.assert_allclose(sometimes.numpy(), 0.975)
    np.testing.assert_allclose(always.numpy(), 0.71)


def test_a_micro_batch_of_weight_0_does_not_count():
    v = tf.Variable(1.0)
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), [v])
    accumulator.add([tf.constant(np.nan, tf.float32)], weight=0)  # a mean over no tokens
    accumulator.add([tf.constant(2.0)], weight=5)
    accumulator.apply()
    np.testing.assert_allclose(v.numpy(), 0.75)


def test_reset():
    v = tf.Variable(1.0)
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), [v])
    accumulator.add([tf.constant(7.0)], weight=2)
    accumulator.reset()
    assert (accumulator.pending, accumulator.total_weight) == (0, 0.0)
    accumulator.add([tf.constant(2.0)], weight=1)
    accumulator.apply()
    np.testing.assert_allclose(v.numpy(), 0.75)


def state_of(accumulator):
    variables = [accumulator._window.pending, accumulator._window.total, accumulator._skipped]
    sums = [getattr(accumulator._window, name) for name in ("dense_0", "values_1", "indices_1")]
    return [variable.numpy().tolist() for variable in variables + sums]


@pytest.mark.parametrize(
    ("gradients", "weight", "message"),
    [
        ([1.0], 1, "one gradient for each of the 2 variables.*Received: 1 gradients"),
        ([[1.0], None], 1, r"Received: a gradient of shape \(1,\) for .* of shape \(\)"),
        ([1.0, None], -1, "finite number, 0 or more.*Received: weight=-1"),
        ([1.0, None], float("nan"), "finite number, 0 or more.*Received: weight=nan"),
        ([1.0, None], float("inf"), "finite number, 0 or more.*Received: weight=inf"),
        ([1.0, None], None, "weight= is required.*weight=len"),
        ([1.0, None], np.ones(2), r"must be a scalar.*shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_wrong_micro_batches_change_nothing(gradients, weight, message, graph):
    variables = [tf.Variable(1.0), tf.Variable(tf.ones([4, 2]))]
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), variables)
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), tf.constant([4, 2]))
    accumulator.add([tf.constant(1.0), rows], weight=2)
    before = state_of(accumulator)
    gradients = [None if g is None else tf.constant(g) for g in gradients]

    def add():
        accumulator.add(gradients, weight=weight)

    with pytest.raises(ValueError, match=message):
        (tf.function(add) if graph else add)()
    assert state_of(accumulator) == before
    assert accumulator.pending == 1


def test_a_weight_that_is_wrong_when_the_graph_runs():
    v = tf.Variable(1.0)
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), [v])

    @tf.function
    def add(weight):
        accumulator.add([tf.constant(1.0)], weight=weight)

    add(tf.constant(2.0))
    for wrong in (-1.0, np.nan, np.inf):
        with pytest.raises(tf.errors.InvalidArgumentError, match="finite number, 0 or more"):
            add(tf.constant(wrong, tf.float32))
    assert (accumulator.pending, accumulator.total_weight) == (1, 2.0)
    assert accumulator._window.dense_0.numpy() == 2.0


def test_an_empty_window():
    accumulator = macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), [tf.Variable(1.0)])
    with pytest.raises(ValueError, match=r"nothing to apply.*flush\(\)"):
        accumulator.apply()
    with pytest.raises(ValueError, match="steps=None"):
        accumulator.step([tf.constant(1.0)], weight=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "adam"}, "must have a method apply_gradients.*'adam'"),
        ({"variables": [3.0]}, "variables must be a nest of variables.*3.0"),
        ({"steps": 0}, "steps must be a positive integer.*steps=0"),
        ({"steps": 2.5}, "steps must be a positive integer.*steps=2.5"),
        ({"reduction": "max"}, r"reduction must be one of \['mean', 'sum'\].*'max'"),
        ({"nonfinite": "ignore"}, r"nonfinite must be one of .*'ignore'"),
    ],
)
def test_wrong_arguments(arguments, message):
    all_arguments = {"optimizer": OPTIMIZERS["v1 SGD"](), "variables": [tf.Variable(1.0)]}
    all_arguments.update(arguments)
    with pytest.raises(ValueError, match=message):
        macrobatch.GradientAccumulator(**all_arguments)


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_that_are_not_finite(graph):
    def accumulated(nonfinite):
        v = tf.Variable(1.0)
        optimizer = OPTIMIZERS["v1 SGD"]()
        accumulator = macrobatch.GradientAccumulator(optimizer, [v], 2, nonfinite=nonfinite)

        def step(gradient, weight):
            return accumulator.step([gradient], weight=weight)

        step = tf.function(step) if graph else step
        for gradient, weight in [(2.0, 3.0), (np.inf, 5.0), (np.nan, 5.0), (6.0, 1.0)]:
            step(tf.constant(gradient, tf.float32), tf.constant(weight))
        return v.numpy(), accumulator.skipped, accumulator.pending

    value, skipped, pending = accumulated("skip")
    np.testing.assert_allclose(value, 1 - 0.125 * 3)
    assert (skipped, pending) == (2, 0)  # a window is of as many micro-batches as are held
    assert not np.isfinite(accumulated("propagate")[0])
    error = tf.errors.InvalidArgumentError if graph else ValueError
    with pytest.raises(error, match="A gradient is not finite, and nonfinite="):
        accumulated("raise")


def checkpoint_of(model, optimizer, accumulator):
    return tf.train.Checkpoint(
        table=model.table,
        kernel=model.kernel,
        unused=model.unused,
        optimizer=optimizer,
        accumulator=accumulator,
    )


def trained(optimizer, path=None, restored=None, at=4):
    """Trains on two windows; saves in the middle of the second, or goes on from there."""
    model, optimizer = Regression(), OPTIMIZERS[optimizer]()
    accumulator = macrobatch.GradientAccumulator(optimizer, model.variables, steps=3)
    checkpoint = checkpoint_of(model, optimizer, accumulator)
    micros = list(micro_batches([[3, 1, 2], [2, 4, 1]]))
    if restored:
        status = checkpoint.restore(restored)
        status.assert_existing_objects_matched()
        assert accumulator.pending == at % 3
        micros = micros[at:]
    for index, (tokens, y) in enumerate(micros):
        if path and index == at:
            path = checkpoint.save(path)
        accumulator.step(model.gradients(tokens, y), weight=len(y.numpy()))
    assert accumulator.pending == 0
    return model, path


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("optimizer", ["keras Adam", "v1 momentum"])
def test_a_checkpoint_in_the_middle_of_a_window(optimizer, tmp_path):
    uninterrupted, path = trained(optimizer, str(tmp_path / "window"))
    continued, _ = trained(optimizer, restored=path)
    for a, b in zip(numpy_of(uninterrupted), numpy_of(continued)):
        np.testing.assert_array_equal(a, b)


@functools.lru_cache(maxsize=None)  # TensorFlow mixes up the collectives of two in one process
def mirrored(replicas):
    names = ["/cpu:0", "/cpu:1"] if TF1 else ["CPU:0", "CPU:1"]
    return tf.distribute.MirroredStrategy(names[:replicas])


def per_replica(strategy, function):
    run = strategy.experimental_run_v2 if TF1 else strategy.run
    return run(function)


def add_on_replicas(strategy, model, accumulator, sizes, tokens, y, graph=False):
    """Gives each replica its own, unequal micro-batches."""
    ends = list(itertools.accumulate(sizes))
    slices = list(zip([0, *ends], ends))
    replicas = strategy.num_replicas_in_sync

    def add(round_):
        def on_replica():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            if tf.is_tensor(replica):
                replica = int(tf.get_static_value(replica))
            start, end = slices[round_ * replicas + replica]
            gradients = model.gradients(tokens[start:end], y[start:end])
            accumulator.add(gradients, weight=end - start)

        per_replica(strategy, on_replica)

    for round_ in range(len(sizes) // replicas):
        (tf.function(add) if graph else add)(round_)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("optimizer", ["keras Adam", "v1 momentum"])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("graph", [False, True])
def test_replicas(optimizer, replicas, graph):
    strategy = mirrored(replicas)
    windows = [[3, 1, 4, 2], [1, 5, 2, 2]]
    tokens, y = data(20)
    with strategy.scope():
        model, maker = Regression(), OPTIMIZERS[optimizer]()
    accumulator = macrobatch.GradientAccumulator(maker, model.variables)
    for window, start in zip(windows, [0, 10]):
        add_on_replicas(strategy, model, accumulator, window, tokens[start:], y[start:], graph)
        assert accumulator.pending == 4
        assert accumulator.total_weight == 10
        accumulator.apply()
        assert (accumulator.pending, accumulator.total_weight) == (0, 0)
    assert_same(model, whole_batch(windows, optimizer))


def test_replicas_are_told_where_to_call():
    strategy = mirrored(2)
    with strategy.scope():
        inside = tf.Variable(1.0)
        optimizer = OPTIMIZERS["v1 SGD"]()
    outside = tf.Variable(1.0)
    one = tf.constant(1.0)
    accumulator = macrobatch.GradientAccumulator(optimizer, [inside], steps=2)
    with pytest.raises(ValueError, match=r"add\(\) inside the function that strategy.run runs"):
        accumulator.add([one], weight=1)
    with pytest.raises(
        ValueError, match=r"add\(\) inside strategy.run, and apply\(\) or flush\(\)"
    ):
        accumulator.step([one], weight=1)
    with pytest.raises(ValueError, match=r"Received: apply\(\) inside strategy.run.*2 replicas"):
        per_replica(strategy, accumulator.apply)
    with pytest.raises(ValueError, match="same strategy"):
        macrobatch.GradientAccumulator(optimizer, [inside, outside])
    accumulator = macrobatch.GradientAccumulator(optimizer, [outside])
    with pytest.raises(ValueError, match="must be made in the strategy's scope"):
        per_replica(strategy, lambda: accumulator.add([one], weight=1))


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_window_moves_to_another_number_of_replicas(before, after, tmp_path):
    path = None
    tokens, y = data(20)
    for replicas, window, start in [(before, [3, 1, 4, 2], 0), (after, [1, 5, 2, 2], 10)]:
        strategy = mirrored(replicas)
        with strategy.scope():
            model, optimizer = Regression(), OPTIMIZERS["keras Adam"]()
        accumulator = macrobatch.GradientAccumulator(optimizer, model.variables)
        checkpoint = checkpoint_of(model, optimizer, accumulator)
        if path:
            # TensorFlow 1.14 restores variables of replicas in their scope only.
            with strategy.scope():
                checkpoint.restore(path).assert_existing_objects_matched()
            assert accumulator.pending == 4
            assert accumulator.total_weight == 10
        add_on_replicas(strategy, model, accumulator, window, tokens[start:], y[start:])
        path = checkpoint.save(str(tmp_path / "window"))
    assert accumulator.pending == 8
    accumulator.apply()
    assert_same(model, whole_batch([[20]], "keras Adam"))


def test_what_this_tensorflow_offers():
    if TF1:
        for name in ("accumulate", "release", "value_and_gradients"):
            with pytest.raises(ImportError, match=r"needs TensorFlow 2.16 or newer.*1.14.0"):
                getattr(macrobatch, name)
        with pytest.raises(ImportError, match=r"needs TensorFlow 2.16 or newer"):
            from macrobatch import accumulate  # noqa: F401
        with pytest.raises(AttributeError, match="no attribute 'accumulated'"):
            macrobatch.accumulated  # noqa: B018
    assert issubclass(macrobatch.ExactnessWarning, UserWarning)
    assert issubclass(macrobatch.GradientAccumulator, tf.Module)

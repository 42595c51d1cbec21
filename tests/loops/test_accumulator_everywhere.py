"""GradientAccumulator, in tests that run on every TensorFlow from 1.14 on.

They use what all versions have: eager execution, tf.function, tf.keras and tf.compat.v1.train
optimizers, MirroredStrategy on two CPU devices.
"""

import copy
import functools
import itertools
import sys
import threading

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


# Graphs take long to make: some windows stand for the rest, which only `make test-all` runs.
QUICK = {(False, 2), (False, 3), (False, 5), (True, 4)}
WINDOWS = [
    pytest.param(graph, steps, marks=[] if (graph, steps) in QUICK else pytest.mark.thorough)
    for graph in (False, True)
    for steps in (1, 2, 3, 4, 5)
]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("graph", "steps"), WINDOWS)
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


def made(*values, **arguments):
    """Variables, and an accumulator that updates them with a rate of 0.125."""
    variables = [tf.Variable(value) for value in values]
    optimizer = OPTIMIZERS["v1 SGD"]()
    return (*variables, macrobatch.GradientAccumulator(optimizer, variables, **arguments))


def test_gradients_that_are_sums():
    v, accumulator = made(1.0, reduction="sum")
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
    v, accumulator = made(1.0)
    accumulator.add([tf.constant(np.nan, tf.float32)], weight=0)  # a mean over no tokens
    accumulator.add([tf.constant(2.0)], weight=5)
    accumulator.apply()
    np.testing.assert_allclose(v.numpy(), 0.75)


def test_reset():
    v, accumulator = made(1.0)
    accumulator.add([tf.constant(7.0)], weight=2)
    accumulator.reset()
    assert (accumulator.pending, accumulator.total_weight) == (0, 0.0)
    accumulator.add([tf.constant(2.0)], weight=1)
    accumulator.apply()
    np.testing.assert_allclose(v.numpy(), 0.75)


# What is refused


def rows_of(values, indices):
    values, indices = tf.convert_to_tensor(values), tf.constant(indices)
    return tf.IndexedSlices(values, indices, tf.constant([4, 2]))


ROWS = rows_of([[1.0, 1.0]], [2])


class Refusing:
    """A number and a table, whose window is as before after what is refused."""

    def __init__(self):
        self.number, self.table, self.accumulator = made(1.0, tf.ones([4, 2]))

    def check(self, add, message, error=ValueError):
        """In the window is one micro-batch, with gradients of 1."""
        with pytest.raises(error, match=message):
            add()
        found = self.accumulator
        assert (found.pending, found.total_weight, found.skipped) == (1, 2.0, 0)
        found.apply()
        assert self.number.numpy() == 0.875
        assert self.table.numpy().tolist() == [[1, 1], [1, 1], [0.875, 0.875], [1, 1]]


def of_other_dtypes():
    """Numbers and rows that are no gradients."""
    for dtype in (tf.int32, tf.bool, tf.complex64, tf.string):
        one = tf.constant("a") if dtype == tf.string else tf.cast(1, dtype)
        message = f"floating-point dtype.*of dtype {dtype.name} for .*of dtype float32"
        for gradients in ([one, ROWS], [1.0, rows_of(tf.fill([1, 2], one), [0])]):
            yield gradients, 1, message


FINITE = "finite number, 0 or more.*Received: weight="


@pytest.mark.parametrize(
    ("gradients", "weight", "message"),
    [
        ([1.0], 1, "one gradient for each of the 2 variables.*Received: 1 gradients"),
        ([np.ones(1), None], 1, r"Received: a gradient of shape \(1,\) for .* of shape \(\)"),
        ([None, np.ones([4, 3])], 1, r"shape \(4, 3\) for .* of shape \(4, 2\)"),
        ([None, 1.0], 1, r"shape \(\) for .* of shape \(4, 2\)"),
        *(([1.0, None], weight, FINITE + str(weight)) for weight in (-1, np.nan, np.inf, "3", 1j)),
        ([1.0, None], b"3", "must be a finite number, 0 or more"),
        ([1.0, None], None, "weight= is required.*weight=len"),
        ([1.0, None], np.ones(2), r"must be a scalar.*shape \(2,\)"),
        *of_other_dtypes(),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_wrong_micro_batches_change_nothing(gradients, weight, message, graph):
    window = Refusing()
    window.accumulator.add([tf.constant(1.0), ROWS], weight=2)

    def add():
        window.accumulator.add(gradients, weight=weight)

    window.check(tf.function(add) if graph else add, message)


NO_ROWS = r"must be rows of its variable.*\(4, 2\)(.|\n)*"
NO_FIT = r"must (be rows of|have the shape of) its variable"


@pytest.mark.parametrize(
    ("values", "indices", "weight", "message", "received"),
    [
        ([1, 2], [4], 2, NO_ROWS, "4 to 4"),
        ([1, 2], [-1], 2, NO_ROWS, "-1 to -1"),
        ([3, 2], [0, 3, 9], 2, NO_ROWS, "0 to 9"),
        # When they are added, the gradient of the first variable would be in its sum already.
        ([3, 2], [0, 0], 2, NO_FIT, ""),
        ([2, 2], [[0], [0]], 2, NO_FIT, ""),
        ([2], [0, 0], 2, NO_FIT, ""),
        *(([1, 2], [0], weight, "finite number, 0 or more", "") for weight in (-1, np.nan, np.inf)),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_what_is_wrong_when_the_graph_runs(values, indices, weight, message, received, graph):
    window = Refusing()

    def add(values, indices, weight):
        window.accumulator.add([tf.constant(1.0), tf.IndexedSlices(values, indices)], weight=weight)

    error = ValueError
    if graph:
        signature = [tf.TensorSpec(None, tf.float32), tf.TensorSpec(None, tf.int32)]
        add = tf.function(add, input_signature=[*signature, tf.TensorSpec([], tf.float32)])
        error, received = tf.errors.InvalidArgumentError, "Received" if received else ""
    add(tf.ones([1, 2]), tf.constant([2]), tf.constant(2.0))
    arguments = tf.ones(values), tf.constant(indices), tf.constant(weight, tf.float32)
    window.check(lambda: add(*arguments), message + received, error)


def test_variables_that_are_not_trained_have_no_gradients():
    trained, other, accumulator = made(1.0, 3)
    with pytest.raises(ValueError, match=r"dtype float32 for .*of dtype int32.*or None"):
        accumulator.add([tf.constant(1.0), tf.constant(0.5)], weight=1)
    accumulator.add([tf.constant(2.0), None], weight=1)
    accumulator.apply()
    assert (trained.numpy(), other.numpy()) == (0.75, 3)


@pytest.mark.skipif(TF1, reason="optimizers of TensorFlow 1.14 know no complex numbers")
def test_complex_variables():
    v, accumulator = made(tf.constant(1.0 + 1.0j))
    accumulator.add([tf.constant(2.0j, v.dtype)], weight=0.1)
    accumulator.add([tf.constant(1.0, v.dtype)], weight=0.3)
    accumulator.apply()
    np.testing.assert_allclose(v.numpy(), 1 + 1j - 0.125 * (0.5j + 0.75), rtol=1e-15)


@pytest.mark.parametrize("graph", [False, True])
def test_python_numbers_are_taken_in_full_precision(graph):
    v, accumulator = made(np.float64(1.0))

    def add():
        for gradient, weight in [(0.1, 0.1), (0.7, 0.3), (np.float64(0.3), np.float64(0.7))]:
            accumulator.add([gradient], weight=weight)

    (tf.function(add) if graph else add)()
    total = 0.1 + 0.3 + 0.7
    assert abs(accumulator.total_weight - total) < 1e-15
    accumulator.apply()
    expected = 1 - 0.125 * (0.1 * 0.1 + 0.7 * 0.3 + 0.3 * 0.7) / total
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-15)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ([], tf.complex64, "must be a finite number, 0 or more"),
        ([], tf.string, "must be a finite number, 0 or more"),
        (None, tf.float32, "must be a scalar"),
    ],
)
def test_weights_of_which_a_graph_knows_that_they_are_wrong(shape, dtype, message):
    _, accumulator = made(1.0)
    signature = [tf.TensorSpec(shape, dtype)]
    add = tf.function(lambda w: accumulator.add([tf.constant(1.0)], weight=w), signature)
    with pytest.raises(ValueError, match=message):
        add.get_concrete_function()
    assert accumulator.pending == 0


@pytest.mark.skipif(TF1, reason="variables of TensorFlow 1.14 have known shapes")
def test_variables_of_unknown_shape():
    v = tf.Variable(tf.zeros([2]), shape=tf.TensorShape([None]))
    with pytest.raises(ValueError, match=r"must have known shapes.*Make it without shape="):
        macrobatch.GradientAccumulator(OPTIMIZERS["v1 SGD"](), [v])


def test_an_empty_window():
    _, accumulator = made(1.0)
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
        v, accumulator = made(1.0, steps=2, nonfinite=nonfinite)

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


# Threads


def in_threads(function, threads=4):
    """Calls a function in several threads that begin together, with turns as short as can be."""
    together, errors = threading.Barrier(threads), []

    def run():
        try:
            together.wait()
            function()
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        started = [threading.Thread(target=run) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors


def test_threads_that_add_lose_nothing():
    """240 micro-batches from four threads, in windows old and new, with sums old and new."""
    one = tf.constant(1.0, tf.float64)
    rows = tf.IndexedSlices(tf.ones([2, 1], tf.float64), tf.constant([1, 3]), tf.constant([4, 1]))
    for _ in range(3):
        v, table, accumulator = made(np.float64(0.0), np.zeros([4, 1]))
        for updates in (1, 2):

            def add(accumulator=accumulator):
                for _ in range(10):
                    accumulator.add([one, rows], weight=2)

            in_threads(add)
            assert (accumulator.pending, accumulator.total_weight) == (40, 80.0)
            accumulator.apply()  # the sums are 80, too
            assert v.numpy() == -0.125 * updates
            np.testing.assert_array_equal(table.numpy()[:, 0], [0, v.numpy(), 0, v.numpy()])


def test_threads_that_step_make_one_update_of_each_window():
    v, accumulator = made(np.float64(0.0), steps=4)
    applied = []

    def step():
        for _ in range(25):
            applied.append(accumulator.step([tf.constant(1.0, tf.float64)], weight=1))

    in_threads(step)
    assert (sum(applied), accumulator.pending, v.numpy()) == (25, 0, -0.125 * 25)


def test_threads_that_flush_and_reset():
    """What a thread has added is updated from once, or forgotten."""
    v, accumulator = made(np.float64(0.0), reduction="sum")

    def add_and_flush():
        for _ in range(25):
            accumulator.add([tf.constant(1.0, tf.float64)])
            accumulator.flush()

    in_threads(add_and_flush)
    assert (accumulator.pending, v.numpy()) == (0, -0.125 * 100)


def test_threads_that_trace_share_the_sums():
    v, accumulator = made(np.float64(0.0))
    functions = []

    def trace():
        add = tf.function(lambda g: accumulator.add([g], weight=1))
        functions.append(add.get_concrete_function(tf.TensorSpec([], tf.float64)))

    in_threads(trace)
    for add in functions:
        add(tf.constant(2.0, tf.float64))
    assert accumulator.pending == 4
    accumulator.apply()
    assert v.numpy() == -0.125 * 2


def test_a_copy_is_another_accumulator():
    """It can be called while an update of the original is being made."""

    class Optimizer:
        def apply_gradients(self, pairs, **_):
            in_threads(lambda: other.add([tf.constant(1.0)], weight=1), threads=1)

    accumulator = macrobatch.GradientAccumulator(Optimizer(), [tf.Variable(1.0)])
    accumulator.add([tf.constant(1.0)], weight=1)
    other = copy.deepcopy(accumulator)
    accumulator.apply()
    assert (accumulator.pending, other.pending) == (0, 2)


# Checkpoints


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


def saved_window(reduction, path, mark=True):
    _, accumulator = made(1.0, reduction=reduction)
    accumulator.add([tf.constant(2.0)], weight=3 if reduction == "mean" else None)
    if not mark:  # as versions before this one
        name = "reduction_" + reduction
        (window,) = [each for each in accumulator.submodules if hasattr(each, name)]
        delattr(window, name)
    return tf.train.Checkpoint(accumulator=accumulator).save(str(path))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(("saved", "restored"), [("mean", "sum"), ("sum", "mean")])
def test_a_window_is_restored_with_its_reduction(saved, restored, deferred, tmp_path):
    path = saved_window(saved, tmp_path / "window")
    v, accumulator = made(5.0, reduction=restored)
    arguments = {} if restored == "sum" else {"weight": 1}
    accumulator.add([tf.constant(8.0)], **arguments)
    checkpoint = tf.train.Checkpoint(**({} if deferred else {"accumulator": accumulator}))

    def restore():
        checkpoint.restore(path)
        checkpoint.accumulator = accumulator

    message = f'checkpoint with reduction="{saved}", and .*with reduction="{restored}"'
    with pytest.raises(ValueError, match=message):
        restore()
    assert accumulator.pending == 1
    accumulator.apply()
    assert v.numpy() == 4.0  # as if nothing had been restored


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_checkpoints_of_older_versions_restore(reduction, mark, tmp_path):
    path = saved_window(reduction, tmp_path / "window", mark)
    v, accumulator = made(0.0, reduction=reduction)
    checkpoint = tf.train.Checkpoint(accumulator=accumulator)
    for _ in range(2):
        status = checkpoint.restore(path)
        status.assert_existing_objects_matched()
        status.assert_consumed()
        assert accumulator.pending == 1
        accumulator.apply()
        assert v.numpy() == 0.75


# Replicas


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
@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.thorough), 2])
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

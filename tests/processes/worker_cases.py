"""What test_workers.py runs on several workers, and plainly on one device to compare with.

    macrobatch run --workers 2 tests/processes/worker_cases.py FOLDER

writes what each worker ends with to FOLDER. Each case is a function of a strategy, or of None for
plain Keras on whole batches, and returns a nest of arrays.
"""

import contextlib
import functools
import os
import pickle
import shutil
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import memory_cases
import numpy as np
import tensorflow as tf
from keras import layers

import macrobatch

CASES = {}
RECORDS = {}  # functions of a strategy and a folder, which have no plain counterpart


def case(function):
    CASES[function.__name__] = function
    return function


def record(function):
    RECORDS[function.__name__] = function
    return function


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def model_of(
    strategy,
    build,
    micro_batch_size=3,
    whole_batch_loss=False,
    nonfinite="propagate",
    **compiled,
):
    """A compiled model, accumulating if there is a strategy."""
    keras.utils.set_random_seed(7)
    with scope_of(strategy):
        model = build()
        arguments = {"optimizer": keras.optimizers.Adam(0.1), "loss": "mse"}
        arguments.update({name: make() for name, make in compiled.items()})
        model.compile(**arguments)
    if strategy is None:
        return model
    return macrobatch.accumulate(
        model, micro_batch_size, whole_batch_loss=whole_batch_loss, nonfinite=nonfinite
    )


def arrays(model):
    return [np.array(v.value) for v in [*model.variables, *model.optimizer.variables]]


def examples(count=29, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, 4))
    return x, np.sin(x.sum(1, keepdims=True))


def mlp():
    return keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(6, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )


class Logs(keras.callbacks.Callback):
    """Keeps what is reported after each batch."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: np.array(value) for name, value in logs.items()})


@case
def arrays_with_validation(strategy):
    """An uneven last batch, clipping, metrics, validation data, evaluate and predict."""
    x, y = examples()
    model = model_of(
        strategy,
        mlp,
        optimizer=lambda: keras.optimizers.Adam(0.1, clipnorm=0.05),
        metrics=lambda: ["mae", keras.metrics.R2Score(name="r2")],
    )
    validation = examples(11, seed=1)
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    logs = Logs()
    history = model.fit(x, y, validation_data=validation, callbacks=[logs], **options).history
    evaluated = model.evaluate(x, y, batch_size=7, verbose=0)
    predicted = model.predict(x[:16], batch_size=8, verbose=0)
    return arrays(model), history, logs.seen, evaluated, np.sort(predicted, 0)


@case
def shuffled_arrays(strategy):
    x, y = examples()
    model = model_of(strategy, mlp)
    keras.utils.set_random_seed(3)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    return arrays(model), history


@case
def examples_that_are_not_finite(strategy):
    """Both workers have some in the first batch, one of them in the second, all are in the last."""
    x, y = examples(18)
    bad = [1, 6, 12, 16, 17]
    if strategy is None:
        rows = [[i for i in range(k, k + 8) if i not in bad] for k in (0, 8)]
        model = model_of(strategy, mlp)
        history = model.fit(
            ((x[some], y[some]) for some in rows), steps_per_epoch=2, shuffle=False, verbose=0
        ).history
        return {**history, "skipped_examples": [5.0]}, arrays(model)
    model = model_of(strategy, mlp, nonfinite="skip")
    bad_x = x.copy()
    bad_x[bad] = np.nan
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss or the gradient of")
        history = model.fit(bad_x, y, batch_size=8, shuffle=False, verbose=0).history
    found = history, arrays(model)
    macrobatch.accumulate(model, 3, nonfinite="raise")
    said = ""
    try:
        model.fit(bad_x, y, batch_size=8, shuffle=False, verbose=0)
    except ValueError as error:
        said = str(error)
    first = [1, 6][strategy.cluster_resolver.task_id]  # of its own
    assert "examples 1, 6 is not finite" in said, said
    assert f"In example {first}, the first layer" in said, said
    for before, after in zip(found[1], arrays(model)):
        np.testing.assert_array_equal(before, after)
    return found


@case
def an_unbuilt_model_and_a_dataset(strategy):
    """Sharded by TensorFlow, which is the default, with steps_per_epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(6)
    model = model_of(strategy, lambda: keras.Sequential([layers.Dense(5), layers.Dense(1)]))
    return model.fit(
        dataset, epochs=3, steps_per_epoch=4, shuffle=False, verbose=0
    ).history, arrays(model)


class OwnTestStep(keras.Model):
    def test_step(self, data):
        return {"three": 3.0 + 0.0 * tf.reduce_sum(data[1])}


@case
def an_own_test_step(strategy):
    def build():
        inputs = keras.Input([4])
        return OwnTestStep(inputs, layers.Dense(1)(inputs))

    x, y = examples(8)
    model = model_of(strategy, build)
    return model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)


WORKERS = 2  # in all layouts


def own_examples(index):
    """Those of a worker that has its own; the second has fewer."""
    x, y = examples(24)
    return x[index::WORKERS][: 12 - 5 * index], y[index::WORKERS][: 12 - 5 * index]


def not_sharded(strategy, prepare, steps):
    """A dataset of whole batches, or of this worker's own examples, of which it has 3 in each."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if strategy is not None:
        own = own_examples(strategy.cluster_resolver.task_id)
        dataset = prepare(tf.data.Dataset.from_tensor_slices(own)).batch(3 * WORKERS)
        return dataset.with_options(options)
    parts = []
    for index in range(WORKERS):
        stream = prepare(tf.data.Dataset.from_tensor_slices(own_examples(index)))
        parts.append([stream.skip(3 * k).take(3) for k in range(steps)])
    batches = [part_0.concatenate(part_1).batch(6) for part_0, part_1 in zip(*parts)]
    return functools.reduce(lambda a, b: a.concatenate(b), batches)


@case
def a_dataset_that_is_not_sharded(strategy):
    dataset = not_sharded(strategy, lambda stream: stream.repeat(), steps=8)
    model = model_of(strategy, mlp, micro_batch_size=2)
    options = {"epochs": 2, "steps_per_epoch": 4, "shuffle": False, "verbose": 0}
    return model.fit(dataset, **options).history, arrays(model)


@case
def a_worker_that_runs_out_of_data(strategy):
    """The other one goes on alone. Of a dataset with a filter the length is not known."""
    dataset = not_sharded(strategy, lambda stream: stream.filter(lambda *_: True), steps=4)
    if strategy is None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(4))
    model = model_of(strategy, mlp, micro_batch_size=2)
    return model.fit(dataset, shuffle=False, verbose=0).history, arrays(model)


def tagger():
    words = keras.Input([5], dtype="int64")
    embedded = layers.Embedding(9, 4, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(3, activation="softmax")(embedded))


@case
def masked_tokens_and_rows_of_a_table(strategy):
    rng = np.random.default_rng(0)
    words = rng.integers(1, 9, [20, 5]) * (rng.random([20, 5]) < rng.random([20, 1]))
    words[:, 0] = 1
    labels = rng.integers(0, 3, [20, 5])
    # Keras takes rows that come twice for different ones; SGD does not mind.
    model = model_of(
        strategy,
        tagger,
        optimizer=lambda: keras.optimizers.SGD(0.5),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(),
    )
    options = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(words, labels, **options).history, arrays(model)


@case
def moving_statistics(strategy):
    """The first layer's inputs do not depend on how the batch is cut."""
    x, y = examples()

    def build():
        return keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(1)])

    model = model_of(strategy, build)
    model.fit(x + 10, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return [np.array(v.value) for v in model.layers[0].non_trainable_variables]


def compared(y, y_pred):
    """Losses of examples that are compared with each other, and whose order counts."""
    logits = -tf.abs(y_pred - tf.transpose(y))
    places = tf.range(tf.shape(y)[0])
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places, logits)
    return losses * tf.cast(places + 1, losses.dtype)


@case
def a_loss_of_the_whole_batch(strategy):
    x, y = examples()
    model = model_of(
        strategy,
        mlp,
        whole_batch_loss=True,
        loss=lambda: compared,
        metrics=lambda: ["mae", keras.metrics.R2Score(name="r2")],
    )
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=examples(11, seed=1), **options).history
    return arrays(model), history


def distributed(strategy, batch):
    """A batch of which each replica gets a part, the last one none."""
    replicas = strategy.num_replicas_in_sync
    starts = [len(batch[0]) * r // max(replicas - 1, 1) for r in range(replicas)]
    ends = [*starts[1:], len(batch[0])]

    def part(context):
        r = context.replica_id_in_sync_group
        return tuple(tf.constant(array[starts[r] : ends[r]]) for array in batch)

    return strategy.experimental_distribute_values_from_function(part)


def loss_of(model, batch):
    x, y = batch
    return tf.reduce_mean((model(x, training=True) - y) ** 2, -1)


@case
def value_and_gradients_of_the_whole_batch(strategy):
    return value_and_gradients(strategy, whole=True)


@case
def value_and_gradients(strategy, whole=False):
    x, y = examples(17)
    model = model_of(None, mlp) if strategy is None else model_of(strategy, mlp)
    with scope_of(strategy):
        model.optimizer.build(model.trainable_variables)

    def step(*batch):
        if strategy is None:
            with tf.GradientTape() as tape:
                predicted = model(batch[0], training=True)
                losses = compared(batch[1], predicted) if whole else loss_of(model, batch)
                loss = tf.reduce_mean(losses)
            gradients = tape.gradient(loss, model.trainable_variables)
        elif whole:
            loss, gradients = macrobatch.value_and_gradients(
                lambda predicted, batch: compared(batch[1], predicted),
                model.trainable_variables,
                batch,
                micro_batch_size=2,
                forward=lambda batch: model(batch[0], training=True),
            )
        else:
            loss, gradients = macrobatch.value_and_gradients(
                lambda batch: loss_of(model, batch),
                model.trainable_variables,
                batch,
                micro_batch_size=2,
            )
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    if strategy is None:
        losses = [step(x, y) for _ in range(3)]
    else:
        run = tf.function(lambda batch: strategy.run(step, args=batch))
        losses = [run(distributed(strategy, (x, y))) for _ in range(3)]
        losses = [strategy.experimental_local_results(loss)[0] for loss in losses]
    return [loss.numpy() for loss in losses], arrays(model)


@case
def accumulator(strategy):
    """A window that is saved in its middle, with rows of which each worker has others."""
    rng = np.random.default_rng(0)
    # Each replica has other rows, and another number of them.
    words, y = np.arange(64).reshape([4, 8, 2]) % 37, rng.normal(size=[4, 8, 1])
    keras.utils.set_random_seed(7)
    with scope_of(strategy):
        table = tf.Variable(rng.normal(size=[37, 3]))
        kernel = tf.Variable(rng.normal(size=[3, 1]))
        optimizer = keras.optimizers.SGD(0.5)

    def gradients_of(words, y):
        with tf.GradientTape() as tape:
            features = tf.reduce_sum(tf.gather(table, words), 1)
            losses = (tf.linalg.matmul(features, kernel) - y) ** 2
            loss = tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(len(words), y.dtype))
        return tape.gradient(loss, [table, kernel])

    if strategy is None:
        for k in (0, 2):
            batch = (np.concatenate(words[k : k + 2]), np.concatenate(y[k : k + 2]))
            gradients = [tf.convert_to_tensor(g) for g in gradients_of(*batch)]
            for variable, gradient in zip((table, kernel), gradients):
                variable.assign_sub(0.5 * gradient)
        return [table.numpy(), kernel.numpy()]

    accumulator = macrobatch.GradientAccumulator(optimizer, [table, kernel])

    @tf.function
    def add(batch):
        def on_replica(words, y):
            gradients = gradients_of(words, y)
            assert isinstance(gradients[0], tf.IndexedSlices)
            accumulator.add(gradients, weight=len(words))

        strategy.run(on_replica, args=batch)

    checkpoint = tf.train.Checkpoint(accumulator=accumulator)
    add(distributed(strategy, (words[0], y[0])))
    # All workers save, since each has a part of the sums, and the chief's file is the one.
    folder = os.path.join(sys.argv[1], f"checkpoint-{strategy.cluster_resolver.task_id}")
    path = checkpoint.save(os.path.join(folder, "middle"))
    accumulator.reset()
    checkpoint.restore(path)
    assert accumulator.pending > 0
    add(distributed(strategy, (words[1], y[1])))
    accumulator.apply()
    add(distributed(strategy, (words[2], y[2])))
    add(distributed(strategy, (words[3], y[3])))
    accumulator.flush()
    return [table.numpy(), kernel.numpy()]


@case
def rows_of_which_nobody_has_any(strategy):
    """Examples without words: TensorFlow crashes where workers exchange no rows at all."""
    words, y = np.zeros([8, 0], "int64"), np.ones([8, 1])
    with scope_of(strategy):
        table, bias = tf.Variable(tf.ones([5, 1], y.dtype)), tf.Variable(tf.zeros([1], y.dtype))
        optimizer = keras.optimizers.SGD(0.5)
    if strategy is None:
        bias.assign_sub(0.5 * tf.reduce_mean(-2.0 * y, 0))
        return [table.numpy(), bias.numpy()]
    accumulator = macrobatch.GradientAccumulator(optimizer, [table, bias])

    def on_replica(words, y):
        with tf.GradientTape() as tape:
            outputs = tf.reduce_sum(tf.gather(table, words), 1) + bias
            loss = tf.math.divide_no_nan(tf.reduce_sum((outputs - y) ** 2), len(words))
        gradients = tape.gradient(loss, [table, bias])
        assert isinstance(gradients[0], tf.IndexedSlices)
        accumulator.add(gradients, weight=len(words))

    tf.function(strategy.run)(on_replica, args=distributed(strategy, (words, y)))
    accumulator.apply()
    return [table.numpy(), bias.numpy()]


@case
def a_backup_that_one_worker_cannot_read(strategy):
    """All workers go on from the one before it."""
    x, y = examples(8)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    if strategy is None:
        model = model_of(strategy, mlp)
        model.fit(x, y, epochs=4, **options)
        return arrays(model)

    def fit(folder, epochs):
        model = model_of(strategy, mlp)
        kept = {"double_checkpoint": True, "delete_checkpoint": False}
        backup = keras.callbacks.BackupAndRestore(folder, **kept)
        return model, model.fit(x, y, epochs=epochs, callbacks=[backup], **options)

    shared = os.path.join(sys.argv[1], "double")
    fit(shared, 3)
    index = strategy.cluster_resolver.task_id
    own = shutil.copytree(shared, f"{shared}-{index}")
    if index == 1:
        os.truncate(os.path.join(own, "epoch-3.index"), 50)
    model, history = fit(own, 4)
    assert history.epoch == [2, 3], history.epoch
    return arrays(model)


@case
def a_worker_that_runs_out_alone(strategy):
    """The last worker has too little memory (RLIMIT_AS), the others have enough."""
    x, y = memory_cases.examples(1000)

    def build():
        return memory_cases.layers_of()

    is_last = strategy is not None and strategy.cluster_resolver.task_id == WORKERS - 1
    model = model_of(strategy, build, "auto", optimizer=lambda: keras.optimizers.Adam(0.01))
    with memory_cases.limited(400) if is_last else contextlib.nullcontext():
        options = {"batch_size": 1000, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(x, y, **options).history
    if strategy is not None:
        sizes = history.pop("micro_batch_size")
        assert max(sizes) < 500, sizes
    return arrays(model), history


@record
def files(strategy, folder):
    """What is there after a fit in which each worker has a folder of its own to write to."""
    x, y = examples(8)
    model = model_of(strategy, mlp, micro_batch_size=2)
    own = os.path.join(folder, f"files-{strategy.cluster_resolver.task_id}")
    os.mkdir(own)
    seen = []

    class Own(keras.callbacks.Callback):
        """Callbacks of users are for all workers."""

        def on_epoch_end(self, epoch, logs=None):
            seen.append(epoch)

    callbacks = [
        keras.callbacks.ModelCheckpoint(os.path.join(own, "model.keras")),
        keras.callbacks.CSVLogger(os.path.join(own, "log.csv")),
        keras.callbacks.TensorBoard(os.path.join(own, "board")),
        keras.callbacks.BackupAndRestore(os.path.join(own, "backup"), delete_checkpoint=False),
        Own(),
    ]
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(x, y, callbacks=callbacks, **options)
    return sorted(os.listdir(own)), seen


@record
def another_backup(strategy, folder):
    """What is said to a worker that finds another backup than the others: see `files`."""
    own = os.path.join(folder, f"files-{strategy.cluster_resolver.task_id}", "backup")
    model = model_of(strategy, mlp, micro_batch_size=2)
    backup = keras.callbacks.BackupAndRestore(own)
    x, y = examples(8)
    try:
        model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[backup])
    except ValueError as error:
        return str(error)


def main(folder, *names):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # see conftest.py
    macrobatch.wait_for_workers()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    results = {"replicas": strategy.num_replicas_in_sync}
    for name in names or [*CASES, *RECORDS]:
        print(name, flush=True)
        is_case = name in CASES
        results[name] = CASES[name](strategy) if is_case else RECORDS[name](strategy, folder)
    path = os.path.join(folder, f"{strategy.cluster_resolver.task_id}.pickle")
    with open(path, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

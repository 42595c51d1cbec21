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
import pytest
import tensorflow as tf
from keras import layers

import macrobatch

CASES = {}


def case(function):
    CASES[function.__name__] = function
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


def trained(model, x, y=None, **options):
    """The history of a training, and where it has ended."""
    if y is not None:
        options = {"batch_size": 8, "epochs": 2, **options}
    history = model.fit(x, y, **{"shuffle": False, "verbose": 0, **options}).history
    return history, arrays(model)


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
    seen = []  # what is reported after each batch
    logged = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            {name: np.array(value) for name, value in logs.items()}
        )
    )
    found = trained(model, x, y, validation_data=examples(11, seed=1), callbacks=[logged])
    evaluated = model.evaluate(x, y, batch_size=7, verbose=0)
    predicted = model.predict(x[:16], batch_size=8, verbose=0)
    return found, seen, evaluated, np.sort(predicted, 0)


@case
def shuffled_arrays(strategy):
    x, y = examples()
    model = model_of(strategy, mlp)
    keras.utils.set_random_seed(3)
    return trained(model, x, y, shuffle=True)


@case
def examples_that_are_not_finite(strategy):
    """Both workers have some in the first batch, one of them in the second, all are in the last."""
    x, y = examples(18)
    bad = [1, 6, 12, 16, 17]
    if strategy is None:
        rows = [[i for i in range(k, k + 8) if i not in bad] for k in (0, 8)]
        batches = ((x[some], y[some]) for some in rows)
        history, ended = trained(model_of(strategy, mlp), batches, steps_per_epoch=2)
        return {**history, "skipped_examples": [5.0]}, ended
    model = model_of(strategy, mlp, nonfinite="skip")
    bad_x = x.copy()
    bad_x[bad] = np.nan
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss or the gradient of")
        found = trained(model, bad_x, y, epochs=1)
    macrobatch.accumulate(model, 3, nonfinite="raise")
    first = [1, 6][strategy.cluster_resolver.task_id]  # of its own
    said = rf"(?s)examples 1, 6 is not finite.*In example {first}, the first layer"
    with pytest.raises(ValueError, match=said):
        trained(model, bad_x, y)
    for before, after in zip(found[1], arrays(model)):
        np.testing.assert_array_equal(before, after)
    return found


@case
def an_unbuilt_model_and_a_dataset(strategy):
    """Sharded by TensorFlow, which is the default, with steps_per_epoch."""
    dataset = tf.data.Dataset.from_tensor_slices(examples()).repeat().batch(6)
    model = model_of(strategy, lambda: keras.Sequential([layers.Dense(5), layers.Dense(1)]))
    return trained(model, dataset, epochs=3, steps_per_epoch=4)


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
    return trained(model, dataset, epochs=2, steps_per_epoch=4)


@case
def a_worker_that_runs_out_of_data(strategy):
    """The other one goes on alone. Of a dataset with a filter the length is not known."""
    dataset = not_sharded(strategy, lambda stream: stream.filter(lambda *_: True), steps=4)
    if strategy is None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(4))
    return trained(model_of(strategy, mlp, micro_batch_size=2), dataset)


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
    return trained(model, words, labels, batch_size=7)


@case
def moving_statistics(strategy):
    """The first layer's inputs do not depend on how the batch is cut."""
    x, y = examples()

    def build():
        return keras.Sequential([keras.Input([4]), layers.BatchNormalization(), layers.Dense(1)])

    model = model_of(strategy, build)
    trained(model, x + 10, y)
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
    return trained(model, x, y, validation_data=examples(11, seed=1))


def distributed(strategy, batch):
    """A batch of which each replica gets a part, the last one none."""
    replicas = strategy.num_replicas_in_sync
    starts = [len(batch[0]) * r // max(replicas - 1, 1) for r in range(replicas)]
    ends = [*starts[1:], len(batch[0])]

    def part(context):
        r = context.replica_id_in_sync_group
        return tuple(tf.constant(array[starts[r] : ends[r]]) for array in batch)

    return strategy.experimental_distribute_values_from_function(part)


@case
def value_and_gradients_of_the_whole_batch(strategy):
    return value_and_gradients(strategy, whole=True)


@case
def value_and_gradients(strategy, whole=False):
    x, y = examples(17)
    model = model_of(strategy, mlp)
    variables = model.trainable_variables
    with scope_of(strategy):
        model.optimizer.build(variables)

    def forward(batch):
        return model(batch[0], training=True)

    def losses_of(predicted, batch):
        _, y = batch
        return compared(y, predicted) if whole else tf.reduce_mean((predicted - y) ** 2, -1)

    def step(*batch):
        if strategy is None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(losses_of(forward(batch), batch))
            gradients = tape.gradient(loss, variables)
        else:
            function, options = lambda batch: losses_of(forward(batch), batch), {}
            if whole:
                function, options = losses_of, {"forward": forward}
            loss, gradients = macrobatch.value_and_gradients(
                function, variables, batch, micro_batch_size=2, **options
            )
        model.optimizer.apply(gradients, variables)
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
    """Windows that are saved in the middle, with rows of which each worker has others."""
    rng = np.random.default_rng(0)
    # Each replica has other rows, and another number of them.
    return windows_of(strategy, np.arange(64).reshape([4, 8, 2]) % 37, rng.normal(size=[4, 8, 1]))


@case
def rows_of_which_nobody_has_any(strategy):
    """Examples without words: TensorFlow crashes where workers exchange no rows at all."""
    return windows_of(strategy, np.zeros([2, 8, 0], "int64"), np.ones([2, 8, 1]))


def windows_of(strategy, words, y):
    """Where variables end after windows of two batches."""
    rng = np.random.default_rng(1)
    with scope_of(strategy):
        shapes = [37, 3], [3, 1], [1]
        table, kernel, bias = variables = [tf.Variable(rng.normal(size=shape)) for shape in shapes]
        optimizer = keras.optimizers.SGD(0.5)

    def gradients_of(words, y):
        with tf.GradientTape() as tape:
            features = tf.reduce_sum(tf.gather(table, words), 1)
            losses = (tf.linalg.matmul(features, kernel) + bias - y) ** 2
            loss = tf.math.divide_no_nan(tf.reduce_sum(losses), tf.cast(len(words), y.dtype))
        return tape.gradient(loss, variables)

    if strategy is None:
        for k in range(0, len(words), 2):
            gradients = gradients_of(*(np.concatenate(each[k : k + 2]) for each in (words, y)))
            for variable, gradient in zip(variables, gradients):
                variable.assign_sub(0.5 * tf.convert_to_tensor(gradient))
        return [variable.numpy() for variable in variables]

    accumulator = macrobatch.GradientAccumulator(optimizer, variables)

    @tf.function
    def add(batch):
        def on_replica(words, y):
            gradients = gradients_of(words, y)
            assert isinstance(gradients[0], tf.IndexedSlices)
            accumulator.add(gradients, weight=len(words))

        strategy.run(on_replica, args=batch)

    checkpoint = tf.train.Checkpoint(accumulator=accumulator)
    # All workers save, since each has a part of the sums, and the chief's file is the one.
    folder = os.path.join(sys.argv[1], f"checkpoint-{strategy.cluster_resolver.task_id}")
    for k, finish in zip(range(0, len(words), 2), (accumulator.apply, accumulator.flush)):
        add(distributed(strategy, (words[k], y[k])))
        path = checkpoint.save(os.path.join(folder, "middle"))
        accumulator.reset()
        checkpoint.restore(path)
        assert accumulator.pending > 0
        add(distributed(strategy, (words[k + 1], y[k + 1])))
        finish()
    return [variable.numpy() for variable in variables]


@case
def a_backup_that_one_worker_cannot_read(strategy):
    """All workers go on from the one before it."""

    def fit(folder, epochs):
        kept = {"double_checkpoint": True, "delete_checkpoint": False}
        backups = [] if strategy is None else [keras.callbacks.BackupAndRestore(folder, **kept)]
        model = model_of(strategy, mlp)
        return trained(model, *examples(8), epochs=epochs, callbacks=backups)

    if strategy is None:
        history, ended = fit(None, 4)
        return history["loss"][2:], ended
    shared = os.path.join(sys.argv[1], "double")
    fit(shared, 3)
    index = strategy.cluster_resolver.task_id
    own = shutil.copytree(shared, f"{shared}-{index}")
    if index == 1:
        os.truncate(os.path.join(own, "epoch-3.index"), 50)
    history, ended = fit(own, 4)
    return history["loss"], ended


@case
def a_worker_that_runs_out_alone(strategy):
    """The last worker has too little memory (RLIMIT_AS), the others have enough."""
    is_last = strategy is not None and strategy.cluster_resolver.task_id == WORKERS - 1
    optimizer = functools.partial(keras.optimizers.Adam, 0.01)
    model = model_of(strategy, memory_cases.layers_of, "auto", optimizer=optimizer)
    with memory_cases.limited(400) if is_last else contextlib.nullcontext():
        history, ended = trained(model, *memory_cases.examples(1000), batch_size=1000)
    if strategy is not None:
        sizes = history.pop("micro_batch_size")
        assert max(sizes) < 500, sizes
    return history, ended


@case
def files(strategy):
    """Each worker has a folder of its own to write to. Plain Keras has nothing to compare with."""
    if strategy is None:
        return []
    own = os.path.join(sys.argv[1], f"files-{strategy.cluster_resolver.task_id}")
    os.mkdir(own)
    seen = []
    backup = os.path.join(own, "backup")
    callbacks = [
        keras.callbacks.ModelCheckpoint(os.path.join(own, "model.keras")),
        keras.callbacks.CSVLogger(os.path.join(own, "log.csv")),
        keras.callbacks.TensorBoard(os.path.join(own, "board")),
        keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False),
        # Callbacks of users are for all workers.
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch)),
    ]
    trained(model_of(strategy, mlp), *examples(8), callbacks=callbacks)
    is_chief = strategy.cluster_resolver.task_id == 0
    written = ["backup", "board", "log.csv", "model.keras"]
    assert sorted(os.listdir(own)) == (written if is_chief else []), "only the chief writes"
    assert seen == [0, 1]
    # One worker finds a backup, and another none.
    refused(strategy, r"Received: backups after \[2, ", callbacks=backups(backup))
    return []


def backups(*arguments):
    return [keras.callbacks.BackupAndRestore(*arguments)]


def refused(strategy, message, x=None, **options):
    """Asserts that a fit is refused, on each worker."""
    model = model_of(strategy, mlp)
    tf.random.set_seed(None)
    x, y = examples(8) if x is None else (x, None)
    with pytest.raises((ValueError, macrobatch.ExactnessWarning), match=message):
        trained(model, x, y, **options)


@case
def what_is_refused(strategy):
    if strategy is None:
        return []
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices(examples(16)).batch(4).with_options(off)
    refused(strategy, r"Received: 4 batches.*steps_per_epoch=", dataset)
    every = r'Received: save_freq=5\. Expected: save_freq="epoch"'
    refused(strategy, every, callbacks=backups("folder", 5))
    refused(strategy, r"Received: backup_dir='a\[1\]'", callbacks=backups("a[1]"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", macrobatch.ExactnessWarning)
        refused(strategy, "set_random_seed", shuffle=True)
    return []


def strategy_of_all():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # see conftest.py
    macrobatch.wait_for_workers(60)
    return tf.distribute.MultiWorkerMirroredStrategy()


def main(folder, *names):
    strategy = strategy_of_all()
    results = {"replicas": strategy.num_replicas_in_sync}
    for name in names or CASES:
        print(name, flush=True)
        results[name] = CASES[name](strategy)
    path = os.path.join(folder, f"{strategy.cluster_resolver.task_id}.pickle")
    with open(path, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

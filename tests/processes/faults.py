"""Trains on two workers, kills one of them time and again, and starts again until all is done.

    python tests/processes/faults.py FOLDER KILLS

writes what the chief ends with to FOLDER. Workers are forked from a process that has imported
TensorFlow, which saves most of the time that it takes to start one.
"""

import json
import os
import pickle
import random
import signal
import socket
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import macrobatch

EPOCHS, STEPS = 30, 4


class Tell(keras.callbacks.Callback):
    """Tells the process that kills how many updates have been made."""

    def __init__(self, pipe):
        super().__init__()
        self.pipe = pipe

    def on_train_batch_end(self, batch, logs=None):
        os.write(self.pipe, b".")
        time.sleep(0.01)


def train(folder, pipe):
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(16)  # see conftest.py
    macrobatch.wait_for_workers(60)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([4]),
                layers.Dense(8, activation="tanh"),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.05), "mse")
    macrobatch.accumulate(model, 2)
    x = np.random.default_rng(0).normal(size=[8 * STEPS, 4])
    backup = keras.callbacks.BackupAndRestore(os.path.join(folder, "backup"))
    callbacks = [Tell(pipe), backup]
    y = np.sin(x.sum(1, keepdims=True))
    # An epoch is the whole data. Arrays would have a new iterator in each epoch, and TensorFlow
    # takes up to seconds to end the one before.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).repeat()
    options = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "shuffle": False, "verbose": 0}
    model.fit(dataset, callbacks=callbacks, **options)
    if strategy.cluster_resolver.task_id == 0:
        variables = [*model.variables, *model.optimizer.variables]
        with open(os.path.join(folder, "end.pickle"), "wb") as file:
            pickle.dump([variable.numpy() for variable in variables], file)


def start(folder, pipe):
    sockets = [socket.socket() for _ in range(2)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    workers = []
    for index in range(2):
        worker = os.fork()
        if worker == 0:
            task = {"type": "worker", "index": index}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
            status = 1
            try:
                train(folder, pipe)
                status = 0
            finally:
                os._exit(status)
        workers.append(worker)
    return workers


def main(folder, kills):
    chance = random.Random(0)
    for attempt in range(kills + 1):
        receiving, sending = os.pipe()
        workers = start(folder, sending)
        os.close(sending)
        if attempt < kills:
            # Both workers tell of each update. After so few, all kills come before the end.
            for _ in range(chance.randrange(6 * STEPS)):
                assert os.read(receiving, 1), "a worker failed by itself"
            time.sleep(chance.random() * 0.1)
            victim = workers[(attempt + 1) % 2]  # a worker, then the chief
            os.kill(victim, signal.SIGKILL)
            survivor = workers[attempt % 2]
            _, status = os.waitpid(victim, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL, "it had ended before"
            time.sleep(0.1)
            os.kill(survivor, signal.SIGKILL)
            os.waitpid(survivor, 0)
        else:
            codes = [os.waitpid(worker, 0)[1] for worker in workers]
            assert codes == [0, 0], codes
        backups = os.path.join(folder, "backup")
        print(attempt, os.listdir(backups) if os.path.isdir(backups) else [], flush=True)
        os.close(receiving)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

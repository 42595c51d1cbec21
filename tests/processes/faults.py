"""What test_workers.py runs on two workers, one of which kills itself after each start.

    macrobatch run --workers 2 --max-restarts KILLS tests/processes/faults.py FOLDER KILLS

writes what the chief ends with to FOLDER.
"""

import os
import pickle
import random
import signal
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
import worker_cases
from keras import layers

EPOCHS, STEPS = 40, 4


class Kills(keras.callbacks.Callback):
    """Kills this process at any moment, after a few updates: all kills come before the end."""

    def __init__(self, chance):
        super().__init__()
        self.updates, self.seconds = chance.randrange(1, 3 * STEPS), chance.random() / 10

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        self.updates -= 1
        if self.updates == 0:
            kill = threading.Timer(self.seconds, os.kill, [os.getpid(), signal.SIGKILL])
            kill.start()


def build():
    return keras.Sequential(
        [
            keras.Input([4]),
            layers.Dense(8, activation="tanh"),
            layers.Dropout(0.3),
            layers.Dense(1),
        ]
    )


def main(folder, kills):
    strategy = worker_cases.strategy_of_all()
    me = strategy.cluster_resolver.task_id
    with open(os.path.join(folder, f"starts-{me}"), "a") as file:
        file.write(".")
        start = file.tell()
    model = worker_cases.model_of(strategy, build, 2)
    x = np.random.default_rng(0).normal(size=[8 * STEPS, 4])
    backup = os.path.join(folder, "backup")
    print(start, os.listdir(backup) if os.path.isdir(backup) else [], flush=True)
    callbacks = [keras.callbacks.BackupAndRestore(backup)]
    if start <= kills and me == start % 2:  # a worker, then the chief
        callbacks.append(Kills(random.Random(start)))
    # An epoch is the whole data. Arrays would have a new iterator in each epoch, and TensorFlow
    # takes up to seconds to end the one before.
    dataset = tf.data.Dataset.from_tensor_slices((x, np.sin(x.sum(1, keepdims=True))))
    options = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "callbacks": callbacks}
    _, ended = worker_cases.trained(model, dataset.batch(8).repeat(), **options)
    if me == 0:
        with open(os.path.join(folder, "end.pickle"), "wb") as file:
            pickle.dump(ended, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

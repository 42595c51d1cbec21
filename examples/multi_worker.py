"""Several machines, or several processes of one: the same script with any number of workers.

    python examples/multi_worker.py                           one process
    macrobatch run --workers 2 examples/multi_worker.py       two workers on this machine

On a cluster each machine runs `python multi_worker.py`, and TF_CONFIG says who the others are
(docs/scaling.md). A run that is stopped, or killed, goes on with the epoch it was in when it is
started again.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import macrobatch

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="multi_worker", help="which all workers share")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

macrobatch.wait_for_workers(timeout=120)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)  # All workers shuffle alike.

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input([784]),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

# One update is made from 512 examples, whatever the number of workers: each has 32 in memory.
macrobatch.accumulate(model, micro_batch_size=32)

rng = np.random.default_rng(0)
y = rng.integers(0, 10, [4096])
x = rng.normal(size=[4096, 784]).astype("float32")
x[:, :10] += 3 * np.eye(10)[y]
history = model.fit(
    x,
    y,
    batch_size=512,
    epochs=options.epochs,
    validation_split=0.1,
    verbose=0,
    callbacks=[
        keras.callbacks.BackupAndRestore(os.path.join(options.folder, "backup")),
        keras.callbacks.ModelCheckpoint(os.path.join(options.folder, "model.keras")),
    ],
).history
print(f"loss: {[round(value, 4) for value in history['loss']]}")
print(f"accuracy on the rest: {[round(value, 4) for value in history['val_accuracy']]}")

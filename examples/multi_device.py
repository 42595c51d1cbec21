"""Several devices of one machine: replicas x micro-batches end where one device ends.

    python examples/multi_device.py

On a machine with several GPUs it uses them all; elsewhere two logical CPU devices stand in.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import macrobatch

BATCH_SIZE, MICRO_BATCH_SIZE = 250, 16  # which two replicas divide, but not into micro-batches

if len(tf.config.list_physical_devices("GPU")) < 2:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = ["CPU:0", "CPU:1"]
else:
    devices = None  # all GPUs


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input([20], dtype="int32"),
            keras.layers.Embedding(1000, 32, mask_zero=True),
            keras.layers.LSTM(32),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=1.0), loss, metrics=["accuracy"])
    return model


# Words, padded with 0; what is asked is whether the first is in the first half of the vocabulary.
rng = np.random.default_rng(0)
lengths = rng.integers(1, 21, [1000, 1])
x = rng.integers(1, 1000, [1000, 20]) * (np.arange(20) < lengths)
y = (x[:, :1] < 500).astype("float32")

plain = build()
start = [np.array(weight) for weight in plain.get_weights()]
plain.fit(x, y, batch_size=BATCH_SIZE, epochs=3, shuffle=False, verbose=0)

strategy = tf.distribute.MirroredStrategy(devices)
with strategy.scope():  # The model, its optimizer and its metrics are made here.
    model = build()
macrobatch.accumulate(model, MICRO_BATCH_SIZE)
history = model.fit(x, y, batch_size=BATCH_SIZE, epochs=3, shuffle=False, verbose=0).history

difference = max(np.abs(a - b).max() for a, b in zip(plain.get_weights(), model.get_weights()))
moved = max(np.abs(a - b).max() for a, b in zip(start, plain.get_weights()))
print(f"loss on {strategy.num_replicas_in_sync} replicas: {history['loss']}")
print(
    f"one device with batches of {BATCH_SIZE}, and {strategy.num_replicas_in_sync} replicas with "
    f"micro-batches of {MICRO_BATCH_SIZE}: weights differ by at most {difference:.1e}, "
    f"and have moved by {moved:.2f}"
)

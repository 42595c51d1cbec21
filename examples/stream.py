"""A loop of your own, micro-batches arriving one by one: GradientAccumulator.

Four ways in which they arrive. Each is trained in windows of micro-batches and, to compare, with a
tape over each whole window; it prints how far apart the weights end.

    python examples/stream.py
"""

import keras
import numpy as np
import tensorflow as tf

import macrobatch

rng = np.random.default_rng(0)
X = rng.normal(size=[100, 8]).astype("float32")
Y = X @ rng.normal(size=[8, 1]).astype("float32")


def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input([8]), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    )


def gradients_of(model, x, y):
    """The gradients of a loss that is a mean over examples."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def from_arrays(model, optimizer):
    """Arrays, cut by hand. Of 100 examples, the last window has one micro-batch of 4."""
    accumulator = macrobatch.GradientAccumulator(optimizer, model.trainable_variables, steps=4)
    for start in range(0, len(X), 8):
        x, y = X[start : start + 8], Y[start : start + 8]
        accumulator.step(gradients_of(model, x, y), weight=len(x))
    accumulator.flush()  # the last window, which is not full
    return [32, 32, 32, 4]


def from_dataset(model, optimizer):
    """A tf.data.Dataset of micro-batches, and the whole epoch in one tf.function."""
    accumulator = macrobatch.GradientAccumulator(optimizer, model.trainable_variables, steps=4)

    @tf.function
    def epoch(dataset):
        for x, y in dataset:
            accumulator.step(gradients_of(model, x, y), weight=tf.shape(x)[0])
        accumulator.flush()

    epoch(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    return [32, 32, 32, 4]


def from_sizes_that_vary(model, optimizer):
    """Micro-batches of different sizes, as bucketing by length makes them.

    Here a window is full when it has at least 25 examples, and not after a number of steps.
    """
    accumulator = macrobatch.GradientAccumulator(optimizer, model.trainable_variables)
    signature = [tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])]

    @tf.function(input_signature=signature)  # any size, one trace
    def add(x, y):
        accumulator.add(gradients_of(model, x, y), weight=tf.shape(x)[0])

    windows, start = [], 0
    for size in [3, 10, 7, 9, 1, 20, 5, 12, 8, 16, 9]:
        add(X[start : start + size], Y[start : start + size])
        start += size
        if accumulator.total_weight >= 25:
            windows.append(int(accumulator.total_weight))
            accumulator.apply()
    left = int(accumulator.total_weight)
    accumulator.flush()
    return [*windows, left]


def with_a_schedule(model, _):
    """A learning-rate schedule counts updates, not micro-batches: give it the number of updates."""
    epochs, micro_batches, steps = 3, 13, 4
    updates = epochs * -(-micro_batches // steps)  # rounded up: flush() makes the last one
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, updates))
    accumulator = macrobatch.GradientAccumulator(optimizer, model.trainable_variables, steps=steps)
    for _ in range(epochs):
        for x, y in tf.data.Dataset.from_tensor_slices((X, Y)).batch(8):
            accumulator.step(gradients_of(model, x, y), weight=len(x))
        accumulator.flush()  # at the end of an epoch, so that no window spans two
    assert int(optimizer.iterations) == updates
    return [32, 32, 32, 4] * epochs


def textbook(sizes, optimizer):
    """One tape over each whole window."""
    model = build()
    start = 0
    for size in sizes:
        start %= len(X)
        gradients = gradients_of(model, X[start : start + size], Y[start : start + size])
        optimizer.apply(gradients, model.trainable_variables)
        start += size
    return model


def compare(way):
    """Trains in this way and by the textbook; returns the largest difference of weights."""

    def optimizer():
        if way is with_a_schedule:
            return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 12))
        return keras.optimizers.Adam(0.01)

    model = build()
    windows = way(model, optimizer())
    whole = textbook(windows, optimizer())
    pairs = zip(model.trainable_variables, whole.trainable_variables)
    return max(float(tf.reduce_max(tf.abs(a - b))) for a, b in pairs), windows


def main():
    for way in (from_arrays, from_dataset, from_sizes_that_vary, with_a_schedule):
        difference, windows = compare(way)
        print(f"{way.__name__:>20}: windows of {windows} examples")
        print(f"{'':>20}  weights differ from whole batches by at most {difference:.1e}")


if __name__ == "__main__":
    main()

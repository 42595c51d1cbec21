"""What version 0.2.0 has saved, and how: `test_saved.py` goes on from it.

    PYTHONPATH=the/package/of/0.2.0 python tests/contract/saved.py

writes tests/contract/data, on TensorFlow. `tests/differential` builds that package, into
build/differential/a0924f9.
"""

import pathlib
import shutil

import keras
import numpy as np

import macrobatch

DATA = pathlib.Path(__file__).resolve().parent / "data"


def numbers(*shape, start=0):
    """Numbers that look random and are the same on every backend."""
    return np.sin(1.7 * (start + np.arange(np.prod(shape)))).reshape(shape)


# A window in the middle: one update is made, and two micro-batches have come since. One was left
# out, because it was not finite.

MICRO_BATCHES = 6
SAVED_AFTER = 5


class Window:
    """An accumulator of a table of embeddings and a kernel, and what arrives at it."""

    def __init__(self, reduction):
        import tensorflow as tf

        self.variables = [tf.Variable(numbers(7, 3)), tf.Variable(numbers(3, 2, start=9))]
        self.accumulator = macrobatch.GradientAccumulator(
            keras.optimizers.Adam(0.1), self.variables, reduction=reduction, nonfinite="skip"
        )
        self.weighted = reduction == "mean"
        self.checkpoint = tf.train.Checkpoint(
            accumulator=self.accumulator, variables=self.variables
        )

    def add(self, start, end):
        """Adds micro-batches; each touches two rows of the table, one of them twice."""
        import tensorflow as tf

        for index in range(start, end):
            rows = tf.IndexedSlices(
                tf.constant(numbers(3, 3, start=index)),
                tf.constant([index % 3, index % 3, 3 + index % 4]),
                tf.constant([7, 3]),
            )
            kernel = numbers(3, 2, start=-index) * (np.inf if index == 3 else 1.0)
            weight = 1.0 + index if self.weighted else None
            self.accumulator.add([rows, tf.constant(kernel)], weight=weight)
            if index == 1:
                self.accumulator.apply()

    def finish(self):
        """The last micro-batch, and the update."""
        self.add(SAVED_AFTER, MICRO_BATCHES)
        self.accumulator.apply()


# A training that ended after two of four epochs, with a BackupAndRestore.

EPOCHS = 4


class Ended(Exception):
    """The training was interrupted."""


def model():
    built = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)]
    )
    built.set_weights([numbers(*weight.shape) for weight in built.weights])
    # Numbers that are the same in float32, in which other backends than TensorFlow take them.
    optimizer = keras.optimizers.Adam(1 / 16, 1 / 2, 3 / 4, 2**-20, use_ema=True, ema_momentum=0.5)
    built.compile(optimizer, "mse")
    return macrobatch.accumulate(built, micro_batch_size=3)


def train(model, *callbacks):
    x, y = numbers(20, 4), numbers(20, 2, start=3)
    options = {"batch_size": 8, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **options).history


def end(epoch, logs):
    if epoch == 2:
        raise Ended


def main():
    import tensorflow as tf

    shutil.rmtree(DATA, ignore_errors=True)
    keras.config.set_floatx("float64")
    for reduction in ("mean", "sum"):
        window = Window(reduction)
        window.add(0, SAVED_AFTER)
        window.checkpoint.write(str(DATA / reduction))
    backup = keras.callbacks.BackupAndRestore(DATA / "backup")
    try:
        train(model(), backup, keras.callbacks.LambdaCallback(on_epoch_begin=end))
    except Ended:
        print("Saved with", macrobatch.__file__, "on TensorFlow", tf.__version__)


if __name__ == "__main__":
    main()

"""fit() in what TensorFlow alone has: graphs, datasets, rows of tables."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from builders import X, Y, compiled, data, dense, fit
from keras import layers, optimizers
from support import MODES, check, thorough
from support.unchanged import unchanged

import macrobatch

FREE = (tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.float64))


def dataset_of(batches, signature=FREE):
    batches = list(batches)
    dataset = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))


# Graphs


class Sizes(layers.Layer):
    """Notes the number of examples of each call that runs in a graph."""

    def __init__(self):
        super().__init__()
        self.seen, self.supports_masking = [], True

    def call(self, inputs):
        if not tf.executing_eagerly():
            tf.py_function(lambda t: self.seen.append(len(t)), [inputs], [])
        return inputs


@pytest.mark.parametrize("cut", [{"micro_batch_size": 3}, {"micro_batch_tokens": 9}])
def test_tokens_are_counted_without_predictions(cut):
    """Also where shapes are not known, which makes TensorFlow assert those of predictions."""
    sizes = Sizes()
    tokens = keras.Input([None], dtype="int32")
    masked = layers.Embedding(9, 4, mask_zero=True)(tokens)
    model = keras.Model(tokens, layers.Dense(5)(sizes(masked)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    axis = 1 if "micro_batch_tokens" in cut else None
    macrobatch.accumulate(model, sequence_axis=axis, **cut)
    x = np.array([[1, 2, 3], [1, 0, 0], [2, 0, 0], [5, 6, 0], [7, 0, 0], [1, 2, 0], [3, 0, 0]])
    batches = dataset_of([(x, x % 5)], (FREE[0], FREE[0]))
    model.fit(batches, shuffle=False, verbose=0)  # tries whether predictions depend on padding
    sizes.seen.clear()
    model.fit(batches, shuffle=False, verbose=0)
    assert sizes.seen == ([3, 3, 1] if axis is None else [3, 4])


# Datasets


@pytest.mark.parametrize("labels", [Y, Y[:, 0]])
def test_an_unbatched_dataset(labels):
    dataset = tf.data.Dataset.from_tensor_slices((X, labels))
    with pytest.raises(ValueError, match=r"If the dataset yields single examples, batch it"):
        fit(compiled(dense()), dataset, None, batch_size=None)


FLOATS = (tf.TensorSpec([None, 4], tf.float64), tf.TensorSpec([None, 2], tf.float64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("rows", "match"), [((0, 0), "one example|is_empty"), ((8, 7), "same number of examples")]
)
def test_batches_whose_sizes_only_a_graph_knows(rows, match, mode):
    if mode == "compiled" and rows[0]:
        pytest.skip("XLA drops the check")
    dataset = dataset_of([(X[: rows[0]], Y[: rows[1]])], FLOATS)
    model = compiled(dense(), **MODES[mode])
    with unchanged(model, (ValueError, tf.errors.InvalidArgumentError), match):
        fit(model, dataset, None, batch_size=None)


class Pooled(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(9, 4, mask_zero=True)
        self.pool, self.head = layers.GlobalAveragePooling1D(), layers.Dense(3)

    def call(self, tokens):
        return self.head(self.pool(self.table(tokens)))


def batches_of_many_widths():
    for width in (5, 3, 3, 4):
        lengths = 1 + np.arange(6) % width
        lengths[0] = width
        tokens = np.where(np.arange(width) < lengths[:, None], 1 + np.arange(width) % 8, 0)
        yield tokens.astype("int32"), data(6, 3)


@pytest.mark.parametrize("eagerly", [False, True])
def test_labels_stay_whole_in_the_batch_that_happens_to_be_as_wide(eagerly):
    """Labels of shape (examples, 3), and batches of tokens 5, 3, 3 and 4 wide."""
    check(
        Pooled,
        lambda: dataset_of(batches_of_many_widths()),
        cut={"micro_batch_size": 2, "sequence_axis": 1},
        optimizer=lambda: optimizers.SGD(0.1),
        run_eagerly=eagerly,
    )


# Rows of tables


class Spy(optimizers.SGD):
    """Notes the gradients that it is given."""

    def apply(self, grads, trainable_variables=None):
        self.given = grads
        return super().apply(grads, trainable_variables)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_sparse_gradients_reach_the_optimizer_sparse_and_merged(mode):
    table = [keras.Input([3], dtype="int32"), layers.Embedding(50, 4), layers.Flatten()]
    spy = Spy(0.1)
    model = compiled(keras.Sequential([*table, layers.Dense(2)]), optimizer=spy, **MODES[mode])
    model.train_on_batch(np.tile([[1, 2, 2]], [8, 1]), Y[:8])
    assert isinstance(spy.given[0], tf.IndexedSlices)
    if mode == "eager":
        assert sorted(spy.given[0].indices.numpy()) == [1, 2]


MEMORY = """
import resource, sys
import keras, numpy as np, tensorflow as tf
import macrobatch

inputs = keras.Input([1], dtype="int32")
rows = keras.layers.Flatten()(keras.layers.Embedding(1_000_000, 64, "zeros")(inputs))
model = keras.Model(inputs, keras.layers.Dense(1)(rows))
# The optimizer writes rows only: one that makes the table dense would hide that others do.
model.compile(keras.optimizers.SGD(), "mse")
if sys.argv[1] == "accumulated":
    macrobatch.accumulate(model, 32)
x = np.random.default_rng(0).integers(0, 1_000_000, size=(256, 1))
for _ in range(2):
    model.train_on_batch(x, np.ones([256, 1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@thorough
def test_a_large_table_costs_the_rows_that_are_touched():
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    peaks = []
    for kind in ("plain", "accumulated"):
        command, env = [sys.executable, "-c", MEMORY, kind], {**os.environ, **threads}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        peaks.append(int(run.stdout.split()[-1]))
    # A dense copy of the table would be 244 MiB; what is touched is 64 KiB.
    assert peaks[1] - peaks[0] < 60

"""The gradient noise scale of a small model, written out in NumPy."""

import math

import keras
import numpy as np
from keras import layers

RNG = np.random.default_rng(0)
WORDS = RNG.integers(1, 9, [10, 5]) * (np.arange(5) < RNG.integers(1, 6, [10, 1]))
TAGS = WORDS[..., None] / 4.0
ACTIVITY, PENALTY = 0.2, 0.3


def tagger():
    """A loss over the tokens that count, one over all of them, and a regulariser."""
    table = layers.Embedding(9, 3, mask_zero=True)
    l2 = keras.regularizers.L2
    dense = layers.Dense(1, kernel_regularizer=l2(PENALTY), activity_regularizer=l2(ACTIVITY))
    return keras.Sequential([keras.Input([5]), table, dense])


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)


def expected(weights, cuts):
    """Norm of the gradient, noise and signal: noise as the variance between micro-batches.

    Args:
        weights: the table, the kernel and the bias of the model.
        cuts: where micro-batches begin, and where the last one ends.
    """
    table, kernel, bias = weights

    def gradient(start, end):
        words = WORDS[start:end]
        vectors = table[words]
        outputs = vectors @ kernel + bias
        of_errors = 2 * (outputs - TAGS[start:end]) * (words > 0)[..., None] / (WORDS > 0).sum()
        of_outputs = of_errors + 2 * ACTIVITY * outputs / len(WORDS)
        of_table = np.zeros_like(table)
        np.add.at(of_table, words, of_outputs * kernel[:, 0])
        of_kernel = (vectors * of_outputs).sum((0, 1))
        return np.concatenate([of_table.ravel(), of_kernel, [of_outputs.sum()]])

    parts = np.stack([gradient(*pair) for pair in zip(cuts, cuts[1:])])
    whole, sizes = parts.sum(0), np.diff(cuts)
    means = parts * (sizes.sum() / sizes)[:, None]
    noise = sizes @ ((means - whole) ** 2).sum(1) / (len(sizes) - 1)
    of_penalty = np.zeros_like(whole)
    of_penalty[table.size : -1] = 2 * PENALTY * kernel[:, 0]
    whole = whole + of_penalty
    return [math.sqrt(whole @ whole), noise, whole @ whole - noise / sizes.sum()]


def check(model, noise, cuts):
    """Trains on one batch, and compares what was measured."""
    weights = [keras.ops.convert_to_numpy(v) for v in model.trainable_weights]
    norm, variance, signal = expected(weights, cuts)
    fit = {"batch_size": 10, "shuffle": False, "verbose": 0}
    logs = model.fit(WORDS, TAGS, callbacks=[noise], **fit).history
    state = keras.ops.convert_to_numpy(noise.meter().state)
    np.testing.assert_allclose(state, [1, norm, 10, 0.5, variance / 2, signal / 2], rtol=1e-9)
    assert signal > 0
    found = logs["noise_scale"][0], logs["gradient_norm"][0]
    np.testing.assert_allclose(found, [variance / signal, norm], rtol=1e-9)

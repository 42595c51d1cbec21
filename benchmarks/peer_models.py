"""What the peers train, on any backend and with Keras 2 too: small models and their data."""

import keras
import numpy as np

BATCH, MICRO_BATCH, EPOCHS = 32, 8, 3
RATE, MOMENTUM = 0.1, 0.9


def regression(n):
    random = np.random.default_rng(1)
    x = random.normal(size=(n, 6))
    y = np.tanh(x @ random.normal(size=(6, 2))) + 0.1 * random.normal(size=(n, 2))
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return inputs, keras.layers.Dense(2)(hidden), "mse", x, y


def padded_tokens(n):
    """Tokens to predict one by one in sequences of 1 to 12; the rest is padding, and masked."""
    random = np.random.default_rng(1)
    real = np.arange(12) < random.integers(1, 13, (n, 1))
    x = random.integers(1, 20, (n, 12)) * real
    inputs = keras.Input((12,), dtype="int32")
    embedded = keras.layers.Embedding(20, 6, mask_zero=True)(inputs)
    hidden = keras.layers.LSTM(8, return_sequences=True)(embedded)
    outputs = keras.layers.Dense(5, activation="softmax")(hidden)
    return inputs, outputs, "sparse_categorical_crossentropy", x, x % 5


def distance(some, others):
    """How far lists of weights are from each other."""
    return float(np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(some, others))))

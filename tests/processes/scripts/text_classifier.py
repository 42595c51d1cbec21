"""A tagger of words, whose padding is masked."""

import sys

import keras
import numpy as np

keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
words = random.integers(1, 30, [41, 6])
words[np.arange(6) >= random.integers(1, 7, [41, 1])] = 0
tags = words % 4

model = keras.Sequential(
    [
        keras.Input([6], dtype="int32"),
        keras.layers.Embedding(30, 4, mask_zero=True),
        keras.layers.GRU(5, return_sequences=True),
        keras.layers.Dense(4, activation="softmax"),
    ]
)
# SGD, because Keras hands repeated rows of the embedding to other optimizers one by one.
model.compile("sgd", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
model.fit(words, tags, batch_size=16, epochs=2, verbose=0)
model.save_weights(sys.argv[1])

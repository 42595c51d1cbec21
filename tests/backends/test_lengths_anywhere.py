"""Sequences by length on the backend of this environment: models that Keras builds with the first
batch.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import assert_same_history

import macrobatch

RANDOM = np.random.default_rng(0)
LENGTHS = np.arange(24) % 20 + 1
TOKENS = RANDOM.integers(1, 9, (24, 20)) * (np.arange(20) < LENGTHS[:, None])
TAGS = TOKENS % 5


def compiled(*inner):
    model = keras.Sequential([*inner, layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def sequential():
    keras.utils.set_random_seed(1)
    return compiled(layers.Embedding(9, 3, mask_zero=True))


@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_sequential_without_an_input_takes_any_length(way):
    plain, other = sequential(), macrobatch.accumulate(sequential(), 4, sequence_axis=1)
    logs = []
    for model in (plain, other):
        if way == "fit":
            logs.append(model.fit(TOKENS, TAGS, batch_size=12, shuffle=False, verbose=0).history)
        else:
            found = model.train_on_batch(TOKENS[:12], TAGS[:12], return_dict=True)
            logs.append({name: [float(value)] for name, value in found.items()})
    assert_same_history(*logs)
    for one, two in zip(plain.weights, other.weights, strict=True):
        left, right = ops.convert_to_numpy(one), ops.convert_to_numpy(two)
        np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-12)
    assert other.input_shape == (None, None)


def test_a_sequential_that_must_have_a_length_gets_one():
    model = compiled(layers.Embedding(9, 3), layers.Flatten())
    macrobatch.accumulate(model, 4, sequence_axis=1)
    with pytest.raises(ValueError, match=r"fixed sequence length.*Expected: None along that axis"):
        model.train_on_batch(TOKENS, TAGS[:, 0])
    macrobatch.accumulate(model, 4)
    model.train_on_batch(TOKENS, TAGS[:, 0])
    assert model.input_shape == (24, 20)

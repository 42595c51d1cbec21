"""Sequences by length on the backend of this environment: models that Keras builds with the first
batch, and models that depend on padding in ways that seldom show.
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


@pytest.mark.parametrize("seed", range(3))
def test_a_maximum_over_all_positions_is_refused(seed):
    """In real examples the padding is seldom the largest."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([None], dtype="int32")
    pooled = layers.GlobalMaxPooling1D()(layers.Embedding(9, 2)(inputs))
    model = keras.Model(inputs, layers.Dense(2)(pooled))
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 4, sequence_axis=1)
    tokens = TOKENS[(LENGTHS > 8) & (LENGTHS < 18)]
    with pytest.raises(ValueError, match="depends on padding"):
        model.train_on_batch(tokens, np.ones([len(tokens), 2]))


def test_padding_of_the_last_micro_batch_alone_is_tried():
    """All examples but one are as long as all sequences."""
    inputs = keras.Input([None], dtype="int32")
    pooled = layers.GlobalAveragePooling1D()(layers.Embedding(9, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(2)(pooled))
    model.compile("sgd", "mse")
    macrobatch.accumulate(model, 4, sequence_axis=1)
    tokens = np.where(np.arange(20) < np.where(np.arange(9) == 3, 5, 20)[:, None], 3, 0)
    with pytest.raises(ValueError, match="depends on padding"):
        model.train_on_batch(tokens, np.ones([9, 2]))

"""Models in a fresh process, where nothing is patched: plain Keras and accumulated end the same.

Other tests leave out what takes time. Here graphs are optimised, examples are checked for whether
they interact, compilers optimise, and arrays go through Keras' own pipeline. This file is the
script of that process, too: its arguments are names of models.
"""

import json
import os
import pathlib
import subprocess
import sys
import warnings

import keras
import numpy as np
from keras import layers, losses, ops, optimizers

BACKEND = keras.backend.backend()
EXAMPLES = 40  # in batches of 16: the last one is smaller
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=[EXAMPLES, 6]), RNG.normal(size=[EXAMPLES, 2])
CLASSES = RNG.integers(0, 3, size=EXAMPLES)
THERE = np.arange(7) < RNG.integers(1, 8, size=[EXAMPLES, 1])
TOKENS = RNG.integers(1, 20, size=[EXAMPLES, 7]) * THERE
TAGS = RNG.integers(0, 3, size=[EXAMPLES, 7])


def adam():
    return optimizers.Adam(0.01, global_clipnorm=0.5)


def dense(*between, loss="mse", **options):
    inputs = tensor = keras.Input([6])
    for layer in [layers.Dense(8, "tanh", kernel_regularizer="l2"), *between, layers.Dense(2)]:
        tensor = layer(tensor)
    model = keras.Model(inputs, tensor)
    model.compile(adam(), loss, metrics=["mae"], **options)
    return model


def recurrent():
    inputs = keras.Input([None], dtype="int32")
    hidden = layers.Embedding(20, 4, mask_zero=True)(inputs)
    hidden = layers.GRU(5, return_sequences=True)(hidden)
    model = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
    # With Adam, plain Keras on TensorFlow makes another update for tokens that are repeated.
    model.compile(optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def tagger():
    model = keras.Sequential([layers.Embedding(20, 4, mask_zero=True), layers.Dense(3, "softmax")])
    model.compile(optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def convolutional():
    convolution = [layers.Conv2D(4, 2, activation="relu"), layers.GlobalAveragePooling2D()]
    head = [layers.LayerNormalization(), layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input([6]), layers.Reshape([2, 3, 1]), *convolution, *head])
    # XLA takes minutes to compile the gradient of a convolution on a CPU.
    jit = False if BACKEND == "tensorflow" else "auto"
    model.compile(adam(), "sparse_categorical_crossentropy", jit_compile=jit)
    return model


def transformer():
    inputs = keras.Input([7, 6])
    attention = layers.MultiHeadAttention(2, 3)(inputs, inputs)
    tensor = layers.LayerNormalization()(layers.Add()([inputs, attention]))
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(tensor)))
    model.compile(adam(), losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return model


def two_towers():
    left, right = keras.Input([6], name="left"), keras.Input([6], name="right")
    tower = layers.Dense(4, "tanh")
    joined = layers.Concatenate()([tower(left), tower(right)])
    outputs = {"kind": layers.Dense(3, "softmax")(joined), "value": layers.Dense(2)(joined)}
    model = keras.Model({"left": left, "right": right}, outputs)
    kinds = {"kind": "sparse_categorical_crossentropy", "value": "mse"}
    model.compile(adam(), kinds, loss_weights={"kind": 1.0, "value": 0.3})
    return model


class Centred(layers.Layer):
    """Each example sees the mean of its batch."""

    def call(self, inputs):
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


def contrastive(y_true, y_pred):
    z = ops.normalize(y_pred, axis=-1)
    near = ops.softmax(-ops.square(y_true[:, :1] - ops.transpose(y_true[:, :1])))
    return losses.categorical_crossentropy(near, ops.matmul(z, ops.transpose(z)), from_logits=True)


# A model, its data, how batches are cut, and what is warned of: nothing, if the update is exact.
SIZE = {"micro_batch_size": 5}
MODELS = {
    "dense": (dense, (X, Y), SIZE, ""),
    "recurrent": (recurrent, (TOKENS, TAGS, THERE * 1.0), SIZE, ""),
    "interacting": (lambda: dense(Centred()), (X, Y), SIZE, "Examples meet in these layers"),
    "convolutional": (convolutional, (X, CLASSES), SIZE, ""),
    "transformer": (transformer, (RNG.normal(size=[EXAMPLES, 7, 6]), Y, CLASSES + 0.5), SIZE, ""),
    "two towers": (
        *(two_towers, ({"left": X, "right": X[::-1]}, {"kind": CLASSES, "value": Y})),
        *(SIZE, ""),
    ),
    "by length": (tagger, (TOKENS, TAGS), {"micro_batch_tokens": 20, "sequence_axis": 1}, ""),
    "contrastive": (
        *(lambda: dense(loss=contrastive), (X, Y)),
        *({**SIZE, "whole_batch_loss": True}, ""),
    ),
    "any size": (dense, (X, Y), {}, ""),
    "normalised": (
        *(lambda: dense(layers.BatchNormalization()), (X, Y)),
        *(SIZE, "BatchNormalization normalises"),
    ),
}


def trained(name, accumulate):
    """Where a model ends, and the warnings on the way."""
    build, data, cut, _ = MODELS[name]
    keras.utils.set_random_seed(1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model = build()
        if accumulate:
            import macrobatch

            macrobatch.accumulate(model, **cut)
        weights = data[2] if len(data) == 3 else None
        options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(*data[:2], sample_weight=weights, **options).history
    variables = [np.array(v) for v in map(ops.convert_to_numpy, model.variables)]
    variables += [np.array(v) for v in map(ops.convert_to_numpy, model.optimizer.variables)]
    said = [f"{each.category.__name__}: {each.message}" for each in seen]
    return [*variables, np.array(history["loss"])], said


def main():
    """Trains the models that the arguments name, and prints how it went as JSON."""
    if BACKEND != "tensorflow":  # Keras computes float64 in float32 there
        from keras.src.backend.common import dtypes

        for name in list(dtypes.BIT64_TO_BIT32_DTYPE):
            dtypes.BIT64_TO_BIT32_DTYPE[name] = name
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    found = {}
    for name in sys.argv[1:]:
        (plain, said), (accumulated, more) = (trained(name, way) for way in (False, True))
        distances = [
            np.abs(a - b).max(initial=0.0) / np.abs(a).max(initial=1.0)
            for a, b in zip(plain, accumulated, strict=True)
        ]
        found[name] = float(max(distances)), [each for each in more if each not in said]
    print(json.dumps(found))


def check(names):
    """Trains models in one process: to import a backend takes seconds."""
    patched = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(patched)}
    run = subprocess.run(
        [sys.executable, pathlib.Path(__file__).resolve(), *names],
        env={**environment, "JAX_ENABLE_X64": "1", "MACROBATCH_CACHE": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    for name in names:
        distance, said = found[name]
        warned = MODELS[name][-1]
        if warned:
            assert distance > 1e-6, f"{name} is exact, and need not be warned of"
            (warning,) = said
            assert warning.startswith(f"ExactnessWarning: {warned}")
        else:
            assert distance <= 1e-10, f"{name} differs by {distance}"
            assert said == [], name


# A GRU takes JAX long to compile.
SOME = ["dense", "two towers" if BACKEND == "jax" else "recurrent", "interacting"]


def test_some_models():
    check(SOME)


if __name__ == "__main__":
    main()
else:
    from support import thorough

    @thorough
    def test_more_models():
        check([name for name in MODELS if name not in SOME])

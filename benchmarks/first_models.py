"""The models of the sections on first calls, built but never called, and their data."""

import time

import keras
import numpy as np

layers = keras.layers

SIDE, CLASSES = 32, 10
LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 6, 64, 4, 1000, 32
DROPOUT = 0.1


def build(name, optimizer="adam", jit_compile=False):
    """The model, and the way it is compiled."""
    keras.utils.set_random_seed(0)
    if name.endswith("transformer"):
        made = transformer(mask=name.startswith("masked"))
        # Keras gives a mask to weighted metrics only.
        metrics = {"weighted_metrics": ["accuracy"]}
    else:
        of_name = {
            "mobilenet": keras.applications.MobileNetV3Small,
            "resnet": keras.applications.ResNet50,
        }
        made = of_name[name](input_shape=(SIDE, SIDE, 3), weights=None, classes=CLASSES)
        metrics = {"metrics": ["accuracy"]}
    loss = "sparse_categorical_crossentropy"
    made.compile(optimizer, loss, jit_compile=jit_compile, **metrics)
    return made


def transformer(mask):
    """Gives each token of a sequence a class."""
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask)(tokens)
    for _ in range(LAYERS):
        # MultiHeadAttention takes the mask off its inputs, so it gets none that is used again.
        normed = layers.LayerNormalization()(x)
        attended = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=DROPOUT)(normed, normed)
        x = layers.Add()([x, attended])
        hidden = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(DROPOUT)(layers.Dense(WIDTH)(hidden))])
    return keras.Model(tokens, layers.Dense(CLASSES, activation="softmax")(x))


def data(name, examples):
    """The arrays of one batch."""
    random = np.random.default_rng(0)
    if name.endswith("transformer"):
        real = np.arange(SEQUENCE) < random.integers(1, SEQUENCE + 1, (examples, 1))
        x = random.integers(1, VOCABULARY, (examples, SEQUENCE), dtype="int32") * real
    else:
        x = random.random((examples, SIDE, SIDE, 3), dtype="float32")
    shape = x.shape if x.ndim == 2 else examples
    return x, random.integers(0, CLASSES, shape, dtype="int32")


class Clock(keras.callbacks.Callback):
    """Notes the processor time of this process, all threads of it, when a batch has ended."""

    def on_train_batch_end(self, batch, logs=None):
        self.end = time.process_time()

    on_test_batch_end = on_train_batch_end

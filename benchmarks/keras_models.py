"""The Keras models of the benchmark, on any backend. Keras 2 has them too."""

import keras
import workloads

layers = keras.layers


def build(name):
    """Inputs and outputs of a model."""
    if name.endswith("cnn"):
        return cnn(side=16 if name == "small cnn" else 32)
    if name == "mlp":
        return mlp(workloads.MLP_WIDTHS)
    if name == "tiny":
        return mlp(workloads.TINY_WIDTHS)
    if name == "embedding":
        return bag_of_ids()
    if name == "encoder":
        return encoder(**workloads.TRANSFORMERS[name])
    length = None if name == "padded transformer" else workloads.SEQUENCE
    return transformer(length, **workloads.TRANSFORMERS[name])


def cnn(side):
    inputs = x = keras.Input((side, side, 3))
    for filters, strides in workloads.CNN_LAYERS:
        x = layers.Conv2D(filters, 3, strides, padding="same", activation="relu")(x)
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


def mlp(widths):
    first, *hidden, last = widths
    inputs = x = keras.Input((first,))
    for width in hidden:
        x = layers.Dense(width, activation="relu")(x)
    return inputs, layers.Dense(last)(x)


def bag_of_ids():
    ids = keras.Input((workloads.IDS,), dtype="int32")
    rows = layers.Embedding(workloads.EMBEDDING_ROWS, workloads.EMBEDDING_WIDTH)(ids)
    return ids, layers.Dense(10)(layers.GlobalAveragePooling1D()(rows))


def encoder(layers, width, vocabulary):
    """A vector for each sequence."""
    tokens, outputs = transformer(workloads.SEQUENCE, layers, width, vocabulary, last=64)
    return tokens, keras.layers.GlobalAveragePooling1D()(outputs)


def in_batch_softmax(_, vectors):
    """Each vector is to be more like its partner's than like those of all others in the batch.

    Two and two belong together.
    """
    vectors = keras.ops.normalize(vectors, axis=1)
    logits = 10 * keras.ops.matmul(vectors, keras.ops.transpose(vectors))
    logits -= 1e4 * keras.ops.eye(keras.ops.shape(logits)[0])
    places = keras.ops.arange(keras.ops.shape(logits)[0])
    partners = places + 1 - 2 * (places % 2)
    return keras.losses.sparse_categorical_crossentropy(partners, logits, from_logits=True)


def transformer(length, layers, width, vocabulary, last=None):
    """Predicts a token for each token of a sequence. Where lengths vary, 0 is padding."""
    norm, heads = workloads.LAYER_NORM_EPSILON, workloads.HEADS
    tokens = keras.Input((length,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width, mask_zero=length is None)(tokens)
    for _ in range(layers):
        attended = keras.layers.LayerNormalization(epsilon=norm)(x)
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(attended, attended)
        x = keras.layers.Add()([x, attended])
        hidden = keras.layers.LayerNormalization(epsilon=norm)(x)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(hidden)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(hidden)])
    return tokens, keras.layers.Dense(last or vocabulary)(x)


def compiled(model, make=None, jit_compile=False, optimizer="adam", steps=None, **more):
    """A compiled model, the same weights in every process.

    Args:
        model: its name.
        make: makes a model from inputs and outputs, instead of keras.Model.
        jit_compile: as in compile().
        optimizer: "adam" or "sgd".
        steps: gradient_accumulation_steps of the optimizer.
        more: may have steps_per_execution, as in compile().
    """
    keras.utils.set_random_seed(0)
    made = (make or keras.Model)(*build(model))
    accumulation = {"gradient_accumulation_steps": steps} if steps else {}
    if optimizer == "adam":
        rate, epsilon = workloads.LEARNING_RATE, workloads.ADAM_EPSILON
        rule = keras.optimizers.Adam(rate, epsilon=epsilon, **accumulation)
    else:
        rule = keras.optimizers.SGD(0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if model == "encoder":
        loss = in_batch_softmax
    execution = {name: value for name, value in more.items() if name == "steps_per_execution"}
    made.compile(rule, loss, jit_compile=jit_compile, **execution)
    if keras.__version__ >= "3":  # a compiled step can make no variables
        made.optimizer.build(made.trainable_variables)
    return made

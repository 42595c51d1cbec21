"""A loop of your own, whole batches in hand: value_and_gradients in place of a GradientTape.

A small tagger of padded sentences, where each batch holds another number of real tokens. It is
trained with a tape over the whole batch and with value_and_gradients, in float32 and in mixed
precision. It prints how far apart the weights end.

    python examples/custom_loop.py
"""

import keras
import numpy as np
import tensorflow as tf

import macrobatch

WORDS, TAGS, LENGTH = 50, 5, 12


def sentences(examples, seed):
    """Words and their tags, padded with 0."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, WORDS, [examples, LENGTH])
    words[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, [examples, 1])] = 0
    return tf.constant(words), tf.constant(words % TAGS)


def build(dtype="float32"):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input([LENGTH], dtype="int64"),
            keras.layers.Embedding(WORDS, 16, dtype=dtype),
            keras.layers.Dense(32, "tanh", dtype=dtype),
            keras.layers.Dense(TAGS, dtype="float32"),
        ]
    )


# reduction=None: one loss for each token. What they are divided by is said by the weights.
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def losses_and_weights(model, words, tags):
    losses = crossentropy(tags, model(words, training=True))
    return losses, tf.cast(words != 0, losses.dtype)


def train_whole(model, optimizer, batches):
    """The textbook: all activations of a batch are in memory at once."""
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def train_step(words, tags):
        with tf.GradientTape() as tape:
            losses, weights = losses_and_weights(model, words, tags)
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, variables)
        # Keras takes rows of an embedding that come twice for different ones: sum them first.
        optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], variables)
        return loss

    return [float(train_step(words, tags)) for words, tags in batches]


def train_accumulated(model, optimizer, batches, micro_batch_size=8):
    """The same updates, with the activations of a micro-batch."""
    variables = model.trainable_variables
    optimizer.build(variables)

    def loss_fn(micro_batch):
        words, tags = micro_batch
        losses, weights = losses_and_weights(model, words, tags)
        # With a LossScaleOptimizer the loss is scaled here, and so is the loss that comes back.
        # With any other optimizer this does nothing.
        return optimizer.scale_loss(losses), weights

    @tf.function
    def train_step(words, tags):
        loss, gradients = macrobatch.value_and_gradients(
            loss_fn, variables, (words, tags), micro_batch_size=micro_batch_size
        )
        scale = optimizer.scale_loss(1.0)
        optimizer.apply(gradients, variables)  # which takes the scale out of the gradients
        return loss / scale

    return [float(train_step(words, tags)) for words, tags in batches]


def compare(dtype, optimizer):
    """Trains both ways; returns the largest difference of weights, and the largest move."""
    batches = [sentences(64, seed) for seed in range(20)]
    start, plain, accumulated = (build(dtype) for _ in range(3))
    losses = train_whole(plain, optimizer(), batches)
    ours = train_accumulated(accumulated, optimizer(), batches)

    def largest(left, right):
        pairs = zip(left.trainable_variables, right.trainable_variables)
        return max(float(tf.reduce_max(tf.abs(a - b))) for a, b in pairs)

    name = optimizer().name
    print(f"{dtype}, {name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, accumulated {ours[-1]:.4f}")
    return largest(plain, accumulated), largest(plain, start)


def main():
    for dtype, optimizer in {
        "float32": lambda: keras.optimizers.Adam(0.01),
        "mixed_float16": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)),
    }.items():
        difference, moved = compare(dtype, optimizer)
        print(f"  weights differ by at most {difference:.1e}, and have moved by up to {moved:.2f}")


if __name__ == "__main__":
    main()

"""Equivalence cases of what TensorFlow alone has: tf.function, tf.data, ragged, sparse inputs."""

import keras
import tensorflow as tf
from builders import N, X, Y, data, dense, tokens
from case import case
from keras import layers, optimizers

CASES = {}

# Gradients that only variables get


class InFunction(layers.Layer):
    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def build(self, shape):
        self.layer.build(shape)

    @tf.function
    def call(self, inputs):
        return self.layer(inputs)


class OwnGradient(InFunction):
    def call(self, inputs):
        @tf.custom_gradient
        def halved(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                outputs = self.layer(x)

            def gradient(upstream, variables=None):
                gradients = tape.gradient(outputs, [x, *(variables or [])], upstream)
                gradients = [0.5 * g for g in gradients]
                return gradients[0], gradients[1:]

            return outputs, gradient

        return halved(inputs)


INDIRECT = {
    "tf.function": lambda: keras.Sequential([keras.Input([4]), InFunction()]),
    "custom_gradient": lambda: keras.Sequential([keras.Input([4]), OwnGradient()]),
}
for name, build in INDIRECT.items():
    CASES[f"gradient-{name}"] = case(build, X, Y, quick="graph")


# A loss with a value for each example, of which JAX and torch take no gradient


class ValuesOfExamples(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2, axis=-1) + keras.ops.sum(self.losses)


def values_of_examples():
    inputs = keras.Input([4])
    return ValuesOfExamples(inputs, layers.Dense(2, kernel_regularizer="l2")(inputs))


CASES["compute_loss-by-example"] = case(values_of_examples, X, Y, loss=None, quick="graph")


# Inputs that are no arrays


def ragged():
    inputs = keras.Input([None], dtype="int32", ragged=True)
    embedded = layers.Embedding(11, 4)(inputs)
    pooled = layers.Lambda(lambda t: tf.reduce_mean(t, axis=1), output_shape=(4,))(embedded)
    return keras.Model(inputs, layers.Dense(2)(pooled))


def ragged_batches():
    rows = tf.ragged.constant([list(row[row > 0]) for row in tokens()], dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(8)


def sparse():
    inputs = keras.Input([4], sparse=True)
    return keras.Model(inputs, layers.Dense(2)(inputs))


def sparse_batches():
    x = tf.sparse.from_dense(X * (data(N, 4, seed=9) > 0))
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(8)


NO_XLA = "graph eager replicas"
CASES["ragged"] = case(
    ragged,
    lambda: ragged_batches(),
    optimizer=lambda: optimizers.SGD(0.1),
    modes=NO_XLA,
    quick="graph",
)
CASES["sparse"] = case(sparse, lambda: sparse_batches(), modes=NO_XLA, quick="graph")


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y))


CASES["Dataset"] = case(dense, lambda: dataset().batch(8), quick="graph")
CASES["Dataset-repeated"] = case(
    dense, lambda: dataset().repeat().batch(8), fit={"steps_per_epoch": 4}, quick="graph"
)

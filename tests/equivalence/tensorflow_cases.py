"""Equivalence cases of what TensorFlow alone has: tf.function, tf.data, ragged, sparse inputs."""

import keras
import numpy as np
import tensorflow as tf
from builders import N, X, Y, data, dense, own_loss, sparse, tokens
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


def of_each(model, y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2, axis=-1) + keras.ops.sum(model.losses)


CASES["compute_loss-by-example"] = case(own_loss(of_each), X, Y, loss=None, quick="graph")


# An optimizer with an entrance of its own, which other backends do not go through


class Doubling(optimizers.SGD):
    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])


CASES["optimizer-apply_gradients"] = case(
    dense, X, Y, optimizer=lambda: Doubling(0.1), modes="graph eager compiled", quick="graph"
)


# Sums of 33 MiB. Such sums start with the gradients of the first micro-batch, outside of the loop.


def large():
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(11, 4, mask_zero=True)(inputs)
    hidden = layers.Dense(2048)(layers.Dense(2048, "tanh")(embedded))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


CASES["large-sums"] = case(
    large,
    tokens(),
    tokens(vocabulary=3),
    optimizer=lambda: optimizers.SGD(0.1),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
    modes="graph",
    quick="graph",
)


# Inputs that are no arrays


def ragged():
    inputs = keras.Input([None], dtype="int32", ragged=True)
    embedded = layers.Embedding(11, 4)(inputs)
    pooled = layers.Lambda(lambda t: tf.reduce_mean(t, axis=1), output_shape=(4,))(embedded)
    return keras.Model(inputs, layers.Dense(2)(pooled))


def ragged_batches():
    rows = tf.ragged.constant([list(row[row > 0]) for row in tokens()], dtype=tf.int32)
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(8)


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


# A first part of a batch that does not know its size, beside one that does; values added for each
# example of what is not dense


class NotDense(keras.Model):
    def __init__(self, adds):
        super().__init__()
        self.dense, self.adds = layers.Dense(2), adds

    def call(self, pair):
        first, second = pair
        is_sparse = isinstance(first, tf.SparseTensor)
        first = tf.sparse.to_dense(first) if is_sparse else first.to_tensor(shape=[None, 4])
        outputs = self.dense(first + second)
        if self.adds:
            self.add_loss(tf.reduce_sum(outputs**2, 1))
        return outputs


ROUND = tf.constant(np.round(np.abs(X)))
KINDS = {"ragged": tf.RaggedTensor.from_tensor, "sparse": tf.sparse.from_dense}


def beside_dense(kind):
    dataset = tf.data.Dataset.from_tensor_slices(((KINDS[kind](ROUND), X), Y))
    return dataset.batch(8, drop_remainder=True)


for kind in KINDS:
    for adds in (False, True):
        CASES[f"{kind}-beside-dense" + "-adds" * adds] = case(
            lambda adds=adds: NotDense(adds),
            lambda kind=kind: beside_dense(kind),
            optimizer=lambda: optimizers.SGD(1e-3),
            modes=NO_XLA,
            quick="eager" if adds or kind == "sparse" else "",
        )

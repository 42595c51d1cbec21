"""Layers and losses in which examples interact, or which depend on how many examples there are."""

from keras import layers, ops


class Centred(layers.Layer):
    """Takes away the mean over the examples."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class ByNumber(layers.Layer):
    """Divides by the number of examples."""

    def call(self, x):
        return x / ops.sum(ops.ones_like(x), axis=0)


class Balanced(layers.Layer):
    """Gives add_loss a product of means over the batch, as routers do."""

    def call(self, x):
        self.add_loss(ops.sum(ops.square(ops.mean(x, axis=0))))
        return x


def contrastive(y_true, y_pred):
    """In-batch softmax: one value for each example, which depends on the others."""
    scores = ops.matmul(y_pred, ops.transpose(y_pred))
    return -ops.diagonal(ops.log_softmax(scores / 0.5, axis=-1))


def of_number(y_true, y_pred):
    losses = ops.mean(ops.square(y_true - y_pred), axis=-1)
    return losses / ops.sum(ops.ones_like(losses))

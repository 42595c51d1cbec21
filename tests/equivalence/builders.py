"""Data and small models for the equivalence cases."""

import keras
import numpy as np
import support
from keras import layers
from support import DensePlain, array

import macrobatch

N = 19  # with batches of 8 and micro-batches of 3: uneven micro-batches and an uneven last batch


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


X, Y = data(N, 4), data(N, 2, seed=1)


def tokens(examples=N, length=6, vocabulary=11, seed=0):
    """Padded sequences: the number of real tokens differs from example to example."""
    random = np.random.default_rng(seed)
    sequences = random.integers(1, vocabulary, size=(examples, length))
    lengths = random.integers(1, length + 1, size=examples)
    return np.where(np.arange(length) < lengths[:, None], sequences, 0)


TAGS = tokens(vocabulary=3)


def padded(seed=0, zero_in_first=0):
    """Sequences of vectors of different lengths; the first examples may have no token at all."""
    mask = tokens(seed=seed) > 0
    mask[:zero_in_first] = False
    return data(N, 6, 2, seed=seed) * mask[..., None]


def batches():
    for start in range(0, N, 8):
        yield X[start : start + 8], Y[start : start + 8]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return list(batches())[index]


def compiled(model, cut=3, **options):
    """An accumulated model."""
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **options})
    cut = cut if isinstance(cut, dict) else {"micro_batch_size": cut}
    return macrobatch.accumulate(model, **cut)


def fit(model, x=X, y=Y, **options):
    """`fit` on batches of eight, in their order."""
    return model.fit(x, y, **{"batch_size": 8, "shuffle": False, "verbose": 0, **options})


def update_of_narrow_sums():
    """An update of 0.1 by gradients 256, 1, -256 and 0. In bfloat16, 256 + 1 is 256."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("bfloat16")
    head = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    with support.strategy.scope():
        model = keras.Sequential([keras.Input([1]), head])
        loss = keras.losses.MeanAbsoluteError(reduction="sum")
        compiled(model, 1, loss=loss)
    fit(model, np.array([[256.0], [1.0], [-256.0], [0.0]]), np.ones([4, 1]))
    return float(array(head.kernel).item())


def masks_drawn(seed):
    """The masks that four examples draw, one in each micro-batch, and how far their seed moves.

    One example at a time is not 0. The gradient is what was not dropped of it.
    """
    dropout = layers.Dropout(0.5, seed=seed)
    model = keras.Sequential([keras.Input([64]), dropout, layers.Dense(1, use_bias=False)])
    sgd = keras.optimizers.SGD(1.0)
    compiled(model, 1, optimizer=sgd, loss=lambda y, y_pred: y_pred)
    state, masks = dropout.seed_generator.state, []
    start = array(state)
    for row in range(4):
        state.assign(start)
        before = model.get_weights()[0]
        model.train_on_batch(np.eye(4)[:, [row]] * np.ones(64), np.zeros([4, 1]))
        masks.append(tuple(np.round(before - model.get_weights()[0], 6).ravel() > 0))
    return masks, array(state) - start


def dense(units=2, **kwargs):
    inputs = keras.Input([4])
    hidden = layers.Dense(5, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(units, **kwargs)(hidden))


def linear(*more, **kwargs):
    """One layer, with others behind it: quick to trace."""
    inputs = outputs = keras.Input([4])
    for layer in [layers.Dense(2, **kwargs), *more]:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def masked(hidden=None, **kwargs):
    """Masking and no embedding: plain Keras is then the update of its gradient."""
    inputs = keras.Input([6, 2])
    hidden = (hidden or layers.Dense(4, activation="tanh"))(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", **kwargs)(hidden))


def recurrent(**kwargs):
    return masked(layers.LSTM(4, return_sequences=True), **kwargs)


def tagger(kind=keras.Model):
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(11, 4, mask_zero=True)(inputs)
    hidden = layers.Dense(5, activation="tanh")(embedded)
    return kind(inputs, layers.Dense(3, activation="softmax")(hidden))


def dense_tagger():
    """The reference of `tagger`: the embedding's rows repeat."""
    return tagger(DensePlain)


def two_outputs(structure="dict"):
    """Two inputs, two outputs of which one is masked: each term has its own denominator."""
    sequence, vector = keras.Input([6, 2], name="sequence"), keras.Input([4], name="vector")
    states = layers.Dense(4, activation="tanh")(layers.Masking()(sequence))
    tags = layers.Dense(3, activation="softmax", name="tags")(states)
    pooled = layers.GlobalAveragePooling1D()(states)
    score = layers.Dense(1, name="score")(layers.Concatenate()([pooled, vector]))
    outputs = {
        "list": [tags, score],
        "dict": {"tags": tags, "score": score},
        "nested": {"a": {"d": tags}, "b": {"c": score}},
    }
    return keras.Model([sequence, vector], outputs[structure])


TWO_INPUTS = {"sequence": padded(), "vector": data(N, 4, seed=2)}
SCORES = data(N, 1, seed=3)


class AddsTo(layers.Layer):
    """Adds to the loss what a function makes of the inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, inputs):
        self.add_loss(self.function(inputs))
        return inputs


def own_loss(function, outputs=None):
    """What builds a model whose `compute_loss` is a function of it, of labels and predictions."""

    class OwnLoss(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return function(self, y, y_pred)

    def build():
        inputs = keras.Input([4])
        if outputs:
            return OwnLoss(inputs, {name: layers.Dense(2)(inputs) for name in outputs})
        return OwnLoss(inputs, layers.Dense(2, kernel_regularizer="l2")(inputs))

    return build


class OwnMetrics(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest = keras.metrics.Mean(name="largest")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        logs = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(keras.ops.max(keras.ops.abs(y_pred), axis=-1))
        return {"twice_the_loss": 2 * logs["loss"], "own": self.largest.result()}


class OwnListOfMetrics(OwnMetrics):
    @property
    def metrics(self):
        return [self.largest]

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(keras.ops.max(keras.ops.abs(y_pred), axis=-1))
        return self.get_metrics_result()


def with_metrics(kind):
    inputs = keras.Input([4])
    return kind(inputs, layers.Dense(2)(inputs))


class Subclassed(keras.Model):
    """Not built before its first batch."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(5, activation="tanh")
        self.second = layers.Dense(2)

    def call(self, inputs):
        return self.second(self.first(inputs))


def shared():
    left, right = keras.Input([4]), keras.Input([4])
    layer = layers.Dense(3, activation="tanh")
    return keras.Model([left, right], layers.Dense(2)(layer(left) * layer(right)))


def nested():
    inputs = keras.Input([4])
    inner = keras.Sequential([layers.Dense(4, activation="tanh", kernel_regularizer="l2")])
    return keras.Model(inputs, layers.Dense(2)(keras.Sequential([inner, inner])(inputs)))


def frozen():
    model = keras.Sequential([keras.Input([4]), layers.Dense(4), layers.Dense(2)])
    model.layers[0].trainable = False
    return model


def convolutional():
    convolution = [layers.Reshape([2, 2, 1]), layers.Conv2D(3, 2), layers.Flatten()]
    return keras.Sequential([keras.Input([4]), *convolution, layers.Dense(2)])


def sparse():
    inputs = keras.Input([4], sparse=True)
    return keras.Model(inputs, layers.Dense(2)(inputs))


class PartlyUnused(keras.Model):
    """One layer gets no gradient at all."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = layers.Dense(2), layers.Dense(2)

    def call(self, inputs):
        self.unused(inputs)
        return self.used(inputs)


class SometimesUsed(keras.Model):
    """A layer that only examples with a positive first feature use: None in other micro-batches."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.always.build(shape)
        self.sometimes.build(shape)

    def call(self, inputs):
        outputs = self.always(inputs)
        used = inputs[:, :1] > 0
        if keras.ops.any(used):
            outputs = outputs + keras.ops.where(used, self.sometimes(inputs), 0.0)
        return outputs


class OneBesideNone(keras.Model):
    """Its inputs have another input deeper inside, and None."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(2)

    def call(self, inputs):
        assert inputs["nothing"] is None
        return self.layer(inputs["some"][0])


class Branching(keras.Model):
    """An embedding in a branch: its gradient comes without a known shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = layers.Embedding(50, 4), layers.Dense(2)

    def build(self, shape):
        self.embedding.build(shape)
        self.last.build([None, 4])

    def call(self, inputs):
        rows = keras.ops.cond(
            keras.ops.sum(inputs) > 3,
            lambda: self.embedding(inputs),
            lambda: 2 * self.embedding(inputs),
        )
        return self.last(keras.ops.sum(rows, axis=1))


# Gradients that only variables get


class Recomputed(keras.Model):
    def __init__(self):
        super().__init__()
        with keras.RematScope(mode="full"):
            self.first = layers.Dense(5, activation="tanh", kernel_regularizer="l2")
        self.second = layers.Dense(2)

    def call(self, inputs):
        return self.second(self.first(inputs))

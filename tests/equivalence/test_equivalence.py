"""Weights after several updates equal those of plain Keras on whole batches, to 1e-10."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, optimizers
from support import MODES, DensePlain, assert_same, assert_same_history, build_pair, check

import macrobatch
from macrobatch._keras import losses as _losses
from macrobatch._tensorflow import loop as _loop

modes = pytest.mark.parametrize("mode", list(MODES))
REDUCTIONS = ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"]
N = 19  # with batches of 8 and micro-batches of 3: uneven micro-batches and an uneven last batch


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def tokens(examples=N, length=6, vocabulary=11, seed=0):
    """Padded sequences: the number of real tokens differs from example to example."""
    random = np.random.default_rng(seed)
    sequences = random.integers(1, vocabulary, size=(examples, length))
    lengths = random.integers(1, length + 1, size=examples)
    return np.where(np.arange(length) < lengths[:, None], sequences, 0)


def dense(units=2, **kwargs):
    inputs = keras.Input([4])
    hidden = layers.Dense(5, activation="tanh")(inputs)
    return keras.Model(inputs, layers.Dense(units, **kwargs)(hidden))


def tagger(classes=3):
    inputs = keras.Input([None], dtype="int32")
    embedded = layers.Embedding(11, 4, mask_zero=True)(inputs)
    hidden = layers.Dense(5, activation="tanh")(embedded)
    return keras.Model(inputs, layers.Dense(classes, activation="softmax")(hidden))


def dense_tagger(classes=3):
    """As `tagger`, with its reference: the embedding's rows repeat."""
    model = tagger(classes)
    return DensePlain(model.inputs, model.outputs[0])


# XLA takes seconds to compile each: unless all are asked for, these stand for the rest.
COMPILED = {
    "test_reductions": {"weighted": [True], "reduction": ["sum", "mean_with_sample_weight"]},
    "test_sizes": {"examples": [17]},
    "test_masks_compiled": {},
    "test_regularizers_count_once": {},
    "test_optimizers_in_other_modes": {"name": ["global_clipnorm"]},
    "test_models": {"name": ["nested"]},
    "test_variables_without_gradient": {},
    "test_repeated_embedding_rows": {},
}


# The loop of eager mode is another one, and the arithmetic in it the same.
EAGER = {
    "test_masks": {"weights": [(N, 6)]},
    "test_reductions": {"weighted": [True]},
    "test_several_outputs": {"structure": ["dict"]},
    "test_regularizers_count_once": {},
    "test_vectors_given_to_add_loss": {},
    "test_sizes": {"examples": [17]},
    "test_a_batch_of_one": {},
    "test_optimizers_in_other_modes": {"name": ["adam"]},
    "test_models": {"name": ["subclassed"]},
    "test_variables_without_gradient": {},
    "test_repeated_embedding_rows": {},
    "test_metrics_are_those_of_the_whole_batch": {},
    "test_a_micro_batch_without_unmasked_elements": {},
}


def selected(name, parameters, thorough):
    """Whether a test is run with these parameters."""
    if parameters.get("mode") == "eager" and not thorough:
        chosen = EAGER.get(name)
        return chosen is not None and all(parameters[key] in chosen[key] for key in chosen)
    if name == "test_masks" and parameters["weights"] == (N, 1) and not thorough:
        return parameters["reduction"] == "mean_with_sample_weight"
    chosen = COMPILED.get(name)
    return (
        thorough
        or parameters.get("mode") != "compiled"
        or (chosen is not None and all(parameters[key] in chosen[key] for key in chosen))
    )


# Losses


@modes
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(mode, reduction, weighted):
    weights = np.random.default_rng(1).uniform(0, 2, N) if weighted else None
    check(
        dense,
        data(N, 4),
        data(N, 2, seed=1),
        loss=lambda: losses.MeanSquaredError(reduction=reduction),
        fit={"sample_weight": weights},
        **MODES[mode],
    )


def masked_sequences(**kwargs):
    """Masking and no embedding: plain Keras is then the update of its gradient."""
    inputs = keras.Input([6, 2])
    hidden = layers.LSTM(4, return_sequences=True)(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", **kwargs)(hidden))


def masked_dense(**kwargs):
    """As `masked_sequences`, but quick to trace."""
    inputs = keras.Input([6, 2])
    hidden = layers.Dense(4, activation="tanh")(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(3, activation="softmax", **kwargs)(hidden))


def padded(seed=0, zero_in_first=0):
    """Sequences of vectors of different lengths; the first examples may have no token at all."""
    mask = tokens(seed=seed) > 0
    mask[:zero_in_first] = False
    return data(N, 6, 2, seed=seed) * mask[..., None]


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", [None, (N, 6), (N, 1)])
def test_masks(mode, reduction, weights):
    check_masks(mode, reduction, weights)


@pytest.mark.parametrize(
    ("reduction", "weights"), [("mean", None), ("mean_with_sample_weight", (N, 6)), ("sum", (N, 1))]
)
def test_masks_compiled(reduction, weights):
    check_masks("compiled", reduction, weights)


def check_masks(mode, reduction, weights):
    if weights is not None:
        weights = np.random.default_rng(1).uniform(0, 2, weights)
    check(
        masked_dense,
        padded(),
        tokens(vocabulary=3),
        loss=lambda: losses.SparseCategoricalCrossentropy(reduction=reduction),
        fit={"sample_weight": weights},
        weighted_metrics=["accuracy"],
        **MODES[mode],
    )


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_a_micro_batch_without_unmasked_elements(mode):
    check(
        masked_sequences,
        padded(zero_in_first=4),
        tokens(vocabulary=3),
        loss="sparse_categorical_crossentropy",
        **MODES[mode],
    )


def test_a_batch_without_unmasked_elements():
    check(
        masked_sequences,
        padded(zero_in_first=9),
        tokens(vocabulary=3),
        loss="sparse_categorical_crossentropy",
    )


@modes
def test_a_mask_from_the_labels(mode):
    check(
        masked_dense,
        padded(),
        tokens(vocabulary=3),
        loss=lambda: losses.SparseCategoricalCrossentropy(ignore_class=2),
        **MODES[mode],
    )


@modes
def test_function_losses(mode):
    def distance(y_true, y_pred):
        return keras.ops.sum(keras.ops.abs(y_true - y_pred), axis=-1)

    check(dense, data(N, 4), data(N, 2, seed=1), loss=distance, **MODES[mode])


def test_class_weight():
    labels = np.random.default_rng(0).integers(0, 3, N)
    check(
        lambda: dense(3, activation="softmax"),
        data(N, 4),
        labels,
        loss="sparse_categorical_crossentropy",
        fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}},
        metrics=["accuracy"],
        weighted_metrics=["sparse_categorical_crossentropy"],
    )


@modes
def test_no_reduction_trains_as_a_sum(mode):
    check(
        dense,
        data(N, 4),
        data(N, 2, seed=1),
        loss=lambda: losses.MeanSquaredError(reduction=None),
        optimizer=lambda: optimizers.SGD(0.01),
        **MODES[mode],
    )


def two_outputs():
    """Two inputs, two outputs of which one is masked: each term has its own denominator."""
    sequence, vector = keras.Input([6, 2], name="sequence"), keras.Input([4], name="vector")
    states = layers.Dense(4, activation="tanh")(layers.Masking()(sequence))
    tags = layers.Dense(3, activation="softmax", name="tags")(states)
    pooled = layers.GlobalAveragePooling1D()(states)
    score = layers.Dense(1, name="score")(layers.Concatenate()([pooled, vector]))
    return [sequence, vector], [tags, score]


def two_inputs():
    return {"sequence": padded(), "vector": data(N, 4, seed=2)}


@modes
@pytest.mark.parametrize("structure", ["list", "dict", "nested"])
def test_several_outputs(mode, structure):
    def build():
        inputs, (tags, score) = two_outputs()
        outputs = {
            "list": [tags, score],
            "dict": {"tags": tags, "score": score},
            "nested": {"a": {"d": tags}, "b": {"c": score}},
        }[structure]
        return keras.Model(inputs, outputs)

    labels, scores = tokens(vocabulary=3), data(N, 1, seed=3)
    y, loss, loss_weights = {
        "list": ([labels, scores], ["sparse_categorical_crossentropy", "mae"], [0.3, 2.0]),
        "dict": (
            {"tags": labels, "score": scores},
            {"tags": "sparse_categorical_crossentropy", "score": "mae"},
            {"tags": 0.3, "score": 2.0},
        ),
        "nested": (
            {"a": {"d": labels}, "b": {"c": scores}},
            {"a": {"d": "sparse_categorical_crossentropy"}, "b": {"c": "mae"}},
            None,
        ),
    }[structure]
    check(build, two_inputs(), y, loss=loss, loss_weights=loss_weights, **MODES[mode])


@modes
def test_each_output_with_its_own_weights(mode):
    def build():
        inputs, (tags, score) = two_outputs()
        return keras.Model(inputs, {"tags": tags, "score": score})

    random = np.random.default_rng(5)
    weights = {"tags": random.uniform(size=(N, 6)), "score": random.uniform(size=N)}
    check(
        build,
        two_inputs(),
        {"tags": tokens(vocabulary=3), "score": data(N, 1, seed=3)},
        loss={
            "tags": losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
            "score": losses.MeanAbsoluteError(reduction="mean_with_sample_weight"),
        },
        weighted_metrics={"tags": ["accuracy"], "score": ["mse"]},
        fit={"sample_weight": weights},
        **MODES[mode],
    )


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_output_without_a_loss():
    def build():
        inputs, (tags, score) = two_outputs()
        return keras.Model(inputs, {"tags": tags, "score": score})

    check(
        build,
        two_inputs(),
        {"tags": tokens(vocabulary=3), "score": data(N, 1, seed=3)},
        loss={"tags": "sparse_categorical_crossentropy", "score": None},
    )


# Regularisers and add_loss


class Penalty(layers.Layer):
    def __init__(self, per_example):
        super().__init__()
        self.per_example = per_example

    def call(self, inputs):
        squares = keras.ops.mean(keras.ops.square(inputs), axis=-1)
        self.add_loss(squares if self.per_example else keras.ops.mean(squares))
        return inputs


@modes
def test_regularizers_count_once(mode):
    def build():
        inputs = keras.Input([4])
        hidden = layers.Dense(5, kernel_regularizer="l1l2", bias_regularizer="l2")(inputs)
        return keras.Model(inputs, layers.Dense(2, activity_regularizer="l2")(hidden))

    check(build, data(N, 4), data(N, 2, seed=1), **MODES[mode])


@modes
def test_vectors_given_to_add_loss(mode):
    def build():
        inputs = keras.Input([4])
        return keras.Model(inputs, layers.Dense(2)(Penalty(True)(layers.Dense(3)(inputs))))

    check(
        build,
        data(N, 4),
        data(N, 2, seed=1),
        optimizer=lambda: optimizers.SGD(0.01),
        **MODES[mode],
    )


@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@modes
def test_scalars_given_to_add_loss(mode):
    def build():
        inputs = keras.Input([4])
        return keras.Model(inputs, layers.Dense(2)(Penalty(False)(layers.Dense(3)(inputs))))

    check(build, data(N, 4), data(N, 2, seed=1), **MODES[mode])


def test_add_loss_and_no_compiled_loss():
    def build():
        inputs = keras.Input([4])
        return keras.Model(inputs, Penalty(True)(layers.Dense(3)(inputs)))

    check(build, data(N, 4), loss=None, optimizer=lambda: optimizers.SGD(0.01))


def test_a_regularizer_and_a_mask():
    check(
        lambda: masked_sequences(kernel_regularizer="l2", activity_regularizer="l2"),
        padded(),
        tokens(vocabulary=3),
        loss="sparse_categorical_crossentropy",
    )


# Sizes


@modes
@pytest.mark.parametrize("micro_batch_size", [1, 7])
@pytest.mark.parametrize(("examples", "batch_size"), [(16, 8), (17, 8), (5, 8)])
def test_sizes(mode, micro_batch_size, examples, batch_size):
    check(
        dense,
        data(examples, 4),
        data(examples, 2, seed=1),
        micro_batch_size=min(micro_batch_size, examples - 1),
        batch_size=batch_size,
        **MODES[mode],
    )


@modes
def test_a_batch_of_one(mode):
    with pytest.warns(UserWarning, match="Nothing is being accumulated"):
        check(dense, data(3, 4), data(3, 2), batch_size=1, micro_batch_size=4, **MODES[mode])


# Optimizers


OPTIMIZERS = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.05, amsgrad=True),
    "adamw": lambda: optimizers.AdamW(0.05, weight_decay=0.1),
    "adamax": lambda: optimizers.Adamax(0.05),
    "nadam": lambda: optimizers.Nadam(0.05),
    "rmsprop": lambda: optimizers.RMSprop(0.05, centered=True),
    "adagrad": lambda: optimizers.Adagrad(0.05),
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "ftrl": lambda: optimizers.Ftrl(0.05),
    "lion": lambda: optimizers.Lion(0.01),
    "lamb": lambda: optimizers.Lamb(0.05),
    "clipnorm": lambda: optimizers.SGD(1.0, clipnorm=0.01),
    "global_clipnorm": lambda: optimizers.Adam(0.05, global_clipnorm=0.01),
    "clipvalue": lambda: optimizers.SGD(1.0, clipvalue=0.01),
    "weight_decay": lambda: optimizers.SGD(0.1, weight_decay=0.3),
    "ema": lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    ),
    "loss_scale": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    check(dense, data(N, 4), data(N, 2, seed=1), optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("name", ["adam", "global_clipnorm", "ema", "schedule"])
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_optimizers_in_other_modes(name, mode):
    check(dense, data(N, 4), data(N, 2, seed=1), optimizer=OPTIMIZERS[name], **MODES[mode])


def test_constraints():
    def build():
        inputs = keras.Input([4])
        constraint = keras.constraints.MaxNorm(0.5)
        return keras.Model(inputs, layers.Dense(2, kernel_constraint=constraint)(inputs))

    check(build, data(N, 4), data(N, 2, seed=1))


# Models


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


MODELS = {
    "sequential": lambda: keras.Sequential([layers.Dense(4), layers.Dense(2)]),
    "subclassed": Subclassed,
    "nested": nested,
    "frozen": frozen,
    "convolutional": lambda: keras.Sequential(
        [
            keras.Input([4]),
            layers.Reshape([2, 2, 1]),
            layers.Conv2D(3, 2),
            layers.Flatten(),
            layers.Dense(2),
        ]
    ),
}


@modes
@pytest.mark.parametrize("name", MODELS)
def test_models(mode, name):
    if name == "convolutional" and mode == "compiled":
        pytest.skip("XLA takes minutes to compile the gradient of a convolution on a CPU")
    check(MODELS[name], data(N, 4), data(N, 2, seed=1), **MODES[mode])


@modes
def test_shared_layers(mode):
    x = [data(N, 4), data(N, 4, seed=4)]
    check(shared, x, data(N, 2, seed=1), **MODES[mode])


class PartlyUnused(keras.Model):
    """One layer gets no gradient at all."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = layers.Dense(2), layers.Dense(2)

    def call(self, inputs):
        self.unused(inputs)
        return self.used(inputs)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@modes
def test_variables_without_gradient(mode):
    check(PartlyUnused, data(N, 4), data(N, 2, seed=1), **MODES[mode])


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
        if tf.reduce_any(used):
            outputs += tf.where(used, self.sometimes(inputs), 0.0)
        return outputs


def test_variables_without_gradient_in_some_micro_batches():
    x = data(16, 4)
    x[:, 0] = np.repeat([1, -1, 1, -1], 4)
    check(SometimesUsed, x, data(16, 2, seed=1), micro_batch_size=4, run_eagerly=True)


# Embeddings


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("graph", "sgd"),
        ("graph", "adam"),
        ("graph", "global_clipnorm"),
        ("graph", "rmsprop"),
        ("eager", "adam"),
        ("compiled", "adam"),
    ],
)
def test_repeated_embedding_rows(mode, name):
    plain, accumulated = build_pair(dense_tagger)
    with accumulated.distribute_strategy.scope():
        accumulated = keras.Model(accumulated.inputs, accumulated.outputs[0])
    macrobatch.accumulate(accumulated, 3)
    x, y = tokens(), tokens(vocabulary=3, seed=1)
    histories = []
    for model in (plain, accumulated):
        with model.distribute_strategy.scope():
            model.compile(OPTIMIZERS[name](), "sparse_categorical_crossentropy", **MODES[mode])
        histories.append(model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0))
    assert_same(plain, accumulated)
    assert_same_history(*histories)


# Mixed precision


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16"])
def test_mixed_precision_is_as_close_as_its_rounding(policy):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    plain, accumulated = build_pair(dense)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        with model.distribute_strategy.scope():
            model.compile(optimizers.SGD(0.1, momentum=0.9), "mse")
        model.fit(data(N, 4), data(N, 2), batch_size=8, epochs=2, shuffle=False, verbose=0)
    precision = {"mixed_float16": 2e-3, "mixed_bfloat16": 1e-2, "bfloat16": 3e-2}[policy]
    assert_same(plain, accumulated, tolerance=precision)


# Data


def test_ragged_inputs():
    rows = [list(row[row > 0]) for row in tokens()]
    x = tf.ragged.constant(rows, dtype=tf.int32)
    y = data(N, 2, seed=1)

    def build():
        inputs = keras.Input([None], dtype="int32", ragged=True)
        embedded = layers.Embedding(11, 4)(inputs)
        pooled = layers.Lambda(lambda t: tf.reduce_mean(t, axis=1), output_shape=(4,))(embedded)
        return keras.Model(inputs, layers.Dense(2)(pooled))

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    check(build, dataset, optimizer=lambda: optimizers.SGD(0.1))


def test_sparse_inputs():
    dense_x = data(N, 4) * (data(N, 4, seed=9) > 0)
    dataset = tf.data.Dataset.from_tensor_slices(
        (tf.sparse.from_dense(dense_x), data(N, 2, seed=1))
    ).batch(8)

    def build():
        inputs = keras.Input([4], sparse=True)
        return keras.Model(inputs, layers.Dense(2)(inputs))

    check(build, dataset)


def test_dict_datasets_with_none():
    class Optional(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layers.Dense(2)

        def call(self, inputs):
            assert inputs["nothing"] is None
            return self.layer(inputs["a"])

    plain, accumulated = build_pair(Optional)
    macrobatch.accumulate(accumulated, 3)
    for model in (plain, accumulated):
        with model.distribute_strategy.scope():
            model.compile(optimizers.SGD(0.1), "mse")
    for start in (0, 8):
        x = {"a": data(N, 4)[start : start + 8], "nothing": None}
        y = data(N, 2, seed=1)[start : start + 8]
        try:
            plain.train_on_batch(x, y)
        except AttributeError:
            pytest.skip("this Keras does not take None among its inputs")
        accumulated.train_on_batch(x, y)
    assert_same(plain, accumulated)


def generator():
    for start in range(0, N, 8):
        yield data(N, 4)[start : start + 8], data(N, 2, seed=1)[start : start + 8]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return list(generator())[index]


@pytest.mark.parametrize("kind", ["generator", "PyDataset", "Dataset", "repeated"])
def test_kinds_of_data(kind):
    plain, accumulated = build_pair(dense)
    macrobatch.accumulate(accumulated, 3)
    arrays = tf.data.Dataset.from_tensor_slices((data(N, 4), data(N, 2, seed=1)))
    for model in (plain, accumulated):
        with model.distribute_strategy.scope():
            model.compile(optimizers.Adam(0.1), "mse")
        x, arguments = {
            # Without steps_per_epoch, plain Keras counts an iteration when it runs out of data.
            "generator": lambda: (generator(), {"steps_per_epoch": 3}),
            "PyDataset": lambda: (Batches(), {"epochs": 2}),
            "Dataset": lambda: (arrays.batch(8), {"epochs": 2}),
            "repeated": lambda: (arrays.repeat().batch(8), {"epochs": 2, "steps_per_epoch": 4}),
        }[kind]()
        model.fit(x, shuffle=False, verbose=0, **arguments)
    assert_same(plain, accumulated)


@pytest.mark.parametrize("steps", [{"steps_per_execution": 3}, {"unrolled": 2}])
@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_several_steps_per_execution(steps, mode):
    def before(model):
        if "unrolled" in steps:
            model.unrolled_steps_per_execution = 2

    check(
        dense,
        data(N, 4),
        data(N, 2, seed=1),
        before=before,
        steps_per_execution=steps.get("steps_per_execution", 4),
        **MODES[mode],
    )


# Metrics


@modes
def test_metrics_are_those_of_the_whole_batch(mode):
    labels = np.random.default_rng(0).integers(0, 2, size=(N, 1))
    check(
        lambda: dense(1, activation="sigmoid"),
        data(N, 4),
        labels,
        loss="binary_crossentropy",
        metrics=lambda: [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="p"),
        ],
        weighted_metrics=lambda: [keras.metrics.Recall(name="r")],
        fit={"sample_weight": np.arange(N), "validation_data": (data(11, 4), labels[:11])},
        **MODES[mode],
    )


# Gradients that only variables get


class Recomputed(keras.Model):
    def __init__(self):
        super().__init__()
        with keras.RematScope(mode="full"):
            self.first = layers.Dense(5, activation="tanh", kernel_regularizer="l2")
        self.second = layers.Dense(2)

    def call(self, inputs):
        return self.second(self.first(inputs))


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
    "recomputed": Recomputed,
    "tf.function": lambda: keras.Sequential([keras.Input([4]), InFunction()]),
    "custom_gradient": lambda: keras.Sequential([keras.Input([4]), OwnGradient()]),
}


@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("name", INDIRECT)
def test_gradients_that_only_variables_get(mode, name):
    check(INDIRECT[name], data(N, 4), data(N, 2, seed=1), **MODES[mode])


class Branching(keras.Model):
    """An embedding in a branch: its gradient comes without a known shape."""

    def __init__(self):
        super().__init__()
        self.embedding, self.last = layers.Embedding(50, 4), layers.Dense(2)

    def build(self, shape):
        self.embedding.build(shape)
        self.last.build([None, 4])

    def call(self, inputs):
        rows = tf.cond(
            tf.reduce_sum(inputs) > 3,
            lambda: self.embedding(inputs),
            lambda: 2 * self.embedding(inputs),
        )
        return self.last(tf.reduce_sum(rows, axis=1))


def test_an_embedding_in_a_branch():
    x = np.random.default_rng(0).permutation(50)[:48].reshape(16, 3)  # no row repeats
    check(Branching, x, data(16, 2, seed=1), optimizer=lambda: optimizers.SGD(0.1))


# Unusual losses


def test_weights_that_cancel_in_a_micro_batch():
    check(
        dense,
        data(16, 4),
        data(16, 2, seed=1),
        micro_batch_size=2,
        loss=lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        fit={"sample_weight": np.tile([1.0, -1.0, 2.0, 3.0], 4)},
    )


@pytest.mark.skipif(_losses.mask_padding() > 0, reason="this Keras adds an epsilon to each mask")
@pytest.mark.filterwarnings("ignore::macrobatch.ExactnessWarning")
@modes
def test_a_scalar_mean_over_a_masked_output(mode):
    def mean(y_true, y_pred):
        return keras.ops.mean((keras.ops.one_hot(y_true, 3) - y_pred) ** 2)

    check(masked_dense, padded(), tokens(vocabulary=3), loss=mean, **MODES[mode])


@modes
def test_a_sum_of_flattened_values(mode):
    class Flat(losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.reshape((y_true - y_pred) ** 2, [-1])

    check(
        dense,
        data(16, 4),
        data(16, 2, seed=1),
        micro_batch_size=4,
        loss=lambda: Flat(reduction="sum"),
        optimizer=lambda: optimizers.SGD(0.01),
        **MODES[mode],
    )


def test_two_outputs_without_reduction():
    def build():
        inputs = keras.Input([4])
        outputs = [layers.Dense(2, name=name)(inputs) for name in ("a", "b")]
        return keras.Model(inputs, outputs)

    check(
        build,
        data(N, 4),
        [data(N, 2, seed=1), data(N, 2, seed=2)],
        loss=lambda: [losses.MeanSquaredError(reduction=None) for _ in range(2)],
        optimizer=lambda: optimizers.SGD(0.01),
    )


def test_several_losses_of_a_single_output():
    check(
        lambda: dense(name="output"),
        data(N, 4),
        data(N, 2, seed=1),
        loss=lambda: ["mse", losses.MeanSquaredError(reduction=None, name="other")],
    )


def test_a_loss_scale_and_a_regularizer():
    check(
        lambda: dense(kernel_regularizer="l2"),
        data(N, 4),
        data(N, 2, seed=1),
        optimizer=OPTIMIZERS["loss_scale"],
    )


def test_sums_that_are_large(monkeypatch):
    """Then they start with the gradients of the first micro-batch, outside of the loop."""
    monkeypatch.setattr(_loop, "LARGE_SUMS", 0)
    x = np.random.default_rng(0).integers(0, 6, [21, 5]) * (
        np.arange(5) < np.arange(21)[:, None] % 6
    )
    check(tagger, x, x % 3, loss="sparse_categorical_crossentropy", metrics=["accuracy"])

"""Random architectures, losses, reductions, masks, weights and sizes: always the same update."""

import keras
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from keras import layers, losses, optimizers
from support import BACKEND, check, thorough

pytestmark = [thorough] if BACKEND == "jax" else []  # JAX compiles each example.

LENGTH, FEATURES, CLASSES = 5, 3, 4
REDUCTIONS = ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum"]

outputs = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["tags", "vectors", "label"]),
        "reduction": st.sampled_from(REDUCTIONS),
        "weights": st.sampled_from([None, "per example", "per position"]),
        "loss_weight": st.sampled_from([0.3, 1.0, 2.0]),
    }
)
architectures = st.fixed_dictionaries(
    {
        "masked": st.booleans(),
        "hidden": st.lists(
            st.sampled_from(["dense", "regularized", "active", "residual"]), max_size=2
        ),
        "outputs": st.lists(outputs, min_size=1, max_size=3),
    }
)


def build(architecture):
    inputs = tensor = keras.Input([LENGTH, FEATURES])
    if architecture["masked"]:
        tensor = layers.Masking()(tensor)
    for kind in architecture["hidden"]:
        new = layers.Dense(
            FEATURES,
            activation="tanh",
            kernel_regularizer="l2" if kind == "regularized" else None,
            activity_regularizer="l2" if kind == "active" else None,
        )(tensor)
        tensor = layers.Add()([tensor, new]) if kind == "residual" else new
    found = {}
    for index, output in enumerate(architecture["outputs"]):
        name = f"output_{index}"
        if output["kind"] == "label":
            pooled = layers.GlobalAveragePooling1D()(tensor)
            found[name] = layers.Dense(CLASSES, activation="softmax", name=name)(pooled)
        else:
            activation = "softmax" if output["kind"] == "tags" else None
            found[name] = layers.Dense(CLASSES, activation=activation, name=name)(tensor)
    return keras.Model(inputs, found)


def training(architecture, examples, random):
    """Losses, labels and weights for an architecture."""
    x = random.normal(size=(examples, LENGTH, FEATURES))
    if architecture["masked"]:
        # Pooling over no position at all is NaN, in plain Keras too.
        shortest = int(any(output["kind"] == "label" for output in architecture["outputs"]))
        lengths = random.integers(shortest, LENGTH + 1, size=(examples, 1))
        x *= (np.arange(LENGTH) < lengths)[..., None]
    loss, y, weights = {}, {}, {}
    for index, output in enumerate(architecture["outputs"]):
        name, kind = f"output_{index}", output["kind"]
        shape = (examples,) if kind == "label" else (examples, LENGTH)
        if kind == "vectors":
            y[name] = random.normal(size=(*shape, CLASSES))
            loss[name] = losses.MeanSquaredError(reduction=output["reduction"])
        else:
            y[name] = random.integers(0, CLASSES, size=shape)
            loss[name] = losses.SparseCategoricalCrossentropy(reduction=output["reduction"])
        # On torch, Keras cannot multiply masks into weights of examples.
        is_possible = BACKEND != "torch" or not architecture["masked"]
        if output["weights"] == "per example" and is_possible:
            shape = (examples,) if kind == "label" else (examples, 1)
        if output["weights"] is not None:
            weights[name] = random.uniform(0, 2, size=shape)
    if len(weights) < len(y):
        weights = None  # Keras takes weights for all outputs or for none.
    return x, y, weights, loss


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # an example takes seconds: too long for shrinking
    suppress_health_check=list(HealthCheck),
)
@given(
    architecture=architectures,
    examples=st.integers(2, 13),
    batch_size=st.integers(2, 9),
    micro_batch_size=st.integers(1, 5),
    eager=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adam", "clipped"]),
    seed=st.integers(0, 99),
)
def test_any_model(architecture, examples, batch_size, micro_batch_size, eager, optimizer, seed):
    x, y, weights, loss = training(architecture, examples, np.random.default_rng(seed))
    make = {
        "sgd": lambda: optimizers.SGD(0.01, momentum=0.9),
        "adam": lambda: optimizers.Adam(0.01),
        "clipped": lambda: optimizers.SGD(0.1, global_clipnorm=0.05),
    }[optimizer]
    names = list(y)
    check(
        lambda: build(architecture),
        x,
        y,
        batch_size=batch_size,
        micro_batch_size=min(micro_batch_size, min(batch_size, examples) - 1),
        optimizer=make,
        loss=loss,
        loss_weights=dict(zip(names, (o["loss_weight"] for o in architecture["outputs"]))),
        fit={"sample_weight": weights},
        moved=False,
        plain={},
        run_eagerly=eager,
    )

"""Equivalence cases: sizes, optimizers, models and kinds of data."""

import functools

import keras
import numpy as np
from builders import (
    Batches,
    Branching,
    PartlyUnused,
    Recomputed,
    SometimesUsed,
    Subclassed,
    X,
    Y,
    batches,
    convolutional,
    data,
    dense,
    dense_tagger,
    frozen,
    linear,
    nested,
    shared,
    tagger,
    tokens,
)
from case import case
from keras import layers, optimizers

CASES = {}

# Sizes: batches of 8 in micro-batches of 1, and of 7 or of all but one example

for examples in (16, 17, 5):
    x, y = data(examples, 4), data(examples, 2, seed=1)
    CASES[f"{examples}-examples-one-by-one"] = case(
        dense, x, y, micro_batch_size=1, quick="graph" if examples == 5 else ""
    )
    CASES[f"{examples}-examples-seven"] = case(
        dense,
        x,
        y,
        micro_batch_size=min(7, examples - 1),
        quick="graph eager compiled" if examples == 17 else "graph",
    )

# Optimizers. One sees a gradient, whatever it comes from: `make test` fits one of each kind, and
# loops/test_accumulator.py has all of them.

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
    "averages": lambda: optimizers.Adam(0.1, use_ema=True, ema_momentum=0.8),
    "schedule": lambda: optimizers.Adam(
        optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.5)
    ),
    "loss_scale": lambda: optimizers.SGD(0.1, loss_scale_factor=64.0),
    "dynamic_loss_scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1), initial_scale=64.0
    ),
}
FITTED = {
    "sgd": "eager",
    "adam": "eager",
    "clipvalue": "eager",
    "ema": "eager",
    "weight_decay": "eager",
    "clipnorm": "eager replicas",
    "global_clipnorm": "eager replicas",
    "loss_scale": "eager",
    "schedule": "graph eager",
}
# On other backends, one of each kind.
ELSEWHERE = {
    "adam": "jax torch torch-compiled",
    "clipnorm": "torch",
    "ema": "torch",
    "global_clipnorm": "jax torch",
    "dynamic_loss_scale": "torch",
    "loss_scale": "torch",
    "schedule": "jax torch",
}
for name, make in OPTIMIZERS.items():
    CASES[f"optimizer-{name}"] = case(
        dense,
        X,
        Y,
        optimizer=make,
        # Replicas refuse to overwrite weights by their averages.
        modes="graph eager compiled" if name == "ema" else "graph eager compiled replicas",
        quick=FITTED.get(name, ""),
        elsewhere=ELSEWHERE.get(name, ""),
    )
CASES["constraint"] = case(
    lambda: linear(kernel_constraint=keras.constraints.MaxNorm(0.5)), X, Y, quick="eager"
)

# Models

CASES["sequential"] = case(
    lambda: keras.Sequential([layers.Dense(4), layers.Dense(2)]), X, Y, quick="graph"
)
CASES["subclassed"] = case(
    Subclassed, X, Y, quick="graph eager", elsewhere="jax jax-eager torch torch-compiled"
)
CASES["nested"] = case(nested, X, Y, quick="graph")


# One output in a container of its own

CONTAINERS = {
    "list": (lambda x, y: ([x], [y]), lambda y: y),
    "list-of-labels": (lambda x, y: ([x], [y]), lambda y: [y]),
    "tuple": (lambda x, y: (x, (y,)), lambda y: y),
    "dict": (lambda x, y: (x, {"only": y}), lambda y: {"only": y}),
}


CASES["weights-in-a-list"] = case(
    lambda: in_container(CONTAINERS["list"][0]),
    X,
    [Y],
    weighted_metrics=["mae"],
    fit={"sample_weight": [np.arange(float(len(X))) % 3]},
    quick="eager",
)


def in_container(container):
    inputs = keras.Input([4])
    return keras.Model(*container(inputs, layers.Dense(2, name="only")(inputs)))


for name, (container, labels) in CONTAINERS.items():
    CASES[f"output-in-a-{name}"] = case(
        functools.partial(in_container, container),
        X,
        labels(Y),
        metrics=["mae"],
        quick="graph" if name == "list" else "",
    )
CASES["frozen"] = case(frozen, X, Y, quick="eager")
CASES["convolutional"] = case(
    convolutional,
    X,
    Y,
    modes="graph eager replicas",  # XLA takes minutes to compile its gradient on a CPU
    quick="graph",
)
CASES["shared"] = case(shared, [X, data(19, 4, seed=4)], Y, quick="eager")
CASES["variables-without-gradient"] = case(
    PartlyUnused, X, Y, filters=["ignore:Gradients do not exist"], quick="graph"
)

used = data(16, 4)
used[:, 0] = np.repeat([1, -1, 1, -1], 4)
CASES["variables-without-gradient-in-some-micro-batches"] = case(
    SometimesUsed,
    used,
    data(16, 2, seed=1),
    micro_batch_size=4,
    run_eagerly=True,
    modes="eager replicas",  # in a graph, a branch has a gradient always
    backends="tensorflow torch",  # JAX traces in eager mode too
)

CASES["gradient-recomputed"] = case(Recomputed, X, Y, quick="graph")

# Embeddings

REPEATED = {
    "sgd": "eager",
    "adam": "graph eager",
    "global_clipnorm": "replicas",
    "rmsprop": "eager",
}
for name, quick in REPEATED.items():
    CASES[f"repeated-rows-{name}"] = case(
        tagger,
        tokens(),
        tokens(vocabulary=3, seed=1),
        reference=dense_tagger,
        optimizer=OPTIMIZERS[name],
        loss="sparse_categorical_crossentropy",
        quick=quick,
    )
CASES["embedding-in-a-branch"] = case(
    Branching,
    np.random.default_rng(0).permutation(50)[:48].reshape(16, 3),  # no row repeats
    data(16, 2, seed=1),
    optimizer=lambda: optimizers.SGD(0.1),
    quick="graph",
)

# Data

# Without steps_per_epoch, plain Keras counts an iteration when it runs out of data.
CASES["generator"] = case(
    dense, lambda: batches(), epochs=1, fit={"steps_per_epoch": 3}, quick="graph"
)
CASES["PyDataset"] = case(dense, lambda: Batches(), quick="graph")


def unroll(model):
    model.unrolled_steps_per_execution = 2


SEVERAL = "tensorflow jax"  # torch takes one step at a time
ONE_DEVICE = "graph eager compiled"  # replicas refuse several steps per execution
CASES["steps_per_execution"] = case(
    dense, X, Y, steps_per_execution=3, modes=ONE_DEVICE, backends=SEVERAL, quick="graph"
)
CASES["steps_per_execution-unrolled"] = case(
    dense,
    X,
    Y,
    steps_per_execution=4,
    before=unroll,
    modes=ONE_DEVICE,
    backends=SEVERAL,
    quick="graph",
)

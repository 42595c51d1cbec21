"""Contenders with Keras on JAX and on torch: plain, accumulating, by hand, and with a peer.

On one thread: those of torch and XLA wait by spinning, and a machine that does anything else makes
their steps several times slower. Peers have no macrobatch in their environments.
"""

import contextlib
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import workloads
from first_models import Clock, build, data
from keras_models import compiled

BACKEND = keras.backend.backend()
if BACKEND == "torch":
    import torch

    torch.set_num_threads(1)
else:
    import jax
    from jax import lax
    from jax import numpy as jnp


def versions():
    import importlib.metadata

    found = {"Keras": keras.__version__}
    for name in (BACKEND, "macrobatch", "accelerate", "optax"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def training(description):
    ways = {
        "floor": TorchByHand if BACKEND == "torch" else JaxByHand,
        "plain": plain,
        "macrobatch": accumulated,
        "keras": keras_accumulation,
        "peer": Accelerated if BACKEND == "torch" else MultiSteps,
        "first": FirstFit,
    }
    return ways[description["way"]](**description["options"])


def parts_of(model, batch, micro_batches):
    """The micro-batches of a batch."""
    arrays = [np.split(array, micro_batches) for array in workloads.data(model, batch)]
    return list(zip(*arrays))


# Steps as fit() takes them, without its callbacks. step() makes one update.


class Fit:
    def __init__(self, model, batches):
        self.model, self.batches = model, batches
        model.make_train_function()
        self.state = state_of(model) if BACKEND == "jax" else None

    def step(self):
        for batch in self.batches:
            if BACKEND == "jax":
                _, self.state = self.model.train_function(self.state, iter([batch]))
            else:
                self.model.train_function([batch])
        if BACKEND == "jax":
            jax.block_until_ready(self.state)


def state_of(model):
    """What Keras passes to steps on JAX."""
    parts = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    # Copies: a step gives the memory of its state away.
    return tuple([jnp.copy(variable.value) for variable in part] for part in parts)


def plain(model, batch):
    return Fit(compiled(model, jit_compile="auto"), parts_of(model, batch, 1))


def accumulated(model, batch, micro_batches):
    import macrobatch

    made = compiled(model, jit_compile="auto")
    macrobatch.accumulate(made, micro_batch_size=batch // micro_batches)
    return Fit(made, parts_of(model, batch, 1))


def keras_accumulation(model, batch, micro_batches):
    made = compiled(model, jit_compile="auto", steps=micro_batches)
    return Fit(made, parts_of(model, batch, micro_batches))


# By hand: what no accumulation can do without


class TorchByHand:
    """A loop with `backward`, which adds to `.grad`, and one update."""

    def __init__(self, model, batch, micro_batches):
        self.model = compiled(model)
        self.parts = [
            tuple(map(torch.from_numpy, part)) for part in parts_of(model, batch, micro_batches)
        ]

    def step(self):
        variables = self.model.trainable_variables
        self.model.zero_grad()
        for x, y in self.parts:
            self.model.compute_loss(x, y, self.model(x, training=True)).backward()
        with torch.no_grad():
            self.model.optimizer.apply([v.value.grad for v in variables], variables)


class Accelerated:
    """The loop of Accelerate's documentation, with the loss of Keras and the optimizer of torch."""

    def __init__(self, model, batch, micro_batches):
        import accelerate

        self.accelerator = accelerate.Accelerator(
            gradient_accumulation_steps=micro_batches, cpu=True
        )
        made = compiled(model)
        self.loss = made.compute_loss
        rule = torch.optim.Adam(
            made.parameters(), workloads.LEARNING_RATE, eps=workloads.ADAM_EPSILON
        )
        self.model, self.optimizer = self.accelerator.prepare(made, rule)
        self.parts = [
            tuple(map(torch.from_numpy, part)) for part in parts_of(model, batch, micro_batches)
        ]

    def step(self):
        for x, y in self.parts:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(x, y, self.model(x, training=True)))
                self.optimizer.step()
                self.optimizer.zero_grad()


class JaxByHand:
    """A compiled micro-batch that adds its gradients, called K times, and a compiled update.

    A loop inside of one compiled step is slower for convolutions: see docs/performance.md.
    """

    def __init__(self, model, batch, micro_batches):
        self.model, self.count = compiled(model), micro_batches
        self.data = [jnp.asarray(array) for array in workloads.data(model, batch)]
        size = batch // micro_batches
        weights, self.others, optimizer, _ = state_of(self.model)
        self.state = weights, optimizer
        self.zeros = jax.jit(lambda weights: [jnp.zeros_like(weight) for weight in weights])

        def added(total, weights, others, data, index):
            x, y = (lax.dynamic_slice_in_dim(each, index * size, size) for each in data)

            def loss(weights):
                y_pred, _ = self.model.stateless_call(weights, others, x, training=True)
                return self.model.loss(y, y_pred)

            return [one + other for one, other in zip(total, jax.grad(loss)(weights))]

        def updated(weights, optimizer, total):
            gradients = [each / self.count for each in total]
            return self.model.optimizer.stateless_apply(optimizer, gradients, weights)

        self.added = jax.jit(added, donate_argnums=0)
        self.updated = jax.jit(updated, donate_argnums=(0, 1, 2))

    def step(self):
        weights, optimizer = self.state
        total = self.zeros(weights)
        for index in range(self.count):
            total = self.added(total, weights, self.others, self.data, index)
        self.state = jax.block_until_ready(self.updated(weights, optimizer, total))


class MultiSteps:
    """A loop with optax.MultiSteps, which is called with each micro-batch."""

    def __init__(self, model, batch, micro_batches):
        import optax

        made = compiled(model)
        weights, others, _, _ = state_of(made)
        rule = optax.MultiSteps(
            optax.adam(workloads.LEARNING_RATE, eps=workloads.ADAM_EPSILON), micro_batches
        )

        def step(weights, state, others, x, y):
            def loss(weights):
                return made.loss(y, made.stateless_call(weights, others, x, training=True)[0])

            updates, state = rule.update(jax.grad(loss)(weights), state, weights)
            return optax.apply_updates(weights, updates), state

        self.others, self.state = others, (weights, rule.init(weights))
        self.parts = parts_of(model, batch, micro_batches)
        self.one = jax.jit(step, donate_argnums=(0, 1))

    def step(self):
        for x, y in self.parts:
            self.state = self.one(*self.state, self.others, x, y)
        jax.block_until_ready(self.state)


# The first step


class FirstFit:
    def __init__(self, model, batch, accumulate=None):
        self.model, self.data = build(model, jit_compile="auto"), data(model, batch)
        if accumulate:
            import macrobatch

            macrobatch.accumulate(self.model, micro_batch_size=accumulate)

    def first(self):
        clock = Clock()
        start = time.process_time()
        self.model.fit(*self.data, batch_size=len(self.data[0]), verbose=0, callbacks=[clock])
        return {"seconds": clock.end - start}

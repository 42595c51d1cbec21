"""How ways to accumulate compare on JAX and on torch: the columns of peers.py for these backends.

The models, the data and the error are those of peers.py: small models in float64, updates of
batches of 32 from micro-batches of 8, three epochs of SGD with momentum, against plain Keras on
whole batches in the same process. Peers get the micro-batches and the loss of the same Keras model.

    KERAS_BACKEND=torch python benchmarks/backend_peers.py    # or jax; a line of JSON for each row

peers.py runs this in .venv-jax and .venv-torch, and the peers in environments of their own.
"""

import argparse
import json
import os
import sys

os.environ.setdefault("JAX_ENABLE_X64", "1")

import keras
import numpy as np
from keras.src.backend.common import dtypes
from peer_models import (
    BATCH,
    EPOCHS,
    MICRO_BATCH,
    MOMENTUM,
    RATE,
    distance,
    padded_tokens,
    regression,
)

BACKEND = keras.backend.backend()
STEPS = BATCH // MICRO_BATCH


def compiled(data, n, steps=None):
    keras.utils.set_random_seed(0)
    inputs, outputs, loss, x, y = data(n)
    model = keras.Model(inputs, outputs)
    rule = keras.optimizers.SGD(RATE, MOMENTUM, gradient_accumulation_steps=steps)
    model.compile(rule, loss)
    return model, x, y


def micro_batches(x, y):
    """Those of all batches, in order: a batch that is smaller has fewer, or a smaller last one."""
    for start in range(0, len(x), BATCH):
        end = min(start + BATCH, len(x))
        for first in range(start, end, MICRO_BATCH):
            last = min(first + MICRO_BATCH, end)
            yield x[first:last], y[first:last]


def fitted(contender, data, n):
    """The weights after training with fit()."""
    model, x, y = compiled(data, n, STEPS if contender == "keras" else None)
    if contender == "macrobatch":
        import macrobatch

        macrobatch.accumulate(model, micro_batch_size=MICRO_BATCH)
    size = MICRO_BATCH if contender == "keras" else BATCH
    model.fit(x, y, batch_size=size, epochs=EPOCHS, shuffle=False, verbose=0)
    return model.get_weights()


def with_accelerate(data, n):
    import accelerate
    import torch

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=STEPS, cpu=True)
    model, x, y = compiled(data, n)
    loss = model.compute_loss
    parts = [tuple(map(torch.as_tensor, part)) for part in micro_batches(x, y)]
    loader = torch.utils.data.DataLoader(parts, batch_size=None)
    rule = torch.optim.SGD(model.parameters(), RATE, MOMENTUM)
    trained, rule, loader = accelerator.prepare(model, rule, loader)
    for _ in range(EPOCHS):
        for part_x, part_y in loader:
            with accelerator.accumulate(trained):
                y_pred = trained(part_x, training=True)
                accelerator.backward(loss(part_x, part_y, y_pred))
                rule.step()
                rule.zero_grad()
    return model.get_weights()


def with_optax(data, n):
    import jax
    import optax

    model, x, y = compiled(data, n)
    weights = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]
    # As Keras' SGD: the rate is inside of the momentum.
    rule = optax.MultiSteps(optax.sgd(RATE, MOMENTUM), STEPS)
    state = rule.init(weights)

    def loss(weights, part_x, part_y):
        y_pred, _ = model.stateless_call(weights, others, part_x, training=True)
        return model.compute_loss(part_x, part_y, y_pred)

    gradients_of = jax.jit(jax.grad(loss))
    for _ in range(EPOCHS):
        for part in micro_batches(x, y):
            updates, state = rule.update(gradients_of(weights, *part), state, weights)
            weights = optax.apply_updates(weights, updates)
    return list(map(np.asarray, weights))


WAYS = {
    "keras": lambda *case: fitted("keras", *case),
    "macrobatch": lambda *case: fitted("macrobatch", *case),
    "accelerate": with_accelerate,
    "optax": with_optax,
}
ROWS = {
    "error, batches that divide evenly (n=64)": (regression, 64),
    "error, smaller last micro-batch (n=60)": (regression, 60),
    "error, smaller last batch (n=48)": (regression, 48),
    "error, padded tokens with a mask": (padded_tokens, 64),
}


def in_float64():
    """Lets Keras compute in float64, which it makes float32 on JAX and on torch."""
    names = dtypes.BIT64_TO_BIT32_DTYPE
    names.update({name: name for name in names})
    keras.backend.set_floatx("float64")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    peer = "accelerate" if BACKEND == "torch" else "optax"
    parser.add_argument("way", choices=["keras", "macrobatch", peer])
    way = parser.parse_args().way
    in_float64()
    for row, case in ROWS.items():
        before, expected = compiled(*case)[0].get_weights(), fitted("plain", *case)
        try:
            value = distance(WAYS[way](*case), expected) / distance(expected, before)
        except Exception as problem:
            print(f"{way}: {row}:\n{problem}", file=sys.stderr)
            value = f"raises {type(problem).__name__}"
        print(json.dumps([row, value]), flush=True)


if __name__ == "__main__":
    main()

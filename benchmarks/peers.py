"""How ways to accumulate gradients compare: the table of docs/exactness.md, measured.

Each contender trains small models in float64, in a process of its own, to make the updates of
batches of 32 from micro-batches of 8: three epochs of SGD with momentum. The reference is plain
Keras on whole batches, of the same Keras in the same process. An error is the distance between
the two results over the distance that the reference moved: 1e-16 is rounding, 10% is a tenth of
the training.

gradient-accumulator needs an older Python, numpy and TensorFlow: an environment for it is made in
.venv-peers, beside the environment of this project. Where that cannot be done it is left out.

    python benchmarks/peers.py [--only CONTENDER] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import environments
import tensorflow as tf
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

keras = tf.keras  # Keras 2 in the older environment, Keras 3 in the newer

CONTENDERS = {
    "plain": "plain Keras, whole batch",
    "keras": "Keras `gradient_accumulation_steps`",
    "macrobatch": "macrobatch",
    "ga-model": "gradient-accumulator 0.5.2, model",
    "ga-optimizer": "gradient-accumulator 0.5.2, optimizer",
}
# Of each: the Python that runs it, the backend of Keras and the way in backend_peers.py.
BACKENDS = {
    "keras-jax": ("Keras `gradient_accumulation_steps`, JAX", ".venv-jax", "jax", "keras"),
    "macrobatch-jax": ("macrobatch, JAX", ".venv-jax", "jax", "macrobatch"),
    "optax": ("`optax.MultiSteps`, JAX", environments.OPTAX, "jax", "optax"),
    "keras-torch": ("Keras `gradient_accumulation_steps`, torch", ".venv-torch", "torch", "keras"),
    "macrobatch-torch": ("macrobatch, torch", ".venv-torch", "torch", "macrobatch"),
    "accelerate": ("HF Accelerate, torch", environments.TORCH, "torch", "accelerate"),
}
CONTENDERS.update({name: each[0] for name, each in BACKENDS.items()})
WHOLE_BATCHES = ("plain", "macrobatch")  # the others are fed micro-batches


# In the contender's process


def sgd(contender, steps, rate=RATE, momentum=MOMENTUM):
    """The optimizer, which averages over `steps` micro-batches if that is its part."""
    if contender == "keras":
        return keras.optimizers.SGD(rate, momentum, gradient_accumulation_steps=steps)
    if contender == "ga-optimizer":
        from gradient_accumulator import GradientAccumulateOptimizer

        inner = keras.optimizers.legacy.SGD(rate, momentum)
        return GradientAccumulateOptimizer(inner, accum_steps=steps)
    return keras.optimizers.SGD(rate, momentum)


def accumulating(contender, inputs, outputs, steps, distributed):
    """The model, which accumulates if that is its part."""
    if contender == "ga-model":
        from gradient_accumulator import GradientAccumulateModel

        model = {"inputs": inputs, "outputs": outputs}
        return GradientAccumulateModel(steps, experimental_distributed_support=distributed, **model)
    model = keras.Model(inputs, outputs)
    if contender == "macrobatch":
        import macrobatch

        macrobatch.accumulate(model, micro_batch_size=MICRO_BATCH)
    return model


def train(contender, data, n, epochs=EPOCHS, replicas=1, **optimizer_options):
    """The weights before and after."""
    # A micro-batch is what one replica has in memory; batch sizes in fit() are over all replicas.
    steps = BATCH // (MICRO_BATCH * replicas)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if replicas > 1 else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        inputs, outputs, loss, x, y = data(n)
        model = accumulating(contender, inputs, outputs, steps, distributed=replicas > 1)
        model.compile(sgd(contender, steps, **optimizer_options), loss)
    before = model.get_weights()
    batch_size = BATCH if contender in WHOLE_BATCHES else BATCH // steps
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return before, model.get_weights()


def error(contender, data, n, **options):
    """Distance from the reference over the distance that it moved."""
    momentum = options.get("momentum", MOMENTUM)
    before, expected = train("plain", data, n, momentum=momentum)
    start, found = train(contender, data, n, **options)
    assert distance(before, start) == 0, "both must start from the same weights"
    return distance(found, expected) / distance(expected, before)


def schedule_steps(contender):
    """The steps at which a schedule is asked for a rate in an epoch of two updates."""

    class Recorder(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self):
            self.steps = set()

        def __call__(self, step):
            step = tf.convert_to_tensor(step)
            tf.py_function(lambda step: self.steps.add(int(step)), [step], [])
            return tf.constant(0.1, "float64")

        def get_config(self):
            return {}

    recorder = Recorder()
    train(contender, regression, 2 * BATCH, epochs=1, rate=recorder)
    return ", ".join(map(str, sorted(recorder.steps)))


ROWS = {
    "error, batches that divide evenly (n=64)": lambda who: error(who, regression, 64),
    "error, smaller last micro-batch (n=60)": lambda who: error(who, regression, 60),
    "error, smaller last batch (n=48)": lambda who: error(who, regression, 48),
    "error, padded tokens with a mask": lambda who: error(who, padded_tokens, 64),
    "learning-rate schedule: steps seen in two updates": schedule_steps,
    "error, `MirroredStrategy`, 2 replicas, no momentum": lambda who: error(
        who, regression, 64, replicas=2, momentum=0.0
    ),
    "error, `MirroredStrategy`, 2 replicas": lambda who: error(who, regression, 64, replicas=2),
}


def measure(contender):
    """Writes one line of JSON for each row, as soon as it is known."""
    keras.backend.set_floatx("float64")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for row, measurement in ROWS.items():
        try:
            value = measurement(contender)
        except Exception as problem:
            print(f"{contender}: {row}:\n{problem}", file=sys.stderr)
            value = f"raises {type(problem).__name__}"
        print(json.dumps([row, value]), flush=True)


# In the main process


def python_of(contender):
    """The Python that runs a contender, or None where there is no environment for it."""
    if contender.startswith("ga-"):
        return environments.python_of(environments.PEERS)
    if contender not in BACKENDS:
        return sys.executable
    environment = BACKENDS[contender][1]
    if not isinstance(environment, str):
        return environments.python_of(environment)
    python = environments.ROOT / environment / "bin" / "python"
    if python.exists():
        return python
    print(f"No {environment}, which make test-backends makes: {contender} is left out.")
    return None


def run(contender, python):
    """The contender's column, from a process of its own."""
    command, variables = [python, __file__, "--measure", contender], dict(os.environ)
    if contender in BACKENDS:
        _, _, variables["KERAS_BACKEND"], way = BACKENDS[contender]
        command = [python, Path(__file__).with_name("backend_peers.py"), way]
    column = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        for line in process.stdout:
            row, value = json.loads(line)
            column[row] = value
            print(f"  {CONTENDERS[contender]}: {row}: {shown(value)}", flush=True)
    return column


def shown(value):
    """An error as a percentage, or as a power of ten where it is rounding; text as it is."""
    if not isinstance(value, float):
        return value
    return f"{value:.1%}" if value > 1e-3 else f"{value:.0e}" if value else "0"


def print_table(columns):
    print("\n| |", " | ".join(CONTENDERS[contender] for contender in columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for row in ROWS:
        cells = [shown(column.get(row, "not measured")) for column in columns.values()]
        print(f"| {row} |", " | ".join(cells), "|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    columns = {}
    for contender in options.only or CONTENDERS:
        python = python_of(contender)
        if python:
            columns[contender] = run(contender, python)
    print_table(columns)
    if options.json:
        options.json.write_text(json.dumps(columns, indent=2) + "\n")


if __name__ == "__main__":
    main()

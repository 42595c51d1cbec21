"""What accumulation costs: the time of a train step, and the peak memory of training.

Time is given as a ratio to the floor, which no accumulation can beat: the forward and backward
passes over the same micro-batches, one after the other, whose gradients are computed and thrown
away, and one update. A batch is 8 micro-batches. All contenders take turns in one process, so that
a busy machine slows all of them; each ratio is of two times from the same round, and the table has
the median of these ratios and their quartiles.

Memory is the peak of a whole process (VmHWM, so on Linux only), one process for each way of
training, and is compared with plain training on batches as small as the micro-batches.

    python benchmarks/step_cost.py [--rounds 15] [--skip-memory] [--json FILE]
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import macrobatch

MICRO_BATCHES = 8
COST_TARGET = 1.10
MEMORY_TARGET = 1.15
SEQUENCE = 64


# Models and data


def cnn():
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for filters, strides in [(32, 1), (32, 2), (64, 1), (64, 2)]:
        model.add(keras.layers.Conv2D(filters, 3, strides, padding="same", activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10))
    return model


def transformer(layers, width, vocabulary):
    """Predicts a token for each token of a sequence; layers normalise before they transform."""
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(tokens)
    for _ in range(layers):
        attended = keras.layers.LayerNormalization()(x)
        attended = keras.layers.MultiHeadAttention(4, width // 4)(attended, attended)
        x = keras.layers.Add()([x, attended])
        hidden = keras.layers.LayerNormalization()(x)
        hidden = keras.layers.Dense(4 * width, activation="gelu")(hidden)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(hidden)])
    return keras.Model(tokens, keras.layers.Dense(vocabulary)(x))


def compiled(build, **optimizer_options):
    keras.utils.set_random_seed(0)
    model = build()
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4, **optimizer_options),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    model.optimizer.build(model.trainable_variables)
    return model


def images(n):
    random = np.random.default_rng(0)
    return random.normal(size=(n, 32, 32, 3)).astype("float32"), random.integers(0, 10, n)


def sequences(n, vocabulary):
    tokens = np.random.default_rng(0).integers(0, vocabulary, (n, SEQUENCE + 1), dtype="int32")
    return tokens[:, :-1], tokens[:, 1:]


# Time. A contender is a function that takes one step; it returns when the step has been taken.


def floor(build, x, y, unrolled):
    """The floor, its micro-batches in a loop or written out one after the other."""
    model = compiled(build)
    variables = model.trainable_variables
    size = len(x) // MICRO_BATCHES

    def micro_batch(t, i):
        return tf.slice(t, [i * size] + [0] * (t.shape.rank - 1), [size, *t.shape[1:]])

    def gradients(x, y, i):
        x, y = micro_batch(x, i), micro_batch(y, i)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, variables)

    def discard(x, y, i):
        """The next index, not before the gradients: so TensorFlow cannot leave them out."""
        with tf.control_dependencies(tf.nest.flatten(gradients(x, y, i), expand_composites=True)):
            return i + 1

    @tf.function
    def step(x, y):
        last, others = tf.constant(0), MICRO_BATCHES - 1
        # Each pass needs the index that the one before gives: one at a time in the loop too.
        for _ in range(others) if unrolled else tf.range(others):
            last = discard(x, y, last)
        model.optimizer.apply(gradients(x, y, last), variables)

    return lambda: step(x, y)


def training(model, batches):
    step = tf.function(model.train_step)
    return lambda: [step(batch)["loss"].numpy() for batch in batches]


def contenders(build, x, y):
    """The steps to time, by name. Keras' own accumulation is fed micro-batches one by one."""
    micro_batches = list(zip(tf.split(x, MICRO_BATCHES), tf.split(y, MICRO_BATCHES)))
    size = len(x) // MICRO_BATCHES
    keras_own = compiled(build, gradient_accumulation_steps=MICRO_BATCHES)
    return {
        "floor, in a loop": floor(build, x, y, unrolled=False),
        "floor, unrolled": floor(build, x, y, unrolled=True),
        "macrobatch": training(macrobatch.accumulate(compiled(build), size), [(x, y)]),
        "Keras, gradient_accumulation_steps": training(keras_own, micro_batches),
        "Keras, plain whole batch": training(compiled(build), [(x, y)]),
    }


def cost(name, build, data, rounds):
    """Times all contenders; one row for each, with its ratio to the faster floor."""
    steps = contenders(build, *map(tf.constant, data))
    for way, step in steps.items():
        print(f"  {name}: warming up: {way}", flush=True)
        for _ in range(3):
            step()
    times = {way: [] for way in steps}
    in_any_order = np.random.default_rng(0).permutation
    for i in range(rounds):
        print(f"  {name}: round {i + 1} of {rounds}", end="\r", flush=True)
        for way in in_any_order(list(steps)):
            start = time.perf_counter()
            steps[way]()
            times[way].append(time.perf_counter() - start)
    print()

    loop, unrolled = times["floor, in a loop"], times["floor, unrolled"]
    fastest = loop if np.median(np.divide(loop, unrolled)) < 1 else unrolled
    rows = []
    for way, values in times.items():
        low, ratio, high = np.quantile(np.divide(values, fastest), (0.25, 0.5, 0.75))
        target = COST_TARGET if way == "macrobatch" else None
        rows.append(row(way, "ms", 1e3 * np.median(values), ratio, f"{low:.2f}-{high:.2f}", target))
    return rows


# Memory


def peak_memory(batch_size, micro_batch_size, updates):
    """What this process held before there was a model, and its peak in training, in MiB."""
    before = memory("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: imports do not count
    model = compiled(lambda: transformer(layers=4, width=256, vocabulary=4000))
    if micro_batch_size:
        macrobatch.accumulate(model, micro_batch_size)
    x, y = sequences(batch_size * updates, vocabulary=4000)
    model.fit(x, y, batch_size=batch_size, verbose=0)
    return before, memory("VmHWM")


def memory(field):
    """Memory of this process in MiB: "VmRSS" is held now, "VmHWM" is the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 2**10


def memories():
    """One row for each way to train; the first is what the others are compared with."""
    runs = {
        "Keras, plain batches of 4": (4, None, 16),
        "macrobatch, batches of 256 in micro-batches of 4": (256, 4, 2),
        "Keras, plain batches of 256": (256, None, 2),
    }
    rows = []
    for way, arguments in runs.items():
        print(f"  memory: {way}", flush=True)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
            before, peak = pool.submit(peak_memory, *arguments).result()
        ratio = peak / rows[0]["MiB"] if rows else 1.0
        target = MEMORY_TARGET if way.startswith("macrobatch") else None
        rows.append(row(way, "MiB", peak, ratio, f"start +{peak - before:.0f}", target))
    return rows


# Results


def row(way, unit, amount, ratio, detail, target):
    amounts = {unit: float(amount), "ratio": float(ratio)}
    return {"way": way, **amounts, "detail": detail, "target": target}


def print_table(title, rows):
    line = "{:<50} {:>8} {:>7} {:>13}  {}".format
    print("\n" + line(title, *list(rows[0])[1:]))
    for way, amount, ratio, detail, target in (r.values() for r in rows):
        verdict = f"<= {target:.2f}: {'met' if ratio <= target else 'MISSED'}" if target else ""
        print(line(way, f"{amount:.0f}", f"{ratio:.2f}", detail, verdict))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps timed of each contender")
    parser.add_argument("--skip-memory", action="store_true", help="measure time only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {os.cpu_count()} CPUs")
    tables = {
        "Time of a step, CNN": cost("CNN", cnn, images(16 * MICRO_BATCHES), options.rounds),
        "Time of a step, transformer": cost(
            "transformer",
            lambda: transformer(layers=2, width=128, vocabulary=2000),
            sequences(8 * MICRO_BATCHES, vocabulary=2000),
            options.rounds,
        ),
    }
    if not options.skip_memory:
        tables["Peak memory of training, larger transformer"] = memories()
    for title, rows in tables.items():
        print_table(title, rows)
    if options.json:
        options.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()

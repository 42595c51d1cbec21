"""The same training plainly, accumulated, and with Keras' own accumulation: weights and memory.

A small convolutional network learns handwritten digits (1797 real images that come with
scikit-learn) three times: on whole batches, on the same batches in micro-batches, and in
micro-batches with Keras' gradient_accumulation_steps. Then it makes a few updates at several batch
sizes, to see how memory grows. Every training has a process of its own, so that its peak memory is
its own too. It takes some minutes on two cores.

    python examples/demo.py [--output demo.png]
"""

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np

BATCH_SIZE = 512
MICRO_BATCH_SIZE = 16
EPOCHS = 6
BATCH_SIZES = [128, 512, 1024]  # of the picture


class Data(NamedTuple):
    images: np.ndarray
    labels: np.ndarray
    unseen: np.ndarray
    unseen_labels: np.ndarray


class Result(NamedTuple):
    """What a training gave, and what it took."""

    weights: List[np.ndarray]
    initial: List[np.ndarray]
    accuracy: float
    extra: float  # MiB, the part of the peak that came with training


def digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    images, unseen, labels, unseen_labels = train_test_split(
        images, labels, test_size=360, random_state=0
    )
    return Data(images, labels, unseen, unseen_labels)


def build_model(gradient_accumulation_steps: Optional[int] = None) -> Any:
    """A network whose gradient is the same however a batch is cut.

    So it has no BatchNormalization and no dropout. It is smooth, too: where a ReLU or a maximum
    falls the other way for a difference in the last digit, rounding grows from update to update.
    """
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    convolution = {"kernel_size": 3, "padding": "same", "activation": "tanh"}
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.UpSampling2D(6, interpolation="bilinear"),
            layers.Conv2D(16, **convolution),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, **convolution),
            layers.AveragePooling2D(2),
            layers.Conv2D(32, **convolution),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(
            0.005, gradient_accumulation_steps=gradient_accumulation_steps
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(data: Data, way: str, batch_size: int, epochs: int) -> Result:
    """Trains the network in one of three ways: "plain", "macrobatch" or "Keras"."""
    import macrobatch

    steps = batch_size // MICRO_BATCH_SIZE
    model = build_model(steps if way == "Keras" else None)
    if way == "macrobatch":
        macrobatch.accumulate(model, micro_batch_size=MICRO_BATCH_SIZE)

    initial = model.get_weights()
    before = memory("VmRSS")
    model.fit(
        data.images,
        data.labels,
        # Keras' own accumulation gets micro-batches, and updates after each so many of them.
        batch_size=MICRO_BATCH_SIZE if way == "Keras" else batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    extra = memory("VmHWM") - before
    _, accuracy = model.evaluate(
        data.unseen, data.unseen_labels, batch_size=MICRO_BATCH_SIZE, verbose=0
    )
    return Result(model.get_weights(), initial, accuracy, extra)


def in_own_process(function: Any, *args: Any) -> Any:
    # Spawned, not forked: a fork would start with the parent's memory.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(function, *args).result()


def memory(field: str) -> float:
    """MiB of this process: "VmRSS" is what it holds now, "VmHWM" the most it ever held."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:  # not Linux: only the peak is known
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 2**10)
    kib = next(line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kib) / 2**10


def distance_from(result: Result, plain: Result) -> float:
    """How far weights are from those of plain training, as a part of the way that those moved."""
    apart, moved = (
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(these, plain.weights)))
        for these in (result.weights, plain.initial)
    )
    return float(apart / moved)


def percent(part: float) -> str:
    return "rounding" if part < 1e-3 else f"{part:.1%} off"


def print_table(results: Dict[str, Result]) -> None:
    def row(name: str, *values: Any) -> None:
        print(f"{name:36}" + "".join(f"{value:>14}" for value in values))

    plain = results["plain"]
    memories = [result.extra for result in results.values()]
    row("", *results)
    row("examples in memory at a time", BATCH_SIZE, MICRO_BATCH_SIZE, MICRO_BATCH_SIZE)
    row("accuracy on 360 unseen images", *[f"{r.accuracy:.1%}" for r in results.values()])
    row("memory that training adds", *[f"{each:.0f} MiB" for each in memories])
    parts = [distance_from(result, plain) for result in results.values()]
    row("weights against plain training", "", *map(percent, parts[1:]))
    same = "same weights" if parts[1] < 1e-3 else f"weights {percent(parts[1])}"
    print(
        f"\nmacrobatch: {same}, {memories[0] / memories[1]:.0f} x less memory; "
        f"Keras' own: {percent(parts[2])}."
    )


def draw(plain: Dict[int, float], accumulated: Dict[int, float], output: Path) -> None:
    """Memory for training against batch size, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for points, colour, name in [
        (plain, "#c44e52", "plain Keras"),
        (accumulated, "#2a6f97", f"macrobatch, micro-batches of {MICRO_BATCH_SIZE}"),
    ]:
        sizes = sorted(points)
        axes.plot(sizes, [points[size] for size in sizes], "o-", color=colour, linewidth=2)
        axes.annotate(
            name,
            (sizes[-1], points[sizes[-1]]),
            (0, 10),
            textcoords="offset points",
            ha="right",
            color=colour,
            weight="bold",
        )
    largest = max(plain)
    less = plain[largest] / accumulated[largest]
    title = f"Batch {largest} trains in {less:.0f} x less memory, with the same update"
    axes.set_title(title, loc="left", weight="bold")
    axes.set_xlabel("batch size (examples per update)")
    axes.set_ylabel("MiB that training adds (lower is better)")
    axes.set_xticks(sorted(plain))
    axes.set_ylim(0, 1.15 * max(plain.values()))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.savefig(output, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("demo.png"), help="the picture to save")
    output = parser.parse_args().output
    data = digits()

    print("Three trainings, then three batch sizes: some minutes on two cores", flush=True)
    # By default the C library keeps some of what is freed, now more, now less. Here it is to give
    # large blocks back at once, which is slower, so that the peak is what training really held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    results = {}
    for way in ("plain", "macrobatch", "Keras"):
        print(f"  {way}: {EPOCHS} epochs, batches of {BATCH_SIZE}", flush=True)
        results[way] = in_own_process(train, data, way, BATCH_SIZE, EPOCHS)

    memories: Dict[str, Dict[int, float]] = {"plain": {}, "macrobatch": {}}
    for size in BATCH_SIZES:
        print(f"  memory of batches of {size}", flush=True)
        batch = data._replace(images=data.images[:size], labels=data.labels[:size])
        jobs = [(train, batch, way, size, 2) for way in memories]
        with ThreadPoolExecutor() as both:
            found = both.map(lambda job: in_own_process(*job), jobs)
            for way, result in zip(memories, found):
                memories[way][size] = result.extra

    print()
    print_table(results)
    draw(memories["plain"], memories["macrobatch"], output)
    print(f"Memory against batch size: {output}")


if __name__ == "__main__":
    main()

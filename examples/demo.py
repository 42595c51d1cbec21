"""The same training with and without accumulation: the same weights, in less memory.

A small convolutional network learns handwritten digits (1797 real images that come with
scikit-learn) twice: on whole batches, and on the same batches in micro-batches. Then it makes a few
updates at several batch sizes, to see how memory grows. Every training has a process of its own, so
that its peak memory is its own too.

    python examples/demo.py [--output demo.png]
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
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
    moved: float  # the largest change of a weight
    loss: float
    accuracy: float
    speed: float  # examples/s
    peak: float  # MiB, of the whole process
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


def build_model() -> Any:
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
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(
    data: Data, batch_size: int, micro_batch_size: Optional[int], epochs: int, verbose: int
) -> Result:
    """Trains the network, accumulated if there is a `micro_batch_size`, otherwise plainly."""
    import keras

    import macrobatch

    model = build_model()
    if micro_batch_size:
        macrobatch.accumulate(model, micro_batch_size=micro_batch_size)

    initial = model.get_weights()
    before = memory("VmRSS")
    ends: List[float] = []
    model.fit(
        data.images,
        data.labels,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=verbose,
        callbacks=[
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: ends.append(time.perf_counter()))
        ],
    )
    peak = memory("VmHWM")

    loss, accuracy = model.evaluate(
        data.unseen, data.unseen_labels, batch_size=MICRO_BATCH_SIZE, verbose=0
    )
    weights = model.get_weights()
    return Result(
        weights=weights,
        moved=largest_difference(weights, initial),
        loss=loss,
        accuracy=accuracy,
        # From the end of the first epoch on, which also traces the step.
        speed=len(data.images) / statistics.median(np.diff(ends)),
        peak=peak,
        extra=peak - before,
    )


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


def largest_difference(a: List[np.ndarray], b: List[np.ndarray]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b))


def print_table(plain: Result, accumulated: Result) -> None:
    def row(name: str, *values: Any) -> None:
        print(f"{name:30}" + "".join(f"{value:>14}" for value in values))

    results = (plain, accumulated)
    row("", "plain", "accumulated")
    row("examples in memory at a time", BATCH_SIZE, MICRO_BATCH_SIZE)
    row("loss on 360 unseen images", *[f"{result.loss:.6f}" for result in results])
    row("accuracy on them", *[f"{result.accuracy:.2%}" for result in results])
    row("examples/s", *[f"{result.speed:.0f}" for result in results])
    row("peak memory", *[f"{result.peak:.0f} MiB" for result in results])
    difference = largest_difference(plain.weights, accumulated.weights)
    row("largest weight difference", "", f"{difference:.1e}")
    print(f"\nTraining moved weights by up to {plain.moved:.2f}: the difference is rounding.")


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
    axes.set_title("Peak memory that training adds, by batch size", loc="left")
    axes.set_xlabel("batch size (examples per update)")
    axes.set_ylabel("MiB")
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

    print(f"Plain: batches of {BATCH_SIZE}", flush=True)
    plain = in_own_process(train, data, BATCH_SIZE, None, EPOCHS, 2)
    print(f"\nAccumulated: batches of {BATCH_SIZE} in {MICRO_BATCH_SIZE}s", flush=True)
    accumulated = in_own_process(train, data, BATCH_SIZE, MICRO_BATCH_SIZE, EPOCHS, 2)

    # By default the C library keeps some of what is freed, now more, now less. Here it is to give
    # large blocks back at once, which is slower, so that the peak is what training really held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    print("\nMemory that training adds to the process", flush=True)
    plain_memory, accumulated_memory = {}, {}
    for size in BATCH_SIZES:
        batch = data._replace(images=data.images[:size], labels=data.labels[:size])
        jobs = [(train, batch, size, micro, 2, 0) for micro in (None, MICRO_BATCH_SIZE)]
        with ThreadPoolExecutor() as both:
            results = both.map(lambda job: in_own_process(*job), jobs)
            plain_memory[size], accumulated_memory[size] = (result.extra for result in results)
        print(
            f"batch size {size:4}: plain {plain_memory[size]:.0f} MiB, "
            f"accumulated {accumulated_memory[size]:.0f} MiB",
            flush=True,
        )

    print()
    print_table(plain, accumulated)
    draw(plain_memory, accumulated_memory, output)
    print(f"Memory against batch size: {output}")


if __name__ == "__main__":
    main()

"""What an update loses to communication: figures of replicas.py, and a model of them.

The model is that of a ring, in which every worker talks to its neighbour only. An all-reduce of n
bytes over W workers takes 2 (W - 1) messages one after the other, of n / W bytes each:

    seconds(n, W) = 2 (W - 1) latency + 2 (W - 1) / W * n / bandwidth

and an update loses the sum of that over its all-reduces. Computing is taken not to go on meanwhile.
Latency and bandwidth come from all-reduces that were timed by themselves. On loopback, bandwidth
is what two processes on one machine can copy and add: there is no wire.

    python benchmarks/scaling_model.py [benchmarks/results/replicas.json] [--picture FILE]
"""

import argparse
import json
from collections import namedtuple
from pathlib import Path

import numpy as np

WAYS = ("macrobatch", "textbook")
TIME_TARGET = 2.0  # at the largest K: how many times less macrobatch loses
MODEL_TARGET = 0.20

# What is assumed of a cluster, whose efficiency is then computed. Nothing here was measured.
PARAMETERS = 100e6
MICRO_BATCH_SECONDS = 0.100
LATENCY = 25e-6
GIGABITS = (10, 100)
WORKERS = (8, 16, 32, 64, 128, 256, 512, 1024)
MICRO_BATCHES = (1, 4, 16, 64)


# The model


class Ring(namedtuple("Ring", ["latency", "bandwidth"])):
    """Seconds for a message between neighbours, and bytes per second."""

    def seconds(self, size, workers):
        """Of an all-reduce of so many bytes."""
        messages = 2 * (workers - 1)
        return messages * self.latency + messages / workers * size / self.bandwidth


def fitted_ring(messages, workers):
    """From all-reduces by themselves: latency from the smallest, bandwidth from the largest two."""
    seconds = {row["bytes"]: np.median(row["seconds"]) for row in messages}
    smallest, *_, large, largest = sorted(seconds)
    steps = 2 * (workers - 1)
    transfer = np.mean([(seconds[n] - seconds[smallest]) / n for n in (large, largest)])
    return Ring(seconds[smallest] / steps, steps / workers / transfer)


def efficiency(ring, workers, k, size=4 * PARAMETERS, micro_batch_seconds=MICRO_BATCH_SECONDS):
    """The part of an update that is not lost, with K micro-batches and one exchange."""
    computing = k * micro_batch_seconds
    return computing / (computing + ring.seconds(size, workers))


def assumed_ring(gigabits):
    return Ring(LATENCY, gigabits * 1e9 / 8)


# The figures


def figures(results):
    """One row for each way and K: medians, quartiles, and what the model says."""
    workers = results["workers"]
    ring = fitted_ring(results["messages"], workers)
    updates = {(row["way"], row["K"]): row for row in results["updates"]}
    rows = []
    for way in WAYS:
        for k in sorted(k for each, k in updates if each == way):
            row, twin = updates[way, k], updates[way + ", no exchange", k]
            # Of two times from the same round, as the machine may be busier in another.
            lost = np.subtract(row["seconds"], twin["seconds"])
            sizes = [4 * elements for elements in row["all-reduces"]]
            # In a ring every worker sends 2 (W - 1) / W of the message.
            expected_bytes = 2 * (workers - 1) * sum(sizes)
            modelled = sum(ring.seconds(size, workers) for size in sizes)
            rows.append(
                {
                    "way": way,
                    "K": k,
                    "all-reduces": len(sizes),
                    "MB": np.median(row["loopback bytes"]) / 1e6,
                    "expected MB": expected_bytes / 1e6,
                    "ms": 1e3 * np.median(row["seconds"]),
                    "no exchange ms": 1e3 * np.median(twin["seconds"]),
                    "lost ms": 1e3 * np.quantile(lost, (0.25, 0.5, 0.75)),
                    "model ms": 1e3 * modelled,
                    "error": modelled / np.median(lost) - 1,
                }
            )
    return ring, rows


def verdict(met):
    return "met" if met else "MISSED"


def print_figures(results, ring, rows):
    parameters, workers = results["parameters"], results["workers"]
    print(f"\n{results['versions']}, {results['machine']}")
    print(f"{workers} workers on loopback, {parameters:,} parameters, medians (quartiles) of")
    print(f"{results['rounds']} rounds. Bytes are of all workers; expected are those of a ring.\n")
    line = "{:<11} {:>3} {:>11} {:>9} {:>9} {:>8} {:>12} {:>20} {:>9} {:>6}".format
    titles = ["way", "K", "all-reduces", "MB", "expected", "ms", "no exchange", "ms lost"]
    print(line(*titles, "model", "error"))
    for row in rows:
        low, lost, high = row["lost ms"]
        print(
            line(
                row["way"],
                row["K"],
                row["all-reduces"],
                f"{row['MB']:.1f}",
                f"{row['expected MB']:.1f}",
                f"{row['ms']:.0f}",
                f"{row['no exchange ms']:.0f}",
                f"{lost:.0f} ({low:.0f}-{high:.0f})",
                f"{row['model ms']:.0f}",
                f"{row['error']:+.0%}",
            )
        )
    largest = max(row["K"] for row in rows)
    ours, textbook = (row for row in rows if row["K"] == largest)
    fewer = textbook["MB"] / ours["MB"]
    faster = textbook["lost ms"][1] / ours["lost ms"][1]
    total = textbook["ms"] / ours["ms"]
    print(
        f"\nAt K = {largest} macrobatch sends {fewer:.1f} times fewer bytes, and loses {faster:.1f}"
    )
    print(f"times less to communication (target {TIME_TARGET}: {verdict(faster >= TIME_TARGET)});")
    print(f"the whole update takes {total:.2f} times less.")
    if results["disturbed"]:
        print(f"Other processes were busy during {results['disturbed']:.0%} of the times.")
    difference, change = (
        results[f"largest {what}"] for what in ("difference of weights", "change of a weight")
    )
    equal = "the same weights" if difference <= 1e-3 * change else "OTHER WEIGHTS"
    print(f"Both end with {equal}: they differ by {difference:.0e} at most, where training moved")
    print(f"weights by up to {change:.0e}.")
    print("\nAll-reduces by themselves, ms:")
    for row in results["messages"]:
        low, middle, high = 1e3 * np.quantile(row["seconds"], (0.25, 0.5, 0.75))
        print(f"{row['bytes']:>12,} bytes {middle:8.2f} ({low:.2f}-{high:.2f})")
    print(f"Latency {1e3 * ring.latency:.2f} ms, bandwidth {ring.bandwidth / 1e9:.2f} GB/s.")
    worst = max(abs(row["error"]) for row in rows)
    met = verdict(worst <= MODEL_TARGET)
    print(f"Worst error of the model: {worst:.0%} (target {MODEL_TARGET:.0%}: {met}).")


def print_model():
    for gigabits in GIGABITS:
        print(f"\nA MODEL, not a measurement: efficiency at {gigabits} Gbit/s, {assumptions()}")
        print("workers " + "".join(f"{f'K = {k}':>9}" for k in MICRO_BATCHES))
        for workers in WORKERS:
            parts = [efficiency(assumed_ring(gigabits), workers, k) for k in MICRO_BATCHES]
            print(f"{workers:>7} " + "".join(f"{part:>9.0%}" for part in parts))


def assumptions():
    return (
        f"{PARAMETERS / 1e6:.0f} M parameters, {1e3 * MICRO_BATCH_SECONDS:.0f} ms per micro-batch, "
        f"{1e6 * LATENCY:.0f} µs latency"
    )


# The picture


def draw(results, ring, rows, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(10, 8.2), layout="constrained")
    above, below = figure.subfigures(2, 1)
    above.suptitle(
        f"Measured: {results['workers']} workers on loopback, "
        f"{results['parameters'] / 1e6:.1f} M parameters",
        fontweight="bold",
    )
    draw_measured(*above.subplots(1, 2), rows)
    below.suptitle(f"A model, not a measurement: {assumptions()}", fontweight="bold")
    draw_model(*below.subplots(1, 2, sharey=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def draw_measured(sent, lost, rows):
    colors = {"macrobatch": "tab:blue", "textbook": "tab:red"}
    labels = {
        "macrobatch": "macrobatch: one exchange per update",
        "textbook": "textbook: every micro-batch",
    }
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        k = [row["K"] for row in mine]
        sent.plot(k, [row["MB"] for row in mine], "o-", color=colors[way], label=labels[way])
        low, middle, high = np.array([row["lost ms"] for row in mine]).T
        lost.errorbar(
            k, middle, [middle - low, high - middle], fmt="o", capsize=3, color=colors[way]
        )
        lost.plot(k, [row["model ms"] for row in mine], "--", color=colors[way])
    lost.plot([], [], "ko", label="measured, with quartiles")
    lost.plot([], [], "k--", label="cost model")
    sent.set_title("Bytes per update, both workers")
    sent.set_ylabel("MB")
    lost.set_title("Time lost to communication per update")
    lost.set_ylabel("ms")
    for axes in (sent, lost):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(k, [str(each) for each in k])
        axes.set_xlabel("K, micro-batches per update")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)


def draw_model(*panels):
    from matplotlib import colormaps

    workers = np.geomspace(WORKERS[0], WORKERS[-1], 100)
    for axes, gigabits in zip(panels, GIGABITS):
        for i, k in enumerate(MICRO_BATCHES):
            color = colormaps["viridis"](0.85 - 0.25 * i)
            label = f"K = {k}" + (" (and textbook, any K)" if k == 1 else "")
            parts = 100 * efficiency(assumed_ring(gigabits), workers, k)
            axes.plot(workers, parts, color=color, linewidth=2, label=label)
        axes.set_title(f"Parallel efficiency at {gigabits} Gbit/s")
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORKERS, [str(each) for each in WORKERS])
        axes.set_ylim(0, 104)
        axes.set_xlabel("workers")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("% of the time spent computing")
    panels[1].legend(frameon=False, loc="lower left")


def report(source, picture=None):
    """Prints what replicas.py has written there, and draws it."""
    results = json.loads(source.read_text())
    ring, rows = figures(results)
    print_figures(results, ring, rows)
    print_model()
    if picture:
        draw(results, ring, rows, picture)
        print(f"\nWritten: {source}, {picture}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = Path(__file__).resolve().parent / "results" / "replicas.json"
    parser.add_argument("results", type=Path, nargs="?", default=results)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it, too")
    options = parser.parse_args()
    report(options.results, options.picture)


if __name__ == "__main__":
    main()

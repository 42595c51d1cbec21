"""The pictures of README and docs, from the results of `make bench`; `make pictures` runs it.

Titles state findings, with numbers that are read from the results. Axes say what is better.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1] / "benchmarks"))

import measures  # noqa: E402

RESULTS = FOLDER.parents[1] / "benchmarks" / "results"
# Of the palette of Okabe and Ito, which colour-blind people can tell apart.
OURS, OTHERS, PLAIN = "#0072B2", "#999999", "#D55E00"


def contenders(section):
    return json.loads((RESULTS / f"{section}.json").read_text())["contenders"]


def picture(name, title, width=8.0, height=4.2):
    """A figure that saves itself."""
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")

    def save():
        figure.savefig(FOLDER / name, dpi=130)
        plt.close(figure)

    return axes, save


def memory():
    found = contenders("memory")
    peaks = {name: statistics.median(each["peak"]) / 1024 for name, each in found.items()}
    lines = {}
    for kind in ("plain", "macrobatch"):
        points = {int(n.split()[1]): p for n, p in peaks.items() if n.startswith(kind + " ")}
        lines[kind] = dict(sorted(points.items()))
    (plain_batch, plain), (our_batch, ours) = (max(lines[k].items()) for k in lines)
    title = (
        f"Batch {plain_batch} takes {plain:.1f} GiB plainly; "
        f"accumulated, batch {our_batch} takes {ours:.1f} GiB"
    )
    axes, save = picture("memory.png", title)
    labels = {"plain": "plain Keras", "macrobatch": "macrobatch, micro-batches of 4"}
    for kind, colour in (("plain", PLAIN), ("macrobatch", OURS)):
        axes.plot(lines[kind].keys(), lines[kind].values(), "o-", color=colour, linewidth=2.5)
        batch, peak = max(lines[kind].items())
        place = {"textcoords": "offset points", "ha": "right", "color": colour, "weight": "bold"}
        axes.annotate(labels[kind], (batch, peak), (0, 10), **place)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lines["macrobatch"]), map(str, lines["macrobatch"]))
    axes.set_xlabel("batch size: examples in one update")
    axes.set_ylabel("peak memory of the process, GiB\n(lower is better)")
    axes.set_ylim(0, 1.15 * plain)
    save()


def over_floor(section, name):
    """As in the tables of docs/performance.md."""
    results = json.loads((RESULTS / f"{section}.json").read_text())
    return measures.time_ratio(results, name, "floor").median


def speed():
    models = {
        "CNN": "cnn",
        "transformer": "transformer",
        "wide MLP": "mlp",
        "transformer, compiled": "transformer-compiled",
        "wide MLP, compiled": "mlp-compiled",
    }
    ours = [over_floor(section, "macrobatch") for section in models.values()]
    keras = [over_floor(section, "keras") for section in models.values()]
    title = (
        f"At most {max(ours):.2f} x the least possible time; "
        f"Keras' own accumulation: up to {max(keras):.2f} x"
    )
    axes, save = picture("speed.png", title)
    for offset, values, colour, label in (
        (-0.2, ours, OURS, "macrobatch"),
        (0.2, keras, OTHERS, "Keras gradient_accumulation_steps"),
    ):
        places = [row + offset for row in range(len(models))]
        axes.barh(places, values, 0.38, color=colour, label=label)
        for place, value in zip(places, values):
            axes.text(value + 0.03, place, f"{value:.2f}", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
    axes.set_xlabel("time of an update over its floor: K passes and one update (lower is better)")
    axes.legend(frameon=False, loc="upper right")
    save()


def lengths():
    found = contenders("lengths")
    ratios = {
        each["label"]: statistics.median(
            a / b for a, b in zip(each["seconds"], found["plain"]["seconds"])
        )
        for each in found.values()
    }
    best = min(ratios.values())
    title = f"Sorting by length: the same update in {best:.2f} of the time of the plain batch"
    axes, save = picture("lengths.png", title, height=2.8)
    colours = [PLAIN if label.startswith("plain") else OURS for label in ratios]
    axes.barh(list(ratios), list(ratios.values()), color=colours)
    for place, value in enumerate(ratios.values()):
        axes.text(value + 0.02, place, f"{value:.2f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("time of an update over plain Keras' (lower is better)")
    save()


def boxes(axes, labels, y, colour, x0=0.0, x1=1.0):
    step = (x1 - x0) / len(labels)
    for place, label in enumerate(labels):
        left = x0 + place * step
        axes.add_patch(plt.Rectangle((left + 0.006, y), step - 0.012, 0.14, color=colour))
        middle = left + step / 2
        axes.text(middle, y + 0.07, label, ha="center", va="center", color="white", fontsize=10)


def arrows(axes, count, high, low):
    for place in range(count):
        x = (place + 0.5) / count
        style = {"arrowstyle": "->", "color": "black"}
        axes.annotate("", (x, low), (x, high), arrowprops=style)


def diagram(name, title, rows):
    """Rows of boxes from top to bottom; between two rows an arrow for each box of the wider one."""
    axes, save = picture(name, title, height=0.95 * len(rows) + 0.4)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(1.09 - 0.25 * len(rows), 1)
    for number, (labels, colour) in enumerate(rows):
        y = 1 - 0.14 - 0.25 * number
        boxes(axes, labels, y, colour)
        if number:
            count = max(len(labels), len(rows[number - 1][0]))
            arrows(axes, count, y + 0.245, y + 0.145)
    save()


def flow():
    diagram(
        "flow.png",
        "K micro-batches, one update: divided by the count of the whole batch",
        [
            (["batch of 32 examples, which does not fit"], PLAIN),
            ([f"micro-batch {k}\n8 examples" for k in range(1, 5)], OURS),
            ([f"forward, backward:\nsum of gradients {k}" for k in range(1, 5)], OURS),
            (
                ["sum of all gradients / examples (or tokens, or weights) of the whole batch"],
                OTHERS,
            ),
            (["one update of the optimizer: the weights of the whole batch"], PLAIN),
        ],
    )


def two_passes():
    diagram(
        "two-passes.png",
        "Two passes: the loss sees the whole batch, memory holds one micro-batch",
        [
            ([f"micro-batch {k}" for k in range(1, 5)], OURS),
            (["forward only:\npredictions"] * 4, OURS),
            (["the loss of ALL predictions, and its gradient for each of them"], PLAIN),
            (["forward again,\nand backward"] * 4, OURS),
            (["sum of gradients: one update, that of the whole batch"], OTHERS),
        ],
    )


if __name__ == "__main__":
    for draw in (memory, speed, lengths, flow, two_passes):
        draw()

"""A picture for each section, from its results."""

import matplotlib

matplotlib.use("Agg")

import first_step
import matplotlib.pyplot as plt
import measures
import sections
from report import available

# Of the palette of Okabe and Ito, which colour-blind people can tell apart.
OURS, OTHERS, FLOOR, TARGET = "#0072B2", "#BBBBBB", "#666666", "#D55E00"
PLAIN = "#E69F00"
OUR_NAMES = ("macrobatch", "tokens", "as they come")
BASES = {"floor": "the floor's", "plain": "plain Keras'", "keras": "Keras' accumulation's"}
BASES["accumulated"] = "plain accumulation's"


def draw(section, results, path):
    ways = {"bars": bars, "memory": memory, "line": line, "first": first_step_bars}
    ways.update(least=least_bars, figures=figures)
    drawn = ways[section.kind](section, results)
    drawn.suptitle(section.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    drawn.savefig(path, dpi=150)
    plt.close(drawn)


def figures(section, results):
    """The shares, the times lost, or the processor times, of all contenders."""
    contenders = [c for c in results["contenders"].values() if "failed" not in c]
    meanings = {"share": "peak over the limit", "lost": "seconds lost"}
    meanings["seconds"] = "processor seconds (lower is better)"
    what = next(each for each in meanings if each in contenders[0])
    size = (10, 1.3 + 0.36 * len(contenders))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    labels = [each["label"] for each in contenders]
    axes.barh(labels, [measures.spread(each[what]).median for each in contenders], color=OURS)
    axes.set_xlabel(meanings[what])
    axes.invert_yaxis()
    return figure


def bars(section, results):
    """Time and memory of each contender, side by side."""
    contenders = results["contenders"]
    names = [name for name, contender in contenders.items() if "failed" not in contender]
    ratios = [available(measures.time_ratio, results, name, section.base) for name in names]
    size = (10, 1.3 + 0.36 * len(names))
    figure, (left, right) = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    form = "{:.2f}"
    if "-" in ratios:  # What all are compared with has failed: seconds are still known.
        ratios = [measures.spread(measures.seconds(results, name)) for name in names]
        form = "{:.3g}"
        left.set_xlabel("seconds")
    else:
        left.set_xlabel(f"time of an update, over {BASES[section.base]}")
        left.set_title(f"| target for macrobatch: {section.mark:.2f}", fontsize=9, color=TARGET)
        for row in (row for row, name in enumerate(names) if name in ("macrobatch", "tokens")):
            ends = [row - 0.5, row + 0.5]
            left.plot([section.mark] * 2, ends, color=TARGET, linewidth=2.5, zorder=3)
    bar_panel(left, names, ratios, form, section.mark)
    bar_panel(right, names, [measures.growth(results, name) for name in names], "{:.0f}")
    right.set_xlabel("peak memory above the start, MiB")
    left.set_yticks(range(len(names)), [contenders[name]["label"] for name in names])
    left.invert_yaxis()
    for label, name in zip(left.get_yticklabels(), names):
        label.set_fontweight("bold" if name in OUR_NAMES else "normal")
    return figure


def bar_panel(axes, names, values, form, mark=None):
    errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
    colours = [
        OURS if n in OUR_NAMES else FLOOR if n.startswith("floor") else OTHERS for n in names
    ]
    medians = [value.median for value in values]
    # One process has one peak: without a spread there is nothing to draw.
    if not any(map(any, errors)):
        errors = None
    spread_bars = {"ecolor": "black", "elinewidth": 1, "capsize": 2.5}
    axes.barh(range(len(names)), medians, 0.68, color=colours, xerr=errors, error_kw=spread_bars)
    widest = max(value.high for value in values)
    gap, width = 0.02 * widest, 0.13 * widest  # of a number
    for place, (name, value) in enumerate(zip(names, values)):
        start = value.high + gap
        if name in OUR_NAMES and mark is not None and start - gap < mark < start + width:
            start = mark + gap  # or the mark would cross it out
        axes.text(start, place, form.format(value.median), va="center", fontsize=9)
    axes.set_xlim(0, 1.15 * widest)
    axes.spines[["top", "right"]].set_visible(False)


def memory(section, results):
    figure, axes = plt.subplots(figsize=(7.5, 4.3), layout="constrained")
    micro, contenders = sections.MEMORY_MICRO_BATCH, results["contenders"]
    for prefix, colour, label in [
        ("plain", PLAIN, "plain Keras"),
        ("macrobatch", OURS, f"macrobatch, micro-batches of {micro}"),
    ]:
        named = [name for name in contenders if name.startswith(prefix + " ")]
        known = [int(name.split()[1]) for name in named if contenders[name].get("peak")]
        values = [measures.peak(results, f"{prefix} {b}").median for b in known]
        axes.plot(known, values, "o-", color=colour, label=label, linewidth=2)
        for batch, value in list(zip(known, values))[-1:]:
            axes.annotate(
                f"{value:.0f} MiB",
                (batch, value),
                (0, 8),
                textcoords="offset points",
                ha="center",
                color=colour,
                fontsize=9,
            )
    if contenders["plain 4"].get("peak"):
        limit = 1.08 * measures.peak(results, "plain 4").median
        axes.axhline(
            limit, color=TARGET, linestyle="--", linewidth=1.2, label="target: 1.08 x plain batch 4"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(known, [f"{batch}\nK={batch // micro}" for batch in known])
    axes.set_xlabel("batch size")
    axes.set_ylabel("peak memory of the process, MiB")
    axes.set_ylim(0)
    axes.margins(x=0.08, y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    return figure


def line(section, results):
    sizes = [s for s in sections.LINE_BATCHES if results["contenders"][str(s)].get("seconds")]
    values = [measures.spread(measures.seconds(results, str(size))) for size in sizes]
    a, b, _ = measures.line(sizes, [value.median for value in values])
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    fitted = [a + b * size for size in sizes]
    left.plot(
        sizes,
        fitted,
        color="black",
        linewidth=1,
        label=f"{1e3 * a:.1f} ms + {1e3 * b:.3f} ms an example",
    )
    errors = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
    left.errorbar(
        sizes, [v.median for v in values], errors, fmt="o", color=OURS, label="macrobatch"
    )
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set_ylabel("seconds of an update")
    left.legend(frameon=False)
    relative = [100 * (1 - fit / value.median) for value, fit in zip(values, fitted)]
    right.plot(sizes, relative, "o", color=OURS)
    right.axhline(0, color="black", linewidth=1)
    for limit in (-5, 5):
        right.axhline(limit, color=TARGET, linestyle="--", linewidth=1.2)
    right.set_ylim(-max(8, *map(abs, relative)) * 1.1, max(8, *map(abs, relative)) * 1.1)
    right.set_xscale("log", base=2)
    right.set_ylabel("distance from the line, %")
    right.set_title("dashed: target, 5 %", fontsize=9, color=TARGET)
    for axes in (left, right):
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("batch size")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def first_step_bars(section, results):
    """What each accumulated contender takes, over the plain one of the same model."""
    ratios = {
        name: available(measures.time_ratio, results, name, first_step.plain(name))
        for name in first_step.limits()
    }
    ratios = {name: ratio for name, ratio in ratios.items() if ratio != "-"}
    figure, axes = ratio_axes({section.contenders[n].label: r.median for n, r in ratios.items()})
    for row, (name, ratio) in enumerate(ratios.items()):
        errors = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        axes.errorbar(ratio.median, row, xerr=errors, ecolor="black", capsize=2.5)
        limit = first_step.limits()[name]
        axes.plot([limit] * 2, [row - 0.5, row + 0.5], color=TARGET, linewidth=2.5, zorder=3)
    axes.set_title("| target", fontsize=9, color=TARGET)
    return figure


def least_bars(section, results):
    """The figures of the targets, which are ratios."""
    ratios = {target.text: available(target.value, results) for target in section.targets}
    return ratio_axes({text: ratio for text, ratio in ratios.items() if ratio != "-"})[0]


def ratio_axes(ratios):
    """A bar for each ratio of processor times, from its label."""
    size = (8, 1.3 + 0.36 * len(ratios))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for row, ratio in enumerate(ratios.values()):
        axes.barh(row, ratio, 0.68, color=OURS)
        axes.text(0.03, row, f"{ratio:.2f}", va="center", fontsize=9, color="white")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(ratios)), list(ratios))
    axes.invert_yaxis()
    axes.set_xlabel(f"processor time, over {BASES['plain']}")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes

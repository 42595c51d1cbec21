"""The picture of a plan: memory and speed against the size of micro-batches."""

from typing import Any, List, Tuple

from macrobatch._plan.report import Plan
from macrobatch._sizes.limit import shown

BLUE, ORANGE, RED, GREY = "#2b6cb0", "#dd6b20", "#c53030", "#718096"


def kinds() -> List[str]:
    """The ends that names of pictures may have."""
    from matplotlib.figure import Figure

    return sorted(Figure().canvas.get_supported_filetypes())


def draw(plan: Plan, path: str) -> None:
    """Writes the picture of a plan to a file."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    spaced = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(9, 4.2), dpi=160, layout=spaced)
    figure.suptitle(_title(plan), x=0.012, ha="left", fontsize=13, fontweight="bold")
    memory, speed = figure.subplots(1, 2)
    for axes in (memory, speed):
        _prepare(axes, plan)
    _draw_memory(memory, plan)
    _draw_speed(speed, plan)
    figure.savefig(path)


def _title(plan: Plan) -> str:
    within = "" if plan.limit is None else f" in {shown(plan.limit)}"
    chosen = f"{plan.choice.name} is the {plan.objective} that fits{within}"
    return f"{plan.model}, batch {plan.examples}: {chosen}"


def _prepare(axes: Any, plan: Plan) -> None:
    sizes = [row.size for row in plan.rows if row.size is not None]
    axes.set_xscale("log", base=2)
    # Sizes between powers of two would run into their neighbours.
    ticks = [size for size in sizes if _is_doubled(size, sizes[0]) or size == plan.whole]
    ticks = [size for size in ticks if size == max(ticks) or size * 1.5 < max(ticks)]
    axes.set_xticks(ticks, [str(size) for size in ticks])
    axes.minorticks_off()
    axes.set_xlabel(plan.choice.unit, color=GREY)
    axes.tick_params(colors=GREY, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#cbd5e0")
    axes.grid(axis="y", color="#edf2f7")
    axes.set_axisbelow(True)
    axes.set_xlim(min(sizes) / 1.3, max(sizes) * 1.3)


def _is_doubled(size: int, first: int) -> bool:
    """Whether a size is the first one, doubled any number of times."""
    times, rest = divmod(size, first)
    return rest == 0 and times & (times - 1) == 0


def _draw_memory(axes: Any, plan: Plan) -> None:
    unit, name = _unit(plan)
    points = [(row.size, row.peak / unit) for row in plan.rows if row.size and row.peak]
    beyond = [(row.size, row.expected / unit) for row in plan.rows if row.size and row.expected]
    axes.plot(*zip(*points), color=BLUE, marker="o", lw=2, zorder=3)
    if beyond:
        dashed = [points[-1], *beyond]
        axes.plot(*zip(*dashed), color=BLUE, marker="o", mfc="white", ls=":", lw=2, zorder=2)
        _label(axes, "not tried", beyond[-1], (-9, -4), GREY, ha="right")
    highest = max(peak for _, peak in [*points, *beyond])
    if plan.limit is not None and plan.limit / unit < 4 * highest:
        limit = plan.limit / unit
        highest = max(highest, limit)
        axes.axhline(limit, color=RED, lw=1.5)
        _label(axes, f"limit {shown(plan.limit)}", (points[0][0], limit), (-8, 5), RED)
    axes.set_ylim(0, highest * 1.15)
    axes.set_title(f"Peak memory of the process, {name}", loc="left", fontsize=10, color=GREY)
    _mark(axes, plan, points, name)


def _draw_speed(axes: Any, plan: Plan) -> None:
    points = [
        (row.size, row.examples_per_second)
        for row in plan.rows
        if row.size and row.examples_per_second
    ]
    axes.plot(*zip(*points), color=ORANGE, marker="o", lw=2, zorder=3)
    speeds = [speed for _, speed in points]
    plain = plan.plain.examples_per_second
    if plain:
        speeds.append(plain)
        axes.axhline(plain, color=GREY, lw=1.2, ls="--")
        _label(axes, "plain batch", (points[0][0], plain), (-8, 5), GREY)
    axes.set_ylim(0, max(speeds) * 1.25)
    axes.set_title("Speed, examples/s", loc="left", fontsize=10, color=GREY)
    _mark(axes, plan, points, "examples/s")


def _mark(axes: Any, plan: Plan, points: List[Tuple[int, float]], unit: str) -> None:
    """Rings the point of the choice, and says what it is."""
    (chosen,) = (point for point in points if point[0] == plan.choice.size)
    axes.scatter(*chosen, s=150, facecolors="none", edgecolors="black", lw=1.5, zorder=4)
    number = f"{chosen[1]:.3g}" if chosen[1] < 1000 else f"{chosen[1]:.0f}"
    # Memory rises, so that there is room to the left of a point, if not in front of the axis.
    side = "left" if points.index(chosen) < len(points) / 2 else "right"
    _label(axes, f"{number} {unit}", chosen, (0, 11), "black", ha=side)


def _label(
    axes: Any,
    text: str,
    point: Tuple[float, float],
    offset: Tuple[int, int],
    color: str,
    ha: str = "left",
) -> None:
    """Writes beside a point, at an offset in points."""
    plate = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate(
        text, point, offset, textcoords="offset points", color=color, ha=ha, bbox=plate, zorder=5
    )


def _unit(plan: Plan) -> Tuple[int, str]:
    peaks = [row.peak or row.expected or 0 for row in plan.rows]
    return (1024**3, "GiB") if max(peaks) > 2 * 1024**3 else (1024**2, "MiB")

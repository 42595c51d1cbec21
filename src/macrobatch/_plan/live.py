"""What is going on, on the terminal: a table that grows, and a progress bar. Plain lines elsewhere.

rich, which Keras brings, draws it. All of it goes to the standard error: the report is the output.
"""

import contextlib
import sys
from typing import Any, Iterator, List, Optional, Set

from macrobatch._plan.report import Row, cells


@contextlib.contextmanager
def shown_live() -> Iterator[Any]:
    """A context with a function that shows rows, what comes next, steps done and steps in all."""
    # The console takes the stream of the moment, also while standard output is redirected.
    from rich.console import Console

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield _Lines()
        return
    from rich.live import Live

    with Live(console=console, transient=True, refresh_per_second=8) as live:
        yield lambda *now: live.update(_drawn(*now), refresh=True)


class _Lines:
    """One line for each row that is new."""

    def __init__(self) -> None:
        self._said: Set[Optional[int]] = set()

    def __call__(self, rows: List[Row], what: str, done: int, steps: int) -> None:
        for row in [row for row in rows if row.size not in self._said]:
            self._said.add(row.size)
            _, peak, speed, _ = cells(row)
            found = f"{peak}, {speed} examples/s" if row.peak is not None else row.note
            _say(f"{row.name}: {found}")
        if done < steps:
            _say(f"[{done + 1}/{steps}] {what}")


def _say(text: str) -> None:
    print(f"macrobatch plan: {text}", file=sys.stderr, flush=True)


def _drawn(rows: List[Row], what: str, done: int, steps: int) -> Any:
    """The table so far, and the bar under it."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("size", "peak memory", "examples/s", "fits"):
        table.add_column(title, justify="right")
    for row in rows:
        style = "" if row.fits else "dim"
        table.add_row(*cells(row), style=style)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=steps, completed=done, width=40), f"{done}/{steps}", what)
    return Group(table, bar)

"""What `verify` returns: the verdict, its causes and the differences, as a table and as JSON."""

import dataclasses
import json
import textwrap
from typing import Any, Dict, List, Optional, Sequence, Tuple

WIDTH = 100
SHOWN = 12  # variables in the table, those that differ most first

VERDICTS = {True: "EXACT", False: "NOT EXACT", None: "COULD NOT TELL"}


@dataclasses.dataclass(frozen=True)
class Cause:
    """One reason for a difference, or one thing to know.

    Attributes:
        kind: "batch_normalization", "examples_meet", "number_of_examples", "scalar_loss",
            "padding", "state", "metrics", "repeated_rows", "precision", "schedule", "random",
            "own_train_step", "not_finite" or "unknown".
        names: of the layers, losses, variables or metrics.
        explanation: what happens.
        advice: what to do.
        affects: what is not that of the whole batch: "update", "statistics" (variables that the
            forward pass writes), "metrics", "rounding"; "nothing" for a hint, and where plain
            Keras is off and the accumulated update is not.
    """

    kind: str
    names: Tuple[str, ...]
    explanation: str
    advice: str
    affects: str


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far a variable is from the whole batch's, after one update.

    Attributes:
        gradient: the distance of the gradients, over the size of the whole batch's. None for
            variables that are not trained, and for models with a train step of their own.
        update: the distance of the values after the update, over how far they moved.
    """

    gradient: Optional[float]
    update: float

    @property
    def largest(self) -> float:
        """The larger one."""
        return max(self.gradient or 0.0, self.update)


@dataclasses.dataclass(frozen=True)
class Report:
    """Whether the accumulated update is that of the whole batch, and if not, why.

    Attributes:
        exact: True if weights and statistics are those of the whole batch, to rounding; False if
            not; None if it could not be told.
        causes: why they are not, and what else there is to know.
        differences: by path, of the trained variables.
        statistics: by path, of other variables that a step writes, moving averages for instance.
        metrics: by name, the difference of what `fit` reports, over its size.
        examples: in the batch.
        settings: how it was cut: what `accumulate` takes.
        dtype: in which the update was computed.
        tolerance: up to which differences are rounding.
        notes: how the comparison was made, where it is not as usual.
    """

    exact: Optional[bool]
    causes: List[Cause]
    differences: Dict[str, Difference]
    statistics: Dict[str, Difference]
    metrics: Dict[str, float]
    model: str
    examples: int
    settings: Dict[str, Any]
    dtype: str
    tolerance: float
    notes: List[str]

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        rounding = f"Differences up to {self.tolerance:.0e} are rounding ({self.dtype})."
        given = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        head = f"{self.model}, a batch of {self.examples} examples, {given}. {rounding}"
        parts = [f"{VERDICTS[self.exact]}\n{_wrapped(head)}"]
        parts += [_wrapped(note) for note in self.notes]
        parts += [f"{i}. {_cause(cause)}" for i, cause in enumerate(self.causes, 1)]
        parts.append(self._table())
        return "\n\n".join(parts)

    def _table(self) -> str:
        everything = {**self.differences, **self.statistics}
        ranked = sorted(everything.items(), key=lambda item: -item[1].largest)
        rows = [("variable", "gradient", "update")]
        rows += [(p, _number(d.gradient), _number(d.update)) for p, d in ranked[:SHOWN]]
        rows += [(f"reported: {n}", "", _number(d)) for n, d in self.metrics.items()]
        if len(ranked) > SHOWN:
            rows.insert(SHOWN + 1, (f"({len(ranked) - SHOWN} more, which differ less)", "", ""))
        width = max(len(row[0]) for row in rows)
        lines = [f"{name:<{width}}  {g:>9}  {u:>9}".rstrip() for name, g, u in rows]
        return "\n".join([lines[0], "-" * (width + 22), *lines[1:]])


def _cause(cause: Cause) -> str:
    title = cause.kind.replace("_", " ")
    of = f" ({some(cause.names)})" if cause.names else ""
    affects = {"nothing": "good to know", "rounding": "affects rounding only"}.get(
        cause.affects, f"affects the {cause.affects}"
    )
    body = _wrapped(f"{cause.explanation} What to do: {cause.advice}")
    return f"{title}{of}: {affects}\n{textwrap.indent(body, '   ')}"


def some(names: Sequence[str]) -> str:
    """Up to five names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH - 3, break_long_words=False, break_on_hyphens=False)


def _number(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.1e}"

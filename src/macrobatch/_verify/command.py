"""What `macrobatch verify` does. Its arguments are in cli."""

import contextlib
import sys
from typing import Any, Dict, List, Optional

from macrobatch._checks import one_line
from macrobatch._no_trace.capture import CannotCapture, Captured, captured

# Exit codes, by the verdict.
CODES = {True: 0, False: 1, None: 2}


def run(target: List[str], settings: Dict[str, Any], as_json: bool, debug: bool = False) -> int:
    """Prints a report, and returns the exit code.

    Args:
        target: a script and its arguments, or module:function.
        settings: what was given of the arguments of `accumulate`.
        as_json: whether to print JSON.
        debug: whether an error is raised, with its traceback, and not said in one line.
    """
    try:
        # What the script prints is not the report.
        with contextlib.redirect_stdout(sys.stderr):
            report = _report(captured(target), settings)
    except CannotCapture as error:
        if debug:
            raise
        return _failed(str(error))
    except Exception as error:
        if debug:
            raise
        return _failed(one_line(error))
    print(report.to_json() if as_json else report)
    return CODES[report.exact]


def _failed(reason: str) -> int:
    print(f"macrobatch verify: {reason}", file=sys.stderr)
    return CODES[None]


def _report(found: Captured, settings: Dict[str, Any]) -> Any:
    # TensorFlow is imported here, and not before the script has.
    from macrobatch._keras import model_checks as checks
    from macrobatch._no_trace import data
    from macrobatch._settings import settings_of
    from macrobatch._verify import verify

    checks.keras_model(found.model)
    if not settings and not settings_of(found.model):
        raise CannotCapture(
            f"The model {found.model.name!r} is not accumulated, so the size of micro-batches is "
            "not known. Pass --micro-batch-size N."
        )
    given = found.x, found.y, found.sample_weight
    if found.options is None:
        return verify.verify(found.model, *given, **settings)
    updates: Optional[int] = None
    steps = found.steps or data.steps_of(*given, **found.options)
    if steps and found.epochs:
        updates = steps * found.epochs
    batch = data.first_batch(*given, **found.options)
    return verify.verify(found.model, *batch, **settings, updates=updates)

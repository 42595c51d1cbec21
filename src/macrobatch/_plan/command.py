"""What `macrobatch plan` does. Its arguments are in cli."""

import contextlib
import importlib.util
import os
import sys
from typing import Any, Dict, List, NamedTuple, Optional

from macrobatch import _backends
from macrobatch._checks import one_line
from macrobatch._no_trace.capture import CannotCapture, Captured, captured
from macrobatch._plan.live import shown_live
from macrobatch._plan.report import NothingFits

FOUND, NOTHING_FITS, COULD_NOT_TELL = 0, 1, 2


class Options(NamedTuple):
    """What was given on the command line.

    Attributes:
        memory_limit: as `find_micro_batch_size` takes it.
        objective: "fastest" or "largest".
        settings: what was given of the arguments of `accumulate`.
        plot: where to write a picture, if anywhere.
        as_json: whether to print JSON.
        debug: whether an error is raised, with its traceback, and not said in one line.
    """

    memory_limit: Optional[str]
    objective: str
    settings: Dict[str, Any]
    plot: Optional[str]
    as_json: bool
    debug: bool = False


def run(target: List[str], options: Options) -> int:
    """Prints a plan, and returns the exit code.

    Args:
        target: a script and its arguments, or module:function.
        options: what else was given.
    """
    try:
        _check_plot(options.plot)
        # What the script prints is not the plan.
        with contextlib.redirect_stdout(sys.stderr):
            plan = _plan(captured(target), options)
            if options.plot is not None:
                from macrobatch._plan import plot

                plot.draw(plan, options.plot)
    except CannotCapture as error:
        if options.debug:
            raise
        return _failed(str(error))
    except NothingFits as error:
        return _failed(str(error), NOTHING_FITS)
    except KeyboardInterrupt:
        return _failed("interrupted.")
    except Exception as error:
        if options.debug:
            raise
        return _failed(one_line(error))
    print(plan.to_json() if options.as_json else plan)
    return FOUND


def _check_plot(path: Optional[str]) -> None:
    """Raises before any work if there can be no picture."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise CannotCapture(
            "--plot needs matplotlib, which is not installed. Install it with: pip install "
            '"macrobatch[plot]", or leave --plot out.'
        )
    from macrobatch._plan import plot

    folder, kind = os.path.dirname(path) or ".", os.path.splitext(path)[1][1:].lower()
    if not os.path.isdir(folder) or kind not in plot.kinds():
        raise CannotCapture(
            f"--plot needs the name of a picture, in a folder that is there. Received: {path}. "
            f"Pass for instance plan.png. Kinds: {', '.join(plot.kinds())}."
        )


def _failed(reason: str, code: int = COULD_NOT_TELL) -> int:
    print(f"macrobatch plan: {reason}", file=sys.stderr)
    return code


def _plan(found: Captured, options: Options) -> Any:
    try:
        _backends.check_available("find_micro_batch_size")
    except ImportError as error:
        raise CannotCapture(str(error)) from error
    # TensorFlow is imported here, and not before the script has.
    from macrobatch._keras import model_checks as checks
    from macrobatch._no_trace import data
    from macrobatch._plan import find

    checks.keras_model(found.model)
    batch = found.x, found.y, found.sample_weight
    if found.options is not None:
        batch = data.first_batch(*batch, **found.options)
    with shown_live() as tell:
        return find.find(
            found.model, *batch, options.memory_limit, options.objective, options.settings, tell
        )

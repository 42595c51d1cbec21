"""What `macrobatch run` does without workers: runs a script here. Its arguments are in cli."""

import sys
from typing import Any, Dict, List, Optional

from macrobatch._run import hook
from macrobatch._workers import script


def run(command: List[str], settings: Optional[Dict[str, Any]]) -> int:
    """Runs `script.py args...` or `-m module args...` as plain Python would.

    What the script raises goes on to Python itself, which knows about exit codes.

    Args:
        command: the script, and its arguments.
        settings: as those of a `hook.Hook`; None leaves every `fit` as it is.
    """
    try:
        with hook.accumulated(settings):
            script.run(command)
    except BaseException:
        _show_without_own_frames()
        raise
    return 0


def _show_without_own_frames() -> None:
    """Lets Python show the error that ends it as if the script had been run by Python alone."""
    shown = sys.excepthook  # perhaps the script's own

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        hook.without_own_frames(error)
        shown(kind, error, error.__traceback__)

    sys.excepthook = excepthook

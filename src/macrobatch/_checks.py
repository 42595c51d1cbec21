"""What all checks share: the warning that an update cannot be exact, at the user's own line,
the log, and how messages show a value. Runs on TensorFlow 1.14 too.
"""

import logging
import os
import re
import sys
import warnings
import weakref
from typing import Any, Sequence, Set, Tuple, Type

# What is found while training. Python shows warnings of a log, if nobody has set up anything else.
LOG = logging.getLogger("macrobatch")


class ExactnessWarning(UserWarning):
    """A part of the model whose update cannot equal that of the whole batch.

    Given once per model, at its first step. It names the layer or the loss and the way out.

    Examples:
        >>> import warnings, macrobatch
        >>> # Refuses inexact training:
        >>> warnings.simplefilter("error", macrobatch.ExactnessWarning)
    """


class Refused(ValueError):
    """What cannot be right when the batch is cut: refused before anything has changed."""


WEIGHTED_METRICS = (
    "Pass it in weighted_metrics= with sample weights of 0 for padding, or mask padding with an "
    "Embedding with mask_zero=True."
)


def shown(value: Any) -> str:
    """What a message shows of a value: the types and shapes in it, not the numbers."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    text = _shown(value)
    return text if len(text) < 300 else text[:300] + "..."


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(_shown, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    return name if shape is None else f"{name} {shape}"


def one_line(error: BaseException, limit: int = 1000) -> str:
    """The kind of an error and its text, in one line."""
    plain = re.sub("\x1b\\[[0-9;]*m", "", str(error))  # Keras prints some of it bold
    text = f"{type(error).__name__}: {' '.join(plain.split())}"
    return text if len(text) <= limit else text[:limit] + "..."


def some(names: Sequence[str], most: int = 3) -> str:
    """Up to three names, and how many there are."""
    more = f", ... ({len(names)} in all)" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


# What may be done with numbers that are infinite or not a number.
NONFINITE = ("propagate", "skip", "raise")


def one_of(name: str, value: Any, options: Sequence[str]) -> Any:
    """Returns `value`, if it is one of the options."""
    if value not in options:
        raise ValueError(f"{name} must be one of {list(options)}. Received: {name}={value!r}.")
    return value


def warn(message: str, category: Type[Warning] = UserWarning) -> None:
    """Warns, at the line of the user's that it is about."""
    folders = _library_folders()
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(folders):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def _library_folders() -> Tuple[str, ...]:
    """Where the files are that users have not written."""
    names = ("macrobatch", "keras", "tensorflow", "jax", "torch", "contextlib", "threading")
    modules = [sys.modules[name] for name in names if name in sys.modules]
    files = [getattr(module, "__file__", None) for module in modules]  # None: made in memory
    return tuple(
        os.path.dirname(f) + os.sep if f.endswith("__init__.py") else f for f in files if f
    )


_warned: "weakref.WeakKeyDictionary[Any, Set[str]]" = weakref.WeakKeyDictionary()


def warn_once(owner: Any, message: str) -> None:
    """Warns that the update is not exact, once per model (or function) and message."""
    messages = _warned.setdefault(owner, set())
    if message not in messages:
        messages.add(message)
        warn(message, ExactnessWarning)

"""What `macrobatch verify` and `macrobatch plan` look at: the first `fit` of a script, or what a
function returns.

Nothing here imports TensorFlow before the script does: a script may set what TensorFlow and Keras
read when they are imported.
"""

import builtins
import contextlib
import functools
import importlib
import inspect
import os
import runpy
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional

from macrobatch._checks import one_line


class Captured(NamedTuple):
    """A model and its data.

    Attributes:
        model: a compiled model.
        x, y, sample_weight: the data, as `fit` takes it.
        options: how `fit` makes batches of it; empty if it is one batch.
        epochs: how many there will be, if it is known.
        steps: of an epoch, if they are given.
    """

    model: Any
    x: Any
    y: Any = None
    sample_weight: Any = None
    options: Optional[Dict[str, Any]] = None
    epochs: Optional[int] = None
    steps: Optional[int] = None


class CannotCapture(Exception):
    """There is nothing to look at, and why."""


class _Fit(BaseException):
    """Ends a script at its first fit. No `except Exception` of the script stops it."""

    def __init__(self, captured: Captured):
        super().__init__()
        self.captured = captured


def captured(target: List[str]) -> Captured:
    """What a script, with its arguments, fits; or what a function of a module returns."""
    if os.path.isfile(target[0]):
        return _of_script(*target)
    module, colon, function = target[0].partition(":")
    if not colon or not module or not function:
        raise CannotCapture(
            "Expected: a Python file, or module:function. "
            f"Received: {target[0]}, which is not a file in {os.getcwd()}."
        )
    return _of_function(module, function)


def _of_script(path: str, *arguments: str) -> Captured:
    before = sys.argv, list(sys.path)
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        with _stopping_at_fit():
            runpy.run_path(path, run_name="__main__")
    except _Fit as found:
        return found.captured
    except SystemExit as end:
        raise CannotCapture(f"{path} ended before any fit(), with exit code {end.code}.") from end
    except Exception as error:
        raise CannotCapture(f"{path} failed before any fit(). {one_line(error)}") from error
    finally:
        sys.argv, sys.path[:] = before
    raise CannotCapture(f"{path} ended without a call of fit().")


@contextlib.contextmanager
def _stopping_at_fit() -> Iterator[None]:
    """Lets the first `fit` of any Keras model end everything, once Keras is imported."""
    plain_import = builtins.__import__
    patched: List[Any] = []

    def importing(*args: Any, **kwargs: Any) -> Any:
        module = plain_import(*args, **kwargs)
        patch()
        return module

    def patch() -> None:
        model = getattr(sys.modules.get("keras"), "Model", None)
        if model is not None and not patched:
            patched.append((model, model.fit))
            model.fit = _fit_like(model.fit)

    patch()
    builtins.__import__ = importing
    try:
        yield
    finally:
        builtins.__import__ = plain_import
        for model, fit in patched:
            model.fit = fit


def _fit_like(plain: Any) -> Any:
    @functools.wraps(plain)  # whose signature others may ask for
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(plain).bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        options = {"batch_size": given["batch_size"] or 32, "class_weight": given["class_weight"]}
        raise _Fit(
            Captured(
                self,
                given["x"],
                given["y"],
                given["sample_weight"],
                options,
                given["epochs"] - given["initial_epoch"],
                given["steps_per_epoch"],
            )
        )

    return fit


def _of_function(module: str, function: str) -> Captured:
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        returned = getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise CannotCapture(f"{module}:{function} failed. {one_line(error)}") from error
    finally:
        sys.path[:] = before
    if not isinstance(returned, (tuple, list)) or not 2 <= len(returned) <= 4:
        raise CannotCapture(
            f"{module}:{function} must return (model, x, y), (model, x, y, sample_weight) or "
            f"(model, batch). Received: a {type(returned).__name__}."
        )
    model, *batch = returned
    if len(batch) == 1 and isinstance(batch[0], tuple):
        batch = list(batch[0])
    return Captured(model, *batch)

"""Why nothing was accumulated in a script, which called no `fit` of Keras. Imports no backend."""

import sys
import threading
from typing import Any, Iterator, Optional

import macrobatch
from macrobatch import _backends

# With these a script accumulates by itself. A name is there once it has been asked for.
_OWN_WAYS = ("accumulate", "value_and_gradients", "GradientAccumulator")
# Python imports one of these to start a process that does not begin as a copy of this one.
_SPAWNING = tuple(
    f"multiprocessing.popen_{kind}" for kind in ("spawn_posix", "spawn_win32", "forkserver")
)


def line(trains_on_batches: bool, is_worker: bool) -> Optional[str]:
    """What to say at the end of a script that called no `fit`; None if there may be no need.

    Args:
        trains_on_batches: whether the script called `train_on_batch`.
        is_worker: whether it is one of several workers, which may well do without Keras.
    """
    main = threading.main_thread()
    is_over = all(each is main or each.daemon for each in threading.enumerate())
    if not is_over or any(name in vars(macrobatch) for name in _OWN_WAYS):
        return None
    keras = sys.modules.get("keras")
    if not hasattr(keras, "config"):  # none, or Keras 2
        return None if is_worker else "nothing was accumulated: the script did not import Keras 3"
    return f"nothing was accumulated in this process: {_reason(keras, trains_on_batches)}"


def _reason(keras: Any, trains_on_batches: bool) -> str:
    if trains_on_batches:
        return (
            "the script called train_on_batch(), and only fit() is accumulated by itself. Call "
            "macrobatch.accumulate(model) in the script."
        )
    own_loop = _backends.of_own_loop(keras.config.backend())
    names = list(_with_own_fit(keras.Model))
    if names:
        return f"the fit() of {names[0]} did not call that of keras.Model. {own_loop}"
    if any(name in sys.modules for name in _SPAWNING):
        return (
            "the script called no fit() in it, and started processes that macrobatch run does not "
            "reach. Call macrobatch.accumulate(model) in the script."
        )
    return f"the script called no fit(). {own_loop}"


def _with_own_fit(kind: Any) -> Iterator[str]:
    """The names of classes of models with a `fit` of their own, but for those of libraries."""
    for each in kind.__subclasses__():
        file = getattr(sys.modules.get(each.__module__), "__file__", None) or ""
        if "fit" in vars(each) and "site-packages" not in file:
            yield each.__name__
        yield from _with_own_fit(each)

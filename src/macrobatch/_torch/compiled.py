"""Forward passes that torch compiles, where the user asked Keras for jit_compile=True.

Keras lets torch compile its whole train step. The loop over micro-batches goes on in Python here,
and the model's `call` is what torch compiles: one function for all micro-batches. Whatever else a
call leaves (losses, masks, statistics, seeds) may get lost in what torch compiles, so the first
batch runs as it is, and shows whether there is anything else.
"""

import contextlib
from typing import Any, Callable, Iterator, Optional

import torch

from macrobatch import _checks
from macrobatch._torch import checks


class CompiledCall:
    """The `call` of a model, compiled if the model was compiled with jit_compile=True."""

    def __init__(self, model: Any):
        self._model = model
        self._compiled: Optional[Callable[..., Any]] = None
        self._is_pure: Optional[bool] = None

    def forget(self) -> None:
        """Looks at the model again, which may have changed."""
        self._compiled = self._is_pure = None

    def look(self, can_be: bool, why_not: str) -> None:
        """Hears whether the call can be compiled: it has left nothing but its outputs."""
        if self._is_pure is None and self._model.jit_compile and not can_be:
            _checks.warn(checks.not_compiled(why_not))
        self._is_pure = can_be and self._is_pure is not False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which the model calls what is compiled."""
        model = self._model
        if not (model.jit_compile and self._is_pure):
            yield
            return
        if self._compiled is None:
            self._compiled = torch.compile(model.call)
        own = vars(model).get("call")
        model.call = self._compiled
        try:
            yield
        finally:
            if own is None:
                del model.call
            else:
                model.call = own


@contextlib.contextmanager
def left_to_steps(model: Any) -> Iterator[None]:
    """A context in which Keras makes functions that it does not compile."""
    compiles, model.jit_compile = model.jit_compile, False
    try:
        yield
    finally:
        model.jit_compile = compiles

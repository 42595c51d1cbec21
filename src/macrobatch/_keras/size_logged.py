"""The size of micro-batches in the logs of each epoch."""

import contextlib
import contextvars
from typing import Any, Callable, Dict, Iterator, Optional

import keras

_is_left_out: "contextvars.ContextVar[bool]" = contextvars.ContextVar(
    "macrobatch_size_left_out", default=False
)


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """A context in which logs have no sizes, for scripts that know nothing of them."""
    token = _is_left_out.set(True)
    try:
        yield
    finally:
        _is_left_out.reset(token)


class SizeLogged(keras.callbacks.Callback):
    """Logs a size at the end of each epoch, before other callbacks see the logs."""

    def __init__(
        self,
        name: str,
        size: Callable[[], Optional[int]],
        expect: Callable[[Optional[int]], None] = lambda updates: None,
    ):
        """Prepares a callback.

        Args:
            name: what the size is called.
            size: gives it, once there is one.
            expect: is told how many updates are to come; None if that is not known.
        """
        super().__init__()
        self._name, self._size, self._expect = name, size, expect

    def on_epoch_begin(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """Tells how long the training is going to be."""
        steps = (self.params or {}).get("steps")  # A CallbackList of the user's gives it none.
        self._expect(steps and steps * (self.params["epochs"] - epoch))

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, Any]] = None) -> None:
        """As Keras' own callbacks log a learning rate."""
        size = None if _is_left_out.get() else self._size()
        if logs is not None and size is not None:
            logs[self._name] = size

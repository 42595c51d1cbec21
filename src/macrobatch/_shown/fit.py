"""What is shown while `fit` runs: updates on the terminal, and more numbers in TensorBoard."""

import contextlib
import functools
import time
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import keras

from macrobatch._keras.fit_call import FitCall
from macrobatch._shown.line import Line, can_show


@contextlib.contextmanager
def shown(
    call: FitCall, line: Line, size: Callable[[], Tuple[str, Optional[int]]]
) -> Iterator[None]:
    """A context in which a fit runs.

    Args:
        call: the call of the fit. Callbacks may be added.
        line: what shows updates.
        size: what the size of micro-batches is called, and the size.
    """
    own = call.get("callbacks")
    all = own.callbacks if isinstance(own, keras.callbacks.CallbackList) else own
    all = keras.tree.flatten([] if all is None else all)
    boards = [each for each in all if isinstance(each, keras.callbacks.TensorBoard)]
    is_shown = (
        call.get("verbose") in ("auto", 1)
        and keras.config.is_interactive_logging_enabled()
        and can_show()
    )
    if is_shown:
        line.start()
    try:
        with contextlib.ExitStack() as stack:
            if boards:
                timed = Timed(size)
                stack.enter_context(call.with_callback(timed))
            for board in boards:
                stack.enter_context(_told(board, timed.numbers))
            yield
    finally:
        line.stop()


class Timed(keras.callbacks.Callback):
    """Measures how long updates take: the seconds of an epoch, without validation, over updates."""

    def __init__(self, size: Callable[[], Tuple[str, Optional[int]]]):
        super().__init__()
        self._size = size
        self._began, self._ended = 0.0, None  # type: float, Optional[float]
        self._latest = 0

    def numbers(self) -> Dict[str, float]:
        """What TensorBoard is told of an epoch."""
        ended = time.perf_counter() if self._ended is None else self._ended
        steps = self.params.get("steps")
        updates = self._latest + (self.model.steps_per_execution or 1)
        updates = updates if steps is None else min(updates, steps)
        found = {"update_time": (ended - self._began) / updates}
        name, size = self._size()
        if size is not None:
            found[name] = size
        return found

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins with training."""
        self._began, self._ended = time.perf_counter(), None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Unlike `on_train_batch_end`, it lets Keras write its line beside the next batch."""
        self._latest = batch

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins."""
        self._ended = time.perf_counter()


@contextlib.contextmanager
def _told(board: Any, numbers: Callable[[], Dict[str, float]]) -> Iterator[None]:
    """Lets TensorBoard, and no other callback, have more numbers of each epoch."""
    plain, before = board.on_epoch_end, vars(board).get("on_epoch_end")

    @functools.wraps(plain)
    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        plain(epoch, {**numbers(), **(logs or {})})

    board.on_epoch_end = on_epoch_end
    try:
        yield
    finally:
        del board.on_epoch_end
        if before is not None:  # It may be among the callbacks twice.
            board.on_epoch_end = before

"""What is shown while `fit` runs: updates on the terminal, and more numbers in TensorBoard."""

import contextlib
import functools
import inspect
import time
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import keras

from macrobatch._shown.line import Line, can_show


def call_of(fit: Any, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    """A call of a `fit` of a model, with all of its arguments."""
    call = inspect.signature(fit).bind(model, *args, **kwargs)
    call.apply_defaults()
    return call


def arguments_of(call: inspect.BoundArguments) -> Dict[str, Any]:
    """The arguments by name. A `fit` of a user's own may have them in its `**kwargs`."""
    if "callbacks" in call.arguments:
        return call.arguments
    kinds = call.signature.parameters.items()
    names = [name for name, each in kinds if each.kind is inspect.Parameter.VAR_KEYWORD]
    found: Dict[str, Any] = call.arguments[names[0]] if names else {}
    return found


@contextlib.contextmanager
def shown(
    arguments: Dict[str, Any], model: Any, line: Line, size: Callable[[], Tuple[str, Optional[int]]]
) -> Iterator[None]:
    """A context in which a fit runs.

    Args:
        arguments: those of the fit. Callbacks may be added.
        model: the model.
        line: what shows updates.
        size: what the size of micro-batches is called, and the size.
    """
    own = arguments.get("callbacks")
    all = own.callbacks if isinstance(own, keras.callbacks.CallbackList) else own
    all = keras.tree.flatten([] if all is None else all)
    boards = [each for each in all if isinstance(each, keras.callbacks.TensorBoard)]
    if boards:
        timed = Timed(size)
        arguments["callbacks"] = with_first(own, model, timed)
    is_shown = (
        arguments.get("verbose", "auto") in ("auto", 1)
        and keras.config.is_interactive_logging_enabled()
        and can_show()
    )
    if is_shown:
        line.start()
    try:
        with contextlib.ExitStack() as stack:
            for board in boards:
                stack.enter_context(_told(board, timed.numbers))
            yield
    finally:
        line.stop()


def with_first(callbacks: Any, model: Any, own: keras.callbacks.Callback) -> Any:
    """The callbacks of a fit, and before them another one, instead of any of its kind."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        own.set_model(model)
        own.set_params(callbacks.params)
        others = [each for each in callbacks.callbacks if not isinstance(each, type(own))]
        callbacks.callbacks[:] = [own, *others]
        return callbacks
    return [own, *keras.tree.flatten([] if callbacks is None else callbacks)]


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
    plain = board.on_epoch_end

    @functools.wraps(plain)
    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        plain(epoch, {**numbers(), **(logs or {})})

    board.on_epoch_end = on_epoch_end
    try:
        yield
    finally:
        del board.on_epoch_end

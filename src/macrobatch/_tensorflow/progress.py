"""How far a loop in a graph is: numbers that the loop leaves behind, and that a thread may read."""

import contextlib
import threading
from typing import Any, Iterator, Optional

import tensorflow as tf

from macrobatch._tensorflow import graph, parts
from macrobatch._types import Size

_current = threading.local()  # Each replica is traced in a thread of its own, and reports nothing.


class Progress:
    """The latest place of the loops of a step.

    It costs one operation in each micro-batch, a few microseconds, and no call of Python.

    Attributes:
        loops: how many loops a step has.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._done = tf.Variable(0, dtype=tf.int32, trainable=False)
            # micro-batches, and in which loop
            self._whole = tf.Variable([0, 1], dtype=tf.int32, trainable=False)
        self.loops, self._number = 1, 0

    def restart(self) -> None:
        """The next loop is the first one of a step."""
        self._number = 0

    def begin(self, count: Size) -> None:
        """A loop over so many micro-batches begins."""
        self._number += 1
        self.loops = max(self.loops, self._number)
        self._done.assign(0)
        self._whole.assign(tf.stack([tf.cast(count, tf.int32), self._number]))

    def at(self, before: Size, done: Size) -> None:
        """So many micro-batches are done. Each operation counts: two more double the cost."""
        is_first = isinstance(before, int) and not before
        self._done.assign(done if is_first else before + done)

    def end(self, results: Any) -> None:
        """The loop is over, as soon as its results are there."""
        with parts.after(results):
            self._whole.assign([0, self._number])

    def read(self) -> Any:
        """Micro-batches that are done, their number, in which loop, and the number of loops."""
        count, number = self._whole.numpy()
        return int(self._done.numpy()), int(count), int(number), self.loops


@contextlib.contextmanager
def reported(progress: Optional[Progress]) -> Iterator[None]:
    """A context in which loops that are run, or traced, say how far they are."""
    before, _current.progress = getattr(_current, "progress", None), progress
    try:
        yield
    finally:
        _current.progress = before


def current() -> Optional[Progress]:
    """Where a loop is to say how far it is. XLA would leave it out, or fail."""
    return None if graph.in_xla() else getattr(_current, "progress", None)

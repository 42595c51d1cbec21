"""The first examples of a batch, handed to Python out of a graph; and code that is run in Python
for a trial, which leaves all variables as they were.
"""

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

import tensorflow as tf

from macrobatch import _internals
from macrobatch._tensorflow import graph, leaves, replicas
from macrobatch._tensorflow.trace import packed, tensors_of
from macrobatch._types import Batch


class Tap:
    """Hands the first examples of a batch to a function: once, whenever it has been opened.

    It works eagerly and in a graph, where many batches run through it. XLA compiles no such thing.
    """

    def __init__(self, receive: Callable[[Batch, int], None]):
        """Opens it.

        Args:
            receive: a function of a batch with the first examples, and of how many there were.
                It may close the tap.
        """
        self._receive = receive
        self._closed = replicas.variable(None, [], tf.int32, "tap_is_closed")

    def open(self) -> None:
        """Lets the next batches be handed over."""
        self._closed.assign(0)

    def close(self) -> None:
        """Lets no batch be handed over."""
        self._closed.assign(1)

    def __call__(self, batches: Sequence[Batch], examples: int) -> Any:
        """Hands batches over, if the tap is open. What it returns is there afterwards.

        Args:
            batches: one, or the parts of one that the replicas of this process have.
            examples: how many examples of each part to hand over, at most.
        """
        parts = [graph.to_tensors(batch) for batch in batches]
        if not all(leaf is None or leaf.shape.rank for leaf in tf.nest.flatten(parts)):
            return tf.constant(True)  # no batch at all: the step will say so

        def hand_over() -> None:
            rows = [_first(part, examples) for part in parts]
            total = sum(_examples(part) for part in parts)
            if tf.executing_eagerly():
                self._receive(_joined(rows), int(total))
                return
            # TensorFlow keeps the function for as long as the process lives.
            like, reference = graph.specs_of(rows), weakref.ref(self)

            def received(total: Any, *tensors: Any) -> None:
                tap = reference()
                if tap is not None:
                    tap._receive(_joined(packed(like, tensors)), int(total))

            tf.py_function(received, [total, *tensors_of(rows)], Tout=[])

        with tf.device("CPU:0"):
            return graph.when(tf.equal(replicas.read(self._closed), 0), hand_over)


def _first(batch: Batch, examples: int) -> Batch:
    """The first examples of a batch, and those that make it as wide as it is."""
    places = [(0, examples), *((example, 1) for example in leaves.widest(batch))]

    def taken(leaf: Any) -> Any:
        if leaf is None:
            return None
        return leaves.concatenated([leaves.slice_of(leaf, *place, False) for place in places])

    return tf.nest.map_structure(taken, batch)


def _examples(batch: Batch) -> Any:
    return leaves.examples_of(next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None))


def _joined(parts: List[Batch]) -> Batch:
    return tf.nest.map_structure(lambda *some: leaves.concatenated(list(some)), *parts)


@contextlib.contextmanager
def unchanged() -> Iterator[None]:
    """Puts variables of TensorFlow back that are written inside. Those of Keras have scopes."""
    before: Dict[int, Tuple[Any, Any]] = {}

    def remembering(write: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
        if id(variable) not in before:
            before[id(variable)] = variable, variable.read_value()
        return write(variable, *args, **kwargs)

    try:
        with _internals.with_writes(remembering):
            yield
    finally:  # What raises may have written before: training goes on after it.
        for variable, value in before.values():
            variable.assign(value)

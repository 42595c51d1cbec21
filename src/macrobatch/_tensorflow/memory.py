"""What earlier batches have shown, as variables: which parts of a batch are no sequences."""

import weakref
from typing import Any, Dict, Sequence

import tensorflow as tf

from macrobatch._tensorflow import replicas


class Memory:
    """Which parts of a batch had another size than the sequences, in any batch so far."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._variables: Dict[Any, Any] = {}

    def differed(self, kinds: Any) -> Sequence[Any]:
        """For each part, whether an earlier batch of these kinds had that part in another size."""
        if kinds not in self._variables:
            self._variables[kinds] = replicas.variable(
                self._strategy, [len(kinds)], tf.int32, "no_sequences", summed=False
            )
        before = replicas.read(self._variables[kinds]) > 0
        return [bool(b) for b in before.numpy()] if tf.executing_eagerly() else tf.unstack(before)

    def note(self, kinds: Any, differ: Sequence[Any]) -> None:
        """Remembers for each part whether its size differs in this batch."""
        variable = self._variables[kinds]
        now = tf.stack([tf.cast(each, tf.int32) for each in differ])
        variable.assign(tf.maximum(replicas.read(variable), now))


_memories: "weakref.WeakKeyDictionary[Any, Dict[int, Memory]]" = weakref.WeakKeyDictionary()


def memory_of(function: Any) -> Memory:
    """The memory of a user's function. A lambda may be made anew for each call."""
    strategy = tf.distribute.get_strategy() if replicas.in_several() else None
    of_function = _memories.setdefault(getattr(function, "__code__", function), {})
    return of_function.setdefault(id(strategy), Memory(strategy))

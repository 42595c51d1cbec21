"""Numbers on which workers agree, between steps."""

from typing import Any, List

import tensorflow as tf


class Agreement:
    """Lets each worker know the numbers of all. Workers wait for each other."""

    def __init__(self, strategy: Any):
        self._strategy = strategy
        self._gathered: Any = None

    def __call__(self, *numbers: int) -> List[List[int]]:
        """The numbers that each replica has, those of the first worker first."""
        if self._gathered is None:

            def gathered(own: Any) -> Any:
                each = self._strategy.run(lambda row: row[None], args=(own,))
                return self._strategy.gather(each, axis=0)

            self._gathered = tf.function(gathered, autograph=False)
        found = self._gathered(tf.constant(numbers, tf.int64))
        return [[int(number) for number in row] for row in found.numpy()]

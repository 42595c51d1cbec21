"""Nothing is written of a batch whose loss or gradient is not finite: no weight, no statistic, no
metric, no seed. The train step tells it in its logs.
"""

from typing import Any, Callable, List

import tensorflow as tf

from macrobatch._keras import finite_checks, guard
from macrobatch._keras.skipping import NOT_FINITE
from macrobatch._tensorflow import replicas, sums
from macrobatch._types import Gradient, Logs, Tensor


class Guard(guard.Guard):
    """What a train step writes, with numbers that are not finite kept out.

    Attributes, beside those of any backend:
        is_looking: `looks` for graphs: not 0 while steps run only to look.
    """

    def __init__(self, policy: str, strategy: Any):
        super().__init__(policy)
        self.is_looking = replicas.variable(strategy, [], tf.int32, "is_looking", summed=False)

    def look(self, looks: bool) -> None:
        super().look(looks)
        self.is_looking.assign(int(looks))

    def check_replicas(self, synchronized: List[str]) -> None:
        """Raises for layers in which replicas meet: without some examples, not all of them do."""
        if self.is_wanted:
            raise ValueError(finite_checks.synchronized(self.policy, synchronized))

    def write(self, gradients: List[Gradient], losses: Any, write: Callable[[], None]) -> Logs:
        """Writes what a batch has left, if it may be written, and returns what to add to the logs.

        Args:
            gradients: of the whole batch; in a replica, its part of them.
            losses: a nest of the reported values.
            write: writes all of it.
        """
        if not self.is_wanted:
            write()
            return {}
        bad = self._not_finite(gradients, losses)
        looks = tf.not_equal(replicas.read(self.is_looking), 0)
        replicas.only_if(tf.logical_and(tf.equal(bad, 0), tf.logical_not(looks)), write)
        return {NOT_FINITE: bad}

    def _not_finite(self, gradients: List[Gradient], losses: Any) -> Tensor:
        own = tf.logical_not(sums.are_finite(self.numbers(gradients, tf.nest.flatten(losses))))
        return replicas.sum_over_replicas([tf.cast(own, tf.float32)])[0]

"""Nothing is written of a batch whose loss or gradient is not finite: no weight, no statistic, no
metric, no seed. The train step tells it in its logs.
"""

from typing import Any, Callable, List

import tensorflow as tf

from macrobatch import _optimizer_checks
from macrobatch._fit import finite_checks
from macrobatch._tensorflow import replicas, sums
from macrobatch._types import Gradient, Logs, Tensor

# Where logs tell how many replicas have met numbers that are not finite.
NOT_FINITE = "macrobatch_not_finite"


class Guard:
    """What a train step writes, with numbers that are not finite kept out.

    Attributes:
        policy: "propagate" lets everything through. "skip" and "raise" keep such numbers out.
        is_looking: not 0 while steps run only to see whether their numbers are finite.
        looks: the same, for Python.
    """

    def __init__(self, policy: str, strategy: Any):
        self.policy = policy
        self.is_looking = replicas.variable(strategy, [], tf.int32, "is_looking", summed=False)
        self.looks = False
        self._scales = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to keep out."""
        return self.policy != "propagate"

    def start(self, optimizer: Any) -> None:
        """Looks at the optimizer of a step that is about to be made."""
        _optimizer_checks.sees_overflows(optimizer, self.policy, "update")
        self._scales = _optimizer_checks.has_dynamic_scale(optimizer)

    def look(self, looks: bool) -> None:
        """Lets steps only look whether their numbers are finite, or lets them write."""
        self.looks = looks
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
        # A gradient may overflow because of a dynamic loss scale, which the optimizer then lowers.
        values = [*([] if self._scales else gradients), *tf.nest.flatten(losses)]
        own = tf.logical_not(sums.are_finite(values))
        return replicas.sum_over_replicas([tf.cast(own, tf.float32)])[0]

"""What measures updates in graphs of TensorFlow, and on replicas."""

from typing import Any, Callable, List, Sequence

import tensorflow as tf

from macrobatch._keras import noise
from macrobatch._keras.noise import Squares
from macrobatch._tensorflow import graph, replicas, sums
from macrobatch._types import Gradient, Logs, Size, Tensor


class Meter:
    """Measures updates of one model or loop. What is known stays on the device.

    Attributes:
        every: how many updates there are for each that is measured.
        decay: what of an average is left when something is measured.
        state: what is known, as in _keras/noise.py.
    """

    def __init__(self, strategy: Any, every: int, decay: float):
        self.every, self.decay = every, decay
        self.state = replicas.variable(
            strategy, [noise.SIZE], tf.float64, "gradient_noise_scale", summed=False
        )

    def start(self, examples: Size) -> "Update":
        """An update that begins, of a batch of so many examples, over all replicas."""
        return Update(self, examples)

    def count(self, examples: Size) -> None:
        """Counts an update that is not measured."""
        before = replicas.read(self.state)
        self.state.assign(noise.counted(before, tf.cast(examples, tf.float64)))

    def updates(self) -> int:
        """How many updates there were. Waits for the device."""
        return int(noise.updates_of(self.state))

    def logs(self) -> Logs:
        """What is logged of the updates so far."""
        return noise.logs_of(replicas.read(self.state))


class Update:
    """One update, which is measured or not. Micro-batches first, then their sum, then `finish`.

    All replicas measure the same updates, so that all of them know the same.
    """

    def __init__(self, meter: Meter, examples: Size):
        self._meter, self._examples = meter, tf.cast(examples, tf.float64)
        self._before = replicas.read(meter.state)
        self._is_measured = tf.equal(tf.math.floormod(self._before[0], meter.every), 0)
        self._norms = tf.zeros([2], tf.float64)

    def of_micro_batch(self, gradients: List[List[Gradient]], examples: Size) -> List[Tensor]:
        """What to sum over micro-batches: weighted squared norms, and the number of micro-batches.

        Args:
            gradients: for one or several losses. What each of them counts may be known only after
                the last micro-batch. So there is a matrix of products.
            examples: the number of examples in the micro-batch.
        """
        if graph.in_xla():  # which cannot merge rows
            gradients = [[sums.dense(each) for each in own] for own in gradients]
        size = tf.cast(examples, tf.float64)
        weight = tf.math.divide_no_nan(self._examples, size)
        products = self._if_measured(
            lambda: weight * sums.products(gradients), [len(gradients)] * 2
        )
        return [products, tf.cast(size > 0, tf.float64)]

    def look(self, gradients: List[Gradient], penalties: Sequence[Gradient] = ()) -> None:
        """Sees the gradient of the whole batch, over all replicas.

        Args:
            gradients: the gradient.
            penalties: what of it comes from weight regularisers.
        """

        def norms() -> Tensor:
            whole = sums.products([gradients])[0, 0]
            if all(penalty is None for penalty in penalties):
                return tf.stack([whole, whole])
            negative = [sums.scaled(penalty, -1.0) for penalty in penalties]
            together = [sums.add(*pair) for pair in zip(gradients, negative)]
            return tf.stack([sums.products([together])[0, 0], whole])

        self._norms = self._if_measured(norms, [2])

    def finish(self, summed: Sequence[Tensor], factors: Sequence[Any], scale: Any = 1.0) -> None:
        """Remembers what was measured.

        Args:
            summed: what `of_micro_batch` gave, summed over this replica's micro-batches.
            factors: how much each of the losses counts.
            scale: the loss scale that is in all gradients.
        """
        products, count = summed
        vector = tf.stack([tf.cast(factor, tf.float64) for factor in factors])
        apart = tf.reduce_sum(vector[:, None] * products * vector)
        (sum_of_all,) = replicas.sum_over_replicas([tf.stack([apart, count])])
        square = tf.cast(scale, tf.float64) ** 2
        found = Squares(
            micro_batches=sum_of_all[1],
            examples=self._examples,
            apart=sum_of_all[0] / square,
            together=self._norms[0] / square,
            whole=self._norms[1] / square,
        )
        state = noise.advanced(self._before, self._is_measured, found, self._meter.decay)
        self._meter.state.assign(state)

    def _if_measured(self, function: Callable[[], Tensor], shape: List[int]) -> Tensor:
        zeros = tf.zeros(shape, tf.float64)
        found = tf.cond(self._is_measured, function, lambda: zeros)
        return tf.ensure_shape(found, shape)

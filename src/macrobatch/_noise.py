"""The gradient noise scale of training: what is measured of an update, and what is kept."""

import math
from typing import Any, Callable, Dict, List, Optional, Sequence

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


class NoiseScale:
    """What a loop of one's own needs of a GradientNoiseScale."""

    def __init__(self, every: int, decay: float):
        self.every, self.decay = _positive_integer(every), _fraction(decay)
        self._meter: Optional[Meter] = None

    def meter(self, strategy: Any = None) -> Meter:
        """What measures, made when it is first needed."""
        if self._meter is None:
            self._meter = Meter(strategy, self.every, self.decay)
        return self._meter

    def restart(self) -> None:
        """Forgets what was measured."""
        self._meter = None

    def result(self) -> Dict[str, float]:
        """The latest `noise_scale` and `gradient_norm`.

        `noise_scale` is nan before anything was measured, and infinity if the gradient is lost in
        its noise. `gradient_norm` is the norm of the gradient of the latest batch that was
        measured, before clipping.
        """
        logs = noise.logs_of(self._state())
        return {name: float(value) for name, value in logs.items()}

    def advice(self) -> str:
        """Whether a larger or a smaller batch would use the data better, in one sentence."""
        return sentence(self.result()["noise_scale"], int(noise.examples_of(self._state())))

    def _state(self) -> Tensor:
        return tf.zeros([noise.SIZE], tf.float64) if self._meter is None else self._meter.state


def sentence(scale: float, batch: int) -> str:
    """What a noise scale says of a batch size.

    A batch of B takes 1 + B / scale times as many examples as the smallest batches, and 1 + scale /
    B times as many updates as the largest, to get equally far: McCandlish et al. 2018, section 2.3.
    """
    if math.isnan(scale):
        return (
            "The gradient noise scale is not known: no batch was cut into several micro-batches "
            "with finite gradients. Pass a micro_batch_size that is smaller than the batch."
        )
    size = f"a batch of {batch}"
    if math.isinf(scale):
        return (
            f"The gradient noise scale is far above {size}, too far to be measured: a larger batch "
            "would use the data as well and take fewer updates."
        )
    start = f"Gradient noise scale {_rounded(scale)}: {size}"
    examples, updates = 1 + batch / max(scale, 1e-9), 1 + scale / batch
    if batch < scale / 2:
        return (
            f"{start} is below it, so a larger batch, up to about {_rounded(scale)}, would use the "
            "data nearly as well and take fewer updates (now about "
            f"{updates:.2g} times the fewest)."
        )
    if batch > scale * 2:
        return (
            f"{start} is above it, so a smaller batch, down to about {_rounded(max(scale, 1))}, "
            "would use the data better and take hardly more updates (now about "
            f"{examples:.2g} times the fewest examples)."
        )
    return (
        f"{start} is close to it: a larger batch would use the data worse, and a smaller one would "
        "take many more updates."
    )


def _rounded(number: float) -> str:
    """Two digits of a large number: it is an estimate."""
    if number < 10:
        return f"{number:.2g}"
    digits = max(0, int(math.log10(number)) - 1)
    return str(round(number / 10**digits) * 10**digits)


def in_any_order(sequence_axis: Optional[int]) -> None:
    """Raises if micro-batches are no random samples of their batch."""
    if sequence_axis is not None:
        raise ValueError(
            "The gradient noise scale is measured from micro-batches of random examples. "
            f"Received: sequence_axis={sequence_axis}, with which a micro-batch has examples of "
            "similar length: what lengths change in the gradient would count as noise. Leave "
            "sequence_axis out for the epochs in which you measure."
        )


def whole_gradient(has_forward: bool, on_replicas: bool) -> None:
    """Raises for a call of value_and_gradients that cannot be measured."""
    if has_forward:
        raise ValueError(
            "The gradient noise scale is that of a loss that is a mean over examples. Received: "
            "noise_scale= and forward=, with which a loss may compare examples with each other. "
            "Leave one of them out."
        )
    if on_replicas:
        raise ValueError(
            "noise_scale= needs the gradient of the whole batch. Received: a call inside "
            "strategy.run, where each replica has a part of it. Use macrobatch.accumulate with "
            "fit(), which measures on replicas, or leave noise_scale= out."
        )


def checked(value: Any) -> NoiseScale:
    """Returns `value`, if it is a GradientNoiseScale."""
    if not isinstance(value, NoiseScale):
        raise ValueError(
            "noise_scale must be a macrobatch.GradientNoiseScale, made once before the loop. "
            f"Received: noise_scale={value!r}."
        )
    return value


def _positive_integer(every: Any) -> int:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            "every must be a positive integer: 10 measures every tenth update. "
            f"Received: every={every!r}."
        )
    return every


def _fraction(decay: Any) -> float:
    if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < 1:
        raise ValueError(
            "decay must be a number from 0 to below 1: what is left of an average when an update "
            f"is measured. Received: decay={decay!r}."
        )
    return float(decay)

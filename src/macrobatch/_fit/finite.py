"""Batches with examples whose loss or gradient is not finite, in graphs and on replicas."""

from typing import Any, Callable, ContextManager, List

import keras
import tensorflow as tf

from macrobatch._fit.guard import Guard
from macrobatch._fit.ran import Ran
from macrobatch._keras.model import ModelStep
from macrobatch._keras.skipping import Run, Skipping
from macrobatch._keras.tried import Tried
from macrobatch._tensorflow import sums
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.examples import Examples
from macrobatch._tensorflow.tap import unchanged
from macrobatch._types import Batch, Logs, Tensor


class Finite(Skipping):
    """Runs batches without the examples that are not finite. An attempt: see _fit/attempts."""

    def __init__(
        self,
        model: Any,
        guard: Guard,
        strategy: Any,
        size: Callable[[], int],
        tried: Callable[[], Tried],
        before_again: Callable[[int], None],
        ran: Ran,
    ):
        super().__init__(model, guard, ENGINE, size, tried, before_again)
        self._strategy, self._ran = strategy, ran

    def __call__(self, run: Run, batch: Batch) -> Logs:
        """As there. However often a batch is run, it counts once."""
        before = self._ran.now()

        def again(batch: Batch) -> Logs:
            self._ran.put_back(before)
            return run(batch)

        return super().__call__(again, batch)

    def examples_of(self, batch: Batch) -> Examples:
        return Examples(batch, self._strategy)

    def micro_batch_of(self, batch: Batch) -> Batch:
        return keras.utils.unpack_x_y_sample_weight(batch)

    def trained(self) -> List[Tensor]:
        return [ENGINE.read(variable.value) for variable in self._model.trainable_weights]

    def not_trained(self) -> List[Tensor]:
        return [ENGINE.read(each.value) for each in self._model.non_trainable_variables]

    def regularizers_are_finite(self) -> bool:
        weights = [variable.value for variable in self._model.trainable_weights]
        with tf.GradientTape() as tape:
            penalty = ModelStep(self._model, True, ENGINE).regularization()
        gradients = tape.gradient(penalty, weights)
        return bool(sums.are_finite([penalty, *gradients]))

    def parts_are_as_large(self) -> bool:
        return bool(self._model.jit_compile)

    def trying(self) -> ContextManager[Any]:
        return unchanged()

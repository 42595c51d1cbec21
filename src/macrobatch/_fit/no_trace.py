"""What TensorFlow offers to work on a user's model that leaves no trace: see _keras.trials."""

import contextlib
from typing import Any, ContextManager, Iterator, List

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras import meeting, trials
from macrobatch._keras.comparison import Groups
from macrobatch._keras.trials import Seen
from macrobatch._keras.tried import Tried
from macrobatch._meeting import verdict_of
from macrobatch._tensorflow import sums
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch, Gradient, Variable


class _Gradients(trials.Gradients):
    """Gradients in variables, so that a graph that was traced before keeps them too."""

    def __init__(self, variables: List[Variable]):
        super().__init__(variables)
        self._kept = {
            id(v): tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables
        }

    def forget(self) -> None:
        for kept in self._kept.values():
            kept.assign(tf.zeros_like(kept))

    def of(self, variable: Variable) -> Any:
        return self._kept[id(variable)].numpy()

    def _keep(
        self, gradients: List[Gradient], variables: List[Variable], seen: Seen, as_they_are: bool
    ) -> List[Gradient]:
        for gradient, variable in zip(gradients, variables):
            seen.append((id(variable), isinstance(gradient, tf.IndexedSlices)))
            if gradient is not None and id(variable) in self._kept:
                kept = self._kept[id(variable)]
                kept.assign(tf.cast(sums.dense(gradient), kept.dtype))
        return gradients if as_they_are else [sums.dense(gradient) for gradient in gradients]


class _Trials(trials.Trials):
    failures = (tf.errors.OpError,)

    def check(self) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(
                "verify compares on one device. Received: a call in the scope of a strategy. Call "
                "it outside of strategy.scope()."
            )

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, tf.errors.ResourceExhaustedError)

    def same_generators(self, model: Any) -> ContextManager[Any]:
        return _internals.same_generators_of_tensorflow()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        logger = tf.get_logger()
        level = logger.level
        logger.setLevel("ERROR")  # TensorFlow counts new functions as traces of an old one
        try:
            yield
        finally:
            logger.setLevel(level)

    def array(self, value: Any) -> Any:
        return tf.identity(value).numpy()  # of a variable of a strategy, too

    def kept(self, value: Any) -> Any:
        return tf.identity(value)  # shares the memory of its variable until that is written

    def gradients(self, variables: List[Variable]) -> trials.Gradients:
        return _Gradients(variables)

    def first_batch(self, data: Any) -> Any:
        found = next(iter(data.get_tf_dataset()), None)
        return found if found is None else keras.utils.unpack_x_y_sample_weight(found)

    def data_of(self, batch: Batch) -> Any:
        return tf.data.Dataset.from_tensors(keras.utils.pack_x_y_sample_weight(*batch))

    def verdict(self, tried: Tried, groups: Groups, is_coarse: bool) -> meeting.Verdict:
        return verdict_of(tried, groups, is_coarse)


TRIALS = _Trials(ENGINE)

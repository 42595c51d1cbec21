"""One size of micro-batches, tried: the train function that `fit` would have, on one batch."""

import time
from typing import Any, Dict, List, NamedTuple, Optional

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._accumulate import accumulate
from macrobatch._keras import installed
from macrobatch._no_trace.twin import twin
from macrobatch._types import Batch

LONG = 2.0  # seconds of an update


class Unit(NamedTuple):
    """In what a size is given to `accumulate`.

    Attributes:
        name: the argument.
        of_example: what the longest example counts.
    """

    name: str
    of_example: int


EXAMPLES = Unit("micro_batch_size", 1)


class Trial:
    """Updates of a model in micro-batches of a size, or of the plain model.

    Attributes:
        size: examples in a micro-batch; None for the plain model.
        seconds: of each update but the first, which traces.
    """

    def __init__(
        self,
        model: Any,
        batch: Batch,
        examples: int,
        size: Optional[int],
        settings: Dict[str, Any],
        unit: Unit = EXAMPLES,
    ):
        """Prepares a trial.

        Args:
            model: a compiled model, whose optimizer is built. Its variables are trained; all else
                of it stays as it is.
            batch: x, y and sample_weight.
            examples: in the batch.
            size: examples in a micro-batch; None for plain updates.
            settings: further arguments of `accumulate`.
            unit: in which `accumulate` is told the size.
        """
        self.size = size
        self.seconds: List[float] = []
        self._model, _ = twin(model, as_it_trains=True)
        if size is not None:
            given: Dict[str, Any] = {unit.name: size * unit.of_example, **settings}
            accumulate(self._model, **given)
        x, y, sample_weight = batch
        data = _internals.data_of_fit(x, y=y, sample_weight=sample_weight, batch_size=examples)
        self._data = data.get_tf_dataset().repeat()
        self._iterator: Any = None

    def start(self) -> None:
        """The first update, by `fit` itself, and one or two more that are timed."""
        installed.fit(self._model, self._data, steps_per_epoch=1, shuffle=False, verbose=0)
        self._iterator = iter(self._data)
        self.update()
        if self.seconds[0] < LONG:
            self.update()

    def update(self) -> None:
        """One more update, timed, with the function that `fit` has made."""
        start = time.perf_counter()
        logs = self._model.train_function(self._iterator)
        keras.tree.map_structure(lambda each: tf.convert_to_tensor(each).numpy(), logs)
        self.seconds.append(time.perf_counter() - start)


def sizes_to_try(examples: int) -> List[int]:
    """1, 2, 4, ... and the whole batch."""
    return [2**power for power in range((examples - 1).bit_length())] + [examples]


def sizes_between(size: int, other: int) -> List[int]:
    """Sizes between two, in quarters of the smaller one."""
    return [s for s in (size * quarters // 4 for quarters in (5, 6, 7)) if size < s < other]

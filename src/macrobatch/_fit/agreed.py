"""One size for all workers. A worker that runs out of memory in a step would leave the others
waiting for it, so each size is rehearsed before, on each worker by itself.
"""

from typing import Any, Callable, Set, Tuple

import tensorflow as tf

from macrobatch._sizes import checks
from macrobatch._sizes.search import Search
from macrobatch._tensorflow.size_checks import exhausted
from macrobatch._types import Batch
from macrobatch._workers.agreement import Agreement


class Agreed:
    """The size on which workers agree before each batch."""

    def __init__(self, strategy: Any, fits_here: Callable[[int, Batch], bool], unit: str):
        """Prepares agreements.

        Args:
            strategy: of the workers.
            fits_here: a function of a size and a batch: whether it fits on this worker. Workers do
                not wait for each other in it.
            unit: what the size is called.
        """
        self._agreement, self._fits_here, self._unit = Agreement(strategy), fits_here, unit
        self._latest = 0
        self._fitted: Set[Tuple[int, str]] = set()

    def __call__(self, search: Search, size: int, batch: Batch) -> int:
        """The size for a batch: that of the first worker, or what fits on all of them.

        Args:
            search: of this worker.
            size: what it says.
            batch: this worker's part.
        """
        shapes = repr(tf.nest.map_structure(tf.type_spec_from_value, batch))
        while True:
            is_new = (self._latest, shapes) not in self._fitted
            of_all = self._agreement(size, search.largest(), int(is_new))
            agreed = search.next_is(min(of_all[0][0], *(largest for _, largest, _ in of_all)))
            if agreed == self._latest and not any(is_new for *_, is_new in of_all):
                return agreed
            fits = (agreed, shapes) in self._fitted or self._fits_here(agreed, batch)
            if all(fit for (fit,) in self._agreement(int(fits))):
                self._latest = agreed
                self._fitted.add((agreed, shapes))
                return agreed
            if not search.ran_out():
                raise exhausted(checks.ran_out_at_one(self._unit, "on one of the workers"))
            size = search.next()

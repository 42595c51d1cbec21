"""Variables that XLA must not write over while it is not known whether a step fits in memory.

A compiled step is given the memory of the variables that it updates. If it runs out of memory, that
memory is freed, and the variables have no values any more: neither weights nor counters. XLA does
not take memory that somebody else refers to. So the first run of each size, with batches of each
shape, has a reference to each value. After an error, all values are there. Later runs have none,
and take no time and no memory for it.
"""

import contextlib
from typing import Any, Callable, Hashable, Iterator, List, Set

import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras import written
from macrobatch._keras.scope import unique
from macrobatch._tensorflow import replicas
from macrobatch._types import Batch, Logs


class Held:
    """The variables of one model, and which steps have fitted.

    Attributes:
        is_on: whether the latest run had references, so that nothing is lost after an error.
    """

    def __init__(self, model: Any, strategy: Any, own: Callable[[], List[Any]]):
        """Prepares references.

        Args:
            model: the model.
            strategy: in whose scope it was made, or None.
            own: gives variables that are no part of it, but are written by its steps.
        """
        self._model, self._strategy, self._own = model, strategy, own
        self._fitted: Set[Hashable] = set()
        self.is_on = False

    def forget(self) -> None:
        """Forgets which steps have fitted: the model may have been compiled anew."""
        self._fitted.clear()

    def run(self, kind: Hashable, run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a batch. If it is the first of its kind that fits, nothing is lost after an error.

        Args:
            kind: what decides how much memory the step takes, beside the shapes of the batch.
            run: runs it.
            batch: the batch.
        """
        leaves = tf.nest.flatten(batch, expand_composites=True)
        kind = kind, *(None if leaf is None else tuple(leaf.shape) for leaf in leaves)
        self.is_on = kind not in self._fitted
        if not self.is_on:
            return run(batch)
        with self._values():
            logs = run(batch)
            tf.nest.map_structure(lambda value: tf.identity(value).numpy(), logs)  # waits for it
        self._fitted.add(kind)
        return logs

    @contextlib.contextmanager
    def _values(self) -> Iterator[None]:
        """A context that refers to all values, and puts them back after an error."""
        kept = [(part, part.read_value()) for part in self._parts()]
        try:
            yield
        except Exception:
            for part, value in kept:
                part.assign(value)
            raise
        finally:
            kept.clear()  # Whoever has the error has this frame, too.

    def _parts(self) -> List[Any]:
        """All variables, as they are on each replica of this machine."""
        found = [_internals.raw_value(each) for each in unique(written.variables_of(self._model))]
        found += self._own()
        return [part for each in found for part in replicas.parts(self._strategy, each)]

"""Sizes that are found while training, on TensorFlow: how steps run with them, are rehearsed, and
what workers agree on. The search for them is in _sizes.
"""

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from macrobatch._fit.agreed import Agreed
from macrobatch._fit.attempts import Attempt
from macrobatch._fit.held import Held
from macrobatch._fit.rehearsal import Rehearsal
from macrobatch._fit.steps import Steps
from macrobatch._keras.size_key import key_of
from macrobatch._keras.size_logged import SizeLogged
from macrobatch._sizes import checks, watch
from macrobatch._sizes import limit as limits
from macrobatch._sizes.finder import Engine, Finder
from macrobatch._sizes.search import Search
from macrobatch._tensorflow import device_memory, replicas, size_checks
from macrobatch._tensorflow.chosen import ChosenSize
from macrobatch._tensorflow.extents import Batches
from macrobatch._types import Batch, Logs

# What a worker keeps free when it rehearses a size: the train step is traced later, and the step
# itself must not run out, because other workers would wait for it.
RESERVE = 2**26  # bytes


class Auto(Engine):
    """The sizes of one model, in training and in testing.

    Attributes:
        compiles: whether functions are compiled for one size each.
    """

    def __init__(self, steps: Steps, memory_limit: Any):
        chosen = steps.cut.chosen
        assert isinstance(chosen, ChosenSize)
        self._steps, self._chosen = steps, chosen
        self._finder = Finder(self, chosen.in_tokens, memory_limit)
        self._begun = 0
        self.compiles = False
        self._rehearsal = Rehearsal(steps)
        self._agreed: Optional[Agreed] = None
        if replicas.has_several_workers(steps.strategy):
            self._agreed = Agreed(steps.strategy, self._fits_here, self._finder.unit)
        self._held = Held(steps.model, steps.strategy, self._own_variables)
        self._batches = Batches(steps.strategy, steps.cut.axis, chosen.in_tokens)

    def forget(self) -> None:
        """Looks again: the model may have been compiled anew."""
        self._finder.forget()
        self._held.forget()
        self._rehearsal = Rehearsal(self._steps)

    @property
    def has_size(self) -> bool:
        """Whether any batch has been trained with."""
        return self._finder.size is not None

    @property
    def is_settled(self) -> bool:
        """Whether a size for training has been found."""
        return self._finder.is_settled

    def logged(self) -> SizeLogged:
        """A callback that logs the size of each epoch."""
        return SizeLogged(self._finder.unit, lambda: self._finder.size)

    def attempt(self, training: bool) -> Attempt:
        """A function that runs batches, each as often as it takes."""

        def attempt(run: Callable[[Batch], Logs], batch: Batch) -> Logs:
            def held(batch: Batch) -> Logs:
                kind = training, self._chosen.current, self._steps.noise.measures
                return self._held.run(kind, run, batch)

            found: Logs = self._finder.attempt(training, held if self._holds() else run, batch)
            return found

        return attempt

    def _holds(self) -> bool:
        """Whether a step that runs out of memory would take variables with it. See _fit/held."""
        if not self._steps.model.jit_compile or self._agreed is not None:
            return False
        return limits.running_out_is_an_error(bool(device_memory.gpus()))

    def _own_variables(self) -> List[Any]:
        steps = self._steps
        counts = [steps.begun, steps.first_batch, steps.ran.variable]
        found = [*counts, *steps.padding.done, *steps.noise.variables()]
        return [variable for variable in found if variable is not None]

    def once(self, run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a batch that may write at any time, and so cannot be run again."""
        return run(batch)

    def variant(self) -> Optional[int]:
        """What a graph is made for, beside its batches."""
        return self._chosen.current if self.compiles else None

    # What the search is told

    @property
    def host_raises(self) -> bool:  # type: ignore[override]
        # What XLA takes beside its buffers may not fit either, and that ends the process
        # (std::bad_alloc, seen with ulimit -v).
        return not self._steps.model.jit_compile

    def device(self) -> watch.DeviceMemory:
        return device_memory

    def is_out_of_memory(self, error: Exception) -> bool:
        return size_checks.is_out_of_memory(error)

    def exhausted(self, message: str) -> Exception:
        return size_checks.exhausted(message)

    def compiles_each_size(self) -> bool:
        return self.compiles

    def set(self, size: int) -> None:
        self._chosen.set(size)

    def measured(self, batch: Batch) -> Tuple[int, float]:
        return self._batches.measured(batch)

    def rehearse(self, batch: Batch, size: int) -> Callable[[], Any]:
        return functools.partial(self._rehearsal, self._batches.rows(batch, size))

    def of_update(self) -> int:
        return self._rehearsal.of_update()

    def wait(self, result: Any) -> None:
        tf.nest.map_structure(np.asarray, result)

    def key(self, batch: Batch, whole: int, memory: Optional[int]) -> Dict[str, Any]:
        steps = self._steps
        how = {
            "unit": self._finder.unit,
            "kind": type(steps).__name__ + steps.own_code,
            "axis": steps.cut.axis,
            "compiled": steps.model.jit_compile,
            "eager": steps.model.run_eagerly,
            "replicas": 1 if self._strategy is None else self._strategy.num_replicas_in_sync,
        }
        part, devices = self._batches.parts(batch)[0], device_memory.names()
        return key_of(steps.model, part, whole, how, memory, devices, tf.__version__)

    def can_rehearse(self) -> bool:
        return bool(self._steps.can_rehearse)

    def shows_size(self) -> bool:
        return bool(self._steps.shows_size or self._steps.meets)

    def has_begun(self) -> bool:
        if self._holds():  # Otherwise the counter may be gone as well.
            return not self._held.is_on
        begun = [int(part.read_value()) for part in replicas.parts(self._strategy, self._variable)]
        before, self._begun = self._begun, max(begun)
        return max(begun) > before

    def why_not_again(self, message: str) -> str:
        return checks.ran_out_in_xla(message) if self._holds() else super().why_not_again(message)

    def ran(self) -> None:
        self._begun += 1

    def is_typical(self) -> bool:
        # Otherwise it looks at parts of a batch, for numbers that are not finite.
        return not self._steps.guard.looks

    def agreed(self, search: Search, size: int, batch: Batch) -> int:
        return size if self._agreed is None else self._agreed(search, size, batch)

    def check_workers(self, message: str) -> None:
        if self._agreed is not None:
            raise self.exhausted(checks.only_here(message))

    def _fits_here(self, size: int, batch: Batch) -> bool:
        """Whether a rehearsal of a size fits in the memory of this worker, and a little more."""
        size += 1 + size // 8
        self._chosen.set(size)
        try:
            reserve = tf.zeros([RESERVE + self._rehearsal.of_update()], tf.int8)
            self._rehearsal(self._batches.rows(batch, size))
            del reserve
        except (tf.errors.OpError, MemoryError) as error:
            if not self.is_out_of_memory(error):
                raise
            return False
        return True

    @property
    def _strategy(self) -> Any:
        return self._steps.strategy

    @property
    def _variable(self) -> Any:
        return self._steps.begun

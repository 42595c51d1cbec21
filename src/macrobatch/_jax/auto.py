"""Sizes that are found while training, on JAX: each size is a constant of a compiled step."""

from typing import Any, Callable, Dict, Optional

import jax
from keras import tree

from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._found_sizes import Backend, FoundSizes
from macrobatch._jax import device_memory, devices
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.steps import Steps, batch_of
from macrobatch._sizes import watch
from macrobatch._types import Batch

# A function of the state and the data of a step.
Function = Callable[[Any, Any], Any]


class Auto(FoundSizes):
    """The sizes of one model.

    Attributes:
        found: what a step comes to before its update, of a state and data; compiled if steps are.
        is_writing: whether an update has begun, which takes the memory of the weights.
    """

    # Buffers that do not fit are an error. But what XLA's threads take beside them may not fit
    # either, and that ends the process (std::bad_alloc, seen with ulimit -v).
    host_raises = False

    def __init__(self, steps: Steps, memory_limit: Any):
        found = devices.distribution()
        count = 1 if found is None else int(found.device_mesh.devices.size)
        super().__init__(
            steps, memory_limit, Backend(jax.__version__, device_memory.names(), count)
        )
        self.is_writing = False
        self._state: Any = None
        self.found: Function = steps.found

    def forget(self) -> None:
        """Looks again: the model may have been compiled anew."""
        self.finder.forget()
        self.found = self._steps.found

    def attempting(self, training: bool, step: Function) -> Function:
        """A step that runs as often as it takes."""

        def attempting(state: Any, data: Any) -> Any:
            self._state = state
            try:
                return self.finder.attempt(training, lambda data: step(state, data), data)
            finally:
                self._state = None

        return attempting

    def device(self) -> watch.DeviceMemory:
        return device_memory

    def is_out_of_memory(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    def exhausted(self, message: str) -> Exception:
        return jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {message}")

    def set(self, size: int) -> None:
        super().set(size)
        self.is_writing = False

    def has_begun(self) -> bool:
        return self.is_writing

    def compiles(self) -> bool:
        model = self._steps.model
        return bool(model.jit_compile) and not model.run_eagerly

    def rehearse(self, batch: Batch, size: int) -> Callable[[], Any]:
        whole, _ = in_order.checked(batch_of(batch), ENGINE)
        rows = jax.numpy.asarray(self.rows_of(batch, size))
        few = tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], whole)

        def work() -> None:
            jax.block_until_ready(self.found(self._state, few))

        if self.compiles():
            work()  # which compiles: that takes memory too, but only once
        return work

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)


def compiled_by_size(function: Function, cut: Cut) -> Function:
    """A function that is compiled once for each size of micro-batches."""
    compiled: Dict[Optional[Any], Function] = {}

    def call(state: Any, data: Any) -> Any:
        size = None if cut.chosen is None else cut.chosen.now()
        if size not in compiled:
            # JAX would take a function that it has compiled before for this one.
            compiled[size] = jax.jit(lambda state, data: function(state, data))
        return compiled[size](state, data)

    return call


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there was not enough memory, on a device or on the host."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)

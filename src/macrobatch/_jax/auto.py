"""Sizes that are found while training, on JAX: each size is a constant of a compiled step."""

from typing import Any, Callable

import jax
from keras import tree

from macrobatch._batches import in_order
from macrobatch._found_sizes import Backend, FoundSizes
from macrobatch._jax import device_memory, devices
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.halves import Found, Halves
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
        backend = Backend(jax.__version__, device_memory.names(), devices.count())
        super().__init__(steps, memory_limit, backend)
        self.is_writing = False
        self._state: Any = None
        self.found: Function = steps.found

    def forget(self, found: Function) -> None:
        """Looks again: the model may have been compiled anew."""
        self.finder.forget()
        self.found = found

    def __call__(self, state: Any, function: Callable[[Batch], Any], batch: Batch) -> Any:
        """Runs a function of a batch that makes an update, as often as it takes."""
        self._state = state
        try:
            return self.finder.attempt(True, function, batch)
        finally:
            self._state = None

    def testing(self, step: Function) -> Function:
        """A test step that runs as often as it takes."""

        def testing(state: Any, data: Any) -> Any:
            return self.finder.attempt(False, lambda data: step(state, data), data)

        return testing

    def writing(self, halves: Halves) -> Halves:
        """Halves of a train step that tell when an update begins."""

        def updated(trained: Any, of_optimizer: Any, found: Found) -> Any:
            self.is_writing = True
            return halves.updated(trained, of_optimizer, found)

        return Halves(halves.found, updated)

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory, on a device or on the host."""
    if isinstance(error, MemoryError):
        return True
    # The class says nothing more. Some texts start with the name of the status, others do not.
    texts = ("RESOURCE_EXHAUSTED", "Out of memory allocating")
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    return is_of_jax and any(text in str(error) for text in texts)

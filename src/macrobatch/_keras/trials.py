"""What a backend offers to work on a user's model that leaves no trace: `verify`, for one.

The methods here are right for backends that run at once.
"""

import contextlib
from typing import Any, ContextManager, Dict, Iterator, List, Tuple

import keras
from keras import ops, tree

from macrobatch._engine import BatchEngine
from macrobatch._keras import meeting
from macrobatch._keras.comparison import Groups
from macrobatch._keras.tried import Tried
from macrobatch._types import Batch, Gradient, Variable

# Of each gradient that an optimizer gets: the id of its variable, and whether it came as rows.
Seen = List[Tuple[int, bool]]


class Gradients:
    """The gradients that an optimizer gets, kept."""

    def __init__(self, variables: List[Variable]):
        self._variables = list(variables)
        self._kept: Dict[int, Any] = {}

    def forget(self) -> None:
        """Lets all gradients be zero."""
        self._kept = {}

    def of(self, variable: Variable) -> Any:
        """The gradient of a variable, as an array; zeros if it got none."""
        kept = self._kept.get(id(variable))
        value = ops.zeros(variable.shape, variable.dtype) if kept is None else kept
        return ops.convert_to_numpy(value)

    @contextlib.contextmanager
    def recorded(self, optimizer: Any, seen: Seen, as_they_are: bool) -> Iterator[None]:
        """A context in which the gradients that an optimizer gets are kept.

        Args:
            optimizer: the optimizer.
            seen: gets to know what was kept.
            as_they_are: whether the optimizer gets rows of tables as they come. Otherwise it gets
                their sum.
        """
        plain = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            grads = list(grads)
            variables = self._variables if trainable_variables is None else trainable_variables
            return plain(self._keep(grads, list(variables), seen, as_they_are), variables)

        optimizer.apply = apply
        try:
            yield
        finally:
            del optimizer.apply

    def _keep(
        self, gradients: List[Gradient], variables: List[Variable], seen: Seen, as_they_are: bool
    ) -> List[Gradient]:
        """What the optimizer gets of these gradients, once they are kept."""
        for gradient, variable in zip(gradients, variables):
            seen.append((id(variable), False))
            self._kept[id(variable)] = gradient
        return gradients


class Trials:
    """What a backend offers."""

    # What it raises besides errors of Python.
    failures: Tuple[Any, ...] = ()
    # Whether its steps are compiled as the user's are. Otherwise they run as without jit_compile.
    compiles = False

    def __init__(self, engine: BatchEngine):
        self.engine = engine

    def check(self) -> None:
        """Raises where updates cannot be compared."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that there was not enough memory."""
        return isinstance(error, MemoryError)

    def same_generators(self, model: Any) -> ContextManager[Any]:
        """A context after which what the backend draws from, and keeps of a model, is as before."""
        return contextlib.nullcontext()

    def in_float64(self) -> ContextManager[Any]:
        """A context in which float64 is float64. Some backends make float32 of it."""
        return contextlib.nullcontext()

    def can_draw_float64(self) -> bool:
        """Whether random numbers can be drawn in float64 here."""
        return True

    def afresh(self, model: Any) -> ContextManager[Any]:
        """A context in which the plain step of a model is compiled anew, if it is compiled."""
        return contextlib.nullcontext()

    def quiet(self) -> ContextManager[Any]:
        """A context in which the backend says nothing of how often it runs."""
        return contextlib.nullcontext()

    def looking(self) -> ContextManager[Any]:
        """A context for forward passes, of which no gradient is taken."""
        return contextlib.nullcontext()

    def array(self, value: Any) -> Any:
        """What a variable holds, as an array."""
        return ops.convert_to_numpy(value)

    def kept(self, value: Any) -> Any:
        """What a variable holds, which stays as it is when the variable is written."""
        return self.array(value)

    def gradients(self, variables: List[Variable]) -> Gradients:
        """What keeps the gradients of variables."""
        return Gradients(variables)

    def first_batch(self, data: Any) -> Any:
        """The first batch of what Keras has made of data, as tensors; None if there is none."""
        found = next(iter(data.get_numpy_iterator()), None)
        return found if found is None else self.batch_of(found)

    def batch_of(self, data: Any) -> Batch:
        """x, y and sample_weight, as tensors."""
        batch = keras.utils.unpack_x_y_sample_weight(data)
        return tree.map_structure(
            lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), batch
        )

    def data_of(self, batch: Batch) -> Any:
        """One batch, as `fit` takes it."""

        def once() -> Iterator[Any]:
            arrays = tree.map_structure(
                lambda leaf: None if leaf is None else ops.convert_to_numpy(leaf), batch
            )
            yield keras.utils.pack_x_y_sample_weight(*arrays)

        return once()

    def verdict(self, tried: Tried, groups: Groups, is_coarse: bool) -> meeting.Verdict:
        """What a trial whether examples meet shows."""
        return meeting.find(tried, groups, self.engine, is_coarse)

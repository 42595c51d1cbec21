"""What layers give to `add_loss`, and what it is of a batch: values of examples, a mean, a sum."""

from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import keras
from keras import ops

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._keras import batch_norm
from macrobatch._keras.probes import activity_losses_are_means
from macrobatch._keras.scope import Written
from macrobatch._types import Batch, Size, Tensor


class Added(NamedTuple):
    """A value that a layer has given to `add_loss`, in a micro-batch.

    Attributes:
        layer: whose it is.
        value: the value.
        kind: "values", one for each example; "mean" or "sum", over the examples; or "scalar": one
            for the micro-batch, which counts as a mean and is exact only if it is one.
    """

    layer: Any
    value: Tensor
    kind: str


class AddedLosses:
    """What the layers of a model give to `add_loss`. Which values grow with a batch is tried once.

    Args of __init__:
        layers: a function that gives the layers of the model.
        forward: the forward pass of the model, of a micro-batch.
        written: the variables that it writes.
        engine: the backend.
    """

    def __init__(
        self,
        layers: Callable[[], List[Any]],
        forward: Callable[[Batch], Any],
        written: Written,
        engine: Engine,
    ):
        self._layers, self._forward, self._written, self._engine = layers, forward, written, engine
        self._growing: Optional[List[bool]] = None

    def of(self, micro_batch: Batch, examples: Size) -> List[Added]:
        """What was given in this scope, in which the forward pass of a micro-batch has run."""
        pairs = added_losses(self._layers())
        return [
            Added(layer, value, self._kind(layer, value, index, micro_batch, examples))
            for index, (layer, value) in enumerate(pairs)
        ]

    def _kind(
        self, layer: Any, value: Tensor, index: int, micro_batch: Batch, examples: Size
    ) -> str:
        if layer.activity_regularizer is not None:
            return "mean" if activity_losses_are_means() else "sum"
        if len(value.shape) == 0:
            return "scalar"
        if value.shape[0] is None:
            return "values"
        # As many values as there are examples may be chance: features, for one. A size that is
        # known although the number of examples is not, is not that number.
        is_equal = isinstance(examples, int) and value.shape[0] == examples
        return "values" if is_equal and self._grows(micro_batch)[index] else "scalar"

    def _grows(self, micro_batch: Batch) -> List[bool]:
        """Which values have more elements for more examples."""
        if self._growing is None:

            def sizes(micro_batch: Batch) -> List[Any]:
                scope = self._written.scope(self._written.values())
                with scope, batch_norm.recorded(alone=True):
                    self._forward(micro_batch)
                    return _sizes(self._layers())

            here = _sizes(self._layers())
            other = self._engine.with_other_size(sizes, micro_batch)
            self._growing = [one != two for one, two in zip(here, other)]
        return self._growing


def _sizes(layers: List[Any]) -> List[Optional[int]]:
    return [value.shape[0] if len(value.shape) else None for _, value in added_losses(layers)]


def added_losses(layers: List[Any]) -> List[Tuple[Any, Tensor]]:
    """The values that layers have given to `add_loss` in this scope, and whose they are."""
    pairs = [(layer, value) for layer in layers for value in _internals.own_losses(layer)]
    values = [ops.convert_to_tensor(value) for _, value in pairs]
    floats = [
        v if keras.backend.is_float_dtype(v.dtype) else ops.cast(v, keras.config.floatx())
        for v in values
    ]
    return [(layer, value) for (layer, _), value in zip(pairs, floats)]

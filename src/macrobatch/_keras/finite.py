"""Where numbers stop being finite: in which layer of a model, in its loss, or in the gradient."""

from typing import Any, List, Sequence

import keras
from keras import ops, tree

from macrobatch._engine import BatchEngine
from macrobatch._keras import calls
from macrobatch._keras.tried import LOSS, Tried
from macrobatch._types import Batch, Gradient, Tensor


def first_place(tried: Tried, micro_batch: Batch, engine: BatchEngine) -> str:
    """What of a micro-batch is not finite first: a name in quotes, "loss" or "gradient".

    Args:
        tried: the model.
        micro_batch: x, y and sample_weight.
        engine: the backend.
    """
    with calls.watched({}, engine) as made:
        found = tried.found(micro_batch)
    for call in made:
        if not are_finite(call.outputs):
            return repr(call.name)
    losses = [value for name, value in found.items() if name.startswith(LOSS)]
    return "gradient" if losses and are_finite(losses) else "loss"


def not_finite_parts(micro_batch: Batch) -> List[str]:
    """Which parts of a micro-batch are not finite from the start: x, y, sample_weight."""
    names = ("x", "y", "sample_weight")
    return [name for name, part in zip(names, micro_batch) if not are_finite(tree.flatten(part))]


def all_finite(values: Sequence[Gradient]) -> Tensor:
    """Whether all numbers are finite, as a tensor. There must be a value."""
    flags = [ops.all(ops.isfinite(value)) for value in values if value is not None]
    return ops.all(ops.stack(flags))


def are_finite(values: List[Any]) -> bool:
    """Whether all numbers are finite. What is no tensor of floats has none that are not."""
    floats = [v for v in values if keras.backend.is_float_dtype(_dtype_of(v))]
    return all(bool(ops.all(ops.isfinite(value))) for value in floats)


def _dtype_of(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return "bool" if dtype is None else str(keras.backend.standardize_dtype(dtype))

"""Sequences that are cut: in metrics each example weighs as if nothing had been cut off; and how
precisely a model computes, for comparing it with and without padding.
"""

import contextlib
from typing import Any, Callable, ContextManager, List, Optional, Sequence

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._keras import checks
from macrobatch._types import Tensor


def over_whole_sequences(
    uncut_fraction: Optional[Callable[..., Any]],
) -> ContextManager[None]:
    """Lets metrics weigh each example as if its sequences had not been cut.

    Keras takes the mean over the positions of each example, and of their weights. So examples of a
    shorter micro-batch would count more than others.
    """
    if uncut_fraction is None:
        return contextlib.nullcontext()
    fraction_of = uncut_fraction

    def reduce_whole(
        reduce: Any, values: Tensor, sample_weight: Any, reduce_fn: Any, dtype: Any
    ) -> Any:
        if reduce_fn is not ops.mean:
            return reduce(values, sample_weight, reduce_fn, dtype)
        positions = _internals.mask_of(values) if sample_weight is None else sample_weight
        part = 1.0 if positions is None else fraction_of(ops.cast(positions, dtype))
        if not isinstance(part, float):
            values, weights = reduce(values, sample_weight, reduce_fn, dtype)
            return values * part, weights * part
        fraction = fraction_of(ops.cast(values, dtype), doubtful=True)
        checks.metric_has_weights(isinstance(fraction, float))
        return reduce(values, sample_weight, reduce_fn, dtype)

    return _internals.with_samplewise_values(reduce_whole)


def low_precision(layers: List[Any]) -> bool:
    """Whether some of these layers compute with less than 32 bits."""
    dtypes = {getattr(layer, "compute_dtype", None) for layer in layers}
    dtypes.add(keras.config.dtype_policy().compute_dtype)
    return not dtypes.isdisjoint({"float16", "bfloat16"})


def fixed_parts(declared: Sequence[Any], nest: Any, axis: int) -> List[Tensor]:
    """What of a nest has a size along an axis that the model declares: no sequences, then."""
    names = [tensor.name for tensor in declared]
    leaves = tree.flatten(nest)
    if isinstance(nest, dict) and set(names) <= set(nest):
        leaves = [nest[name] for name in names]
    if len(leaves) != len(declared):
        return []
    return [
        leaf
        for tensor, leaf in zip(declared, leaves)
        if leaf is not None and len(tensor.shape) > axis and tensor.shape[axis] is not None
    ]

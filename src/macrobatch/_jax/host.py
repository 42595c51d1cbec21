"""Batches on the host, as arrays of NumPy. There, shapes may depend on data."""

from typing import Any, ContextManager, List, Sequence, Tuple

import jax
import keras
import numpy as np
from keras import tree

from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, Size, Tensor


class Host(BatchEngine):
    """Arrays of NumPy, and numbers that are known."""

    def on_host(self) -> ContextManager[Any]:
        return jax.default_device(jax.devices("cpu")[0])

    def agreed_size(
        self, batch: Batch, sizes: List[Size], least: int, uneven: str, empty: str
    ) -> Tuple[Batch, Size]:
        return batch, sizes[0]  # All sizes are known, so they have been compared.

    def in_order(self, leaf: Tensor, order: Tensor) -> Tensor:
        return leaf

    def taken(self, leaf: Tensor, order: Tensor, start: Size, end: Size) -> Tensor:
        return leaf[np.asarray(order[int(start) : int(end)])]

    def rearranged(self, leaf: Tensor, axis: int, places: Tensor) -> Tensor:
        shape = [size if i in (0, axis) else 1 for i, size in enumerate(leaf.shape)]
        return np.take_along_axis(leaf, np.asarray(places).reshape(shape), axis)

    def shortened(self, leaf: Tensor, axis: int, length: Size, exactly: bool) -> Tensor:
        return leaf[(slice(None),) * axis + (slice(int(length)),)]

    def lengths_of(self, leaf: Tensor, axis: int) -> Tensor:
        others = tuple(set(range(1, leaf.ndim)) - {axis})
        there = (leaf != 0).any(others)
        positions = np.arange(1, there.shape[1] + 1, dtype="int32")
        return np.where(there, positions, 0).max(1, initial=0).astype("int32")

    def spec(self, leaf: Tensor, shape: Sequence[Any]) -> Any:
        # Not 2: two examples of half the length have as many elements as one of all of it.
        sizes = tuple(3 if size is None else size for size in shape)
        return jax.ShapeDtypeStruct(sizes, leaf.dtype)


HOST = Host()


def batch_of(data: Any) -> Batch:
    """x, y and sample_weight, as arrays of NumPy in the dtypes that JAX computes in."""

    def array(leaf: Any) -> Any:
        if leaf is None:
            return None
        found = np.asarray(leaf)
        return found.astype(jax.dtypes.canonicalize_dtype(found.dtype), copy=False)

    return tree.map_structure(array, keras.utils.unpack_x_y_sample_weight(data))

"""Calls of layers, and of operations in functional models, as they are made: what went into each,
what came out, and what comes out instead.
"""

import contextlib
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._engine import BatchEngine
from macrobatch._types import Tensor

# For calls by the order in which they start: for each of several runs, what comes out instead.
Outputs = Dict[int, List[List[Tensor]]]


class Call(NamedTuple):
    """A call.

    Attributes:
        name: of the layer or operation.
        start: how many calls had been started before.
        inputs: the numbers that went in, on the host: a device may have no room for them all.
        outputs: those that came out.
        is_dense: whether all outputs are dense tensors.
    """

    name: str
    start: int
    inputs: List[Any]
    outputs: List[Any]
    is_dense: bool


@contextlib.contextmanager
def watched(instead: Dict[int, List[Tensor]], engine: BatchEngine) -> Iterator[List[Call]]:
    """Records the calls that this thread makes, in the order in which they end.

    A layer may trace what it calls: a loop over positions, for one. Calls in there have no numbers,
    and are left out. That of the layer has all.

    Args:
        instead: by the place of a call in the order in which they start, what comes out of it.
        engine: the backend.
    """
    found: List[Call] = []
    started = [0]

    def watching(call: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        start = started[0]
        started[0] += 1
        outputs = call(operation, *args, **kwargs)
        if start in instead:
            outputs = _replaced(outputs, instead[start])
        given, made = _numbers((args, kwargs)), _numbers(outputs)
        if any(engine.is_traced(leaf) for leaf in (*given, *made)):
            return outputs
        is_dense = all(engine.kind_of(leaf) == "dense" for leaf in made)
        inputs, of_host = ([on_host(leaf) for leaf in leaves] for leaves in (given, made))
        found.append(Call(operation.name, start, inputs, of_host, is_dense))
        return outputs

    with _internals.with_calls(watching):
        yield found


def on_host(tensor: Tensor) -> Any:
    """A tensor of numbers as an array."""
    if keras.backend.standardize_dtype(tensor.dtype) == "bfloat16":  # which NumPy does not know
        tensor = ops.cast(tensor, "float32")
    return ops.convert_to_numpy(tensor)


def _numbers(nest: Any) -> List[Tensor]:
    return [leaf for leaf in tree.flatten(nest) if _is_numeric(leaf)]


def _is_numeric(leaf: Any) -> bool:
    return ops.is_tensor(leaf) and keras.backend.standardize_dtype(leaf.dtype) != "string"


def _replaced(nest: Any, tensors: Sequence[Tensor]) -> Any:
    """A nest with other tensors in place of its own."""
    remaining = iter(tensors)
    return tree.map_structure(
        lambda leaf: ops.cast(next(remaining), leaf.dtype) if _is_numeric(leaf) else leaf, nest
    )

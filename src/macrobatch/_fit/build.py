"""Everything that a model lacks is made before its first step is traced. Keras makes it while it
traces, and then has to trace once more.
"""

import contextlib
from typing import Any, List, Optional

import keras
import tensorflow as tf
from keras import tree

from macrobatch import _internals
from macrobatch._keras.scope import Scope
from macrobatch._tensorflow import graph
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch, Whole


def from_types(model: Any, batch: Batch, axis: Optional[int] = None) -> None:
    """Builds a model, its losses and its metrics, if types and shapes are enough for it.

    Args:
        model: the model.
        batch: a batch, or its types and shapes.
        axis: the axis of sequences, whose length is left open.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    symbolic = tree.map_structure(lambda leaf: _symbolic(leaf, axis), (x, y, sample_weight))
    # Some models have code that no graph can have, or inputs that are not dense.
    with contextlib.suppress(Exception):
        _internals.build(model, *symbolic)


def _symbolic(leaf: Any, axis: Optional[int]) -> Any:
    if leaf is None or isinstance(leaf, tf.OptionalSpec):  # None, from a generator
        return None
    shape: List[Any] = [None, *leaf.shape[1:]]
    if axis is not None and len(shape) > axis:
        shape[axis] = None
    return keras.KerasTensor(tuple(shape), keras.backend.standardize_dtype(leaf.dtype))


def by_running(step: Any, micro_batch: Batch) -> None:
    """Builds by a run whose results nobody needs."""

    def run(micro_batch: Batch) -> None:
        step(micro_batch, step.values(), Whole(1, guesses=[]), alone=True)

    leaves = tf.nest.flatten(micro_batch)
    are_there = all(leaf is None or tf.is_tensor(leaf) for leaf in leaves)
    if tf.executing_eagerly() and are_there and ENGINE.examples(micro_batch):
        run(micro_batch)
        return
    specs = graph.specs_of(micro_batch, any_size=True) if are_there else micro_batch
    # In a symbolic scope, weights may also be regularised that the scope has no value of.
    with Scope(), keras.SymbolicScope():
        tf.function(run, autograph=False).get_concrete_function(specs)

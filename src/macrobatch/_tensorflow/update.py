"""One reduction over replicas, one call of the optimizer. Runs on TensorFlow 1.14 too."""

import collections
import functools
import inspect
import threading
from typing import Any, Callable, Dict, List, Optional, Set

import tensorflow as tf

from macrobatch import _internals
from macrobatch._tensorflow import checks, replicas, sums
from macrobatch._types import Gradient


def apply_gradients(
    optimizer: Any,
    gradients: List[Gradient],
    variables: List[Any],
    look: Optional[Callable[[List[Gradient]], None]] = None,
) -> None:
    """Calls an optimizer with gradients; in a replica, with their sums over all replicas.

    Left to itself an optimizer would clip the part of each replica, and Keras 3 take a row that
    several replicas bring for different rows. So they are summed before it sees them.

    Args:
        optimizer: the optimizer.
        gradients: one for each variable.
        variables: the variables.
        look: a function that sees the sums before the optimizer does.
    """
    if replicas.in_several():
        checks.optimizer_on_replicas(optimizer)
    arguments = _no_reduction_of_its_own(optimizer) if replicas.in_several() else None
    if arguments is not None:
        gradients = _agreed(gradients, variables)
        there = [gradient for gradient in gradients if gradient is not None]
        totals = iter(replicas.sum_over_replicas(there))
        gradients = [g if g is None else sums.merge_rows(next(totals)) for g in gradients]
    if look is not None:
        look(gradients)
    # Sums are float32 or wider, also those over replicas; variables may be narrower.
    dtypes = [tf.as_dtype(variable.dtype).base_dtype for variable in variables]
    gradients = [sums.cast(gradient, dtype) for gradient, dtype in zip(gradients, dtypes)]
    all_optimizers = [] if arguments is None else _internals.with_inner_optimizers(optimizer)
    summed = [id(each) for each in all_optimizers]
    with _counting:
        _reduced.update(summed)
    try:
        optimizer.apply_gradients(list(zip(gradients, variables)), **(arguments or {}))
    finally:
        with _counting:
            _reduced.subtract(summed)


def is_of_keras_3(optimizer: Any) -> bool:
    """Whether an optimizer is one of Keras 3, known by what it sums over replicas with."""
    return hasattr(optimizer, _internals.REDUCING)


def _agreed(gradients: List[Gradient], variables: List[Any]) -> List[Gradient]:
    """The gradients, of the same kinds on all replicas: zeros where only others have one."""
    if not tf.executing_eagerly():  # In a graph all replicas have the same.
        return gradients
    sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    dense = [g is not None and not rows for g, rows in zip(gradients, sparse)]
    (counts,) = replicas.sum_over_replicas([tf.constant([sparse, dense], tf.float32)])
    agreed = []
    for gradient, variable, some_rows, some_dense in zip(gradients, variables, *counts.numpy()):
        shape, dtype = tf.TensorShape(variable.shape), sums.wide(tf.as_dtype(variable.dtype))
        if gradient is None and some_dense:
            gradient = tf.zeros(shape, dtype)
        elif gradient is None and some_rows:
            none = tf.zeros([0, *shape[1:]], dtype)
            gradient = tf.IndexedSlices(none, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))
        agreed.append(sums.dense(gradient) if some_dense else gradient)
    return agreed


# How many replicas are in a call with gradients that are summed already, for each optimizer. It
# counts for all threads, since an optimizer may go on in another one (LossScaleOptimizer does).
_reduced: "collections.Counter[int]" = collections.Counter()
_counting = threading.Lock()


def _no_reduction_of_its_own(optimizer: Any) -> Optional[Dict[str, bool]]:
    """The arguments with which an optimizer takes gradients as they are; None if it does not."""
    if not is_of_keras_3(optimizer):
        names = inspect.signature(optimizer.apply_gradients).parameters
        for name, value in _NO_REDUCTION.items():
            if name in names:
                return {name: value}
        return None  # tf.compat.v1.train, which takes the sum itself, also of rows
    # Keras 3 has no public way. An inner optimizer may have a method of its own.
    for each in _internals.with_inner_optimizers(optimizer):
        if is_of_keras_3(each):
            _reduce_once(type(each))
    return {}


# The functions that this room has put into classes. They are known by identity: anybody's wrapper
# has a __wrapped__, and copies the attributes of what it wraps.
_own: Set[Callable[..., Any]] = set()


def _reduce_once(kind: type) -> None:
    """Keeps optimizers of this class from summing again; for other calls the class is as before."""
    owner: Any = next(c for c in kind.__mro__ if _internals.REDUCING in vars(c))
    reduce = vars(owner)[_internals.REDUCING]
    if reduce in _own:
        return

    @functools.wraps(reduce)
    def reduce_once(self: Any, pairs: Any) -> Any:
        return list(pairs) if _reduced[id(self)] > 0 else reduce(self, pairs)

    _own.add(reduce_once)
    setattr(owner, _internals.REDUCING, reduce_once)


# In tf_keras: its optimizers, and the legacy ones.
_NO_REDUCTION = {"skip_gradients_aggregation": True, "experimental_aggregate_gradients": False}

"""A window: the sums of the micro-batches since the last update, as variables, so that they can be
saved in its middle. Each replica holds a part of them. Runs on TensorFlow 1.14 too.
"""

import functools
from typing import Any, List

import numpy as np
import tensorflow as tf

from macrobatch import _replicas, _split, _sums

# The kinds of gradients that a variable may have got, maybe both. Which of them there are is an
# array of booleans, of shape [2, variables].
DENSE, ROWS = 0, 1


class Window(tf.Module):
    """The sums of weight * gradient and of weight.

    Sums are made when the first gradient of their kind arrives: a table whose gradients are rows
    has no dense sum.

    Attributes:
        pending: the number of micro-batches held. It is a float, as is any count here, because a
            checkpoint divides it among replicas.
        total: the sum of their weights.
        arrivals: how many have brought a gradient of each kind for each variable.
    """

    def __init__(self, variables: List[Any], strategy: Any):
        super().__init__(name="window")
        self._making = False
        self._strategy = strategy
        self._shapes = tuple(tuple(tf.TensorShape(v.shape).as_list()) for v in variables)
        self._dtypes = tuple(tf.as_dtype(v.dtype) for v in variables)
        wide = tf.float64 if tf.float64 in self._dtypes else tf.float32
        self.pending = _replicas.variable(strategy, [], tf.float32, "pending")
        self.total = _replicas.variable(strategy, [], wide, "total_weight")
        self.arrivals = _replicas.variable(strategy, [2, len(variables)], tf.float32, "arrivals")

    def prepared(self, gradients: List[Any]) -> List[Any]:
        """The gradients in the form in which they are summed. Makes the sums that are missing."""
        gradients = [
            _sums.cast(gradient, _sums.wide(dtype), tf.int64)
            for gradient, dtype in zip(gradients, self._dtypes)
        ]
        if _split.in_xla():  # which has no tensors of unknown size, so no rows
            gradients = [_sums.dense(gradient) for gradient in gradients]
        for kind, index in np.argwhere(_kinds_of(gradients)):
            if not self._has_sum(kind, index):
                _replicas.once(functools.partial(self._make_sum, kind, index))
        return gradients

    def add(self, gradients: List[Any], weight: Any) -> None:
        """Adds prepared gradients; with a weight of None, as they are."""
        for index, gradient in enumerate(gradients):
            if weight is not None:
                gradient = _sums.scaled(gradient, weight)
            if isinstance(gradient, tf.IndexedSlices):
                values, indices = self._sum(ROWS, index)
                rows = _sums.merge_rows(_sums.add(self._rows(index), gradient))
                values.assign(rows.values)
                indices.assign(rows.indices)
            elif gradient is not None:
                self._sum(DENSE, index)[0].assign_add(gradient)
        if weight is not None:
            self.total.assign_add(weight)
        self.arrivals.assign_add(_kinds_of(gradients).astype("float32"))
        self.pending.assign_add(1.0)

    def gradients(self, kinds: Any, factor: Any) -> List[Any]:
        """The sums of these kinds times a factor: in a replica, its part of them."""
        gradients = []
        for index, dtype in enumerate(self._dtypes):
            total = None
            if kinds[DENSE, index]:
                total = _replicas.local(self._sum(DENSE, index)[0])
            if kinds[ROWS, index]:
                total = _sums.add(total, self._rows(index))
            gradients.append(_sums.cast(_sums.scaled(total, factor), dtype))
        return gradients

    def clear(self) -> None:
        """Forgets everything."""
        for variable in [*self._sums(), self.pending, self.total, self.arrivals]:
            variable.assign(_nothing(variable))

    def kinds(self) -> Any:
        """The kinds of gradients that have come so far, in this window or before."""
        indices = range(len(self._shapes))
        return np.array([[self._has_sum(k, i) for i in indices] for k in (DENSE, ROWS)], bool)

    def _names(self, kind: int, index: int) -> List[str]:
        names = ["dense"] if kind == DENSE else ["values", "indices"]
        return [f"{name}_{index}" for name in names]

    def _has_sum(self, kind: int, index: int) -> bool:
        return all(hasattr(self, name) for name in self._names(kind, index))

    def _sum(self, kind: int, index: int) -> List[Any]:
        return [getattr(self, name) for name in self._names(kind, index)]

    def _sums(self) -> List[Any]:
        return [variable for k, i in np.argwhere(self.kinds()) for variable in self._sum(k, i)]

    def _rows(self, index: int) -> Any:
        values, indices = (_replicas.local(variable) for variable in self._sum(ROWS, index))
        return tf.IndexedSlices(values, indices, tf.constant(self._shapes[index], tf.int64))

    def _make_sum(self, kind: int, index: int) -> None:
        shape = self._shapes[index]
        dtype = _sums.wide(self._dtypes[index])
        if kind == DENSE:
            made = [_replicas.variable(self._strategy, shape, dtype, "dense")]
        else:
            made = [
                _replicas.variable(self._strategy, [None, *shape[1:]], dtype, "values"),
                _replicas.variable(self._strategy, [None], tf.int64, "indices", summed=False),
            ]
        self._making = True
        for name, variable in zip(self._names(kind, index), made):
            setattr(self, name, variable)
        self._making = False

    # Checkpoints. TensorFlow has no public hooks for these two; tests/test_accumulator.py notices
    # if their names change.

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint that is being restored has under a name."""
        kind, _, index = name.partition("_")
        if name == "arrivals" and hasattr(self, name):
            # A sum that the checkpoint does not have was not there when it was saved.
            for variable in self._sums():
                for part in _replicas.parts(self._strategy, variable):
                    part.assign(_nothing(part))
        elif kind in ("dense", "values", "indices") and index.isdigit() and not self._making:
            # The checkpoint has a sum that this process may not have made yet.
            if not hasattr(self, name):
                self._make_sum(DENSE if kind == "dense" else ROWS, int(index))
            return getattr(self, name)
        return super()._lookup_dependency(name, *args, **kwargs)

    @property
    def _checkpoint_dependencies(self) -> Any:
        """What a checkpoint saves."""
        self._align_rows()
        return super()._checkpoint_dependencies

    def _align_rows(self) -> None:
        """Gives all replicas the same rows, so that they can be summed in a checkpoint."""
        if self._strategy is None or not tf.executing_eagerly():
            return
        for _, index in np.argwhere(self.kinds()[[ROWS]]):
            both = (_replicas.parts(self._strategy, v) for v in self._sum(ROWS, index))
            replicas = list(zip(*both))
            rows, _ = tf.unique(tf.concat([indices for _, indices in replicas], 0))
            for values, indices in replicas:
                shape = [rows.shape.as_list()[0], *values.shape.as_list()[1:]]
                none = tf.IndexedSlices(tf.zeros(shape, values.dtype), rows)
                own = tf.IndexedSlices(values.read_value(), indices.read_value())
                aligned = _sums.merge_rows(_sums.add(none, own))
                values.assign(aligned.values)
                indices.assign(aligned.indices)


def _kinds_of(gradients: List[Any]) -> Any:
    rows = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
    dense = [g is not None and not sparse for g, sparse in zip(gradients, rows)]
    return np.array([dense, rows], bool)


def _nothing(variable: Any) -> Any:
    """Zeros for a variable; none where its shape is unknown."""
    return tf.zeros([size or 0 for size in variable.shape.as_list()], variable.dtype)

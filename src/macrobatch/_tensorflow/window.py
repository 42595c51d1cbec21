"""A window: the sums of the micro-batches since the last update, as variables, so that they can be
saved in its middle. Each replica holds a part of them. Runs on TensorFlow 1.14 too.
"""

import functools
from typing import Any, List

import numpy as np
import tensorflow as tf

from macrobatch._tensorflow import graph
from macrobatch._tensorflow import replicas as _replicas
from macrobatch._tensorflow import sums as _sums

# The kinds of gradients that a variable may have got, maybe both. Which of them there are is an
# array of booleans, of shape [2, variables].
DENSE, ROWS = 0, 1


class Window(tf.Module):
    """The sums of weight * gradient and of weight.

    Sums are made when the first gradient of their kind arrives: a table whose gradients are rows
    has no dense sum. What a sum holds counts only if something has arrived since the window began;
    otherwise it is left over from another one.

    Attributes:
        pending: the number of micro-batches held. It is a float, as is any count here, because a
            checkpoint divides it among replicas.
        total: the sum of their weights.
        arrivals: how many have brought a gradient of each kind for each variable.
    """

    def __init__(self, variables: List[Any], strategy: Any):
        super().__init__(name="window")
        self._making = False
        self._dense_only = False
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
        if self._dense_only or graph.in_xla():  # XLA has no tensors of unknown size, so no rows
            gradients = [_sums.dense(gradient) for gradient in gradients]
        for kind, index in np.argwhere(_kinds_of(gradients)):
            if not self._has_sum(kind, index):
                _replicas.once(functools.partial(self._make_sum, kind, index))
        return gradients

    def add(self, gradients: List[Any], weight: Any) -> None:
        """Adds prepared gradients; with a weight of None, as they are."""
        kinds = _kinds_of(gradients)
        if weight is not None:
            gradients = [_sums.scaled(gradient, weight) for gradient in gradients]
        arrived = _replicas.local(self.arrivals) > 0
        # Mostly all have arrived before: then a graph needs no choice for each variable.
        done = graph.when(
            tf.reduce_all(tf.logical_or(arrived, np.logical_not(kinds))),
            lambda: self._add_to_sums(gradients),
            lambda: self._add_to_sums(gradients, arrived),
        )
        # Whoever sees these counts sees the sums.
        with tf.control_dependencies([done]):
            if weight is not None:
                self.total.assign_add(weight)
            self.arrivals.assign_add(kinds.astype("float32"))
            self.pending.assign_add(1.0)

    def gradients(self, kinds: Any, factor: Any) -> List[Any]:
        """The sums of these kinds times a factor: in a replica, its part of them."""
        arrived = _replicas.local(self.arrivals) > 0
        gradients = []
        for index in range(len(self._dtypes)):
            total = None
            if kinds[DENSE, index]:
                total = _replicas.local(self._sum(DENSE, index)[0])
                total = _sums.scaled(total, arrived[DENSE, index])
            if kinds[ROWS, index]:
                total = _sums.add(total, self._rows(index, arrived[ROWS, index]))
            gradients.append(_sums.scaled(total, factor))
        return gradients

    def clear(self) -> None:
        """Begins a new window."""
        for variable in (self.pending, self.total, self.arrivals):
            variable.assign(_nothing(variable))

    def refuse_rows(self) -> None:
        """Makes all gradients dense from now on, for updates that expect nothing else."""
        self._dense_only = True

    def variables_of_sums(self) -> List[Any]:
        """The variables behind all sums that there are."""
        return [variable for k, i in np.argwhere(self.kinds()) for variable in self._sum(k, i)]

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

    def _rows(self, index: int, arrived: Any) -> Any:
        """The rows of a sum, none of them if nothing has arrived."""
        values, indices = (_replicas.local(variable) for variable in self._sum(ROWS, index))
        end = tf.where(arrived, tf.int32.max, 0)  # a slice ends where its tensor does, at most
        shape = tf.constant(self._shapes[index], tf.int64)
        return tf.IndexedSlices(values[:end], indices[:end], shape)

    def _add_to_sums(self, gradients: List[Any], arrived: Any = None) -> None:
        """Adds to sums; where nothing has arrived, what a sum holds is replaced."""
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                values, indices = self._sum(ROWS, index)
                rows = self._rows(index, True if arrived is None else arrived[ROWS, index])
                rows = _sums.merge_rows(_sums.add(rows, gradient))
                values.assign(rows.values)
                indices.assign(rows.indices)
            elif gradient is not None:
                (total,) = self._sum(DENSE, index)
                if arrived is None:
                    total.assign_add(gradient)
                else:
                    kept = _sums.scaled(_replicas.local(total), arrived[DENSE, index])
                    total.assign(kept + gradient)

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
        of_sums = kind in ("dense", "values", "indices") and index.isdigit()
        if of_sums and int(index) < len(self._shapes) and not self._making:
            # The checkpoint has a sum that this process may not have made yet.
            if not hasattr(self, name):
                self._make_sum(DENSE if kind == "dense" else ROWS, int(index))
            return getattr(self, name)
        return super()._lookup_dependency(name, *args, **kwargs)

    @property
    def _checkpoint_dependencies(self) -> Any:
        """What a checkpoint saves."""
        if self._strategy is not None and tf.executing_eagerly():
            self._tidy_up()
            self._align_rows()
        return super()._checkpoint_dependencies

    def _tidy_up(self) -> None:
        """Clears what is left over from another window, so that it is not summed over replicas."""
        arrivals = [part.numpy() for part in _replicas.parts(self._strategy, self.arrivals)]
        for kind, index in np.argwhere(self.kinds()):
            for variable in self._sum(kind, index):
                for part, arrived in zip(_replicas.parts(self._strategy, variable), arrivals):
                    if not arrived[kind, index]:
                        part.assign(_nothing(part))

    def _align_rows(self) -> None:
        """Gives all replicas the same rows, so that they can be summed."""
        for _, index in np.argwhere(self.kinds()[[ROWS]]):
            both = (_replicas.parts(self._strategy, v) for v in self._sum(ROWS, index))
            replicas = list(zip(*both))
            rows, _ = tf.unique(_replicas.gathered(self._strategy, self._sum(ROWS, index)[1]))
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

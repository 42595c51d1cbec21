"""A window: the sums of the micro-batches since the last update, as variables, so that they can be
saved in its middle. Each replica holds a part of them. Runs on TensorFlow 1.14 too.
"""

import functools
import threading
from typing import TYPE_CHECKING, Any, List, Optional, Tuple

import numpy as np
import tensorflow as tf

from macrobatch._tensorflow import graph, replicas, sums
from macrobatch._tensorflow import window_checks as _window_checks
from macrobatch._types import Gradient, Tensor, Variable

# The kinds of gradients that a variable may have got, maybe both. Which of them there are is an
# array of booleans, of shape [2, variables].
DENSE, ROWS = 0, 1
if TYPE_CHECKING:
    Kinds = np.ndarray[Any, np.dtype[np.bool_]]
else:
    Kinds = np.ndarray

# A name in checkpoints that begins so ends with the reduction that the window is for.
_REDUCTION = "reduction_"


class Lock:
    """A lock that a thread may take again. A copy of it is another lock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def __reduce__(self) -> Tuple[Any, ...]:
        return Lock, ()


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
        lock: for whoever adds, updates or clears: these write several variables. No replica may
            hold it where replicas meet, as they do in `make_sums`.
    """

    def __init__(self, variables: List[Variable], strategy: Any, reduction: str):
        super().__init__(name="window")
        self.lock = Lock()
        self._making = False
        self._dense_only = False
        self._strategy = strategy
        self._reduction = reduction
        self._shapes = tuple(tuple(tf.TensorShape(v.shape).as_list()) for v in variables)
        self._dtypes = tuple(tf.as_dtype(v.dtype) for v in variables)
        wide = tf.float64 if _needs_double(self._dtypes) else tf.float32
        pending = replicas.variable(strategy, [], tf.float32, "pending")
        # A second name for a variable that every checkpoint has: older checkpoints, which lack
        # the name, still have a value for each variable. TensorFlow asks for the first name only.
        setattr(self, _REDUCTION + reduction, pending)
        self.pending = pending
        self.total = replicas.variable(strategy, [], wide, "total_weight")
        self.arrivals = replicas.variable(strategy, [2, len(variables)], tf.float32, "arrivals")

    def prepared(self, gradients: List[Gradient]) -> List[Gradient]:
        """The gradients in the form in which they are summed. Changes nothing."""
        prepared = []
        for gradient, dtype, shape in zip(gradients, self._dtypes, self._shapes):
            if isinstance(gradient, tf.IndexedSlices):  # which need not know their table
                gradient = tf.IndexedSlices(gradient.values, gradient.indices, tf.constant(shape))
            prepared.append(sums.cast(gradient, sums.wide(dtype), tf.int64))
        return prepared

    def make_sums(self, gradients: List[Gradient]) -> None:
        """Makes the sums that are missing for prepared gradients. Replicas meet here."""
        for kind, index in np.argwhere(self._kinds_of(gradients)):
            if not self._has_sum(kind, index):
                replicas.once(functools.partial(self._make_sum, kind, index))

    def add(self, gradients: List[Gradient], weight: Optional[Tensor]) -> None:
        """Adds prepared gradients; with a weight of None, as they are."""
        kinds = self._kinds_of(gradients)
        if not kinds[ROWS].any():
            gradients = [sums.dense(gradient) for gradient in gradients]
        if weight is not None:
            gradients = [sums.scaled(gradient, weight) for gradient in gradients]
        arrived = replicas.local(self.arrivals) > 0
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

    def gradients(self, kinds: Kinds, factor: Tensor) -> List[Gradient]:
        """The sums of these kinds times a factor: in a replica, its part of them."""
        arrived = replicas.local(self.arrivals) > 0
        gradients = []
        for index in range(len(self._dtypes)):
            total: Gradient = None
            if kinds[DENSE, index]:
                total = replicas.local(self._sum(DENSE, index)[0])
                total = sums.scaled(total, arrived[DENSE, index])
            if kinds[ROWS, index]:
                total = sums.add(total, self._rows(index, arrived[ROWS, index]))
            gradients.append(sums.scaled(total, factor))
        return gradients

    def clear(self) -> None:
        """Begins a new window."""
        for variable in (self.pending, self.total, self.arrivals):
            variable.assign(_nothing(variable))

    def refuse_rows(self) -> None:
        """Makes all gradients dense from now on, for updates that expect nothing else."""
        self._dense_only = True

    def variables_of_sums(self) -> List[Variable]:
        """The variables behind all sums that there are."""
        return [variable for k, i in np.argwhere(self.kinds()) for variable in self._sum(k, i)]

    def kinds(self) -> Kinds:
        """The kinds of gradients that have come so far, in this window or before."""
        indices = range(len(self._shapes))
        return np.array([[self._has_sum(k, i) for i in indices] for k in (DENSE, ROWS)], bool)

    def _kinds_of(self, gradients: List[Gradient]) -> Kinds:
        """The kinds of sums that prepared gradients go to."""
        there = np.array([gradient is not None for gradient in gradients], bool)
        rows = np.array([isinstance(gradient, tf.IndexedSlices) for gradient in gradients], bool)
        if self._dense_only or graph.in_xla():  # XLA has no tensors of unknown size, so no rows
            rows = np.zeros_like(rows)
        return np.array([there & ~rows, rows])

    def _names(self, kind: int, index: int) -> List[str]:
        names = ["dense"] if kind == DENSE else ["values", "indices"]
        return [f"{name}_{index}" for name in names]

    def _has_sum(self, kind: int, index: int) -> bool:
        return all(hasattr(self, name) for name in self._names(kind, index))

    def _sum(self, kind: int, index: int) -> List[Variable]:
        return [getattr(self, name) for name in self._names(kind, index)]

    def _rows(self, index: int, arrived: Tensor) -> tf.IndexedSlices:
        """The rows of a sum, none of them if nothing has arrived."""
        values, indices = (replicas.local(variable) for variable in self._sum(ROWS, index))
        end = tf.where(arrived, tf.int32.max, 0)  # a slice ends where its tensor does, at most
        shape = tf.constant(self._shapes[index], tf.int64)
        return tf.IndexedSlices(values[:end], indices[:end], shape)

    def _add_to_sums(self, gradients: List[Gradient], arrived: Optional[Tensor] = None) -> None:
        """Adds to sums; where nothing has arrived, what a sum holds is replaced."""
        for index, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                values, indices = self._sum(ROWS, index)
                rows = self._rows(index, True if arrived is None else arrived[ROWS, index])
                rows = sums.merge_rows(sums.add_rows(rows, gradient))
                values.assign(rows.values)
                indices.assign(rows.indices)
            elif gradient is not None:
                (total,) = self._sum(DENSE, index)
                if arrived is None:
                    total.assign_add(gradient)
                else:
                    kept = sums.scaled(replicas.local(total), arrived[DENSE, index])
                    total.assign(kept + gradient)

    def _make_sum(self, kind: int, index: int) -> None:
        with self.lock:
            if self._has_sum(kind, index):  # by now: another thread was faster
                return
            shape, dtype = self._shapes[index], sums.wide(self._dtypes[index])
            if kind == DENSE:
                made = [replicas.variable(self._strategy, shape, dtype, "dense")]
            else:
                made = [
                    replicas.variable(self._strategy, [None, *shape[1:]], dtype, "values"),
                    replicas.variable(self._strategy, [None], tf.int64, "indices", summed=False),
                ]
            self._making = True
            for name, variable in zip(self._names(kind, index), made):
                setattr(self, name, variable)
            self._making = False

    # Checkpoints. TensorFlow has no public hooks for these two; tests/loops/test_accumulator.py
    # notices if their names change.

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint that is being restored has under a name."""
        if name.startswith(_REDUCTION):
            _window_checks.same_reduction(name[len(_REDUCTION) :], self._reduction)
        kind, _, index = name.partition("_")
        of_sums = kind in ("dense", "values", "indices") and index.isdigit()
        if of_sums and int(index) < len(self._shapes) and not self._making:
            if kind != "dense":
                _window_checks.may_bring_rows(not self._dense_only)
            # The checkpoint has a sum that this process may not have made yet.
            if not hasattr(self, name):
                self._make_sum(DENSE if kind == "dense" else ROWS, int(index))
            return getattr(self, name)
        return super()._lookup_dependency(name, *args, **kwargs)

    @property
    def _checkpoint_dependencies(self) -> Any:
        """What a checkpoint saves."""
        if self._strategy is not None and tf.executing_eagerly():
            with self.lock:
                self._tidy_up()
                self._align_rows()
        return super()._checkpoint_dependencies

    def _tidy_up(self) -> None:
        """Clears what is left over from another window, so that it is not summed over replicas."""
        arrivals = [part.numpy() for part in replicas.parts(self._strategy, self.arrivals)]
        for kind, index in np.argwhere(self.kinds()):
            for variable in self._sum(kind, index):
                for part, arrived in zip(replicas.parts(self._strategy, variable), arrivals):
                    if not arrived[kind, index]:
                        part.assign(_nothing(part))

    def _align_rows(self) -> None:
        """Gives all replicas the same rows, so that they can be summed."""
        for _, index in np.argwhere(self.kinds()[[ROWS]]):
            both = (replicas.parts(self._strategy, v) for v in self._sum(ROWS, index))
            pairs = list(zip(*both))
            rows, _ = tf.unique(replicas.gathered(self._strategy, self._sum(ROWS, index)[1]))
            for values, indices in pairs:
                shape = [rows.shape.as_list()[0], *values.shape.as_list()[1:]]
                none = tf.IndexedSlices(tf.zeros(shape, values.dtype), rows)
                own = tf.IndexedSlices(values.read_value(), indices.read_value())
                aligned = sums.merge_rows(sums.add_rows(none, own))
                values.assign(aligned.values)
                indices.assign(aligned.indices)


def _needs_double(dtypes: Tuple[tf.DType, ...]) -> bool:
    return tf.float64 in dtypes or tf.complex128 in dtypes


def _nothing(variable: Variable) -> Tensor:
    """Zeros for a variable; none where its shape is unknown."""
    return tf.zeros([size or 0 for size in variable.shape.as_list()], variable.dtype)

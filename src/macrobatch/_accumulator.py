"""GradientAccumulator: the sum of micro-batches that arrive one by one, from TensorFlow 1.14 on.

The update is made from sum(weight * gradient) / sum(weight) over a window of micro-batches. What is
held between calls are variables, so that it can be saved in the middle of a window.
"""

from typing import Any, Callable, List, Optional, TypeVar

import numpy as np
import tensorflow as tf

from macrobatch import _checks, _replicas, _split, _sums

Method = TypeVar("Method", bound=Callable[..., Any])


def _as_it_is(method: Method) -> Method:
    """Keeps tf.function from converting this code's `if` and `for`, which need no conversion."""
    keep = getattr(tf.autograph.experimental, "do_not_convert", None)  # newer than 1.14
    return method if keep is None else keep(method)


# The kinds of gradients that a variable may have got in a window, maybe both.
DENSE, ROWS = 0, 1


class GradientAccumulator(tf.Module):
    """Sums the gradients of micro-batches and updates once, as their whole batch would.

    For loops that get their micro-batches one by one. The update is made from the weighted mean of
    the gradients, so that micro-batches may differ in size, and a window in length:

        for x, y in dataset:                            # each element is a micro-batch
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            accumulator.step(tape.gradient(loss, variables), weight=len(x))
        accumulator.flush()                             # what is left of the last window

    A variable that got no gradient in a whole window is not updated. Schedules and whatever else
    counts steps in the optimizer count updates. Rows of embeddings stay rows. It runs eagerly, in
    a `tf.function`, and in one with `jit_compile=True`. With several replicas, call `add` inside
    `strategy.run`, and `apply` or `flush` outside of it.

    It is a `tf.Module`: `tf.train.Checkpoint(accumulator=accumulator)` saves a window in the
    middle, with the variables and the optimizer.

    Args:
        optimizer: any optimizer with `apply_gradients`: of Keras 3, tf_keras or
            `tf.compat.v1.train`.
        variables: the variables to update, in the order in which their gradients will come.
        steps: the number of micro-batches in a window, for `step`.
        reduction: `"mean"`, or `"sum"` if losses are already divided by what the whole window
            divides them by. Then gradients have no weights.
        nonfinite: what to do with gradients that are infinite or not a number. `"propagate"` adds
            them; `"skip"` leaves that micro-batch out and counts it in `skipped`; `"raise"` is an
            error.

    Example:

    >>> import macrobatch, tensorflow as tf
    >>> variable = tf.Variable(1.0)
    >>> optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
    >>> accumulator = macrobatch.GradientAccumulator(optimizer, [variable])
    >>> accumulator.add([tf.constant(2.0)], weight=3)  # the mean of three examples
    >>> accumulator.add([tf.constant(6.0)], weight=1)  # and of one
    >>> accumulator.apply()  # the mean of four is 3
    >>> float(variable.numpy())
    -0.5
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Any,
        steps: Optional[int] = None,
        *,
        reduction: str = "mean",
        nonfinite: str = "propagate",
    ):
        super().__init__(name="gradient_accumulator")
        self._steps = _checks.steps(steps)
        self._reduction = _checks.one_of("reduction", reduction, ["mean", "sum"])
        policies = ["propagate", "skip", "raise"]
        self._nonfinite = _checks.one_of("nonfinite", nonfinite, policies)
        _checks.applies_gradients(optimizer, self._nonfinite)
        variables = tf.nest.flatten(variables)
        for variable in variables:
            _checks.variable(variable)
        self._making = False
        self._strategy = strategy = _replicas.strategy_of(variables)
        self._variables = variables
        # A checkpoint of the accumulator also saves these, which the window belongs to.
        self.optimizer = optimizer
        self._weights = [_replicas.tf_variable(variable) for variable in variables]
        self._dtypes = [_sums.wide(tf.as_dtype(v.dtype)) for v in variables]
        # Counts are floats, because a checkpoint divides them among replicas.
        wide = tf.float64 if tf.float64 in self._dtypes else tf.float32
        self._pending = _replicas.variable(strategy, [], tf.float32, "pending")
        self._skipped = _replicas.variable(strategy, [], tf.float32, "skipped")
        self._total = _replicas.variable(strategy, [], wide, "total_weight")
        # How many micro-batches have brought a gradient of each kind for each variable.
        self._arrivals = _replicas.variable(strategy, [2, len(variables)], tf.float32, "arrivals")
        self._build_optimizer()

    @property
    def pending(self) -> Any:
        """The number of micro-batches in the window. In a graph, a tensor."""
        return _count(self._pending)

    @property
    def skipped(self) -> Any:
        """The number of micro-batches that were left out so far. In a graph, a tensor."""
        return _count(self._skipped)

    @property
    def total_weight(self) -> Any:
        """The sum of the weights in the window; 0 with reduction="sum". In a graph, a tensor."""
        total = _replicas.read(self._total)
        return float(total) if tf.executing_eagerly() else total

    @_as_it_is
    def add(self, gradients: Any, *, weight: Any = None) -> None:
        """Adds the gradients of a micro-batch to the window.

        Args:
            gradients: a gradient for each variable, None where there is none.
            weight: what the loss of this micro-batch is a mean over: the number of its examples,
                or of its tokens. Required, and refused with reduction="sum".

        Raises:
            ValueError: if the gradients do not fit the variables, or for a weight that is missing,
                negative or not finite. Nothing has changed then.
        """
        _checks.place_to_add(self._strategy, _replicas.in_replica(), _replicas.count())
        gradients = _checks.gradients(gradients, self._variables)
        _checks.weight(weight, self._reduction)
        gradients = [_sums.cast(g, dtype, tf.int64) for g, dtype in zip(gradients, self._dtypes)]
        if _split.in_xla():  # which has no tensors of unknown size, so no rows
            gradients = [_sums.dense(gradient) for gradient in gradients]
        kinds = self._kinds_of(gradients)
        for kind, index in np.argwhere(kinds):
            self._make_sum(kind, index)
        good = tf.constant(True)
        if weight is not None:
            weight = tf.cast(weight, self._total.dtype)
            good = tf.logical_and(weight >= 0, tf.math.is_finite(weight))

        def hold() -> None:
            self._hold(gradients, kinds, weight)

        with _asserted(good, _checks.WEIGHT):
            if self._nonfinite == "propagate":
                hold()
            elif self._nonfinite == "skip":
                _when(_sums.are_finite(gradients), hold, lambda: self._skipped.assign_add(1.0))
            else:
                with _asserted(_sums.are_finite(gradients), _checks.NOT_FINITE):
                    hold()

    @_as_it_is
    def apply(self) -> None:
        """Updates the variables from the window, and starts a new one.

        Raises:
            ValueError: if the window is empty.
        """
        self._check_place("apply")
        _checks.applies_in_xla(not _split.in_xla())
        with _asserted(_replicas.read(self._pending) > 0, _checks.EMPTY_WINDOW):
            self._apply()

    @_as_it_is
    def step(self, gradients: Any, *, weight: Any = None) -> Any:
        """Adds the gradients of a micro-batch, and applies when `steps` are in the window.

        Args:
            gradients: as for `add`.
            weight: as for `add`.

        Returns:
            Whether it applied. In a graph, a tensor.
        """
        steps = _checks.has_steps(self._steps)
        self._check_place("step")
        self.add(gradients, weight=weight)
        full = tf.round(_replicas.read(self._pending)) >= steps
        if _split.in_xla():
            # What this step has added is sure to be there, and has to be all.
            kinds = self._kinds()
            gradients = tf.nest.flatten(gradients)
            complete = all(g is not None for g in gradients) and not kinds[ROWS].any()
            _checks.applies_in_xla(complete)
            _when(full, lambda: self._update(kinds))
        else:
            _when(full, self._apply)
        return bool(full) if tf.executing_eagerly() else full

    @_as_it_is
    def flush(self) -> Any:
        """Applies what is in the window, if there is anything.

        Returns:
            Whether it applied. In a graph, a tensor.
        """
        self._check_place("flush")
        _checks.applies_in_xla(not _split.in_xla())
        some = _replicas.read(self._pending) > 0
        _when(some, self._apply)
        return bool(some) if tf.executing_eagerly() else some

    @_as_it_is
    def reset(self) -> None:
        """Forgets the window."""
        _replicas.run(self._strategy, self._clear)

    def _check_place(self, method: str) -> None:
        replicas = 1 if self._strategy is None else self._strategy.num_replicas_in_sync
        _checks.place_to_apply(replicas, _replicas.in_replica(), method)

    def _build_optimizer(self) -> None:
        """Makes the variables of the optimizer, where it has a way to: not in a branch later."""
        optimizer = self.optimizer
        build = getattr(optimizer, "build", None)
        if build is None or getattr(optimizer, "built", getattr(optimizer, "_built", False)):
            return
        with tf.init_scope():
            if self._strategy is None:
                build(self._variables)
            else:
                with self._strategy.scope():
                    build(self._variables)

    # The window.

    def _hold(self, gradients: List[Any], kinds: Any, weight: Any) -> None:
        for index, gradient in enumerate(gradients):
            if weight is not None:
                gradient = _sums.scaled(gradient, weight)
            if kinds[ROWS, index]:
                values, indices = self._sum(ROWS, index)
                rows = _sums.merge_rows(_sums.add(self._rows(index), gradient))
                values.assign(rows.values)
                indices.assign(rows.indices)
            elif kinds[DENSE, index]:
                self._sum(DENSE, index)[0].assign_add(gradient)
        if weight is not None:
            self._total.assign_add(weight)
        self._arrivals.assign_add(kinds.astype("float32"))
        self._pending.assign_add(1.0)

    def _clear(self) -> None:
        for kind, index in np.argwhere(self._kinds()):
            for variable in self._sum(kind, index):
                variable.assign(_nothing(variable))
        for variable in (self._pending, self._total, self._arrivals):
            variable.assign(_nothing(variable))

    def _apply(self) -> None:
        """Updates from what is in the window."""
        if tf.executing_eagerly():
            self._update(_replicas.read(self._arrivals).numpy() > 0)
            return
        # Which gradients an update has is fixed in a graph. It is those that have come so far; for
        # a window with others (because two functions with other gradients share it), leave the
        # graph.
        kinds = self._kinds()
        expected = tf.reduce_all(tf.equal(_replicas.read(self._arrivals) > 0, kinds))

        def leave() -> None:
            done = tf.py_function(self._apply_and_say_so, [], tf.bool)
            with tf.control_dependencies([done]):
                for weight in self._weights if self._strategy is None else []:
                    weight.assign_add(tf.zeros_like(weight))  # what reads it later has to wait

        if kinds.any():
            _when(expected, lambda: self._update(kinds), leave)
        else:
            leave()

    def _apply_and_say_so(self) -> bool:
        self._apply()
        return True

    def _update(self, kinds: Any) -> None:
        """Updates from gradients of these kinds, and starts a new window."""
        total = _replicas.read(self._total)

        def update() -> None:
            gradients = [self._gradient(i, kinds[:, i], total) for i in range(kinds.shape[1])]
            _replicas.apply_gradients(self.optimizer, gradients, self._variables)
            self._clear()

        _replicas.run(self._strategy, update)

    def _gradient(self, index: int, kinds: Any, total: Any) -> Any:
        """The gradient of a variable: in a replica, its part in the whole."""
        gradient = _replicas.local(self._sum(DENSE, index)[0]) if kinds[DENSE] else None
        if kinds[ROWS]:
            gradient = _sums.add(gradient, self._rows(index))
        if gradient is not None and self._reduction == "mean":
            one = tf.ones([], total.dtype)
            gradient = _sums.scaled(gradient, tf.math.divide_no_nan(one, total))
        return _sums.cast(gradient, tf.as_dtype(self._variables[index].dtype))

    def _rows(self, index: int) -> Any:
        values, indices = (_replicas.local(variable) for variable in self._sum(ROWS, index))
        shape = tf.constant(tf.TensorShape(self._variables[index].shape).as_list(), tf.int64)
        return tf.IndexedSlices(values, indices, shape)

    # Sums are made when the first gradient of their kind arrives: a table whose gradients are rows
    # has no dense sum.

    def _names(self, kind: int, index: int) -> List[str]:
        names = ["dense"] if kind == DENSE else ["values", "indices"]
        return [f"{name}_{index}" for name in names]

    def _sum(self, kind: int, index: int) -> List[Any]:
        return [getattr(self, name) for name in self._names(kind, index)]

    def _kinds(self) -> Any:
        """The kinds of gradients that have come so far."""
        indices = range(len(self._variables))
        made = [[hasattr(self, self._names(k, i)[-1]) for i in indices] for k in (DENSE, ROWS)]
        return np.array(made, bool).reshape(2, -1)

    def _kinds_of(self, gradients: List[Any]) -> Any:
        rows = [isinstance(gradient, tf.IndexedSlices) for gradient in gradients]
        there = [gradient is not None for gradient in gradients]
        return np.array([np.logical_and(there, np.logical_not(rows)), rows], bool)

    def _make_sum(self, kind: int, index: int) -> None:
        if all(hasattr(self, name) for name in self._names(kind, index)):
            return

        def make() -> None:
            shape = tf.TensorShape(self._variables[index].shape).as_list()
            dtype = self._dtypes[index]
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

        _replicas.once(make)

    # Checkpoints. TensorFlow has no public hooks for these three; tests/test_accumulator.py notices
    # if their names change.

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint that is being restored has under a name."""
        kind, _, index = name.partition("_")
        if name == "_arrivals" and hasattr(self, name):
            self._clear_for_restoring()
        elif kind in ("dense", "values", "indices") and index.isdigit() and not self._making:
            # The checkpoint has a sum that this process may not have made yet.
            self._make_sum(DENSE if kind == "dense" else ROWS, int(index))
            return getattr(self, name)
        return super()._lookup_dependency(name, *args, **kwargs)

    def _trackable_children(self, *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint saves."""
        self._align_rows()
        return super()._trackable_children(*args, **kwargs)

    @property
    def _checkpoint_dependencies(self) -> Any:
        """What a checkpoint saves, up to TensorFlow 2.8."""
        self._align_rows()
        return super()._checkpoint_dependencies

    def _clear_for_restoring(self) -> None:
        # A sum that the checkpoint does not have was not there when it was saved.
        for kind, index in np.argwhere(self._kinds()):
            for variable in self._sum(kind, index):
                for part in _replicas.parts(self._strategy, variable):
                    part.assign(_nothing(part))

    def _align_rows(self) -> None:
        """Gives all replicas the same rows, so that they can be summed in a checkpoint."""
        if self._strategy is None or not tf.executing_eagerly():
            return
        for _, index in np.argwhere(self._kinds()[[ROWS]]):
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


def _nothing(variable: Any) -> Any:
    """Zeros for a variable; none where its shape is unknown."""
    shape = [size or 0 for size in variable.shape.as_list()]
    return tf.zeros(shape, variable.dtype)


def _count(variable: Any) -> Any:
    count = tf.cast(tf.round(_replicas.read(variable)), tf.int32)
    return int(count) if tf.executing_eagerly() else count


def _when(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any] = tf.no_op) -> None:
    """Calls one of two functions, now or in the graph."""
    if tf.executing_eagerly():
        (then if condition else otherwise)()
        return

    def branch(function: Callable[[], Any]) -> Any:
        function()
        return tf.constant(True)

    tf.cond(condition, lambda: branch(then), lambda: branch(otherwise))


def _asserted(condition: Any, message: str) -> Any:
    """A context that is entered only if the condition holds. XLA, for one, drops assertions."""
    if not tf.executing_eagerly():
        return tf.control_dependencies([tf.debugging.Assert(condition, [message])])
    if not condition:
        raise ValueError(message)
    return tf.control_dependencies([])

"""GradientAccumulator: the sum of micro-batches that arrive one by one, from TensorFlow 1.14 on.

The update is made from sum(weight * gradient) / sum(weight) over a window of micro-batches.
"""

import numbers
import sys
from typing import Any, Callable, List, Optional, TypeVar, Union

import numpy as np
import tensorflow as tf

from macrobatch import _optimizer_checks
from macrobatch._checks import NONFINITE, one_of
from macrobatch._tensorflow import checks, graph, replicas, sums, update, window_checks
from macrobatch._tensorflow.window import ROWS, Kinds, Window
from macrobatch._types import Tensor, Variable

if sys.version_info >= (3, 8):
    from typing import Literal

Method = TypeVar("Method", bound=Callable[..., Any])


def _as_it_is(method: Method) -> Method:
    """Keeps tf.function from converting this code's `if` and `for`, which need no conversion."""
    keep = getattr(tf.autograph.experimental, "do_not_convert", None)  # newer than 1.14
    return method if keep is None else keep(method)


class GradientAccumulator(tf.Module):
    """Sums the gradients of micro-batches and updates once, as their whole batch would.

    For loops that get their micro-batches one by one. The update is made from the weighted mean of
    the gradients. So micro-batches may differ in size, and windows in length:

        for x, y in dataset:  # each element is a micro-batch
            with tf.GradientTape() as tape:
                losses = losses_of(y, model(x, training=True))
                loss = tf.reduce_mean(losses)  # over len(x) examples: its weight
            accumulator.step(tape.gradient(loss, variables), weight=len(x))
        accumulator.flush()  # the last window, which is not full

    A variable without a gradient in the whole window is not updated. Schedules, and all other
    counts of steps in the optimizer, count updates. Rows of embeddings stay rows. An accumulator
    runs eagerly, in a `tf.function`, and in a `tf.function` with `jit_compile=True`. With several
    replicas, call `add` inside `strategy.run`, and `apply` or `flush` outside of it.

    Several threads may call an accumulator in eager mode, or while their functions are traced: the
    calls wait for each other. Graphs do not wait when they run. Functions that add to one window,
    and `strategy.run`, need one thread at a time.

    An accumulator is a `tf.Module`: `tf.train.Checkpoint(accumulator=accumulator)` saves a window
    in the middle, with the variables and the optimizer. A window restores only with the reduction
    that it was saved with.

    Args:
        optimizer: any optimizer with `apply_gradients`: of Keras 3, tf_keras or
            `tf.compat.v1.train`.
        variables: the variables to update, in the order in which their gradients will come.
        steps: the number of micro-batches in a window, for `step`.
        reduction: `"mean"`, or `"sum"` if losses are already divided by the denominator of the
            whole window. Then gradients have no weights.
        nonfinite: what to do with gradients that are infinite or not a number. `"propagate"` adds
            them. `"skip"` leaves the micro-batch out and counts it in `skipped`. `"raise"` is an
            error.

    Examples:
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
        reduction: "Literal['mean', 'sum']" = "mean",
        nonfinite: "Literal['propagate', 'skip', 'raise']" = "propagate",
    ):
        super().__init__(name="gradient_accumulator")
        self._steps = window_checks.steps(steps)
        self._reduction = one_of("reduction", reduction, ["mean", "sum"])
        self._nonfinite = one_of("nonfinite", nonfinite, NONFINITE)
        window_checks.applies_gradients(optimizer, self._nonfinite)
        variables = tf.nest.flatten(variables)
        checks.no_variables(variables)
        for variable in variables:
            checks.variable(variable)
        window_checks.known_shapes(variables)
        self._strategy = replicas.strategy_of(variables)
        # A checkpoint of the accumulator also saves these, which the window belongs to.
        self.optimizer = optimizer
        self._weights = [replicas.tf_variable(variable) for variable in variables]
        # Other optimizers than those of Keras 3 do not know its variables.
        self._variables = variables if update.is_of_keras_3(optimizer) else self._weights
        self._window = Window(self._variables, self._strategy, self._reduction)
        self._skipped = replicas.variable(self._strategy, [], tf.float32, "skipped")
        self._build_optimizer()
        _optimizer_checks.optimizer(optimizer)  # a MultiOptimizer may know its inner ones only now

    @property
    def pending(self) -> Any:
        """The number of micro-batches in the window. In a graph, a tensor."""
        return _count(self._window.pending)

    @property
    def skipped(self) -> Any:
        """The number of micro-batches that were left out so far. In a graph, a tensor."""
        return _count(self._skipped)

    @property
    def total_weight(self) -> Any:
        """The sum of the weights in the window; 0 with reduction="sum". In a graph, a tensor."""
        total = replicas.read(self._window.total)
        return float(total) if tf.executing_eagerly() else total

    @_as_it_is
    def add(self, gradients: Any, *, weight: Any = None) -> None:
        """Adds the gradients of a micro-batch to the window.

        Args:
            gradients: a gradient for each variable, None where there is none.
            weight: the number that the loss of this micro-batch is a mean over: the number of its
                examples, or of its tokens. Required, and refused with reduction="sum".

        Raises:
            ValueError: if the gradients do not fit the variables in shape or dtype, for rows that
                a table does not have, or for a weight that is missing, negative or not finite.
                Nothing has changed then. (Other replicas may have added theirs.) In a graph, a
                fault that shows only when the graph runs is an InvalidArgumentError. XLA drops such
                checks: in a function with `jit_compile=True`, weights that are tensors are not
                checked, and rows out of range do not count.
        """
        window_checks.place_to_add(self._strategy, replicas.in_replica())
        replicas.check_scope(self._strategy)
        gradients = window_checks.gradients(gradients, self._variables)
        window_checks.weight(weight, self._reduction)
        window_checks.raises_in_xla(self._nonfinite, graph.in_xla())
        checks = window_checks.fit_when_run(gradients, self._variables)
        gradients = self._window.prepared(gradients)
        if weight is not None:
            weight = _as_tensor(weight, self._window.total.dtype)
            good = tf.logical_and(weight >= 0, tf.math.is_finite(weight))
            checks.append((good, window_checks.WEIGHT))
        if self._nonfinite == "raise":
            checks.append((sums.are_finite(gradients), window_checks.NOT_FINITE))
        allowed = graph.refuse_unless(*checks)
        self._window.make_sums(gradients)

        def hold() -> None:
            self._window.add(gradients, weight)

        with self._window.lock, allowed:
            if self._nonfinite == "skip":
                finite = sums.are_finite(gradients)
                graph.when(finite, hold, lambda: self._skipped.assign_add(1.0))
            else:
                hold()

    @_as_it_is
    def apply(self) -> None:
        """Updates the variables from the window, and starts a new one.

        Raises:
            ValueError: if the window is empty.
        """
        self._check_place("apply")
        window_checks.applies_in_xla(not graph.in_xla())
        with self._window.lock:
            some = replicas.read(self._window.pending) > 0
            with graph.refuse_unless((some, window_checks.EMPTY_WINDOW)):
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
        steps = window_checks.has_steps(self._steps)
        self._check_place("step")
        with self._window.lock:
            self.add(gradients, weight=weight)
            full = tf.round(replicas.read(self._window.pending)) >= steps
            if graph.in_xla():
                # What this step has added is sure to be there, and has to be all.
                kinds = self._window.kinds()
                gradients = tf.nest.flatten(gradients)
                complete = all(g is not None for g in gradients) and not kinds[ROWS].any()
                window_checks.applies_in_xla(complete)
                self._window.refuse_rows()
                graph.when(full, lambda: self._update(kinds))
            else:
                graph.when(full, self._apply)
        return bool(full) if tf.executing_eagerly() else full

    @_as_it_is
    def flush(self) -> Any:
        """Applies the window, if it is not empty.

        Returns:
            Whether it applied. In a graph, a tensor.
        """
        self._check_place("flush")
        window_checks.applies_in_xla(not graph.in_xla())
        with self._window.lock:
            some = replicas.read(self._window.pending) > 0
            graph.when(some, self._apply)
        return bool(some) if tf.executing_eagerly() else some

    @_as_it_is
    def reset(self) -> None:
        """Forgets the window."""
        with self._window.lock:
            replicas.run(self._strategy, self._window.clear)

    def _check_place(self, method: str) -> None:
        window_checks.place_to_apply(self._strategy, replicas.in_replica(), method)

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

    def _apply(self) -> None:
        """Updates from what is in the window."""
        if tf.executing_eagerly():
            self._update(replicas.read(self._window.arrivals).numpy() > 0)
            return
        # In a graph it is fixed which gradients an update has: those that have come so far. For a
        # window with others, because nothing had come yet or because it is shared by functions
        # with different gradients, leave the graph.
        kinds = self._window.kinds()
        as_expected = tf.reduce_all(tf.equal(replicas.read(self._window.arrivals) > 0, kinds))

        def update() -> None:
            if kinds.any():
                self._update(kinds)

        def leave() -> None:
            with tf.control_dependencies([tf.py_function(self._apply_eagerly, [], tf.bool)]):
                # What is read later in the graph must wait: it does, for what is written here.
                for variable in self._everything():
                    for part in replicas.parts(self._strategy, variable):
                        part.assign_add(tf.zeros_like(part))

        graph.when(tf.logical_and(as_expected, bool(kinds.any())), update, leave)

    def _apply_eagerly(self) -> bool:
        with self._window.lock:
            self._apply()
        return True

    def _everything(self) -> List[Variable]:
        """The variables that an update writes, as far as they are known."""
        window, variables = self._window, getattr(self.optimizer, "variables", [])
        variables = variables() if callable(variables) else variables
        of_optimizer = [replicas.tf_variable(variable) for variable in variables]
        counts = [window.pending, window.total, window.arrivals]
        return [*self._weights, *of_optimizer, *counts, *window.variables_of_sums()]

    def _update(self, kinds: Kinds) -> None:
        """Updates from gradients of these kinds, and begins a new window."""
        window_checks.some_gradients(bool(kinds.any()))
        total = replicas.read(self._window.total)
        one = tf.ones_like(total)
        factor = one if self._reduction == "sum" else tf.math.divide_no_nan(one, total)

        def apply() -> None:
            gradients = self._window.gradients(kinds, factor)
            update.apply_gradients(self.optimizer, gradients, self._variables)
            self._window.clear()

        replicas.run(self._strategy, apply)


def _count(variable: Variable) -> Union[int, Tensor]:
    count = tf.cast(tf.round(replicas.read(variable)), tf.int32)
    return int(count) if tf.executing_eagerly() else count


def _as_tensor(number: Any, dtype: tf.DType) -> Tensor:
    """A number as a tensor. `tf.cast` would make a float32 of Python's first."""
    if isinstance(number, (numbers.Real, np.ndarray)):
        return tf.constant(np.array(number, dtype.as_numpy_dtype))
    return tf.cast(number, dtype)

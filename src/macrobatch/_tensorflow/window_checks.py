"""What GradientAccumulator checks, and its messages. Those that it shares are elsewhere."""

import numbers
from typing import Any, List, Optional, Sequence

import tensorflow as tf

from macrobatch import _optimizer_checks
from macrobatch._checks import shown
from macrobatch._types import Check, Gradient, Tensor, Variable


def steps(value: Any) -> Optional[int]:
    """Returns `value` as an int, if it is a positive whole number or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            "steps must be a positive integer, the number of micro-batches in a window, or None. "
            f"Received: steps={value!r}."
        )
    return int(value)


def has_steps(value: Optional[int]) -> int:
    """Returns `value`, if there is one."""
    if value is None:
        raise ValueError(
            "step() applies when the window is full, and needs to know its length. Received: "
            "steps=None. Pass GradientAccumulator(..., steps=4), or call add() and apply()."
        )
    return value


def applies_gradients(value: Any, nonfinite: str) -> None:
    """Raises unless `value` is an optimizer that a GradientAccumulator can call."""
    if not callable(getattr(value, "apply_gradients", None)):
        raise ValueError(
            "optimizer must have a method apply_gradients, as those of Keras, tf_keras and "
            f"tf.compat.v1.train have. Received: {shown(value)}."
        )
    _optimizer_checks.optimizer(value)
    _optimizer_checks.sees_overflows(value, nonfinite, "window")


def known_shapes(variables: Sequence[Variable]) -> None:
    """Raises for variables that may change their shape."""
    for variable in variables:
        shape = tf.TensorShape(variable.shape)
        if not shape.is_fully_defined():
            raise ValueError(
                "Variables must have known shapes. Received: "
                f"{_name(variable)!r} of shape {shape}. Make it without shape=."
            )


def gradients(value: Any, variables: Sequence[Variable]) -> List[Gradient]:
    """Returns gradients as a list, if they fit the variables."""
    flat = tf.nest.flatten(value)
    if len(flat) != len(variables) or hasattr(value, "__next__"):
        raise ValueError(
            f"There must be one gradient for each of the {len(variables)} variables, None where "
            "there is none: pass tape.gradient(loss, variables), without the variables. "
            f"Received: {len(flat)} gradients, {shown(value)}."
        )
    return [_fitting(gradient, variable) for gradient, variable in zip(flat, variables)]


def _fitting(gradient: Any, variable: Variable) -> Gradient:
    """Returns a gradient, if its dtype and shape fit the variable, as far as they are known."""
    if gradient is None:
        return None
    dtype = tf.as_dtype(variable.dtype)
    if isinstance(gradient, float) and dtype.is_floating:
        gradient = tf.constant(gradient, dtype)  # which would be a float32 otherwise
    elif not tf.is_tensor(gradient):
        gradient = tf.convert_to_tensor(gradient)
    if isinstance(gradient, (tf.SparseTensor, tf.RaggedTensor)):
        raise ValueError(
            "Each gradient must be a tensor, a tf.IndexedSlices or None. Received: a "
            f"{type(gradient).__name__} for {_name(variable)!r}."
        )
    given = tf.as_dtype(gradient.dtype)
    real, imaginary = given.is_floating, given.is_complex and dtype.is_complex
    if not (imaginary or (real and (dtype.is_floating or dtype.is_complex))):
        raise ValueError(
            "Gradients and their variables must be of a floating-point dtype. Received: a gradient "
            f"of dtype {given.name} for {_name(variable)!r} of dtype {dtype.base_dtype.name}. Pass "
            "what tape.gradient returns, or None for a variable that is not trained."
        )
    shape = tf.TensorShape(variable.shape)
    if isinstance(gradient, tf.IndexedSlices):  # which need not know the size of the table
        rows = gradient.indices.shape
        if shape.ndims == 0 or not rows.is_compatible_with(gradient.values.shape[:1]):
            raise ValueError(f"{_rows(variable)} {_received(gradient)}")
        given = shape[:1].concatenate(gradient.values.shape[1:])
    else:
        given = gradient.shape
    if not shape.is_compatible_with(given):
        raise ValueError(
            f"Each gradient must have the shape of its variable. Received: a gradient of shape "
            f"{tuple(given.as_list())} for {_name(variable)!r} of shape {tuple(shape.as_list())}. "
            "Give the gradients in the order of the variables."
        )
    return gradient


def _name(variable: Variable) -> str:
    return str(getattr(variable, "path", variable.name))


GRADIENT_SHAPES = (
    "Each gradient must have the shape of its variable. Received: one of another shape. Give the "
    "gradients in the order of the variables."
)


def fit_when_run(gradients: Sequence[Gradient], variables: Sequence[Variable]) -> List[Check]:
    """What remains to be checked of gradients: shapes that a graph does not know, and rows."""
    checks: List[Check] = []
    for gradient, variable in zip(gradients, variables):
        shape = tf.TensorShape(variable.shape).as_list()
        if isinstance(gradient, tf.IndexedSlices):
            if not gradient.values.shape[1:].is_fully_defined():
                checks.append(
                    (_has_shape(gradient.values[:1], [None, *shape[1:]]), GRADIENT_SHAPES)
                )
            rows = tf.cast(gradient.indices, tf.int64)
            there = tf.reduce_all(tf.logical_and(rows >= 0, rows < shape[0]))
            is_wrong = tf.executing_eagerly() and not there  # then numbers can be named
            message = f"{_rows(variable)} {_received(gradient, is_wrong)}"
            checks.append((there, message))
            if not (gradient.values.shape[:1].is_fully_defined() and rows.shape.is_fully_defined()):
                alike = tf.equal(tf.shape(gradient.values)[:1], tf.shape(rows))
                checks.append((tf.reduce_all(alike), message))
        elif gradient is not None and not gradient.shape.is_fully_defined():
            checks.append((_has_shape(gradient, shape), GRADIENT_SHAPES))
    return checks


def _has_shape(tensor: Tensor, shape: List[Optional[int]]) -> Tensor:
    """Whether a tensor has this shape, None being any size, when the graph runs."""

    def sizes_agree() -> Tensor:
        known = [i for i, size in enumerate(shape) if size is not None]
        sizes = tf.gather(tf.shape(tensor), tf.constant(known, tf.int32))
        return tf.reduce_all(tf.equal(sizes, tf.constant([shape[i] for i in known], tf.int32)))

    # Without the rank, [1] and [1, 1] would be equal by broadcasting.
    return tf.cond(tf.equal(tf.rank(tensor), len(shape)), sizes_agree, lambda: tf.constant(False))


def _rows(variable: Variable) -> str:
    shape = tf.TensorShape(variable.shape)
    return (
        "The rows of a gradient must be rows of its variable, with one index for each. "
        f"{_name(variable)!r} has shape {tuple(shape.as_list())}."
    )


def _received(gradient: tf.IndexedSlices, with_numbers: bool = False) -> str:
    """What a message says of rows."""
    indices = gradient.indices
    text = f"Received: values of shape {gradient.values.shape}, indices of shape {indices.shape}"
    if with_numbers:
        text += f" from {indices.numpy().min()} to {indices.numpy().max()}"
    return f"{text}."


def some_gradients(there_are: bool) -> None:
    """Raises for an update without any gradient."""
    if not there_are:
        raise ValueError(
            "No variable got a gradient in this window. Received: None for every variable. Check "
            "that the loss depends on the variables; reset() forgets the window."
        )


def raises_in_xla(nonfinite: str, in_xla: bool) -> None:
    """Raises for a policy that XLA has no way for."""
    if in_xla and nonfinite == "raise":
        raise ValueError(
            'nonfinite="raise" cannot work inside a function with jit_compile=True, which has no '
            'assertions. Use "skip" and look at skipped, or call add() outside of that function.'
        )


WEIGHT = "The weight of a micro-batch must be a finite number, 0 or more."


def weight(value: Any, reduction: str) -> None:
    """Raises if a micro-batch's weight is missing, not wanted, no scalar, or known to be wrong."""
    if reduction == "sum":
        if value is not None:
            raise ValueError(
                f'reduction="sum" adds gradients as they are. Received: weight={value!r}. Leave '
                'it out, or use reduction="mean".'
            )
        return
    if value is None:
        raise ValueError(
            "weight= is required: how much this micro-batch counts in the mean. Received: None. "
            "Pass what its loss is a mean over, such as the number of its examples or tokens: "
            "weight=len(x), or tf.shape(x)[0] where the graph does not know it."
        )
    shape = tf.TensorShape(getattr(value, "shape", ()))
    if shape.ndims != 0:
        raise ValueError(
            "The weight of a micro-batch must be a scalar. "
            f"Received: a value of shape {shape}. Sum it."
        )
    known = value if tf.executing_eagerly() or not tf.is_tensor(value) else 0
    dtype = value.dtype if tf.is_tensor(value) else tf.float32
    try:
        good = 0 <= float(known) < float("inf") and not isinstance(known, (str, bytes))
    except (TypeError, ValueError):
        good = False
    if not good or dtype.is_complex or dtype == tf.string:
        raise ValueError(f"{WEIGHT} Received: weight={value}.")


def same_reduction(saved: str, reduction: str) -> None:
    """Raises for a checkpoint of a window that is a sum of something else."""
    if saved != reduction:
        raise ValueError(
            "A window must be restored with the reduction that it was saved with. Received: a "
            f'checkpoint with reduction="{saved}", and a GradientAccumulator with '
            f'reduction="{reduction}". Make it with reduction="{saved}", or leave it out of the '
            "tf.train.Checkpoint that restores."
        )


def may_bring_rows(there_is_room: bool) -> None:
    """Raises for a checkpoint with rows that a compiled function would not see."""
    if not there_is_room:
        raise ValueError(
            "A compiled step() cannot go on with a window that has rows of a table. Received: a "
            "checkpoint with such rows, after a function with jit_compile=True was traced. "
            "Restore it before that, apply() the window, and then call the function."
        )


EMPTY_WINDOW = (
    "There is nothing to apply: no micro-batch was added since the last update. Received: "
    "pending=0. Call add() first, or flush(), which applies only if there is something."
)

NOT_FINITE = (
    'A gradient is not finite, and nonfinite="raise". The micro-batch was not added. Find its '
    'cause with tf.debugging.enable_check_numerics(), or leave such micro-batches out with "skip".'
)


def place_to_add(strategy: Any, in_replica: bool) -> None:
    """Raises if gradients of replicas cannot be added here."""
    if strategy is not None and not in_replica:
        raise ValueError(
            "Each replica adds its own gradients. Received: a call outside of strategy.run, for "
            f"variables of {type(strategy).__name__}. Call add() inside the function that "
            "strategy.run runs, and apply() or flush() outside of it."
        )


def place_to_apply(strategy: Any, in_replica: bool, method: str) -> None:
    """Raises if an update of replicas cannot be made here."""
    if strategy is not None and (in_replica or method == "step"):
        where = "inside" if in_replica else "outside of"
        raise ValueError(
            "For variables of a strategy, call add() inside strategy.run, and apply() or flush() "
            f"outside of it. Received: {method}() {where} strategy.run, for "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas."
        )


def applies_in_xla(complete: bool) -> None:
    """Raises for an update inside a compiled function that may lack gradients."""
    if not complete:
        raise ValueError(
            "Inside a function with jit_compile=True, only step() can apply, and only if every "
            "variable has a gradient in every micro-batch: what is there must be known when it "
            "is compiled. Call add() inside the function and apply() outside of it, or leave "
            "variables without gradients out."
        )

"""What GradientAccumulator checks, and its messages. Those that it shares are in _checks."""

import numbers
from typing import Any, List, Optional, Sequence

import tensorflow as tf

from macrobatch import _checks


def one_of(name: str, value: Any, options: Sequence[str]) -> Any:
    """Returns `value`, if it is one of the options."""
    if value not in options:
        raise ValueError(f"{name} must be one of {list(options)}. Received: {name}={value!r}.")
    return value


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
            f"tf.compat.v1.train have. Received: {_checks.shown(value)}."
        )
    _checks.optimizer(value)
    if nonfinite == "skip" and _has_dynamic_scale(value):
        raise ValueError(
            'nonfinite="skip" would hide from the optimizer the overflows that its dynamic loss '
            f'scale reacts to. Received: nonfinite="skip" with {type(value).__name__}. '
            'Use nonfinite="propagate": the optimizer then skips the window and lowers the scale.'
        )


def _has_dynamic_scale(value: Any) -> bool:
    if not any("LossScaleOptimizer" in each.__name__ for each in type(value).__mro__):
        return False
    # Up to TensorFlow 2.3 and in tf.compat.v1 the scale is an object.
    scale = getattr(value, "loss_scale", getattr(value, "_loss_scale", None))
    fixed = type(scale).__name__ == "FixedLossScale"
    return bool(getattr(value, "dynamic", not fixed))


def gradients(value: Any, variables: Sequence[Any]) -> List[Any]:
    """Returns gradients as a list, if they fit the variables."""
    flat = tf.nest.flatten(value)
    if len(flat) != len(variables) or hasattr(value, "__next__"):
        raise ValueError(
            f"There must be one gradient for each of the {len(variables)} variables, None where "
            "there is none: pass tape.gradient(loss, variables), without the variables. "
            f"Received: {len(flat)} gradients, {_checks.shown(value)}."
        )
    flat = [g if g is None or tf.is_tensor(g) else tf.convert_to_tensor(g) for g in flat]
    for gradient, variable in zip(flat, variables):
        if gradient is None:
            continue
        shape = tf.TensorShape(variable.shape)
        if isinstance(gradient, tf.IndexedSlices):  # which need not know the size of the table
            given = shape[:1].concatenate(gradient.values.shape[1:])
        else:
            given = gradient.shape
        if not shape.is_compatible_with(given):
            name = getattr(variable, "path", variable.name)
            raise ValueError(
                f"Each gradient must have the shape of its variable. Received: a gradient of shape "
                f"{tuple(given.as_list())} for {name!r} of shape {tuple(shape.as_list())}. Give "
                "the gradients in the order of the variables."
            )
    return flat


GRADIENT_SHAPES = (
    "Each gradient must have the shape of its variable. Received: one of another shape. Give the "
    "gradients in the order of the variables."
)


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
    if len(getattr(value, "shape", ())) != 0:
        raise ValueError(
            "The weight of a micro-batch must be a scalar. "
            f"Received: a value of shape {tuple(value.shape)}. Sum it."
        )
    known = value if tf.executing_eagerly() or not tf.is_tensor(value) else 0
    try:
        good = 0 <= float(known) < float("inf")
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"{WEIGHT} Received: weight={known}.")


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

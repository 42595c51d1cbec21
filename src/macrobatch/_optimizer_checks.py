"""Checks of optimizers. Runs on TensorFlow 1.14 too."""

from typing import Any

from macrobatch import _internals


def optimizer(value: Any) -> None:
    """Raises if the optimizer, or one inside it, accumulates by itself."""
    for each in _internals.with_inner_optimizers(value):
        if getattr(each, "gradient_accumulation_steps", None):
            raise ValueError(
                "The optimizer accumulates gradients by itself, over several steps. "
                f"Received: gradient_accumulation_steps={each.gradient_accumulation_steps} on "
                f"{type(each).__name__}. Leave it out: macrobatch itself makes one update of them "
                "all."
            )


def sees_overflows(value: Any, nonfinite: str, skipped: str) -> None:
    """Raises if an optimizer with a dynamic loss scale would not see what the scale reacts to.

    Args:
        value: the optimizer.
        nonfinite: what is done with numbers that are not finite.
        skipped: what such an optimizer leaves out by itself: the window, or the update.
    """
    if nonfinite == "skip" and has_dynamic_scale(value):
        raise ValueError(
            'nonfinite="skip" would hide from the optimizer the overflows that its dynamic loss '
            f'scale reacts to. Received: nonfinite="skip" with {type(value).__name__}. '
            f'Use nonfinite="propagate": the optimizer then skips the {skipped} and lowers the '
            "scale."
        )


def has_dynamic_scale(value: Any) -> bool:
    """Whether an optimizer, or one inside it, has a loss scale that reacts to overflows."""
    return any(_has_dynamic_scale(each) for each in _internals.with_inner_optimizers(value))


def _has_dynamic_scale(value: Any) -> bool:
    if not any("LossScaleOptimizer" in each.__name__ for each in type(value).__mro__):
        return False
    # Up to TensorFlow 2.3 and in tf.compat.v1 the scale is an object.
    scale = getattr(value, "loss_scale", getattr(value, "_loss_scale", None))
    fixed = type(scale).__name__ == "FixedLossScale"
    return bool(getattr(value, "dynamic", not fixed))

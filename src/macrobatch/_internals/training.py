"""Private names of optimizers and of TensorFlow."""

from typing import Any, Callable, List

# Optimizers

# The method with which an optimizer of Keras 3 sums gradients over replicas. Gradients that are
# summed already must not be summed again, and there is no argument for it.
REDUCING = "_all_reduce_sum_gradients"


def with_inner_optimizers(value: Any) -> List[Any]:
    """An optimizer, and all optimizers inside it, each once: those inside inner ones too."""
    found: List[Any] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        # None of these names is public in all versions. LossScaleOptimizer has an inner optimizer
        # (_optimizer in older versions, and in many wrappers), MultiOptimizer has several.
        if hasattr(each, "apply_gradients") and all(each is not other for other in found):
            found.append(each)
            names = ("inner_optimizer", "_optimizer")
            waiting += [getattr(each, name, None) for name in names]
            waiting += getattr(each, "_inner_optimizers", ())
    return found


def variables_of_optimizer(optimizer: Any) -> List[Any]:
    """The variables that an optimizer was built for. `optimizer.variables` are its own."""
    return list(optimizer._trainable_variables)


# TensorFlow


def is_in_xla(graph: Any) -> bool:
    """Whether XLA will compile a graph that is being traced. XLA needs slices of static size."""
    from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

    return bool(GraphOrParentsInXlaContext(graph))


def is_compiled(function: Any) -> bool:
    """Whether a tf.function has jit_compile=True, which it tells nobody."""
    return bool(getattr(function, "_jit_compile", False))


def is_of_unknown_shape(error: Exception) -> bool:
    """Whether XLA could not compile because a shape depends on data. Only the text tells."""
    return "compile-time constant" in str(error)


def is_recording() -> bool:
    """Whether a tape of this thread records. A tape tells it of itself only."""
    from tensorflow.python.eager import record

    return bool(record.could_possibly_record())


def autograph_status() -> Any:
    """What tf.function does here to `if` and `for` on tensors: by default, make operations."""
    import tensorflow as tf

    return tf.__internal__.autograph.control_status_ctx()  # TensorFlow's name for Keras' use


def autograph_converted(function: Callable[..., Any], status: Any) -> Callable[..., Any]:
    """A function converted as a tf.function would."""
    import tensorflow as tf

    return tf.__internal__.autograph.tf_convert(function, status)

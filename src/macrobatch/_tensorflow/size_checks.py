"""What is special to TensorFlow in sizes that are found: its errors, and what it refuses."""

import tensorflow as tf

# What a compiler raises besides, where a device has no memory.
_NO_MEMORY = ("out of memory", "out_of_memory", "failed to allocate")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory."""
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    kinds = (tf.errors.InternalError, tf.errors.UnknownError)
    return isinstance(error, kinds) and any(text in str(error).lower() for text in _NO_MEMORY)


def exhausted(message: str) -> Exception:
    """An error of TensorFlow that says that there is no memory."""
    error: Exception = tf.errors.ResourceExhaustedError(None, None, message)
    return error


def not_compiled(unit: str) -> ValueError:
    """What to say where a compiler needs to know sizes."""
    return ValueError(
        f'{unit}="auto" does not go with jit_compile=True, where sizes are constants. Expected: a '
        f"number, {unit}=8 for instance. To find one, call macrobatch.value_and_gradients for some "
        f"batches outside of a tf.function: the log says {unit}=..., once it is found."
    )


def not_in_strategy(unit: str, several_workers: bool) -> ValueError:
    """What to say where replicas could not agree on a size."""
    where, way_out = "strategy.run outside of a tf.function", "put strategy.run into a tf.function"
    if several_workers:
        where, way_out = "several workers", "use macrobatch.accumulate, whose workers agree"
    return ValueError(
        f'{unit}="auto" does not go with {where}. Expected: a number, {unit}=8 for instance. '
        f"Or {way_out}."
    )


def not_in_a_graph(unit: str) -> ValueError:
    """What to say where memory has to be watched, but a graph runs without Python."""
    return ValueError(
        f'{unit}="auto" in a tf.function needs a size that was found before, where running out of '
        "memory is no error but the end of the process (on a CPU), or where there is a "
        "memory_limit=. Call macrobatch.value_and_gradients outside of a tf.function for some "
        f"batches first, until the size stays, or pass a number, {unit}=8 for instance."
    )

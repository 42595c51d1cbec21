"""What is said of sizes that are found while training: refusals, errors and lines in the log."""

import logging
from typing import Any, Sequence

import tensorflow as tf

# Python shows warnings of a log on the terminal, if nobody has set up anything else.
LOG = logging.getLogger("macrobatch")

# What a compiler raises besides, where a device has no memory.
_NO_MEMORY = ("out of memory", "out_of_memory", "failed to allocate")
_LESS = (
    "What makes one example smaller: rematerialisation (keras.RematScope), mixed precision "
    "(keras.mixed_precision), shorter sequences or smaller images, a smaller model."
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory."""
    if isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return True
    kinds = (tf.errors.InternalError, tf.errors.UnknownError)
    return isinstance(error, kinds) and any(text in str(error).lower() for text in _NO_MEMORY)


def _exhausted(message: str) -> Exception:
    error: Exception = tf.errors.ResourceExhaustedError(None, None, message)
    return error


def ran_out_at_one(unit: str, message: str) -> Exception:
    """What to raise where not even the smallest micro-batch fits."""
    return _exhausted(
        f"Not even a micro-batch of one example fits in memory ({unit}=1). Nothing of this batch "
        f"has been applied. {_LESS}\n{message}"
    )


def only_here(message: str) -> Exception:
    """What to raise where one of several workers ran out of memory in a step."""
    return _exhausted(
        "This worker ran out of memory in a step that had fitted without the other workers. They "
        "wait for it in this step, so the step cannot be run again. Start again with a smaller "
        f"memory_limit=, or with a number for micro_batch_size=.\n{message}"
    )


def ran_out_while_writing(message: str) -> Exception:
    """What to raise where the optimizer ran out of memory."""
    return _exhausted(
        "Memory ran out while the optimizer was writing. All gradients of the batch were there, so "
        "smaller micro-batches would not help, and the batch is not run again, because some "
        "weights may have been updated. Go on from a checkpoint or a backup "
        "(keras.callbacks.BackupAndRestore), with an optimizer that keeps less (SGD, Adafactor), "
        f"or with a smaller model.\n{message}"
    )


def too_little(limit: Any, least: str, unit: str) -> ValueError:
    """What to say of a limit in which not even the smallest micro-batch fits."""
    return ValueError(
        f"memory_limit must be more than an update with {unit}=1 takes, {least}. "
        f"Received: {limit}. Nothing has been trained. Pass more. {_LESS}"
    )


def shrunk(unit: str, sizes: Sequence[int], whole: int) -> str:
    """What to log where a batch was run again."""
    tried = ", ".join(map(str, sizes[:-1]))
    return (
        f"macrobatch: a batch of {whole} ran out of memory with {unit}={tried}, and was run again "
        f"with {sizes[-1]}: the update is that of the whole batch"
    )


def settled(unit: str, size: int, whole: int, why: str) -> str:
    """What to log where a size has been found."""
    return f"macrobatch: {unit}={size} for batches of {whole}: {why}"


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

"""What is said of sizes that are found while training: errors, and lines in the log."""

from typing import Any, Sequence

_LESS = (
    "What makes one example smaller: rematerialisation (keras.RematScope), mixed precision "
    "(keras.mixed_precision), shorter sequences or smaller images, a smaller model."
)


def ran_out_at_one(unit: str, message: str) -> str:
    """What to say where not even the smallest micro-batch fits."""
    return (
        f"Not even a micro-batch of one example fits in memory ({unit}=1). Nothing of this batch "
        f"has been applied. {_LESS}\n{message}"
    )


def only_here(message: str) -> str:
    """What to say where one of several workers ran out of memory in a step."""
    return (
        "This worker ran out of memory in a step that had fitted without the other workers. They "
        "wait for it in this step, so the step cannot be run again. Start again with a smaller "
        f"memory_limit=, or with a number for micro_batch_size=.\n{message}"
    )


def ran_out_while_writing(message: str) -> str:
    """What to say where the optimizer ran out of memory."""
    return (
        "Memory ran out while the optimizer was writing. All gradients of the batch were there, so "
        "smaller micro-batches would not help, and the batch is not run again, because some "
        "weights may have been updated. Go on from a checkpoint or a backup "
        "(keras.callbacks.BackupAndRestore), with an optimizer that keeps less (SGD, Adafactor), "
        f"or with a smaller model.\n{message}"
    )


def ran_out_in_xla(message: str) -> str:
    """What to say where a compiled step ran out of memory that had fitted before."""
    return (
        "Memory ran out in a compiled step that had fitted before: others may have taken memory in "
        "the meantime. XLA had been given the memory of the weights (jit_compile=True), so that "
        "their values may be lost. Start again from a checkpoint or a backup "
        "(keras.callbacks.BackupAndRestore), with less that runs beside, or with a smaller "
        f"memory_limit=.\n{message}"
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

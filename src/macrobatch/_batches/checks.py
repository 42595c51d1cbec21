"""The validations of batches of sequences, and their messages: what was received, what is expected,
what to do.
"""

import inspect
import numbers
from typing import Any, Optional, Sequence

from macrobatch import _checks

_LENGTHS = "lengths= must be a function that returns the length of each example, as integers."
ONE_PER_EXAMPLE = f"{_LENGTHS} Received: another number of lengths than there are examples."


def sizes(
    micro_batch_size: Any,
    micro_batch_tokens: Any,
    sequence_axis: Any,
    lengths: Any,
    of: Sequence[str],
) -> "tuple[Optional[int], Optional[int], Optional[int], Any]":
    """Returns how to cut, if exactly one size is given and the rest goes with it.

    `of` are the names of the arguments that `lengths` is called with.
    """
    received = (
        f"Received: micro_batch_size={micro_batch_size!r}, "
        f"micro_batch_tokens={micro_batch_tokens!r}, sequence_axis={sequence_axis!r}."
    )
    if (micro_batch_size is None) == (micro_batch_tokens is None):
        raise ValueError(
            "Exactly one of micro_batch_size (examples in memory at one time) and "
            f"micro_batch_tokens (examples times the longest of them) must be given. {received}"
        )
    if micro_batch_size is not None:
        micro_batch_size = _checks.micro_batch_size(micro_batch_size)
    elif not _is_integer(micro_batch_tokens) or micro_batch_tokens < 1:
        raise ValueError(
            "micro_batch_tokens must be a positive integer: what the number of examples times the "
            f"longest of them may be in a micro-batch, 4096 for instance. {received}"
        )
    if sequence_axis is not None and (not _is_integer(sequence_axis) or sequence_axis < 1):
        raise ValueError(
            "sequence_axis must be a positive integer: the axis along which sequences are padded. "
            f"Axis 0 is the examples, so for inputs of shape (examples, positions) it is 1. "
            f"{received}"
        )
    if sequence_axis is None and (micro_batch_tokens is not None or lengths is not None):
        name = "micro_batch_tokens" if micro_batch_tokens is not None else "lengths"
        raise ValueError(
            f"{name}= needs sequence_axis=, the axis along which sequences are padded: for inputs "
            f"of shape (examples, positions) it is 1. {received}"
        )
    if lengths is not None and not (callable(lengths) and _takes(lengths, len(of))):
        raise ValueError(
            f"lengths= must be a function of ({', '.join(of)}) that returns the length of each "
            f"example. Received: lengths={_checks.shown(lengths)}, which "
            f"{'takes other arguments' if callable(lengths) else 'is no function'}."
        )
    as_int = [None if v is None else int(v) for v in (micro_batch_tokens, sequence_axis)]
    return (micro_batch_size, *as_int, lengths)


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _takes(function: Any, count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # Some functions that are not of Python do not tell.
        pass
    return True


def outside_of_xla(in_xla: bool) -> None:
    """Raises in a compiled function, where no shape can depend on data."""
    if in_xla:
        raise ValueError(
            "sequence_axis= cuts sequences to lengths that depend on the data, which XLA cannot "
            "compile. Received: a call inside a function with jit_compile=True (or on a TPU). "
            "Compile the inside instead: leave jit_compile out of your function, and pass "
            "loss_fn=tf.function(loss_fn, jit_compile=True)."
        )


def has_sequences(leaves: Sequence[Any], axis: int, batch: Any) -> None:
    """Raises if nothing in a batch has the sequence axis."""
    if not leaves:
        raise ValueError(
            f"Nothing in the batch has an axis {axis} along which it could be cut. Received: "
            f"sequence_axis={axis} and a batch of {_checks.shown(batch)}."
        )


def has_lengths(leaves: Sequence[Any], axis: int) -> None:
    """Raises if nothing says how long examples are."""
    if not leaves:
        raise ValueError(
            "There is nothing to tell the length of an example from: no integer input, no ragged "
            f"input and no sample weight with an axis {axis}. Pass lengths=, a function that "
            "returns the length of each example."
        )


def given_lengths(lengths: Any) -> None:
    """Raises unless what `lengths` returned are integers, one for each example."""
    if not lengths.dtype.is_integer or len(lengths.shape) != 1:
        raise ValueError(
            f"{_LENGTHS} Received: a tensor of shape {tuple(lengths.shape)} and dtype "
            f"{lengths.dtype.name}. Expected: integers of shape (examples,)."
        )


def free_lengths(inputs: Sequence[Any], axis: int) -> None:
    """Raises if all inputs of a model have a fixed size along the axis."""
    along_axis = [tensor for tensor in inputs if len(tensor.shape) > axis]
    if along_axis and all(tensor.shape[axis] is not None for tensor in along_axis):
        first = along_axis[0]
        free = [None if i == axis else size for i, size in enumerate(first.shape)][1:]
        raise ValueError(
            f"The model has a fixed sequence length, so its inputs cannot be cut along "
            f"sequence_axis={axis}. Received: the input {first.name!r} of shape "
            f"{tuple(first.shape)}. Expected: None along that axis, as in "
            f"keras.Input({tuple(free)}), or no sequence_axis=."
        )


def cannot_be_shorter(axis: Any, error: Exception) -> str:
    """What to say of what runs on whole sequences, but not on shorter ones."""
    return (
        f"The model or its loss has a fixed sequence length: it failed on sequences that are cut "
        f"along sequence_axis={axis}, and not on whole ones. If something that is no sequence "
        "happens to have the size of the sequences along that axis, pad the sequences to another "
        "size; otherwise leave sequence_axis= out. What it failed with: "
        f"{type(error).__name__}: {error}"
    )


WEIGHTED_METRICS = (
    "Pass it in weighted_metrics= with sample weights of 0 for padding, or mask padding with an "
    "Embedding with mask_zero=True."
)


def metric_has_weights(is_whole: bool) -> None:
    """Raises for a metric that takes a mean over all positions, of which some were cut off."""
    if not is_whole:
        raise ValueError(
            "A metric takes means over all positions, so that it depends on padding, and cutting "
            f"padding off would change it. {WEIGHTED_METRICS}"
        )


REFUSAL = "so that cutting it off would change the result"


def not_compared(drew: bool, depends_on_others: bool) -> Optional[str]:
    """What to warn of where it cannot be tried whether anything depends on padding."""
    if drew:
        why = (
            "random numbers are drawn that dropout does not draw (GaussianNoise, for instance), "
            "others for each length"
        )
    elif depends_on_others:
        why = (
            "the padding of a ragged input is made by longer examples beside it, and examples "
            "depend on each other anyway, in BatchNormalization or in a scalar loss"
        )
    else:
        return None
    return (
        f"Whether cutting off padding changes the result cannot be tried: {why}. The update is "
        "that of the whole batch only if nothing depends on padding."
    )


def no_mask(operations: Sequence[str]) -> str:
    """What to say of a loss that knows nothing of padding."""
    lost = f" These pass none on: {', '.join(operations)}." if operations else ""
    return f"No mask reaches the loss, and there are no sample weights.{lost} "


def depends_on_padding(name: str, hint: str, lengths_are_given: bool) -> str:
    """What to say of a loss, or of a metric, that is not the same without padding."""
    what = "The loss, or a layer before it," if name == "loss" else f"The metric {name!r}"
    way_out = (
        "Keep padding out of it, with sample weights of 0, in loss_fn with (losses, weights), or "
        "with a mask: that of an Embedding with mask_zero=True, if every layer up to the loss "
        "passes it on, and no layer pools, attends or convolves over all positions without it. If "
        "all of them count, leave sequence_axis= out."
        if name == "loss"
        else WEIGHTED_METRICS
    )
    if lengths_are_given:
        way_out += " Or lengths= returns lengths that are too short."
    return (
        f"{what} depends on padding, {REFUSAL}. Received: "
        "another value for a micro-batch cut to its longest example than for the same one whole "
        f"(compared once, without dropout). {hint}{way_out}"
    )


def not_synchronized(tokens: Any, synchronized: Sequence[str]) -> None:
    """Raises where replicas would have different numbers of micro-batches, but meet in each."""
    if tokens is not None:
        raise ValueError(
            "Layers in which replicas meet need the same number of micro-batches on each. "
            f"Received: micro_batch_tokens={tokens} and synchronized=True on "
            f"{list(synchronized)}. Pass micro_batch_size= instead, or set synchronized=False."
        )

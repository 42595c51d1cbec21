"""What is checked of batches and of how they are to be cut."""

import contextlib
import inspect
import numbers
from typing import Any, Callable, Iterator, Optional, Sequence, Tuple

import keras
from keras import ops, tree

from macrobatch._checks import shown
from macrobatch._types import Batch, MicroBatches, Tensor

_LENGTHS = "lengths= must be a function that returns the length of each example, as integers."
AUTO = "auto"  # a size that is found while training
ONE_PER_EXAMPLE = f"{_LENGTHS} Received: another number of lengths than there are examples."


def sizes(
    micro_batch_size: Any,
    micro_batch_tokens: Any,
    sequence_axis: Any,
    lengths: Any,
    of: Sequence[str],
) -> "tuple[Any, Any, Optional[int], Any]":
    """Returns how to cut, if not more than one size is given and the rest goes with it.

    A size may be "auto", which the number of examples is too if nothing is given. `of` are the
    names of the arguments that `lengths` is called with.
    """
    received = (
        f"Received: micro_batch_size={micro_batch_size!r}, "
        f"micro_batch_tokens={micro_batch_tokens!r}, sequence_axis={sequence_axis!r}."
    )
    if micro_batch_size is not None and micro_batch_tokens is not None:
        raise ValueError(
            "Only one of micro_batch_size (examples in memory at one time) and "
            f"micro_batch_tokens (examples times the longest of them) can be given. {received}"
        )
    if micro_batch_size is None and micro_batch_tokens is None:
        micro_batch_size = AUTO
    if micro_batch_tokens is None:
        micro_batch_size = _micro_batch_size(micro_batch_size)
    elif not _is_auto(micro_batch_tokens) and not (
        _is_integer(micro_batch_tokens) and micro_batch_tokens >= 1
    ):
        raise ValueError(
            "micro_batch_tokens must be a positive integer: what the number of examples times the "
            'longest of them may be in a micro-batch, 4096 for instance. Or "auto", for what '
            f"is fastest. {received}"
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
            f"example. Received: lengths={shown(lengths)}, which "
            f"{'takes other arguments' if callable(lengths) else 'is no function'}."
        )
    tokens, axis = (
        value if value is None or _is_auto(value) else int(value)
        for value in (micro_batch_tokens, sequence_axis)
    )
    return micro_batch_size, tokens, axis, lengths


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


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


def not_compilable(axis: int) -> str:
    """What to say of a model that XLA cannot compile for any length."""
    return (
        "XLA cannot compile this model for sequences of any length: its gradient has shapes that "
        "are known only when it runs, as those of recurrent layers (LSTM, GRU) are. Received: "
        f"jit_compile=True and sequence_axis={axis}. Compile the model with jit_compile=False, or "
        "leave sequence_axis out."
    )


def has_sequences(leaves: Sequence[Any], axis: int, batch: Any) -> None:
    """Raises if nothing in a batch has the sequence axis."""
    if not leaves:
        raise ValueError(
            f"Nothing in the batch has an axis {axis} along which it could be cut. Received: "
            f"sequence_axis={axis} and a batch of {shown(batch)}."
        )


def has_lengths(leaves: Sequence[Any], axis: int) -> None:
    """Raises if nothing says how long examples are."""
    if not leaves:
        raise ValueError(
            "There is nothing to tell the length of an example from: no integer input, no ragged "
            f"input and no sample weight with an axis {axis}. Pass lengths=, a function that "
            "returns the length of each example."
        )


def given_lengths(lengths: Any) -> Tensor:
    """Returns what `lengths` returned as a tensor, if it is integers, one for each example."""
    try:
        if lengths is None or isinstance(lengths, str):
            raise ValueError
        tensor = ops.convert_to_tensor(lengths)
    except Exception:
        raise ValueError(
            f"{_LENGTHS} Received: {shown(lengths)}. Expected: integers of shape (examples,)."
        ) from None
    if "int" not in str(tensor.dtype) or len(tensor.shape) != 1:
        raise ValueError(
            f"{_LENGTHS} Received: a tensor of shape {tuple(tensor.shape)} and dtype "
            f"{keras.backend.standardize_dtype(tensor.dtype)}. Expected: integers of shape "
            "(examples,)."
        )
    return tensor


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


def _micro_batch_size(value: Any) -> Any:
    """Returns `value` as an int, if it is a positive whole number; or "auto"."""
    if _is_auto(value):
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            "micro_batch_size must be a positive integer: the number of examples whose "
            'activations are in memory at one time, 8 for instance. Or "auto", for what is '
            f"fastest. Received: micro_batch_size={value!r} (of type {type(value).__name__})."
        )
    return int(value)


def kinds_of(batch: Batch) -> Tuple[Optional[int], ...]:
    """For each part of a batch, its rank; None where there is none. Batches of a kind are alike."""
    leaves = tree.flatten(batch)
    return tuple(None if leaf is None else len(leaf.shape) for leaf in leaves)


def batch_shapes(
    leaves: Sequence[Tuple[Optional[int], ...]], shapes: Any, may_be_empty: bool
) -> None:
    """Raises unless all parts of a batch have the examples as their first dimension."""
    if not leaves:
        raise ValueError(f"A batch must hold at least one tensor. Received: {shapes}.")
    if () in leaves:
        raise ValueError(
            "Every part of a batch must have the examples as its first dimension. "
            f"Received: a scalar, in shapes {shapes}. If the dataset yields single examples, batch "
            "it: dataset.batch(512). Otherwise repeat the scalar for every example, or make it a "
            "constant of the model."
        )
    sizes = {shape[0] for shape in leaves if shape[0] is not None}
    if len(sizes) > 1:
        raise ValueError(uneven_batch(shapes))
    if sizes == {0} and not may_be_empty:
        raise ValueError(empty_batch(shapes))


def uneven_batch(shapes: Any) -> str:
    """What to say of a batch whose parts have different numbers of examples."""
    return (
        "All parts of a batch must have the same number of examples as their first dimension. "
        f"Received: shapes {shapes}. If the dataset yields single examples, batch it: "
        "dataset.batch(512). Otherwise make it yield examples and labels together."
    )


def empty_batch(shapes: Any) -> str:
    """What to say of a batch without examples."""
    return (
        f"A batch must have at least one example. Received: shapes {shapes}. "
        "Filter empty batches out of the dataset."
    )


@contextlib.contextmanager
def explaining(
    micro_batches: MicroBatches, dry_run: Callable[[Batch], None]
) -> Iterator[Callable[[Exception], Exception]]:
    """Says so where something fails on sequences that are cut, and not on whole ones.

    Yields a function that does the same for an error that a graph raises later.
    """
    like = micro_batches.whole_and_shorter()

    def explained(error: Exception) -> Exception:
        if like is None or (isinstance(error, ValueError) and "depends on padding" in str(error)):
            return error
        try:
            dry_run(like[0])
        except Exception:
            return error
        try:
            dry_run(like[1])
        except Exception as found:
            return ValueError(cannot_be_shorter(micro_batches.axis, found))
        return error

    try:
        yield explained
    except Exception as error:
        found = explained(error)
        if found is error:
            raise
        raise found from error

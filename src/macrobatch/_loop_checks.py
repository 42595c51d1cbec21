"""What is checked of loops over micro-batches, and of sequences that are cut in them."""

import re
from typing import Any, Iterable, List, Optional, Sequence

from macrobatch._checks import WEIGHTED_METRICS


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
        f"{what} depends on padding, so that cutting it off would change the result. Received: "
        "another value for a micro-batch cut to its longest example than for the same one whole "
        f"(compared once, without dropout). {hint}{way_out}"
    )


# Operations that draw other numbers each time. Those of Keras draw from seeds, which are values,
# and tf.random.stateless_uniform and the like from their arguments.
DRAWING = re.compile("(Random|Rng|Stateful(?!Part)|Multinomial|(Parameterized)?TruncatedNormal)")


def drawing_anew(operations: Iterable[str]) -> List[str]:
    """Which types of operations draw other numbers whenever they run, as tf.random does."""
    return sorted(each for each in operations if DRAWING.match(each))


def draws_nothing_anew(operations: Iterable[str]) -> None:
    """Raises for a forward pass whose second run would draw other random numbers."""
    drawing = drawing_anew(operations)
    if drawing:
        raise ValueError(
            f"{_SAME_TWICE} Received: a forward pass with {drawing}. {_DRAW_FROM_SEEDS}"
        )


_SAME_TWICE = (
    "The forward pass runs twice, so that the loss can see the whole batch, and must come to the "
    "same both times."
)
_DRAW_FROM_SEEDS = (
    "Draw random numbers with layers (Dropout, GaussianNoise), with keras.random and a "
    "keras.random.SeedGenerator, or with tf.random.stateless_uniform and the like; or draw them "
    "before, as a part of the batch. tf.random and NumPy draw others each time."
)
PASSES_DIFFER = (
    f"{_SAME_TWICE} Received: other outputs in the second pass. {_DRAW_FROM_SEEDS} Nor may it "
    "depend on a tf.Variable that it writes itself."
)
LOSSES_DIFFER = (
    "All replicas must come to the same loss of the whole batch. Received: different ones, as "
    f"where the loss draws random numbers. {_DRAW_FROM_SEEDS}"
)


def can_be_gathered(tensors: Iterable[Any]) -> None:
    """Raises for tensors that replicas cannot exchange."""
    kinds = {tensor.dtype.name for tensor in tensors}
    unknown = sorted(kinds & {"string", "complex64", "complex128", "variant", "resource"})
    if unknown:
        raise ValueError(
            "Replicas must exchange what the loss of the whole batch sees: outputs, labels and "
            "weights, and inputs where compute_loss or compute_metrics is overridden, or with "
            f"forward=. Received: tensors of dtype {unknown}. Expected: numbers or booleans. "
            "Convert them in the dataset."
        )


def is_not_sparse(name: str, kind: str) -> None:
    """Raises for an output that TensorFlow has no gradients for."""
    if kind == "sparse":
        raise ValueError(
            f"{name} must be dense or ragged tensors. Received: a tf.SparseTensor. Make it dense, "
            "with tf.sparse.to_dense."
        )


def outputs_of_examples(name: str, leaf: Any, examples: Any) -> None:
    """Raises for an output that cannot have the examples first."""
    rank, size = leaf.shape.rank, leaf.shape[0] if leaf.shape.rank else None
    known = examples if isinstance(examples, int) else None
    if rank is None or rank == 0 or (size is not None and size != known):
        raise ValueError(f"{not_of_examples(name)} (Here: shape {leaf.shape}.)")


def not_of_examples(name: str) -> str:
    """What to say of outputs of another number than there are examples."""
    return (
        f"{name} must have the examples first, so that those of all micro-batches can be joined. "
        "Received: a tensor of another first size than the micro-batch, or of unknown rank. A "
        "loss that a layer computes belongs into add_loss. If a layer has a fixed batch size, as "
        "in keras.ops.reshape(x, (64, -1)), use -1 or keras.ops.shape(x)[0] for the examples."
    )


def not_synchronized(tokens: Any, chosen: Any, synchronized: Sequence[str]) -> None:
    """Raises where replicas would have different numbers of micro-batches, but meet in each."""
    if chosen is not None:
        raise ValueError(
            "Layers in which replicas meet need a size that is known when the step is traced. "
            f'Received: micro_batch_size="auto" and synchronized=True on {list(synchronized)}. '
            "Pass a number, micro_batch_size=8 for instance, or set synchronized=False."
        )
    if tokens is not None:
        raise ValueError(
            "Layers in which replicas meet need the same number of micro-batches on each. "
            f"Received: micro_batch_tokens={tokens} and synchronized=True on "
            f"{list(synchronized)}. Pass micro_batch_size= instead, or set synchronized=False."
        )


def aux_has_rank(leaf: Any) -> None:
    """Raises for auxiliary values of which a graph cannot know how to join them."""
    if leaf.shape.rank is None:
        raise ValueError(
            "In a graph, aux must have known ranks. Received: a tensor of unknown rank, as "
            "tf.py_function returns it. Set it with tensor.set_shape(...)."
        )

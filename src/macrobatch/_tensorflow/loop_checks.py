"""What is checked of loops over micro-batches, and of sequences that are cut in them."""

from typing import Any, Optional, Sequence

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


def not_synchronized(tokens: Any, synchronized: Sequence[str]) -> None:
    """Raises where replicas would have different numbers of micro-batches, but meet in each."""
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

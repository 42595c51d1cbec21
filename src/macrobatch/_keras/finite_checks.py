"""What is said of examples, weights and layers whose numbers are not finite."""

from typing import List, Sequence

from macrobatch._checks import some

# How many examples a message names.
MOST = 10


def own_train_step(policy: str) -> str:
    """What to say of a step of the user's own, which writes while it runs."""
    return (
        f"nonfinite={policy!r} needs a train step that writes nothing before all of its numbers "
        "are known. The train_step of this model is its own, and writes when it likes. Received: "
        f'nonfinite={policy!r} for a model that overrides train_step. Use nonfinite="propagate", '
        "or override compute_loss instead."
    )


def synchronized(policy: str, layers: Sequence[str]) -> str:
    """What to say of layers in which replicas must meet."""
    return (
        f"nonfinite={policy!r} runs a batch again without some of its examples. Layers with "
        f"synchronized=True need the same number of them on each replica. Received: {layers}. Set "
        'synchronized=False, or use nonfinite="propagate".'
    )


def weights(names: List[str]) -> str:
    """What to say of weights that are not finite before a batch."""
    return (
        f"No example is at fault: weights are not finite before the batch: {some(names)}. Nothing "
        "has changed. Start again from weights that are finite: a checkpoint, or new ones with a "
        "smaller learning rate."
    )


def regularizers() -> str:
    """What to say of regularisers that are not finite."""
    return (
        "No example is at fault: the weight regularisers of the model, or their gradients, are "
        "not finite, although all weights are. Nothing has changed. Look for weights that are very "
        "large, and for regularisers that have no derivative where a weight is 0."
    )


def refused(groups: List[List[int]], examples: int, where: str) -> str:
    """What to say of bad examples that are an error.

    Args:
        groups: examples that are bad: alone, or together.
        examples: the number of examples in the batch.
        where: what is the first that is not finite.
    """
    return (
        f'{_named(groups)} not finite, and nonfinite="raise". Received: a batch of {examples} '
        f"examples, counted from 0. {where}Nothing has changed. Look at these examples, or train "
        'without them: nonfinite="skip".'
    )


def skipped(groups: List[List[int]], examples: int) -> str:
    """What to say of bad examples that are left out."""
    return (
        f"{_named(groups)} not finite, in a batch of {examples} examples, counted from 0. The "
        "update was made from the other examples. The log skipped_examples counts all that are "
        "left out. Later ones in this fit are not named."
    )


def all_skipped(groups: List[List[int]], examples: int) -> str:
    """What to say of a batch that has no good example."""
    return (
        f"{_named(groups)} not finite. These are all {examples} examples of the batch: no update "
        "was made. The log skipped_examples counts them. Later batches in this fit of which no "
        "example is left are not named."
    )


ELSEWHERE = "Another worker has these examples, and says what of them is not finite first. "


def first_place(example: int, where: str, inputs: Sequence[str]) -> str:
    """What of an example is not finite first.

    Args:
        example: its place in the batch.
        where: "loss", "gradient", or the name of a layer in quotes.
        inputs: what of the example was not finite from the start.
    """
    given = f" (not finite in the batch itself: {', '.join(inputs)})" if inputs else ""
    if where == "gradient":
        return f"In example {example}, only the gradient is not finite{given}. "
    if where == "loss":
        return f"In example {example}, the loss is the first that is not finite{given}. "
    return f"In example {example}, the first layer whose output is not finite is {where}{given}. "


def _named(groups: List[List[int]]) -> str:
    """The examples, as the subject of a sentence: "The loss or the gradient of ... is"."""
    alone = [str(group[0]) for group in groups if len(group) == 1]
    together = [group for group in groups if len(group) > 1]
    parts = []
    if alone:
        parts.append(f"example{'s' if len(alone) > 1 else ''} {_list(alone)}")
    for group in together:
        parts.append(f"examples {_list([str(each) for each in group])} together (not one by one)")
    return f"The loss or the gradient of {' and of '.join(parts)} is"


def _list(places: List[str]) -> str:
    more = f", ... ({len(places)} in all)" if len(places) > MOST else ""
    return ", ".join(places[:MOST]) + more

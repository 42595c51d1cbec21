"""What is said where examples meet, and where nobody can tell."""

from typing import Dict, List, Sequence

from macrobatch._checks import some

SO = "so that the update is not that of the whole batch"
SIZE = "how many examples a micro-batch has, or on the place of an example in it"


def messages(
    layers: Sequence[str], losses: Sequence[str], own_names: Dict[str, str], is_random: bool
) -> List[str]:
    """What to say of a model after a trial. Losses have names of their own, besides Keras'."""
    found = [of_layers(layers)] if layers else []
    found += [of_losses(losses, own_names)] if losses else []
    return [*found, RANDOM] if is_random else found


def of_layers(names: Sequence[str]) -> str:
    """What to say of layers in which examples meet."""
    return (
        f"Examples meet in these layers: {some(names)}. What comes of an example depends on "
        f"the other examples of its micro-batch, {SO}. Use layers that work by example "
        "(LayerNormalization, attention within an example). If a layer compares examples for the "
        "sake of the loss, move that into the loss and pass whole_batch_loss=True. A larger "
        "micro_batch_size only brings the update closer to that of the whole batch."
    )


def of_losses(names: Sequence[str], own_names: Dict[str, str]) -> str:
    """What to say of losses in which examples meet."""
    return (
        f"Examples meet in these losses: {some(names)}. {_after_outputs(names, own_names)}The loss "
        f"of an example depends on the other examples of its micro-batch, {SO}. Compute them on "
        "the predictions of the whole batch: macrobatch.accumulate(..., whole_batch_loss=True)."
    )


def _after_outputs(names: Sequence[str], own_names: Dict[str, str]) -> str:
    """What losses are called that Keras names after outputs, whose names the user may not know."""
    others = [
        f"{name!r} has {own_names[name]!r}"
        for name in names[:3]
        if own_names.get(name) not in ("", None, name)
    ]
    return f"Keras names losses after outputs: {', '.join(others)}. " if others else ""


def of_sizes(layers: Sequence[str], losses: Sequence[str], own_names: Dict[str, str]) -> List[str]:
    """What to say of layers and of losses that depend on how many examples there are."""
    found = []
    if layers:
        found.append(
            f"These layers depend on {SIZE}: {some(layers)}. Micro-batches have fewer examples, "
            f"{SO}. Divide by no number of examples, take numbers by example from the data and not "
            "from arange, and draw with a keras.random.SeedGenerator and not with a number as seed."
        )
    if losses:
        found.append(
            f"These losses depend on {SIZE}: {some(losses)}. "
            f"{_after_outputs(losses, own_names)}Micro-batches have fewer examples, "
            f"{SO}. Return one value per example, divided by no number of examples: Keras takes "
            "the mean. Or compute them on the predictions of the whole batch: "
            "macrobatch.accumulate(..., whole_batch_loss=True)."
        )
    return found


def of_loss_fn(names: Sequence[str]) -> str:
    """What to say of a user's `loss_fn`, and of layers that it calls."""
    return _of_function("loss_fn", names) + (
        "Let one function make predictions by example, and compare examples in a loss of the "
        "whole batch: macrobatch.value_and_gradients(..., forward=)."
    )


def of_function_and_size(name: str, layers: Sequence[str]) -> str:
    """What to say of a user's function that depends on how many examples there are."""
    which = f" (because of these layers: {some(layers)})" if layers else ""
    return (
        f"{name} depends on {SIZE}{which}. Micro-batches have fewer examples, {SO}. Take numbers "
        "by example from the data, not from arange. Divide what comes of an example by no number "
        "of examples. A loss is one value per example, or their mean."
    )


def of_forward(names: Sequence[str]) -> str:
    """What to say of a user's `forward`, and of layers that it calls."""
    return _of_function("forward", names) + (
        "Let forward work by example (LayerNormalization, attention within an example), and "
        "compare examples in loss_fn, which sees the outputs of the whole batch."
    )


def _of_function(name: str, names: Sequence[str]) -> str:
    where = f"in these layers, which {name} calls: {some(names)}" if names else f"in {name}"
    return (
        f"Examples meet {where}. What comes of an example depends on the other examples of its "
        f"micro-batch, {SO}. "
    )


RANDOM = (
    "It is not known whether examples meet in a layer or in the loss, which would make the update "
    "another one than that of the whole batch: two runs of the same examples differ. Random "
    "numbers that the backend or NumPy draws without Keras are others in each run. Draw with "
    "keras.random and a keras.random.SeedGenerator, which can be put back, to find out."
)


NOT_FINITE = (
    "It is not known whether examples meet in a layer or in the loss, which would make the update "
    "another one than that of the whole batch: the loss of the first examples is NaN or infinite. "
    "Look for the reason in the data, in the learning rate, or in a logarithm or a quotient of the "
    "loss. After another accumulate or compile, the next batch is tried."
)


def failed(examples: int, error: Exception) -> str:
    """What to say of a model that cannot be tried."""
    reason = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__
    return (
        "It is not known whether examples meet in a layer or in the loss, which would make the "
        f"update another one than that of the whole batch: a run of {examples} examples, outside "
        f"of any graph, failed. {text[:300]}"
    )

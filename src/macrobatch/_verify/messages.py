"""The causes in words: what happens, and what to do."""

from typing import Sequence

from macrobatch._verify.report import Cause, some


def batch_normalization(names: Sequence[str], also_another: bool) -> Cause:
    """Layers that normalise by the statistics of a micro-batch."""
    more = " With these layers at fixed statistics a difference remains." if also_another else ""
    gone = "" if also_another else " With these layers at fixed statistics the difference is gone."
    return Cause(
        "batch_normalization",
        tuple(names),
        "BatchNormalization normalises by the statistics of each micro-batch, not of the batch."
        + more
        + gone,
        "Use a larger micro_batch_size that divides the batch, freeze these layers "
        "(trainable=False), or normalise by example (LayerNormalization, GroupNormalization).",
        "update",
    )


def layers_meet(names: Sequence[str]) -> Cause:
    """Layers in which examples meet."""
    return Cause(
        "examples_meet",
        tuple(names),
        "What these layers make of an example depends on the other examples of its micro-batch.",
        "Use layers that work by example. If a layer compares examples for the sake of the loss, "
        f"move that into the loss, which can see the whole batch: {WHOLE_BATCH_LOSS}.",
        "update",
    )


def losses_meet(names: Sequence[str], repair: str) -> Cause:
    """Losses with a value per example in which examples meet."""
    return Cause(
        "examples_meet",
        tuple(names),
        "The loss of an example depends on the other examples of its micro-batch.",
        repair or f"Compute the loss on the predictions of the whole batch: {WHOLE_BATCH_LOSS}.",
        "update",
    )


def layers_and_size(names: Sequence[str]) -> Cause:
    """Layers that depend on how many examples there are, or on their places."""
    return Cause(
        "number_of_examples",
        tuple(names),
        "What these layers make of an example depends on how many examples its micro-batch has, or "
        "on its place among them.",
        "Divide by no number of examples, take numbers by example from the data and not from "
        "arange, and draw with a keras.random.SeedGenerator and not with a number as seed.",
        "update",
    )


def losses_and_size(names: Sequence[str], repair: str) -> Cause:
    """Losses with a value per example that depend on how many there are, or on their places."""
    return Cause(
        "number_of_examples",
        tuple(names),
        "The loss of an example depends on how many examples its micro-batch has, or on its place "
        "among them.",
        repair
        or "Return one value per example, divided by no number of examples: Keras takes the mean. "
        f"Or compute the loss on the predictions of the whole batch: {WHOLE_BATCH_LOSS}.",
        "update",
    )


def scalar_loss(names: Sequence[str], repair: str) -> Cause:
    """Losses that are one number for the batch, and no mean over examples."""
    return Cause(
        "scalar_loss",
        tuple(names),
        "This loss is one number for the batch. It counts as a mean over the examples, and is "
        "none: the micro-batches together come to another value than the batch.",
        repair
        or "Return one value per example, or pass micro_batch_weight=, a function that returns "
        f"what the loss is a mean over. A loss of predictions can see all of them: "
        f"{WHOLE_BATCH_LOSS}. A scalar that a layer adds cannot.",
        "update",
    )


WHOLE_BATCH_LOSS = "whole_batch_loss=True"


def weight(code: str) -> str:
    """The argument that gives micro-batches a weight."""
    return f"micro_batch_weight=lambda x, y, sample_weight: {code}"


def repair(found: Sequence[str]) -> str:
    """What to do where one of some arguments makes it exact; empty if none does."""
    if not found:
        return ""
    return f"Pass {', or '.join(found)}. With it the update is exact here, which was tried."


def padding(refusal: str, works_without: bool) -> Cause:
    """A batch that cannot be cut by length."""
    advice = "Mask padding (an Embedding with mask_zero=True), or give it sample weights of 0."
    if works_without:
        advice += " Or leave sequence_axis= out: the update is then exact, which was tried."
    return Cause(
        "padding",
        (),
        f"fit() refuses to cut sequences along sequence_axis here. {refusal}",
        advice,
        "update",
    )


def state(names: Sequence[str]) -> Cause:
    """Variables that the forward pass writes once per micro-batch."""
    return Cause(
        "state",
        tuple(names),
        "The forward pass writes these variables once per micro-batch, not once per batch.",
        "Make sure that the layer allows for it. A BatchNormalization layer that is called twice, "
        "or uses renorm, needs a layer of its own for each call, without renorm.",
        "statistics",
    )


def metrics(names: Sequence[str], by_the_step: bool) -> Cause:
    """Metrics that do not report the whole batch."""
    reason = (
        "The loss or the forward pass updates these metrics, so once per micro-batch: each update "
        "counts the same, however many examples it is of."
        if by_the_step
        else "These metrics take one number per update, which counts the same however many "
        "examples it is of."
    )
    return Cause(
        "metrics",
        tuple(names),
        f"{reason} The weights are not affected.",
        "Update the metric with one value per example, or with the number of examples as "
        "sample_weight.",
        "metrics",
    )


def repeated_rows(names: Sequence[str], difference: float) -> Cause:
    """A table of which rows repeat, under an optimizer that does more than add."""
    return Cause(
        "repeated_rows",
        tuple(names),
        "Rows of these tables repeat in the batch. Plain Keras on TensorFlow hands the optimizer "
        "each occurrence by itself, which for this optimizer is not the update of the gradient: "
        f"plain Keras is off by {difference:.1e} of the step. macrobatch adds the rows up first, "
        "and is compared with the update of the true gradient.",
        "Nothing. Expect weights other than those of plain Keras.",
        "nothing",
    )


def precision(names: Sequence[str], difference: float) -> Cause:
    """Narrower numbers inside a float64 model."""
    parts = f"These compute with fewer digits: {some(names)}." if names else ""
    return Cause(
        "precision",
        tuple(names),
        f"Something in this float64 model computes in float32. {parts} So results agree to "
        f"{difference:.1e} only. All in float64 the difference is gone, so it is rounding.",
        'Give every layer dtype="float64", and call keras.config.set_floatx("float64") before '
        "the losses are made, to see it to the last digit.",
        "rounding",
    )


def hidden_precision(difference: float) -> Cause:
    """Numbers that are narrower for a reason that the model does not show."""
    return Cause(
        "precision",
        (),
        "Something in the model computes in float32, whatever its dtype is. The examples in "
        f"another order differ by {difference:.1e} too, in plain Keras, so it is rounding.",
        "Look for a cast to float32 in a layer or in the loss, to see it to the last digit.",
        "rounding",
    )


def schedule(decay_steps: int, updates: int, micro_batches: int) -> Cause:
    """A schedule that seems to count micro-batches."""
    return Cause(
        "schedule",
        (),
        f"The learning rate decays over {decay_steps} steps, and there will be {updates} updates "
        f"of {micro_batches} micro-batches each. With macrobatch one step is one update, so "
        "the schedule would end far from where it leads to.",
        f"If decay_steps was counted in micro-batches, use decay_steps={updates}.",
        "nothing",
    )


def random() -> Cause:
    """Numbers that are drawn anew each time."""
    return Cause(
        "random",
        (),
        "Two updates of the whole batch by plain Keras, from the same weights, differ: something "
        "draws random numbers that cannot be replayed, such as tf.random or NumPy.",
        "Draw with keras.random and a keras.random.SeedGenerator, and verify again.",
        "update",
    )


def unknown(names: Sequence[str]) -> Cause:
    """A difference that nothing here explains."""
    return Cause(
        "unknown",
        tuple(names),
        "The update differs from that of the whole batch, most for these variables, for no reason "
        "that was tried.",
        "Please report it, with the model.",
        "update",
    )


def own_step(names: Sequence[str], warned: Sequence[str]) -> Cause:
    """A train step of the user's own."""
    return Cause(
        "own_train_step",
        tuple(names),
        "The model has a train step of its own, which makes another update of micro-batches than "
        + " ".join(["of the batch, most for these variables.", *warned]),
        "Where examples meet, compare them with macrobatch.value_and_gradients(..., forward=) "
        "inside the step. Use means over examples elsewhere.",
        "update",
    )


def not_finite(where: str, parts: Sequence[str]) -> Cause:
    """Plain Keras' own update is not finite."""
    begins = "The batch is finite: the model, its loss or its weights make the numbers."
    advice = "Look at the loss and at the weights, which may not be finite themselves."
    if parts:
        begins = f"It begins in the batch: {', '.join(parts)} has NaN or infinity."
        advice = "Leave such examples out, and verify again."
    return Cause(
        "not_finite",
        tuple(parts) or (where,),
        f"The {where} of the whole batch is not finite in plain Keras, so there is nothing to "
        f"compare with. {begins}",
        advice,
        "update",
    )

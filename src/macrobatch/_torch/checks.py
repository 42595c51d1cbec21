"""What is checked of models on torch, and what is said of them."""

from typing import Iterable, Sequence, Tuple

from macrobatch._checks import some


def no_own_train_step(is_own: bool) -> None:
    """Raises for a model with a train step of its own."""
    if is_own:
        raise ValueError(
            "On torch, a train_step of the model's own cannot be cut into micro-batches: its "
            "backward() leaves the gradients of one micro-batch where its optimizer takes those of "
            "the batch. Received: a model that overrides train_step. Override compute_loss "
            "instead, which fit() calls for each micro-batch, and pass whole_batch_loss=True if "
            "it compares examples. Or accumulate in the step itself: for each micro-batch, "
            "(loss * share).backward(), where share is its part of the examples; then one "
            "optimizer.apply."
        )


def counts_memory(device: str, does: bool) -> None:
    """Raises for a limit of a GPU whose peaks torch does not tell."""
    if not does:
        raise ValueError(
            "torch does not tell the peak memory of this GPU, so that memory_limit= cannot be "
            f"kept. Received: {device}. Leave memory_limit= out: a batch that runs out of memory "
            "is run again with a smaller size."
        )


def batch_norm_of_torch(names: Sequence[str]) -> str:
    """What to say of BatchNorm modules of torch inside a model."""
    return (
        "torch.nn.BatchNorm normalises by the statistics of each micro-batch, and moves its "
        "running statistics once per micro-batch, not once per batch: the update is not exactly "
        f"that of the whole batch. Modules: {some(names)}. Use keras.layers.BatchNormalization, "
        "whose statistics are pooled over the batch, or normalise by example "
        "(torch.nn.LayerNorm, torch.nn.GroupNorm)."
    )


def no_distributed_modules(names: Iterable[str]) -> None:
    """Raises for modules that exchange gradients in each backward pass."""
    found = list(names)
    if found:
        raise ValueError(
            "DistributedDataParallel exchanges gradients in each backward pass, so once per "
            "micro-batch, and takes the mean over processes, which is not the mean over the "
            f"examples of all of them. Received: such a module in the layers {some(found)}. Give "
            "the layer the module itself, without the wrapper, and train in one process."
        )


LEAVES_MORE = (
    "its call leaves more than its outputs, and torch.compile may lose that: a mask, a loss that a "
    "layer adds, moving statistics, or numbers drawn from a seed. (With sample weights, masks "
    "cannot be told apart.)"
)
RUNS_TWICE = (
    "with whole_batch_loss=True its call runs twice, with a graph and without, which torch.compile "
    "makes two functions of that may draw different numbers."
)


def not_compiled(why: str) -> str:
    """What to say of a model that is not compiled."""
    return (
        f"jit_compile=True has no effect on this model: {why} The steps run as without jit_compile."
    )


def outputs_of_examples(shape: Tuple[int, ...], examples: int) -> None:
    """Raises for predictions that do not have the examples first."""
    if not shape or shape[0] != examples:
        raise ValueError(
            "The predictions of a model must have the examples first, so that those of all "
            f"micro-batches can be joined. Received: a tensor of shape {shape} for {examples} "
            "examples. A loss that a layer computes belongs into add_loss. If a layer has a fixed "
            "batch size, as in keras.ops.reshape(x, (64, -1)), use -1 or keras.ops.shape(x)[0] for "
            "the examples."
        )


PASSES_DIFFER = (
    "The forward pass runs twice, so that the loss can see the whole batch, and must come to the "
    "same both times. Received: other outputs in the second pass. Draw random numbers with layers "
    "(Dropout, GaussianNoise), with keras.random or with torch; or draw them before, as a part of "
    "the batch. NumPy and generators of your own draw others each time. Nor may the pass depend on "
    "a tensor that it writes itself, as torch.nn.BatchNorm does."
)

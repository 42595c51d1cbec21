"""predict in micro-batches: the predictions of the whole batch, in its order.

TensorFlow's loop is in _fit/predict.
"""

from typing import Any, Callable, List

from keras import ops, tree

from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, Size

# A function of the inputs of a micro-batch.
Predict = Callable[[Batch], Any]


def in_turns(predict: Predict, x: Batch, cut: Cut, engine: BatchEngine) -> Any:
    """What a model predicts for a batch, by micro-batches that run one by one in Python.

    Args:
        predict: predicts a micro-batch.
        x: the inputs of the batch.
        cut: how batches are cut.
        engine: the backend.
    """
    micro_batches = of_batch(x, cut, engine)
    found: List[Any] = []
    for run in micro_batches.runs:
        for index in range(int(run.count)):
            micro_batch = micro_batches.get(run, index)
            found.append(predict(micro_batch))
            check_rows(found[-1], engine.examples(micro_batch))
    return tree.map_structure(lambda *leaves: ops.concatenate(leaves, 0), *found)


def of_batch(x: Batch, cut: Cut, engine: BatchEngine) -> in_order.InOrder:
    """The micro-batches of a batch whose shapes are known. Nothing is cut off examples."""
    x, examples = in_order.checked(x, engine)
    size, tokens = cut.now()
    if size is None:
        assert tokens is not None
        assert cut.axis is not None
        shapes = [leaf.shape for leaf in tree.flatten(x) if leaf is not None]
        longest = max([1, *(int(shape[cut.axis]) for shape in shapes if len(shape) > cut.axis)])
        size = max(1, tokens // longest)
    return in_order.InOrder(x, examples, size, engine)


def check_rows(outputs: Any, examples: Size) -> None:
    """Raises for predictions that are not one for each example: they cannot be put together."""
    for leaf in tree.flatten(outputs):
        shape = leaf.shape
        if not len(shape) or shape[0] != examples:
            raise ValueError(not_first(tuple(shape)))


def not_first(shape: Any) -> str:
    """What to say of an output that does not have the examples first."""
    return (
        "predict on an accumulated model cuts batches into micro-batches, so each output must have "
        f"the examples first. Received: an output of shape {shape}. Call macrobatch.release(model) "
        "before predict, or write a predict_step of your own, which is left alone."
    )

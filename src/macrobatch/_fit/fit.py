"""The way into the steps on TensorFlow: see _backends.ROOMS."""

from typing import Any, Callable, Optional

from macrobatch import _internals
from macrobatch._batches import checks as batch_checks
from macrobatch._batches.cut import Cut
from macrobatch._fit import checks, install, own
from macrobatch._fit.whole_batch import WholeBatchAccumulation
from macrobatch._tensorflow.chosen import ChosenSize


def Accumulation(
    model: Any,
    cut: Cut,
    micro_batch_weight: Optional[Callable[..., Any]],
    nonfinite: str,
    memory_limit: Any,
    whole_batch_loss: bool,
) -> install.Accumulation:
    """What Keras is to call of one model, not yet installed. Raises for what cannot be right."""
    checks.can_be_accumulated(model)
    sizes: Any = (cut.size, cut.tokens)
    if batch_checks.AUTO in sizes:
        chosen = ChosenSize(_internals.strategy_of(model), sizes[1] == batch_checks.AUTO)
        cut = cut._replace(size=None, tokens=None, chosen=chosen)
    own.check(model, cut, whole_batch_loss, nonfinite)
    kind = WholeBatchAccumulation if whole_batch_loss else install.Accumulation
    return kind(model, cut, micro_batch_weight, nonfinite, memory_limit)

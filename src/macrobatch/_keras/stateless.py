"""One way to run code of Keras from values to values, whatever that code is."""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence

from macrobatch._keras import batch_norm
from macrobatch._keras.scope import Written
from macrobatch._types import Tensor


class Result(NamedTuple):
    """What a run has brought.

    Attributes:
        value: what the code returned.
        written: for each variable, the value after the run; None if it did not change.
        moments: of the inputs of BatchNormalization layers.
    """

    value: Any
    written: List[Optional[Tensor]]
    moments: List[batch_norm.Moments]


def run(
    code: Callable[[], Any],
    written: Written,
    values: List[Tensor],
    alone: bool = False,
    drops: bool = True,
    weights: Sequence[Tensor] = (),
) -> Result:
    """Runs code that may write Keras variables.

    Args:
        code: the code.
        written: the variables that it may write. What it writes besides is added to them.
        values: the values of those variables.
        alone: whether layers must not meet those of other replicas.
        drops: whether dropout drops anything.
        weights: values for the trained variables, if not their own.
    """

    def once() -> Any:
        scope = written.scope(values, weights)
        error: Optional[Exception] = None
        value: Any = None
        calls_of: batch_norm.Calls = {}
        try:
            with batch_norm.recorded(alone) as calls_of, scope, scope.dropping(drops):
                value = code()
        except Exception as raised:
            error = raised
        return scope, calls_of, value, error

    scope, calls_of, value, error = once()
    if scope.made_variables:
        # They had no value in there: now they have. What makes new ones each time gets on without.
        scope, calls_of, value, error = once()
    if error is not None:
        raise error
    return Result(value, *written.after(scope, calls_of))

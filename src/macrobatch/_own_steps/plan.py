"""What a step of a user's own does: the gradients it asks for, what it writes, what it logs."""

from typing import Any, Dict, List, NamedTuple, Tuple

from macrobatch._keras import checks as keras_checks
from macrobatch._own_steps import checks
from macrobatch._types import Variable, names


class Asked(NamedTuple):
    """A gradient that a step asks for.

    Attributes:
        per_example: for each target, whether it has a value for each example.
        of_examples: whether any target depends on examples.
        group: the place of the first gradient in its group. No gradient of a group depends on
            another one, or on an update after it, so that they are summed in one loop.
    """

    per_example: List[bool]
    of_examples: bool = True
    group: int = 0


class Plan(NamedTuple):
    """What a step does.

    Attributes:
        gradients: those of variables, in the order in which the step asks for them.
        inner: those of tensors, likewise.
        last: the place of the last group whose gradients depend on examples; -1 if there is none.
            In the loop of its micro-batches everything else is collected too.
        updates: how each call of `update_state` of a Mean or Sum counts: by its "own" weight, by
            the "share" of the micro-batch, "scaled" by both, or "once" for the batch.
        variables: all variables that the step writes.
        written_after: for each of them, how many gradients had been asked for at its first write.
        chained: those of metrics, and statistics that move once per micro-batch: they go from
            micro-batch to micro-batch.
        pooled: BatchNormalization layers whose statistics move once; whether their inputs have a
            mask.
        decaying: those whose statistics move once per micro-batch.
        logs: whether each of the logs is a mean over the examples.
        applied: optimizers, and the variables that they update, in the order of the calls.
        counts: the number of denominators that are counted.
        draws_anew: whether tf.random is used.
    """

    gradients: List[Asked]
    inner: List[Asked]
    last: int
    updates: List[str]
    variables: List[Variable]
    written_after: Dict[int, int]
    chained: List[Variable]
    pooled: Dict[Any, bool]
    decaying: List[Any]
    logs: List[bool]
    applied: List[Tuple[Any, List[Variable]]]
    counts: int
    draws_anew: bool

    def ends(self, group: int) -> int:
        """The place of the last gradient in a group."""
        return max(i for i, asked in enumerate(self.gradients) if asked.group == group)

    def inexact(self) -> List[str]:
        """What cannot equal the whole batch, and the way out."""
        normalizing = names([*self.pooled, *self.decaying])
        messages = keras_checks.inexact(normalizing, names(self.decaying))
        groups = {asked.group for asked in self.gradients if asked.of_examples}
        return [*messages, *checks.draws_anew(len(groups), self.draws_anew)]

"""What a step of a user's own does: the gradients it asks for, what it writes, what it logs."""

from typing import Any, Dict, List, NamedTuple, Tuple

from macrobatch._keras import checks as keras_checks
from macrobatch._keras.scope import is_seed
from macrobatch._own_steps import checks
from macrobatch._types import Variable, names


class Asked(NamedTuple):
    """A gradient that a step asks for.

    Attributes:
        per_example: for each target, whether it has a value for each example, or is their sum.
        of_examples: whether any target depends on examples.
        group: the place of the first gradient in its group. No gradient of a group depends on
            another one, or on an update after it, so that they are summed in one loop.
    """

    per_example: List[bool]
    of_examples: bool = True
    group: int = 0


class Early(NamedTuple):
    """What may be written before the last gradient is there: variables, and those of optimizers."""

    variables: List[Variable]
    optimizers: List[Any]


class Plan(NamedTuple):
    """What a step does.

    Attributes:
        gradients: those of variables, in the order in which the step asks for them.
        inner: those of tensors, likewise.
        last: the place of the last group whose gradients depend on examples; -1 if there is none.
            In the loop of its micro-batches everything else is collected too.
        updates: how each call of `update_state` of a Mean or Sum counts: by its "own" weight, by
            the "share" of the micro-batch, "scaled" by both, as a "sum" over the examples, or
            "once" for the batch.
        variables: all variables that the step writes.
        written_after: for each of them, how many gradients had been asked for at its first write.
        chained: those of metrics, and statistics that move once per micro-batch: they go from
            micro-batch to micro-batch.
        pooled: BatchNormalization layers whose statistics move once; whether their inputs have a
            mask.
        decaying: those whose statistics move once per micro-batch.
        logs: how each of the logs counts: by the "share" of the micro-batch, as a "sum" over the
            examples, or "once" for the batch.
        applied: optimizers, and the variables that they update, in the order of the calls.
        counts: the number of denominators that are counted.
        draws_anew: whether tf.random is used.
        early: what may be written before the last gradient of examples is there.
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
    logs: List[str]
    applied: List[Tuple[Any, List[Variable]]]
    counts: int
    draws_anew: bool
    early: Early

    def ends(self, group: int) -> int:
        """The place of the last gradient in a group."""
        return max(i for i, asked in enumerate(self.gradients) if asked.group == group)

    @property
    def end(self) -> int:
        """The place of the last gradient that the step waits for; -1 if there is none."""
        return self.ends(self.last) if self.last >= 0 else -1

    def shows_size(self) -> bool:
        """Whether the size of micro-batches shows in what the step comes to."""
        return bool(self.inexact()) or self.draws_anew or any(map(is_seed, self.variables))

    def inexact(self) -> List[str]:
        """What cannot equal the whole batch, and the way out."""
        normalizing = names([*self.pooled, *self.decaying])
        messages = keras_checks.inexact(normalizing, names(self.decaying))
        groups = {asked.group for asked in self.gradients if asked.of_examples}
        return [*messages, *checks.draws_anew(len(groups), self.draws_anew)]

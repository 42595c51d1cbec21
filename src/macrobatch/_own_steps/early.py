"""What a step may write before its last gradient is there, and how that is taken back, so that a
batch that fails can be run again.

What comes after the last gradient cannot be taken back. A variable counts batches that got there.
"""

from typing import Any, Callable, FrozenSet, List, NamedTuple, Sequence, Tuple

import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras.scope import unique
from macrobatch._own_steps.plan import Early
from macrobatch._tensorflow import replicas
from macrobatch._types import Batch, Logs, Tensor, Variable


class _Kept(NamedTuple):
    variable: Variable
    value: Tensor


def early_of(
    writes: Sequence[Tuple[Variable, FrozenSet[Any]]],
    optimizers: Sequence[Any],
    variables: Sequence[Variable],
    end: int,
) -> Early:
    """What may be written before the gradient at the place `end` is there.

    In a graph, what comes later in the code may run earlier, unless it depends on that gradient.
    Updates by optimizers are made to wait: see runs.Real.

    Args:
        writes: the variables that a step assigns to, and the marks of what it assigns: see flow.
        optimizers: those that it calls.
        variables: all that it writes.
        end: the place of the last gradient that depends on examples.
    """

    def waits(marks: FrozenSet[Any]) -> bool:
        pairs = [mark[:2] for mark in marks if isinstance(mark, tuple)]
        return any(
            (kind == "gradient" and place == end) or (kind == "applied" and place > end)
            for kind, place in pairs
        )

    early = {id(variable) for variable, marks in writes if not waits(marks)}
    late = {id(variable) for variable, _ in writes} - early
    every = unique([*variables, *(variable for variable, _ in writes)])
    found = [variable for variable in every if id(variable) not in late]
    called = [
        optimizer
        for optimizer in optimizers
        if any(id(o.iterations) in early for o in _internals.with_inner_optimizers(optimizer))
    ]
    return Early(found, list({id(each): each for each in called}.values()))


class Undo:
    """Runs batches, and takes back what a batch that failed had written: an `Attempt`."""

    def __init__(self, early: Callable[[Batch], List[Early]], begun: Any):
        """Prepares to take back.

        Args:
            early: gives what steps may write early, of all kinds that are known of now.
            begun: a variable that counts batches whose last gradient was there.
        """
        self._early, self._begun = early, begun
        self._count = int(replicas.read(begun))

    def __call__(self, run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        """Runs a batch. After an error all is as before, unless the batch had begun to write."""
        kept = [_Kept(each, _read(each)) for each in self._variables(batch)]
        counter = self._begun.read_value()  # XLA writes over no value that is referred to.
        try:
            logs = run(batch)
        except Exception:
            self._take_back(kept, batch)
            raise
        finally:
            del counter
        self._count += 1
        return logs

    def _take_back(self, kept: List[_Kept], batch: Batch) -> None:
        known = {id(each.variable) for each in kept}
        if any(id(variable) not in known for variable in self._variables(batch)):
            self._begun.assign_add(1)  # A new kind of batch may have written what was not kept.
        before, self._count = self._count, int(replicas.read(self._begun))
        if self._count > before:
            return
        for variable, value in kept:
            variable.assign(value)

    def _variables(self, batch: Batch) -> List[Variable]:
        found: List[Variable] = []
        for early in self._early(batch):
            found += early.variables
            for optimizer in early.optimizers:
                found += optimizer.variables
        return unique(found)


def _read(variable: Any) -> Tensor:
    # TensorFlow writes into another buffer while this one is in use: nothing is copied before.
    return tf.convert_to_tensor(_internals.raw_value(variable))

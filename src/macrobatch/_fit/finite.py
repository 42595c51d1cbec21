"""Batches with examples whose loss or gradient is not finite: the examples are looked for, and the
batch is run again without them.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Set

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._fit import finite_checks
from macrobatch._fit.guard import NOT_FINITE, Guard
from macrobatch._keras import finite
from macrobatch._keras.model import ModelStep
from macrobatch._keras.tried import Tried
from macrobatch._tensorflow import sums
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.examples import Examples
from macrobatch._tensorflow.tap import unchanged
from macrobatch._types import Batch, Logs

# The log that counts examples that were left out, since metrics were reset.
SKIPPED = "skipped_examples"

Run = Callable[[Batch], Logs]


class Finite:
    """Runs batches without the examples whose loss or gradient is not finite.

    A step writes nothing of a batch that has such an example: see Guard. To find the example, parts
    of the batch run through the same step, which then writes nothing at all.
    """

    def __init__(
        self,
        model: Any,
        guard: Guard,
        strategy: Any,
        size: Callable[[], int],
        tried: Callable[[], Tried],
        before_again: Callable[[int], None],
    ):
        """Prepares attempts.

        Args:
            model: the model.
            guard: what tells whether numbers are finite.
            strategy: in whose scope the model was made, or None.
            size: how many examples to look at together first; 0 for the halves of the batch.
            tried: the model as a function of a micro-batch that leaves everything as it was.
            before_again: called with the number of its examples before a batch is run again.
        """
        self._model, self._guard, self._strategy = model, guard, strategy
        self._size, self._tried, self._before_again = size, tried, before_again
        self._skipped = 0
        self._warned: Set[Any] = set()

    def start(self) -> None:
        """Lets warnings be given again: once for each fit."""
        self._warned.clear()

    def reset(self) -> None:
        """Counts examples from 0 again, as metrics do."""
        self._skipped = 0

    def __call__(self, run: Run, batch: Batch) -> Logs:
        """An attempt: see _fit/attempts."""
        logs = dict(run(batch))
        if not _is_bad(logs):
            return self._counted(logs)
        self._check_state()
        examples = Examples(batch, self._strategy)
        remaining = list(range(examples.count))
        left_out: List[List[int]] = []
        while True:
            groups = self._bad(run, examples, remaining)
            left_out += groups
            self._before_again(examples.count)
            if self._guard.policy == "raise":
                where = self._where(examples, groups)
                raise ValueError(finite_checks.refused(groups, examples.count, where))
            gone = {example for group in groups for example in group}
            remaining = [example for example in remaining if example not in gone]
            if not remaining:
                break
            logs = dict(run(examples.some(remaining)))
            if not _is_bad(logs):
                break
        self._skipped += examples.count - len(remaining)
        self._warn(left_out, examples.count, bool(remaining))
        return self._counted(logs if remaining else self._unchanged(logs))

    def _bad(self, run: Run, examples: Examples, among: List[int]) -> List[List[int]]:
        """The smallest groups of examples that are bad."""
        compiled = bool(self._model.jit_compile)

        def is_bad(chosen: List[int]) -> bool:
            return _is_bad(dict(run(examples.some(chosen, as_many=compiled))))

        with self._looking():
            return smallest_bad(is_bad, among, len(among) if compiled else self._size())

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        self._guard.look(True)
        try:
            yield
        finally:
            self._guard.look(False)

    def _check_state(self) -> None:
        """Raises if it is not examples that are at fault."""
        trained = self._model.trainable_weights
        names = [v.path for v in trained if not finite.are_finite([ENGINE.read(v.value)])]
        if names:
            raise ValueError(finite_checks.weights(names))
        weights = [variable.value for variable in trained]
        with tf.GradientTape() as tape:
            penalty = ModelStep(self._model, True, ENGINE).regularization()
        gradients = tape.gradient(penalty, weights)
        if not bool(sums.are_finite([penalty, *gradients])):
            raise ValueError(finite_checks.regularizers())

    def _where(self, examples: Examples, groups: List[List[int]]) -> str:
        """What is not finite first, in the first example that this process can look at."""
        alone = [group[0] for group in groups if len(group) == 1]
        for example in alone:
            batch = examples.alone(example)
            if batch is not None:
                micro_batch = keras.utils.unpack_x_y_sample_weight(batch)
                # The message helps. Without it, the error is still the right one.
                with contextlib.suppress(Exception), unchanged():
                    place = finite.first_place(self._tried(), micro_batch, ENGINE)
                    parts = finite.not_finite_parts(micro_batch)
                    return finite_checks.first_place(example, place, parts)
                return ""
        return finite_checks.ELSEWHERE if alone else ""

    def _warn(self, groups: List[List[int]], examples: int, is_updated: bool) -> None:
        kind = is_updated, any(len(group) > 1 for group in groups)
        if kind not in self._warned:
            self._warned.add(kind)
            said = finite_checks.skipped if is_updated else finite_checks.all_skipped
            _checks.warn(said(sorted(groups), examples))

    def _unchanged(self, logs: Logs) -> Logs:
        """Logs, where no batch has changed them."""
        results = self._model.get_metrics_result()
        return {name: results.get(name, value) for name, value in logs.items()}

    def _counted(self, logs: Logs) -> Logs:
        if self._guard.policy == "skip":
            logs[SKIPPED] = self._skipped
        return logs


def smallest_bad(
    is_bad: Callable[[List[int]], bool], group: List[int], size: int, is_sure: bool = True
) -> List[List[int]]:
    """The smallest groups that are bad, in a group that is: single examples, if they are.

    Where some examples are bad only together, the group of them that no half of is bad.

    Args:
        is_bad: whether examples are bad.
        group: of examples.
        size: of the groups into which it is cut first; later ones are halved.
        is_sure: whether it is known that the group is bad.
    """
    if len(group) == 1:
        return [group] if is_sure or is_bad(group) else []
    step = size if 0 < size < len(group) else (len(group) + 1) // 2
    parts = [group[start : start + step] for start in range(0, len(group), step)]
    found: List[List[int]] = []
    for part in parts:
        # If all others are good, it must be the last one. A guess: they may be bad together.
        is_last = part is parts[-1] and not found
        if is_last or is_bad(part):
            found += smallest_bad(is_bad, part, size, is_sure=not is_last)
    if not found and (is_sure or is_bad(group)):
        return [group]
    return found


def _is_bad(logs: Dict[str, Any]) -> bool:
    return bool(logs.pop(NOT_FINITE) > 0)

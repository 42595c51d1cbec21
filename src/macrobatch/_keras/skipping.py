"""Batches with examples whose loss or gradient is not finite: the examples are looked for, and the
batch is run again without them.
"""

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Set

from macrobatch import _checks
from macrobatch._engine import BatchEngine
from macrobatch._keras import finite, finite_checks
from macrobatch._keras.guard import Guard
from macrobatch._keras.tried import Tried
from macrobatch._types import Batch, Logs, Tensor, Variable

# Where the logs of a step tell whether it has met numbers that are not finite: more than 0.
NOT_FINITE = "macrobatch_not_finite"
# The log that counts examples that were left out, since metrics were reset.
SKIPPED = "skipped_examples"

# Runs a batch, and writes what comes of it if all of its numbers are finite.
Run = Callable[[Batch], Logs]


class Skipping:
    """Runs batches without the examples whose loss or gradient is not finite.

    A step writes nothing of a batch that has such an example: see Guard. To find the example, parts
    of the batch run through the same step, which then writes nothing at all.
    """

    def __init__(
        self,
        model: Any,
        guard: Guard,
        engine: BatchEngine,
        size: Callable[[], int],
        tried: Callable[[], Tried],
        before_again: Callable[[int], None],
    ):
        """Prepares attempts.

        Args:
            model: the model.
            guard: what tells which numbers must be finite.
            engine: the backend.
            size: how many examples to look at together first; 0 for the halves of the batch.
            tried: the model as a function of a micro-batch that leaves everything as it was.
            before_again: called with the number of its examples before a batch is run again.
        """
        self._model, self._guard, self._engine = model, guard, engine
        self._size, self._tried, self._before_again = size, tried, before_again
        self._skipped = 0
        self._warned: Set[Any] = set()

    # What each backend does in its own way.

    def examples_of(self, batch: Batch) -> Any:
        """The examples of a batch, and batches of some of them: `count`, `some` and `alone`."""
        raise NotImplementedError

    def micro_batch_of(self, batch: Batch) -> Batch:
        """x, y and sample_weight of a small batch, as the model takes them."""
        raise NotImplementedError

    def trained(self) -> List[Tensor]:
        """The values of the trained variables."""
        raise NotImplementedError

    def not_trained(self) -> List[Tensor]:
        """The values of the weights that are not trained, such as statistics."""
        raise NotImplementedError

    def regularizers_are_finite(self) -> bool:
        """Whether what weight regularisers add, and its gradients, are finite."""
        raise NotImplementedError

    def parts_are_as_large(self) -> bool:
        """Whether parts of a batch must have its shape, so that nothing is compiled for them."""
        return False

    def trying(self) -> ContextManager[Any]:
        """A context in which the model can run, and after which everything is as before."""
        raise NotImplementedError

    def metrics(self) -> Logs:
        """The results of the model's metrics."""
        found: Logs = self._model.get_metrics_result()
        return found

    # What is the same on all of them.

    def start(self) -> None:
        """Lets warnings be given again: once for each fit."""
        self._warned.clear()

    def reset(self) -> None:
        """Counts examples from 0 again, as metrics do."""
        self._skipped = 0

    def __call__(self, run: Run, batch: Batch) -> Logs:
        """Runs a batch as often as it takes."""
        logs = dict(run(batch))
        if not _is_bad(logs):
            return self._counted(logs)
        self._check_state()
        examples = self.examples_of(batch)
        remaining = list(range(examples.count))
        left_out: List[List[int]] = []
        while True:
            groups = self._bad(run, examples, remaining)
            left_out += groups
            gone = {example for group in groups for example in group}
            if len(gone) == len(remaining):
                # Statistics may be at fault. But not each number must be finite there.
                _check_weights(self._model.non_trainable_variables, self.not_trained())
            self._before_again(examples.count)
            if self._guard.policy == "raise":
                where = self._where(examples, groups)
                raise ValueError(finite_checks.refused(groups, examples.count, where))
            remaining = [example for example in remaining if example not in gone]
            if not remaining:
                break
            logs = dict(run(examples.some(remaining)))
            if not _is_bad(logs):
                break
        self._skipped += examples.count - len(remaining)
        self._warn(left_out, examples.count, bool(remaining))
        return self._counted(logs if remaining else self._unchanged(logs))

    def _bad(self, run: Run, examples: Any, among: List[int]) -> List[List[int]]:
        """The smallest groups of examples that are bad."""
        as_large = self.parts_are_as_large()
        # What fills a part up. The same examples again might overflow, as they do not in the batch.
        good: List[int] = []

        def is_bad(chosen: List[int]) -> bool:
            nonlocal good
            found = _is_bad(dict(run(examples.some(chosen, as_large, good))))
            if not found and len(chosen) > len(good):
                good = chosen
            return found

        with self._looking():
            return smallest_bad(is_bad, among, len(among) if as_large else self._size())

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        self._guard.look(True)
        try:
            yield
        finally:
            self._guard.look(False)

    def _check_state(self) -> None:
        """Raises if it is not examples that are at fault."""
        _check_weights(self._model.trainable_weights, self.trained())
        if not self.regularizers_are_finite():
            raise ValueError(finite_checks.regularizers())

    def _where(self, examples: Any, groups: List[List[int]]) -> str:
        """What is not finite first, in the first example that this process can look at."""
        alone = [group[0] for group in groups if len(group) == 1]
        for example in alone:
            batch = examples.alone(example)
            if batch is not None:
                # The message helps. Without it, the error is still the right one.
                with contextlib.suppress(Exception), self.trying():
                    micro_batch = self.micro_batch_of(batch)
                    place = finite.first_place(self._tried(), micro_batch, self._engine)
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
        results = self.metrics()
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


def _check_weights(variables: List[Variable], values: List[Tensor]) -> None:
    """Raises for weights that are not finite."""
    pairs = zip(variables, values)
    names = [variable.path for variable, value in pairs if not finite.are_finite([value])]
    if names:
        raise ValueError(finite_checks.weights(names))


def _is_bad(logs: Dict[str, Any]) -> bool:
    return bool(logs.pop(NOT_FINITE) > 0)

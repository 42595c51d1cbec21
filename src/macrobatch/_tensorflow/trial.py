"""Whether what comes of a micro-batch depends on its padding. Then it must not be cut shorter.

Nobody can see it from a model or a loss, so one micro-batch is run cut and whole, once, before
anything is trained on.
"""

import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Sequence

import tensorflow as tf

from macrobatch import _loop_checks
from macrobatch._checks import warn_once
from macrobatch._tensorflow import graph, replicas
from macrobatch._types import Batch, MicroBatches, Tensor

# What rounding may bring, over the largest number; padding brings more, since the shortest
# examples are compared.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 5e-2

# What comes of a micro-batch, by name: the loss, and metrics.
Found = Dict[str, List[Tensor]]


class Trial(NamedTuple):
    """What to compare.

    Attributes:
        outcomes: functions of a micro-batch.
        drew: whether, in the last of them, random numbers were drawn that dropout does not draw.
        owner: the model or function that this is about, for warnings.
        is_coarse: whether numbers are of less than 32 bits somewhere.
        is_additive: whether, in the last of them, no example should depend on other ones.
        hint: what is known after them of why a loss might depend on padding.
        beside_whole: whether they are functions of a micro-batch that is cut and the same whole.
    """

    outcomes: Sequence[Callable[[Batch], Found]]
    drew: Callable[[], bool]
    owner: Any
    is_coarse: bool
    is_additive: Callable[[], bool]
    hint: Callable[[], str] = str
    beside_whole: bool = False


def check(micro_batches: MicroBatches, trial: Trial, done: Any) -> None:
    """Raises, here or when the graph runs, if a micro-batch comes to something else when it is cut.

    Micro-batches that are taken afterwards are there only once this is known.

    Args:
        micro_batches: a batch.
        trial: what to compare.
        done: a variable that is not 0 when there is nothing to be done, and set here.
    """
    comparison = micro_batches.comparison()
    if comparison is None:
        return
    needed = tf.logical_and(comparison.is_padded, tf.equal(replicas.read(done), 0))
    names: List[str] = []

    def compare() -> List[Tensor]:
        equal: Dict[str, List[Tensor]] = {}
        for outcome in trial.outcomes:
            of_whole, others = comparison.run(outcome, trial.is_additive, trial.beside_whole)
            for other in others:
                for name, values in other.items():
                    close = _close(of_whole[name], values, trial.is_coarse)
                    equal.setdefault(name, []).append(close)
        depends = comparison.is_ragged and not trial.is_additive()
        unknown = _loop_checks.not_compared(trial.drew(), depends)
        if unknown is not None:
            warn_once(trial.owner, unknown)
        if trial.drew():
            return []
        names[:] = list(equal)
        return [tf.reduce_all(tf.stack(each)) for each in equal.values()]

    def refusal(name: str) -> str:
        hint = trial.hint() if name == "loss" else ""
        return _loop_checks.depends_on_padding(name, hint, micro_batches.lengths_are_given)

    if tf.executing_eagerly():
        equal = compare() if bool(needed) else []
    else:
        # The names are known once the comparison has been traced.
        equal = tf.cond(needed, compare, lambda: [tf.constant(True)] * len(names))
    pairs = list(zip(names, tf.nest.flatten(equal)))
    with graph.refuse_unless(*((is_equal, refusal(name)) for name, is_equal in pairs)):
        done.assign(tf.where(needed, 1, replicas.read(done)))
        micro_batches.hold(tf.identity)


class Done:
    """For which functions, and which of their variables, a trial has been made."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, List[Any]] = weakref.WeakKeyDictionary()

    def has(self, function: Any, key: Any, variables: List[Any]) -> bool:
        """Whether it has. Variables are known by themselves: an id may be that of another one."""
        return any(
            known == key
            and len(references) == len(variables)
            and all(reference() is v for reference, v in zip(references, variables))
            for known, references in self._known.get(function, ())
        )

    def add(self, function: Any, key: Any, variables: List[Any]) -> None:
        """Remembers that it has."""
        references = [weakref.ref(variable) for variable in variables]
        alive = [
            each
            for each in self._known.get(function, [])
            if all(ref() is not None for ref in each[1])
        ]
        self._known[function] = [*alive, (key, references)]


_done = Done()


def check_once(
    function: Any, variables: List[Any], micro_batches: MicroBatches, trial: Trial
) -> None:
    """Checks a function of a user, once for its variables; in a graph, once for each trace."""
    comparison = micro_batches.comparison()
    if comparison is None:
        return
    # A lambda may be made anew for each call, a closure for each model.
    code = getattr(function, "__code__", function)
    key = micro_batches.axis
    if tf.executing_eagerly() and _done.has(code, key, variables):
        return
    done = replicas.variable(None, [], tf.int32, "padding_checked")
    if not tf.executing_eagerly():
        # Functions refer to variables, but do not keep them.
        tf.compat.v1.add_to_collection("macrobatch", done)
    check(micro_batches, trial, done)
    if tf.executing_eagerly() and int(done):
        _done.add(code, key, variables)


def comparable(gradients: Sequence[Any]) -> List[Tensor]:
    """Gradients that there are; of rows of a table, their sum."""
    found = [gradient for gradient in gradients if gradient is not None]
    return [tf.reduce_sum(g.values, 0) if isinstance(g, tf.IndexedSlices) else g for g in found]


def _close(some: List[Tensor], others: List[Tensor], is_coarse: bool) -> Tensor:
    """Whether values are the same but for rounding."""
    close = [tf.constant(True)]
    for one, other in zip(some, others):
        if not one.dtype.is_floating:
            close.append(tf.reduce_all(tf.equal(one, other)))
            continue
        tolerance = COARSE if is_coarse else TOLERANCES.get(one.dtype.name, COARSE)
        finite = tf.math.is_finite(one)
        # Where it is not finite with padding, of which there may be none without, nothing is known.
        close.append(tf.reduce_all(tf.logical_or(~finite, tf.math.is_finite(other))))
        one, other = (tf.where(finite, value, tf.zeros_like(value)) for value in (one, other))
        size = tf.reduce_max(tf.maximum(tf.abs(one), tf.abs(other))) + 0.01
        close.append(tf.reduce_all(tf.abs(one - other) <= tolerance * size))
    return tf.reduce_all(tf.stack(close))

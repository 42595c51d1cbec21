"""Whether examples meet in a function of a micro-batch: tried in Python, with the first examples of
a batch that may be in a graph.
"""

import weakref
from typing import Any, Callable, List, Sequence

import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches.cut import Cut
from macrobatch._keras import comparison, meeting, meeting_checks, stateless
from macrobatch._keras.scope import Written
from macrobatch._keras.sequences import low_precision
from macrobatch._tensorflow import graph, leaves, replicas
from macrobatch._tensorflow import loss_fn as loss_fns
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.tap import Tap, unchanged
from macrobatch._tensorflow.trial import Done
from macrobatch._types import Batch, Size


def verdict_of(tried: meeting.Tried, groups: comparison.Groups, is_coarse: bool) -> meeting.Verdict:
    """What a trial shows. Outside of graphs. No variable is changed.

    Args:
        tried: what is tried. What it writes to Keras variables must stay in a scope.
        groups: examples, from `meeting.groups`.
        is_coarse: whether numbers are of less than 32 bits somewhere.
    """
    with unchanged():
        return meeting.find(tried, groups, ENGINE, is_coarse)


def is_cut(examples: Size, cut: Cut, several: bool) -> bool:
    """Whether a batch is cut at all. If not, examples may meet as much as they like.

    One example is not, whoever has it.
    """
    return examples > 1 and (several or cut.size is None or examples > cut.size)


def size_of(cut: Cut, batch: Batch) -> int:
    """The number of examples in a micro-batch of a trial."""
    examples, tokens = cut.size, cut.tokens
    if cut.chosen is not None:
        now = cut.chosen.now()
        if isinstance(now, int):  # Of a graph it is not known here.
            examples, tokens = (None, now) if cut.chosen.in_tokens else (now, None)
    size = meeting.size_of(examples or meeting.MOST)
    if tokens is None or cut.axis is None:
        return size
    # Examples are as long here as the longest of the batch.
    there = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    lengths = [leaves.length_of(leaf, cut.axis) for leaf in there if len(leaf.shape) > cut.axis]
    return max(2, min(size, tokens // max([1, *lengths])))


_done = Done()
_warned: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of code


class OfForward(meeting.Tried):
    """The trial of a user's `forward`: once for its code and its variables."""

    _name = "forward"

    def __init__(self, function: Callable[[Any], Any], variables: Sequence[Any]):
        self._function, self._variables = function, list(variables)
        self._code = _code_of(function)

    def check(self, batch: Batch, examples: Size, cut: Cut) -> Any:
        """Warns, now or when the graph runs, if examples of a batch meet.

        XLA calls no Python. There, nothing is known.

        Returns:
            what is there once the trial has been made. Variables must not be written before.
        """
        several = replicas.in_several()
        if graph.in_xla() or self._is_done():
            return ()
        if tf.executing_eagerly():
            if is_cut(examples, cut, several):
                self._try(batch, size_of(cut, batch))
            return ()

        def receive(rows: Batch, examples: int) -> None:
            if is_cut(examples, cut, several):
                tap.close()
                if not self._is_done():  # by another replica, or by another trace
                    self._try(rows, size_of(cut, rows))

        tap = Tap(receive)
        # A graph refers to variables, but does not keep them.
        tf.compat.v1.add_to_collection("macrobatch", tap)
        return tap([batch], 2 * meeting.MOST)

    @property
    def has_warned(self) -> bool:
        """Whether a trial of this code has shown, or could not rule out, that examples meet."""
        return self._code in _warned

    def _is_done(self) -> bool:
        return _done.has(self._code, None, self._variables)

    def _try(self, batch: Batch, size: int) -> None:
        _done.add(self._code, None, self._variables)
        groups = meeting.groups(batch, ENGINE.examples(batch), size, ENGINE)
        assert groups is not None
        try:
            verdict = verdict_of(self, groups, low_precision([]))
        except Exception:  # What belongs to a graph, for one, cannot be had outside of it.
            return
        for message in self._messages(verdict):
            _warned.add(self._code)
            _checks.warn(message, _checks.ExactnessWarning)

    def found(self, micro_batch: Batch) -> comparison.Found:
        return self._run(micro_batch, Written([], self._variables, ENGINE))

    def alone(self, micro_batch: Batch) -> comparison.Found:
        written = Written([], self._variables, ENGINE)
        found = self._run(micro_batch, written, drops=False)
        return {} if written.drew else found

    def _run(self, micro_batch: Batch, written: Written, drops: bool = True) -> comparison.Found:
        def code() -> Any:
            return self._function(micro_batch)

        result = stateless.run(code, written, [], alone=True, drops=drops).value
        return self._values(result, ENGINE.examples(micro_batch))

    def _values(self, result: Any, examples: Size) -> comparison.Found:
        """What must be apart for each example."""
        leaves = [leaf for leaf in tf.nest.flatten(result) if isinstance(leaf, tf.Tensor)]
        return {str(place): leaf for place, leaf in enumerate(leaves) if len(leaf.shape)}

    def _messages(self, verdict: meeting.Verdict) -> List[str]:
        if verdict.is_random:
            return [meeting_checks.RANDOM]
        if verdict.layers or verdict.values:
            return [self._message(verdict.layers)]
        if verdict.sized_layers or verdict.sized:
            return [meeting_checks.of_function_and_size(self._name, verdict.sized_layers)]
        return [meeting_checks.NOT_FINITE] if verdict.unknown else []

    def _message(self, layers: Sequence[str]) -> str:
        return meeting_checks.of_forward(layers)


class OfLossFn(OfForward):
    """The trial of a user's `loss_fn`."""

    _name = "loss_fn"

    def __init__(self, function: Callable[[Any], Any], variables: Sequence[Any], has_aux: bool):
        super().__init__(function, variables)
        self._has_aux = has_aux

    def _values(self, result: Any, examples: Size) -> comparison.Found:
        result = loss_fns.with_aux(result)[0] if self._has_aux else result
        mean = loss_fns.mean_of(result, examples)
        found = {"numerator": mean.numerator, "denominator": mean.denominator}
        losses, _ = loss_fns.losses_and_weights(result)
        if len(losses.shape) and isinstance(losses, tf.Tensor):
            found["losses"] = losses
        return found

    def _message(self, layers: Sequence[str]) -> str:
        return meeting_checks.of_loss_fn(layers)


def _code_of(function: Any) -> Any:
    """What of a function is the same for each call, and can be remembered.

    A lambda may be made anew for each call, a closure for each model.
    """
    code = getattr(function, "__code__", function)
    try:
        hash(code), weakref.ref(code)
    except TypeError:
        return type(function)
    return code

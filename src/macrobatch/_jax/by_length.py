"""Steps on sequences by length. A batch is cut on the host, before anything is compiled.

    batch -> the order of its examples, longest first, and lengths, rounded up to a few
    for each micro-batch:  total += part(micro-batch)     compiled once for each of its shapes
    update(total)

Lengths, and the sizes of a smaller last micro-batch, are rounded so that shapes are few.
"""

import contextlib
import copy
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import jax
import numpy as np
from jax import numpy as jnp

from macrobatch import _internals, _optimizer_checks
from macrobatch._batches import in_order
from macrobatch._batches.by_length import ByLength
from macrobatch._batches.cut import Cut
from macrobatch._jax import host, loop
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.halves import Found, Halves
from macrobatch._jax.padding import Padding
from macrobatch._jax.state import State, StateScope
from macrobatch._jax.steps import Steps
from macrobatch._keras import model_checks
from macrobatch._keras.model import ModelStep
from macrobatch._types import Batch, Part, Tensor, Whole


class LengthSteps(Steps):
    """The steps of one model. They are not compiled from outside, but compile their parts."""

    def __init__(self, model: Any, cut: Cut, micro_batch_weight: Optional[Callable[..., Any]]):
        super().__init__(model, cut, micro_batch_weight)
        self._padding = Padding(cut)
        self._parts: Dict[bool, Parts] = {}
        self._updated = self.compiled(self.updated, donate_argnums=(0, 1))
        self._count = 0  # of the micro-batches of the latest batch

    def forget(self, training: bool) -> None:
        """Forgets what is known of a model that may be compiled anew."""
        self._padding.done[training] = False
        self._parts.pop(training, None)
        self._updated = self.compiled(self.updated, donate_argnums=(0, 1))

    def remember(self) -> Callable[[int], None]:
        """Lets the trial of padding be made with other examples, if it was made with these."""
        before = self._padding.done[True]

        def forget(examples: int) -> None:
            self._padding.done[True] = before

        return forget

    def compiled(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """A function, compiled if the model's steps are."""
        # A method of the same object would be taken for the same function, already traced.
        is_compiled = self.model.jit_compile and not self.model.run_eagerly
        if not is_compiled:
            return function

        def call(*args: Any) -> Any:
            return function(*args)

        call.__name__ = function.__name__  # which JAX shows
        return jax.jit(call, **options)

    def micro_batches_of(self, data: Any) -> int:
        return self._count

    def check(self, data: Any) -> Tuple[Batch, int]:
        batch, examples = in_order.checked(host.batch_of(data), host.HOST)
        _optimizer_checks.optimizer(self.model.optimizer)
        model_checks.splittable_layers(_internals.layers_of(self.model))
        model_checks.no_overwriting_variables(self.model.trainable_weights)
        return batch, int(examples)

    def halves(self) -> Halves:
        """Gradients and update of a train step. The update writes into the memory of the weights,
        so that nothing may fail in it.
        """
        return Halves(self.found, self._updated)

    def on_devices(self, state: State, data: Any, training: bool, measures: bool = False) -> Found:
        batch, examples = self.check(data)
        micro_batches = self._padding.cut(self.model, batch, examples)
        self._count = sum(int(run.count) for run in micro_batches.runs)
        if training not in self._parts:
            self._parts[training] = Parts(self, training)
        parts = self._parts[training]
        found = parts.of(micro_batches, state)
        with self._padding.explaining(micro_batches, found):
            self._padding.check(micro_batches, found)
            return found.found()


class Parts:
    """What is compiled of a model, for all batches, and what is known of it."""

    def __init__(self, steps: LengthSteps, training: bool):
        self._steps, self._training = steps, training
        self.model = ModelStep(
            steps.model, training, ENGINE, steps.micro_batch_weight, self._uncut_fraction
        )
        self.no_counts = steps.no_counts()
        self._batch: Any = None  # whose micro-batches are traced, and the size of its sequences
        self.part = steps.compiled(self._part, static_argnums=0)
        self.counting = steps.compiled(self._counting, static_argnums=0)
        self.trying = steps.compiled(self._trying, static_argnums=0)
        self.added = steps.compiled(loop.added, donate_argnums=0)
        self.finished = steps.compiled(self._finished, static_argnums=2)

    def of(self, micro_batches: ByLength, state: State) -> "PartsOfBatch":
        """The same for a batch."""
        self._batch = micro_batches
        return PartsOfBatch(self, micro_batches, state)

    def values(self, state: State) -> List[Tensor]:
        """The values that go into the first micro-batch."""
        with StateScope(self._steps.model, state):
            return self.model.values()

    def warn(self, like: Part) -> None:
        """Says what cannot equal the whole batch."""
        self._steps.warn(self.model, like)

    def _part(self, key: Any, given: Any, micro_batch: Batch, values: Any, counts: Tensor) -> Part:
        """The part of a micro-batch.

        Args:
            key: what a trace depends on besides shapes: which parts of the batch are sequences.
            given: the state, and the batch's number of examples and size of sequences.
            micro_batch: the micro-batch.
            values: the values of the step's variables.
            counts: those of the whole batch.
        """
        state, examples, size = given
        with self._of_size(size), StateScope(self._steps.model, state):
            step = self._steps.step(self.model, Whole(examples), state.trained)
            return step(micro_batch, values, counts)

    def _counting(self, key: Any, given: Any, micro_batch: Batch, values: Any) -> Part:
        """The counts of a micro-batch. A compiler leaves out what they do not depend on."""
        part = self._part(key, given, micro_batch, values, self.no_counts)
        return Part([], part.counts, part.written)

    def _trying(
        self, key: Any, given: Any, micro_batch: Batch, values: Any, weights: List[Tensor]
    ) -> Any:
        """What a micro-batch comes to with other weights: gradients, losses, what is written."""
        state, _, size = given

        def losses(weights: List[Tensor]) -> Any:
            whole = Whole(1, guesses=[])  # Over 1, shares are sums.
            found = self.model(micro_batch, values, whole, drops=False, weights=weights)
            return found.losses, (found.reported, found.counts, found.written)

        with self._of_size(size), StateScope(self._steps.model, state):
            found, back, (reported, counts, written) = jax.vjp(losses, weights, has_aux=True)
            gradients = []
            for place in range(len(found)):
                of_one = [jnp.full_like(each, i == place) for i, each in enumerate(found)]
                gradients += back(of_one)[0]
            return [*gradients, *reported, *counts], written[1:]

    def _finished(self, total: Part, state: State, examples: int) -> Found:
        with StateScope(self._steps.model, state) as scope:
            weights = state.trained
            return self._steps.finished(self.model, weights, total, examples, scope, examples)

    def _uncut_fraction(self, micro_batch: Batch, weights: Tensor, doubtful: bool = False) -> Any:
        return self._batch.uncut_fraction(micro_batch, weights, doubtful)

    @contextlib.contextmanager
    def _of_size(self, size: Tensor) -> Iterator[None]:
        """A context in which a trace does not know the size of the batch's sequences."""
        before, self._batch = self._batch, copy.copy(self._batch)
        self._batch.sequences = copy.copy(before.sequences)
        self._batch.sequences.size = size
        try:
            yield
        finally:
            self._batch = before


class PartsOfBatch:
    """The micro-batches of a batch, and what they come to."""

    def __init__(self, parts: Parts, micro_batches: ByLength, state: State):
        self._parts, self._micro_batches, self._state = parts, micro_batches, state
        self.model, self.weights = parts.model, state.trained
        self._key = tuple(map(bool, micro_batches.sequences.are_sequences))
        numbers = int(micro_batches.examples), int(micro_batches.sequences.size)
        self._given = (state, *(np.asarray(number, "int32") for number in numbers))

    def learn(self) -> None:
        """Finds out which variables a micro-batch writes, without running it."""
        first = self._micro_batches.first()
        while True:
            values = self.values()
            like = self.like(first, values)
            if self.model.fits(values):
                break  # The run has found no more variables.
        self._parts.warn(like)

    def like(self, micro_batch: Batch, values: List[Tensor]) -> Part:
        """The shapes of the part of a micro-batch."""
        counts = self._parts.no_counts

        def traced(given: Any, micro_batch: Batch, values: Any) -> Part:
            return self._parts.part(self._key, given, micro_batch, values, counts)

        return jax.eval_shape(traced, self._given, micro_batch, values)

    def values(self) -> List[Tensor]:
        """The values that go into the first micro-batch."""
        return self._parts.values(self._state)

    def tried(self, micro_batch: Batch, weights: List[Tensor]) -> Any:
        """What a micro-batch comes to with other weights."""
        return self._parts.trying(self._key, self._given, micro_batch, self.values(), weights)

    def found(self) -> Found:
        """What the batch comes to: everything but the update."""
        self.learn()
        parts, values, counts = self._parts, self.values(), self._parts.no_counts
        if self.model.counts and self.model.training:
            total = self._total(
                lambda each, values: parts.counting(self._key, self._given, each, values), values
            )
            own = jnp.stack([count.astype(counts.dtype) for count in total.counts])
            counts = counts.at[: len(own)].set(own)
        total = self._total(
            lambda each, values: parts.part(self._key, self._given, each, values, counts), values
        )
        return parts.finished(total, self._state, int(self._micro_batches.examples))

    def _total(self, part_of: Callable[[Batch, List[Tensor]], Part], values: List[Tensor]) -> Part:
        total: Optional[Part] = None
        for micro_batch in self._each():
            part = part_of(micro_batch, loop.after(values, total))
            total = part if total is None else self._parts.added(total, part)
        assert total is not None
        return total

    def _each(self) -> Iterator[Batch]:
        (run,) = self._micro_batches.runs
        for index in range(int(run.count)):
            yield self._micro_batches.get(run, index)

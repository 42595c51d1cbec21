"""Compiled steps on one device: the loop goes on in Python, and a micro-batch is what JAX compiles.

XLA makes convolutions in the body of a loop slow on a CPU: their gradients take 15 times as long.
The sums of a batch are in one piece of memory, which goes from micro-batch to micro-batch.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple

import jax
import numpy as np
from jax import numpy as jnp

from macrobatch._jax import devices, loop
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.halves import Found
from macrobatch._jax.state import State, StateScope
from macrobatch._jax.steps import Steps, batch_of, counted_by
from macrobatch._keras.comparison import Groups
from macrobatch._types import Batch, Part, Tensor, Whole


class Turns:
    """What is compiled for batches of the same shapes, that are cut alike."""

    def __init__(
        self,
        steps: Steps,
        training: bool,
        measures: bool,
        state: State,
        batch: Batch,
        examples: int,
    ):
        self._steps, self._measures, self._examples = steps, measures, examples
        self._runs = self._cut(batch).runs
        self._model = steps.model_step(training)
        self._no_counts = steps.no_counts()
        while True:
            self._part = jax.jit(self._part_of)  # traced once for all that call it
            values, like = jax.eval_shape(self._first, state, batch, self._no_counts)
            if self._model.fits(values):
                break  # The run has found no more variables.
        steps.warn(self._model, like)
        self._start = jax.jit(lambda state: loop.nothing_like(like, self._values(state)))
        self._counts = jax.jit(self._counts_of)
        self._turns = [jax.jit(self._turn_of(run), donate_argnums=0) for run in self._runs]
        self._finish = jax.jit(self._finished, donate_argnums=0)

    def found(self, state: State, batch: Batch) -> Found:
        """What a batch comes to: everything but the update."""
        counts = self._no_counts
        if self._model.counts and self._model.training:
            counts = self._counts(state, batch)
        total = self._start(state)
        for run, turn in zip(self._runs, self._turns):
            for index in range(run.count):
                total = turn(total, state, batch, counts, index)
        return self._finish(total, state)

    def sums_of_each(self, state: State, groups: Groups) -> Optional[List[List[Any]]]:
        """The sums of micro-batches, each by itself, on the host; None if of another size."""
        if groups.size != self._runs[0].size:
            return None

        def sums(micro_batch: Batch) -> List[Any]:
            # In a batch of the shapes that are compiled. Only its first micro-batch runs.
            rows = jax.tree.map(self._repeated, micro_batch)
            total = self._turns[0](self._start(state), state, rows, self._no_counts, 0)
            return [np.asarray(each) for each in total.sums]

        return [sums(each) for each in groups.micro_batches]

    def _repeated(self, leaf: Tensor) -> Tensor:
        return jnp.asarray(np.resize(np.asarray(leaf), (self._examples, *leaf.shape[1:])))

    def _cut(self, batch: Batch) -> Any:
        return self._steps.cut.apply(batch, self._examples, ENGINE)

    def _values(self, state: State) -> List[Tensor]:
        with StateScope(self._steps.model, state):
            return self._model.values()

    def _part_of(
        self, micro_batch: Batch, values: List[Tensor], counts: Tensor, state: State
    ) -> Part:
        """The part of a micro-batch."""
        steps = self._steps
        with StateScope(steps.model, state):
            step = steps.step(self._model, Whole(self._examples), state.trained, self._measures)
            return step(micro_batch, values, counts)

    def _first(self, state: State, batch: Batch, counts: Tensor) -> Tuple[List[Tensor], Part]:
        """The values that go into the first micro-batch, and its part."""
        values = self._values(state)
        return values, self._part(self._cut(batch).get(self._runs[0], 0), values, counts, state)

    def _counts_of(self, state: State, batch: Batch) -> Tensor:
        def call(micro_batch: Batch, values: List[Tensor], counts: Tensor) -> Part:
            return self._part(micro_batch, values, counts, state)

        return counted_by(call, self._cut(batch), self._values(state), self._no_counts, True)

    def _turn_of(self, run: Any) -> Callable[..., Part]:
        def turn(total: Part, state: State, batch: Batch, counts: Tensor, index: Tensor) -> Part:
            values = loop.after(self._values(state), total)
            part = self._part(self._cut(batch).get(run, index), values, counts, state)
            return loop.added(total, part)

        return turn

    def _finished(self, total: Part, state: State) -> Found:
        with StateScope(self._steps.model, state) as scope:
            count, weights = self._examples, state.trained
            return self._steps.finished(
                self._model, weights, total, count, scope, count, self._measures
            )


class Compiled:
    """What a batch comes to, of a state and data: everything but the update, compiled."""

    def __init__(self, steps: Steps, training: bool, measures: bool = False):
        """Compiles nothing yet.

        Args:
            steps: the steps of the model.
            training: whether the model is trained, or tested.
            measures: whether to measure the gradient noise scale.
        """
        self._arguments = steps, training, measures
        self._takes_turns = steps.takes_turns and not devices.are_several()
        self._in_one_piece = _in_one_piece(*self._arguments)
        self._made: Dict[Any, Turns] = {}
        self._latest: Optional[Turns] = None

    def __call__(self, state: State, data: Any) -> Found:
        if not self._takes_turns:
            return self._in_one_piece(state, data)
        steps, batch = self._arguments[0], batch_of(data)
        leaves, structure = jax.tree.flatten(batch)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = structure, shapes, _size_of_now(steps)
        if key not in self._made:
            self._made[key] = Turns(*self._arguments, state, *steps.check(batch))
        self._latest = self._made[key]
        return self._latest.found(state, batch)

    def sums_of_each(self, state: State, groups: Groups) -> Optional[List[List[Any]]]:
        """The gradients and the losses of some micro-batches, from the same state, on the host.

        None if nothing is compiled for micro-batches of their size.
        """
        return None if self._latest is None else self._latest.sums_of_each(state, groups)


def _in_one_piece(steps: Steps, training: bool, measures: bool) -> Callable[[State, Any], Found]:
    """The same, with the loop inside of what is compiled, once for each size of micro-batches."""
    made: Dict[Any, Callable[[State, Any], Found]] = {}

    def found(state: State, data: Any) -> Found:
        size = _size_of_now(steps)
        if size not in made:
            # JAX would take a function that it has compiled before for this one.
            made[size] = jax.jit(
                lambda state, data: steps.on_devices(state, data, training, measures)
            )
        return made[size](state, data)

    return found


def _size_of_now(steps: Steps) -> Optional[int]:
    """The size of micro-batches, if it is found while training."""
    return None if steps.cut.chosen is None else steps.cut.chosen.now()

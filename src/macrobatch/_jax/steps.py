"""A train step and a test step that cut their batch into micro-batches, from the state before to
the state after. No arithmetic of their own: the loop is beside this file, the rest is in _keras.
"""

from typing import Any, Callable, List, Optional, Tuple

import jax
import keras
from jax import numpy as jnp
from keras import tree

from macrobatch import _checks, _internals, _optimizer_checks
from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._jax import devices, loop, squares
from macrobatch._jax.engine import ENGINE, any_is_traced, arrays
from macrobatch._jax.halves import Found
from macrobatch._jax.state import State, StateScope
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import finite, model_checks, probes, report
from macrobatch._keras.guard import Guard
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import Scope
from macrobatch._types import Batch, Logs, MicroBatches, Part, Tensor, Whole


class Steps:
    """The steps of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        guard: what tells which numbers must be finite, if asked for.
        shows_size: whether the size of micro-batches shows in the update; None if not yet known.
        takes_turns: whether, compiled, micro-batches may run one by one: see `turns`.
    """

    takes_turns = True

    def __init__(self, model: Any, cut: Cut, micro_batch_weight: Optional[Callable[..., Any]]):
        probes.probe()
        self.model, self.cut, self.micro_batch_weight = model, cut, micro_batch_weight
        self.guard = Guard()
        self.shows_size: Optional[bool] = None

    def forget(self, training: bool) -> None:
        """Forgets what is known of a model that may be compiled anew. Here, nothing is."""

    def remember(self) -> Callable[[int], None]:
        """A function that forgets what was learnt since now, of a batch that is run again."""
        return lambda examples: None

    def micro_batches_of(self, data: Any) -> int:
        """The number of micro-batches of a batch that a step has just run on, over all devices."""
        examples, count = int(ENGINE.examples(data)), devices.count()
        spreads = examples % count == 0  # else each device computes all of the batch
        size, _ = self.cut.now()
        runs = in_order.runs_of(examples // count if spreads else examples, size, static=True)
        return sum(run.count for run in runs) * (count if spreads else 1)

    def train_step(self, state: Any, data: Any) -> Tuple[Logs, Any]:
        """Makes the update that the whole batch would have made."""
        found = self.found(state, data)
        return found.logs, self.updated(state[0], state[2], found)

    def test_step(self, state: Any, data: Any) -> Tuple[Logs, Any]:
        """Reports the loss and the metrics of the whole batch."""
        trained, others, metrics = state
        found = self.on_devices(State(trained, others, [], metrics), data, training=False)
        return found.logs, (trained, found.others, found.metrics)

    def found(self, state: Any, data: Any, measures: bool = False) -> Found:
        """What a batch comes to: everything but the update.

        Args:
            state: the state before it.
            data: the batch.
            measures: whether to measure the gradient noise scale.
        """
        return self.on_devices(State(*state), data, training=True, measures=measures)

    def check(self, data: Any) -> Tuple[Batch, int]:
        """A batch and the number of its examples, once both suit the model."""
        batch, examples = in_order.checked(batch_of(data), ENGINE)
        _optimizer_checks.optimizer(self.model.optimizer)
        model_checks.splittable_layers(_internals.layers_of(self.model))
        model_checks.no_overwriting_variables(self.model.trainable_weights)
        return batch, int(examples)

    def updated(self, trained: List[Tensor], of_optimizer: List[Tensor], found: Found) -> State:
        """The state after the update."""
        optimizer = self.model.optimizer
        if trained:
            trained, of_optimizer = optimizer.stateless_apply(
                of_optimizer, found.gradients, trained
            )
        else:
            _checks.warn("The model does not have any trainable weights.")
        return State(trained, found.others, of_optimizer, found.metrics)

    def on_devices(self, state: State, data: Any, training: bool, measures: bool = False) -> Found:
        """What a batch comes to, in training or in testing: everything but the update."""
        batch, examples = self.check(data)

        def found(state: State, batch: Batch) -> Found:
            return self._found(state, batch, examples, training, measures)

        return devices.spread(found, state, batch)

    def _found(
        self, state: State, batch: Batch, examples: int, training: bool, measures: bool
    ) -> Found:
        """What a batch, or this device's part of it, comes to."""
        own = ENGINE.examples(batch)
        micro_batches = self.cut.apply(batch, own, ENGINE)
        compiled = any_is_traced((batch, state))
        with StateScope(self.model, state) as scope:
            model = self.model_step(training)
            step = self.step(model, Whole(examples), state.trained, measures)
            part = self._run(step, model, micro_batches, compiled)
            return self.finished(model, state.trained, part, own, scope, examples, measures)

    def model_step(self, training: bool) -> ModelStep:
        """The model as a function of a micro-batch."""
        return ModelStep(self.model, training, ENGINE, self.micro_batch_weight)

    def finished(
        self,
        model: ModelStep,
        weights: List[Tensor],
        part: Part,
        own: int,
        scope: StateScope,
        examples: int,
        measures: bool = False,
    ) -> Found:
        """What a batch comes to, once all of its micro-batches have run. In the scope of its state.

        Args:
            model: the step of the model, after its last run.
            weights: the values of the trained variables.
            part: the part of the whole batch; on several devices, of this device's micro-batches.
            own: the number of its examples.
            scope: the scope.
            examples: the number of examples of the whole batch.
            measures: whether the gradient noise scale is measured.
        """
        penalty, penalties = self._penalty(model, weights if model.training else [])
        count = len(model.trained) + (squares.SIZE if measures else 0)
        sums = ENGINE.sum_over_replicas(part.sums[:count])
        gradients = [
            (one + other).astype(weight.dtype)
            for one, other, weight in zip(sums, penalties, weights)
        ]
        told = report.told(
            model,
            penalty,
            part.sums[count:],
            part.counts,
            part.written[1:],
            part.latest,
            own,
            ENGINE,
        )
        told.write()
        model.written.write(part.written[1:], part.moments)
        is_finite = self._is_finite(gradients, told.values, model.training)
        measured: Any = ()
        if measures:
            measured = squares.of_batch(sums, penalties, examples, self._loss_scale())
        return Found(gradients, scope.others(), scope.metrics(), told.logs, is_finite, measured)

    def _is_finite(self, gradients: List[Tensor], losses: Any, training: bool) -> Any:
        """Whether all numbers are finite that must be; nothing if nobody asks."""
        if not training or not self.guard.is_wanted:
            return ()
        return finite.all_finite(self.guard.numbers(gradients, tree.flatten(losses)))

    def step(
        self, model: ModelStep, whole: Whole, weights: List[Tensor], measures: bool = False
    ) -> Any:
        """The step of a micro-batch: a function of it, of values, and of the whole's counts.

        In the scope of a state.
        """
        scale = self._loss_scale() if model.training else 1.0

        def step(micro_batch: Batch, values: List[Tensor], counts: Tensor) -> Part:
            known = whole._replace(counts=counts)

            def loss(weights: List[Tensor]) -> Any:
                outcome = model(micro_batch, values, known, weights=weights)
                value = outcome.losses[0] if model.training else jnp.zeros([])
                return value * jnp.asarray(scale, value.dtype), outcome._replace(losses=[])

            gradients: List[Tensor] = []
            if model.training:
                gradients, outcome = jax.grad(loss, has_aux=True)(weights)
            else:
                _, outcome = loss([])
            there = outcome.is_there
            if there is not None:  # Where a micro-batch counts nothing, gradients may be 0 / 0.
                gradients = [jnp.where(there, g, jnp.zeros_like(g)) for g in gradients]
            gradients = [widened(gradient) for gradient in gradients]
            measured: List[Tensor] = []
            if measures:
                examples = int(ENGINE.examples(micro_batch))
                measured = squares.of_micro_batch(gradients, whole.examples / examples)
            return Part(
                [*gradients, *measured, *outcome.reported],
                outcome.counts,
                outcome.written,
                outcome.moments,
                outcome.logs,
            )

        return step

    def _run(
        self, step: Any, model: ModelStep, micro_batches: MicroBatches, compiled: bool
    ) -> Part:
        """The part of the whole batch."""
        ones = self.no_counts()
        # Compiled, the step is traced once, for the counts and for the loop.
        call = jax.jit(step) if compiled else step
        values = model.values()
        first = micro_batches.get(micro_batches.runs[0], 0)
        run_first = jax.eval_shape if compiled else (lambda call, *args: call(*args))
        like = run_first(call, first, values, ones)
        while not model.fits(values):  # The run has found more variables.
            values = model.values()
            call = jax.jit(step) if compiled else step
            like = run_first(call, first, values, ones)
        self.warn(model, like)
        counts = ones
        if model.counts and model.training:
            counts = counted_by(call, micro_batches, values, ones, compiled)

        def counted(micro_batch: Batch, values: List[Tensor]) -> Part:
            return call(micro_batch, values, counts)

        return loop.run(counted, micro_batches, values, compiled)

    def no_counts(self) -> Tensor:
        """What stands for counts that are not known. They are more than there can be."""
        # How many there are is known after the first run.
        return jnp.ones([_most_counts(self.model)], keras.config.floatx())

    def _penalty(self, model: ModelStep, weights: List[Tensor]) -> Any:
        """What weight regularisers add to the loss, and to its gradients."""
        scale = self._loss_scale() if model.training else 1.0

        def penalty(weights: List[Tensor]) -> Any:
            with Scope(model.trained, weights):
                found = model.regularization()
                return found * jnp.asarray(scale, found.dtype), found

        gradients, found = jax.grad(penalty, has_aux=True)(weights)
        return found, [widened(gradient) for gradient in gradients]

    def _loss_scale(self) -> Tensor:
        return self.model.optimizer.scale_loss(jnp.ones([], keras.config.floatx()))

    def warn(self, model: Any, part: Part) -> None:
        written = keras_checks.written_by_layers(model.unexplained(part.written))
        messages = [*model.inexact, *written]
        for message in messages:
            _checks.warn_once(self.model, message)
        if model.training:
            self.shows_size = bool(messages) or model.written.drew or model.written.dropped


def counted_by(
    call: Any, micro_batches: MicroBatches, values: List[Tensor], ones: Tensor, compiled: bool
) -> Tensor:
    """The counts of the whole batch, from a step. A compiler leaves out what they do not depend on:
    no predictions are made.
    """

    def counting(micro_batch: Batch, values: List[Tensor]) -> Part:
        part = call(micro_batch, values, ones)
        return Part([], part.counts, part.written)

    own = loop.run(counting, micro_batches, values, compiled).counts
    (own,) = ENGINE.sum_over_replicas([jnp.stack([n.astype(ones.dtype) for n in own])])
    return ones.at[: len(own)].set(own)


def _most_counts(model: Any) -> int:
    """The most denominators that can be counted: one of each loss, and the user's weight."""
    compiled = _internals.compiled_loss(model)
    return 1 + (len(_internals.flat_losses(compiled)) if compiled and compiled.built else 0)


def widened(gradient: Tensor) -> Tensor:
    """A gradient that can be summed without losing digits."""
    is_narrow = jnp.issubdtype(gradient.dtype, jnp.floating) and gradient.dtype.itemsize < 4
    return gradient.astype("float32") if is_narrow else gradient


def batch_of(data: Any) -> Batch:
    """x, y and sample_weight, as arrays."""
    return arrays(keras.utils.unpack_x_y_sample_weight(data))

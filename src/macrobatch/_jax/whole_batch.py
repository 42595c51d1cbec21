"""Steps whose loss and metrics see the predictions of the whole batch, in two passes.

    outputs_j = forward(B_j)                   first pass: for all j, nothing is kept but outputs
    G         = d loss(outputs) / d outputs    the loss of the whole batch, once
    gradient  = sum_j d <forward(B_j), G_j>    second pass

That is the chain rule. Both passes start from the same values, of seeds for instance, so that
random layers draw the same. On several devices each runs both passes on its own examples, and the
outputs of all are gathered between them.
"""

from typing import Any, List, Tuple

import jax
from jax import numpy as jnp

from macrobatch import _loop_checks
from macrobatch._jax import gather, loop
from macrobatch._jax.engine import ENGINE, any_is_traced
from macrobatch._jax.halves import Found
from macrobatch._jax.state import State, StateScope
from macrobatch._jax.steps import Steps, widened
from macrobatch._keras import whole_batch
from macrobatch._keras.whole_batch import WholeBatchStep
from macrobatch._types import Batch, Forward, MicroBatches, Part, Run, Size, Tensor


class WholeBatchSteps(Steps):
    """The steps of one model, in two passes."""

    takes_turns = False

    def _found(
        self, state: State, batch: Batch, examples: int, training: bool, measures: bool
    ) -> Found:
        own = ENGINE.examples(batch)
        micro_batches = self.cut.apply(batch, own, ENGINE)
        compiled, weights = any_is_traced((batch, state)), state.trained if training else []
        with StateScope(self.model, state) as scope:
            model = WholeBatchStep(self.model, training, ENGINE)
            first = self._first_pass(model, micro_batches, examples, compiled)
            values = model.values()
            # The loss sees the predictions of all devices, and is the same on each of them.
            floats, rest = _split(gather.whole(first.aux))
            inputs = gather.whole(batch if model.needs_inputs else (None, *batch[1:]))
            variables = model.written.variables
            after = gather.same_seeds(variables, model.values_for_loss(first.written))
            totals = ENGINE.sum_over_replicas(list(first.sums))

            def loss(floats: Any, totals: List[Tensor], weights: List[Tensor]) -> Any:
                outputs = _joined(floats, rest)
                found = model.loss(inputs, outputs, totals, after, examples, weights)
                run = found.run._replace(value=None)
                value = found.loss * self._scale(found.loss, training)
                return jnp.sum(value), whole_batch.Found(found.loss, found.logs, run)

            gradients: List[Tensor] = []
            arguments = floats, totals, weights
            if training:
                of_loss, found = jax.grad(loss, (0, 1, 2), has_aux=True)(*arguments)
                second = self._second_pass(model, weights, of_loss[1], examples)
                rows = _WithRows(micro_batches, gather.own(of_loss[0], own))
                sums = loop.run(second, rows, values, compiled).sums
                sums = ENGINE.sum_over_replicas(list(sums))
                gradients = [
                    (one + widened(other)).astype(weight.dtype)
                    for one, other, weight in zip(sums, of_loss[2], weights)
                ]
            else:
                _, found = loss(*arguments)
            written = gather.apart_again(model.written_by_loss.variables, found.run.written)
            found = found._replace(run=found.run._replace(written=written))
            model.write(first.written, first.moments, found)
            is_finite = self._is_finite(gradients, found.loss, training)
            return Found(gradients, scope.others(), scope.metrics(), found.logs, is_finite)

    def _scale(self, loss: Tensor, training: bool) -> Tensor:
        return self._loss_scale().astype(loss.dtype) if training else jnp.ones([], loss.dtype)

    def _first_pass(
        self, model: WholeBatchStep, micro_batches: MicroBatches, examples: int, compiled: bool
    ) -> Part:
        """The outputs of all micro-batches, and what their forward passes have left."""

        def forward(micro_batch: Batch, values: List[Tensor]) -> Part:
            found = model.forward(micro_batch, values, examples)
            own = ENGINE.examples(micro_batch)
            for leaf in jax.tree.leaves(found.outputs):
                if leaf.shape[:1] != (own,):
                    message = _loop_checks.not_of_examples("The predictions of the model")
                    raise ValueError(f"{message} (Here: shape {leaf.shape}.)")
            return Part(list(found.totals), (), found.written, found.moments, aux=found.outputs)

        run_first = jax.eval_shape if compiled else (lambda call, *args: call(*args))
        values, first = model.values(), micro_batches.get(micro_batches.runs[0], 0)
        like = run_first(forward, first, values)
        self.warn(model, like)
        return loop.run(forward, micro_batches, model.values(), compiled)

    def _second_pass(
        self, model: WholeBatchStep, weights: List[Tensor], of_totals: List[Tensor], examples: int
    ) -> loop.Step:
        """The step of the second pass: of a micro-batch, and of its rows of the loss's gradient."""

        def step(micro_batch: Any, values: List[Tensor]) -> Part:
            micro_batch, rows = micro_batch

            def product(weights: List[Tensor]) -> Tuple[Tensor, Forward]:
                found = model.forward(micro_batch, values, examples, weights=weights)
                floats, _ = _split(found.outputs)
                pairs = [*zip(floats, rows), *zip(found.totals, of_totals)]
                terms = [jnp.sum(one * other.astype(one.dtype)) for one, other in pairs]
                return sum(terms, jnp.zeros([])), found

            gradients, found = jax.grad(product, has_aux=True)(weights)
            return Part([widened(gradient) for gradient in gradients], (), found.written)

        return step


class _WithRows(MicroBatches):
    """Micro-batches, each with its rows of a nest that has all examples first."""

    def __init__(self, micro_batches: MicroBatches, nest: Any):
        self._micro_batches, self._nest = micro_batches, nest
        self.examples, self.runs = micro_batches.examples, micro_batches.runs

    def get(self, run: Run, index: Size) -> Batch:
        return self._micro_batches.get(run, index), self._micro_batches.rows(self._nest, run, index)


def _is_float(leaf: Tensor) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _split(outputs: Any) -> Tuple[List[Tensor], Any]:
    """The outputs that have gradients, and how to join them with the others."""
    leaves, structure = jax.tree.flatten(outputs)
    floats = [leaf for leaf in leaves if _is_float(leaf)]
    return floats, ([None if _is_float(leaf) else leaf for leaf in leaves], structure)


def _joined(floats: List[Tensor], rest: Any) -> Any:
    leaves, structure = rest
    waiting = iter(floats)
    return structure.unflatten([next(waiting) if leaf is None else leaf for leaf in leaves])

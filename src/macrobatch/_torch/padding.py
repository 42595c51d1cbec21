"""Sequences in fit(): which parts of a batch are cut, and the trial whether anything depends on
padding. Where micro-batches are not made by length, there is nothing to do.
"""

import contextlib
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from keras import tree

from macrobatch import _internals
from macrobatch._batches import checks
from macrobatch._batches.cut import Cut
from macrobatch._batches.sequences import MemoryAtOnce
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import report
from macrobatch._keras.model import ModelStep
from macrobatch._keras.scope import without
from macrobatch._keras.sequences import fixed_parts, low_precision
from macrobatch._keras.whole_batch import WholeBatchStep
from macrobatch._torch import trial
from macrobatch._torch.engine import ENGINE, on_device, same_draws
from macrobatch._types import Batch, MicroBatches, Size, Tensor, Whole


class Padding:
    """What is known of the padding of a model's batches.

    Attributes:
        done: whether it is known that nothing depends on padding, in testing and in training.
    """

    def __init__(self, cut: Cut):
        self._cut, self._memory = cut, MemoryAtOnce()
        self.done = [False, False]

    def cut(self, model: Any, batch: Batch, examples: Size) -> MicroBatches:
        """Cuts a batch of x, y and sample_weight."""
        (x, y, sample_weight), axis = batch, self._cut.axis
        fixed: List[Tensor] = []
        if axis is not None:
            checks.free_lengths(models.inputs_of(model), axis)
            fixed = fixed_parts(models.inputs_of(model), x, axis)
            fixed += fixed_parts(getattr(model, "outputs", None) or [], y, axis)
        return self._cut.apply(
            batch, examples, ENGINE, batch, x, sample_weight, fixed, memory=self._memory
        )

    def check(self, model: ModelStep, micro_batches: MicroBatches) -> None:
        """Tries, once, whether anything depends on padding."""
        if self._cut.axis is None or self.done[model.training]:
            return
        whole = Whole(1, guesses=[])  # Over 1, shares are sums.
        weights = [variable.value for variable in model.trained]

        def outcome(micro_batch: Batch) -> trial.Found:
            found = model(on_device(micro_batch), model.values(), whole, drops=False)
            gradients = trial.gradients_of(found.losses, weights)
            return _found(model, [*gradients, *found.reported, *found.counts], found.written[1:])

        def of_moved_weights(micro_batch: Batch) -> trial.Found:
            arguments = on_device(micro_batch), model.values(), whole
            found = model(*arguments, drops=False, weights=moved)
            return _found(model, [*found.reported, *found.counts], found.written[1:])

        with same_draws():
            moved = trial.moved(weights)
        self._try(model, micro_batches, [outcome, of_moved_weights][: 1 + bool(weights)])

    def check_whole_batch(self, model: WholeBatchStep, micro_batches: MicroBatches) -> None:
        """Tries, once, whether anything depends on padding, where the loss sees whole sequences."""
        if self._cut.axis is None or self.done[model.training]:
            return
        weights = [variable.value for variable in model.trained]

        def outcome(pair: Tuple[Batch, Batch], moves: bool = False) -> trial.Found:
            cut, uncut = (on_device(each) for each in pair)
            examples, values = ENGINE.examples(uncut), model.values()
            options: Any = {"drops": False, "weights": moved if moves else ()}
            of_whole = model.forward(uncut, values, examples, **options).outputs
            passed = model.forward(cut, values, examples, **options)
            outputs = tree.map_structure(
                lambda one, other: None if one is None else trial.sized_like(one, other),
                passed.outputs,
                of_whole,
            )
            totals = list(passed.totals)
            found = model.loss(uncut, outputs, totals, values, examples, options["weights"])
            gradients = [] if moves else trial.gradients_of([found.loss], weights)
            after = found.state_of(model.written_by_loss.variables)
            return _with_metrics(model, [found.loss, *gradients], after)

        with same_draws():
            moved = trial.moved(weights)
        outcomes = [outcome, lambda pair: outcome(pair, moves=True)][: 1 + bool(weights)]
        self._try(model, micro_batches, outcomes, beside_whole=True)

    def _try(
        self, model: Any, micro_batches: MicroBatches, outcomes: Any, beside_whole: bool = False
    ) -> None:
        self.done[model.training] = trial.check(
            micro_batches,
            trial.Trial(
                [trial.of_batch(outcome, bool(model.trained)) for outcome in outcomes],
                lambda: model.written.drew,
                model.model,
                low_precision(_internals.layers_of(model.model)),
                lambda: not beside_whole and not model.inexact,
                lambda: (
                    "" if model.reaches_loss else keras_checks.no_mask(models.unmasked(model.model))
                ),
                beside_whole,
            ),
        )

    @contextlib.contextmanager
    def explaining(self, model: Any, micro_batches: MicroBatches) -> Iterator[None]:
        """Says so where a model fails on sequences that are cut, and not on whole ones."""

        def dry_run(like: Batch) -> None:
            with torch.no_grad(), same_draws():
                model(on_device(like), model.values(), Whole(1, guesses=[]))

        with checks.explaining(micro_batches, dry_run):
            yield


def _found(model: ModelStep, losses: List[Tensor], written: Sequence[Any]) -> trial.Found:
    return _with_metrics(model, losses, dict(zip(map(id, model.written.variables), written)))


def _with_metrics(model: Any, losses: List[Tensor], after: Dict[int, Any]) -> trial.Found:
    """What a micro-batch comes to, by name: the loss with its gradients, and the metrics."""
    found = {"loss": losses}
    for metric in without(models.metrics_of(model.model), report.trackers_of(model.model)):
        # Not its result: what is wrong by a factor would go unnoticed there.
        values = [after.get(id(variable)) for variable in metric.variables]
        found.setdefault(metric.name, []).extend(v for v in values if v is not None)
    return found

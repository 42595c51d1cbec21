"""A Keras model in the trial whether examples meet: the terms of its loss, and its predictions."""

import contextlib
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._engine import BatchEngine
from macrobatch._keras import batch_norm, meeting, meeting_checks, report
from macrobatch._keras.added import added_losses
from macrobatch._keras.comparison import Found, Groups
from macrobatch._keras.model import ModelStep
from macrobatch._keras.pieces import Pieces
from macrobatch._keras.scope import Scope, unique
from macrobatch._types import Batch, Whole

# Kinds of values. A value is known by its kind and a place.
PREDICTIONS, LOSS, VALUES = "predictions", "loss", "values"


class Causes(NamedTuple):
    """The names of layers and of losses that make micro-batches differ from the whole batch.

    Attributes:
        layers: the layers in which examples meet.
        losses: the losses in which they meet.
        sized_layers: the layers that depend on how many examples there are, or on their places.
        sized_losses: the losses that depend on these.
    """

    layers: Sequence[str] = ()
    losses: Sequence[str] = ()
    sized_layers: Sequence[str] = ()
    sized_losses: Sequence[str] = ()


class _Ran(NamedTuple):
    """A run of a micro-batch: its predictions, and whether it drew random numbers."""

    micro_batch: Batch
    y_pred: Any
    drew: bool


class Tried(ModelStep, meeting.Tried):
    """A compiled model as a function of a micro-batch that leaves everything as it was.

    Metrics are not run. On several workers, to read them would be to wait for the others.

    Attributes:
        with_losses: whether losses are tried too, and not only layers.
    """

    alone_of = (0, 2)  # For rows, one piece tells as much as two.

    def __init__(
        self,
        model: Any,
        engine: BatchEngine,
        micro_batch_weight: Optional[Callable[..., Any]] = None,
        with_losses: bool = True,
    ):
        super().__init__(model, True, engine, micro_batch_weight)
        self.with_losses, self._is_added_to = with_losses, False
        self._latest: Optional[_Ran] = None  # of the runs of the formula
        trackers = [v for metric in report.trackers_of(model) for v in metric.variables]
        self._states = unique([*model.metrics_variables, *trackers])

    def found(self, micro_batch: Batch) -> Found:
        """The predictions, the values of each loss, and the numerator of each term."""
        self._latest = None  # All predictions of two runs might take more memory than training.
        self._latest = self._run(micro_batch, self.with_losses)
        found = _rows_of(self._latest.y_pred)
        if self.with_losses:
            found.update(self._numerators())
            for index, term in enumerate(self.terms):
                if f"{LOSS} {index}" in found and term.values is not None and not term.is_scalar:
                    found[f"{VALUES} {index}"] = term.values
        return found

    def certain(
        self, names: List[str], compared: Callable[[Callable[[Batch], Found]], List[str]]
    ) -> List[str]:
        """Without values that differ, but whose gradient does not: each may have a mean in it.

        The sum of values may hide what a gradient shows, where a part of them has none.
        """
        sums = [name for name in names if not name.startswith(VALUES)]
        doubtful = [int(name.split()[1]) for name in names if name not in sums]
        doubtful = [place for place in doubtful if f"{LOSS} {place}" not in sums]
        # Behind predictions that differ everything does.
        if not doubtful or any(name.startswith(PREDICTIONS) for name in sums):
            return sums
        found = compared(lambda micro_batch: self._slopes(micro_batch, doubtful))
        of_slopes = {f"{VALUES} {name.split()[1]}" for name in found}
        return [*sums, *(name for name in names if name in of_slopes)]

    def _slopes(self, micro_batch: Batch, places: List[int]) -> Found:
        """The gradients of some terms of the loss with respect to the predictions."""
        with self._running():
            y_pred = self._forward(micro_batch)
        leaves = tree.flatten(y_pred)
        masks = [_internals.mask_of(leaf) for leaf in leaves]
        floats = [
            i
            for i, leaf in enumerate(leaves)
            if keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype))
        ]

        def numerators(predictions: List[Any]) -> List[Any]:
            given = list(leaves)
            for place, prediction in zip(floats, predictions):
                given[place] = prediction
                if masks[place] is not None:
                    _internals.set_mask(prediction, masks[place])
            with self._running():
                whole = Whole(self._engine.examples(micro_batch))
                self._collect(micro_batch, tree.pack_sequence_as(y_pred, given), whole)
            return [self.terms[place].numerator for place in places]

        slopes = self._engine.gradients_of(numerators, [leaves[i] for i in floats])
        return {
            f"{VALUES} {place} {index}": slope
            for place, each in zip(places, slopes)
            for index, slope in enumerate(each)
        }

    def alone(self, micro_batch: Batch) -> Found:
        ran = self._latest
        if ran is None or ran.micro_batch is not micro_batch:
            ran = self._run(micro_batch)
        return {} if ran.drew else _rows_of(ran.y_pred)

    def apart(self, made: Pieces) -> Sequence[Found]:
        ran, self._latest = self._latest, None
        if not self.with_losses:
            return super().apart(made)
        together = made.batches[0]
        if ran is None or ran.micro_batch is not together:
            ran = self._run(together)
        return self.losses_of(made, ran.y_pred)

    def predicted(self, micro_batch: Batch) -> Any:
        """The predictions for some examples."""
        return self._run(micro_batch).y_pred

    def _run(self, micro_batch: Batch, with_losses: bool = False) -> _Ran:
        """A run in which nothing is dropped, so that there is less that depends on sizes."""
        with self._running() as scope, scope.dropping(False):
            y_pred = self._forward(micro_batch)
            self._is_added_to = bool(added_losses(_internals.layers_of(self.model)))
            drew = scope.drew
            if with_losses:
                self._collect(micro_batch, y_pred, Whole(self._engine.examples(micro_batch)))
        return _Ran(micro_batch, y_pred, drew)

    def losses_of(self, made: Pieces, y_pred: Any) -> Sequence[Found]:
        """The terms of the loss of some predictions together, and of each piece of these.

        Losses that are one number for the batch have a message of their own. So does what layers
        add.
        """
        is_cut = all(leaf.shape[0] == made.sizes[0] for leaf in tree.flatten(y_pred))
        # An own loss may ask for what layers have added, which is of all examples.
        is_known = not (self.is_overridden and self._is_added_to)
        if not (is_cut and is_known):
            return [{} for _ in made.batches]
        first, found = made.sizes[1], []
        for batch, rows in zip(made.batches, (slice(None), slice(first), slice(first, None))):
            with self._running() as scope:
                self._collect(batch, _part_of(y_pred, rows), Whole(made.sizes[0]))
            of_values = [not term.is_scalar and not term.is_added for term in self.terms]
            found.append({} if scope.drew else self._numerators(of_values))
        return found

    @contextlib.contextmanager
    def _running(self) -> Iterator[Scope]:
        """A scope for a run. An own compute_loss may ask a metric."""
        # Seeds have the same values again, in each scope.
        scope = Scope(self._states, [ops.zeros(v.shape, v.dtype) for v in self._states])
        with batch_norm.recorded(alone=True), scope, _internals.without_replica_scaling():
            yield scope

    def _numerators(self, wanted: Optional[Sequence[bool]] = None) -> Found:
        """The numerator of each term of the loss, or of those that are wanted."""
        # Of some losses that are given for a single output, Keras uses none.
        return {
            f"{LOSS} {index}": term.numerator
            for index, term in enumerate(self.terms)
            if not (isinstance(term.weight, float) and term.weight == 0)
            and (wanted is None or wanted[index])
        }

    def normalizing(self) -> List[Any]:
        """The layers that may normalise by the moments of a micro-batch."""
        kind = keras.layers.BatchNormalization
        return [layer for layer in _internals.layers_of(self.model) if isinstance(layer, kind)]

    def messages(self, groups: Groups, verdict: meeting.Verdict) -> List[str]:
        """What to say of a trial."""
        causes = self.causes(verdict)
        own_names = {term.name: term.own_name for term in self.terms}
        found = meeting_checks.messages(causes.layers, causes.losses, own_names, verdict.is_random)
        found += meeting_checks.of_sizes(causes.sized_layers, causes.sized_losses, own_names)
        return [*found, meeting_checks.NOT_FINITE] if verdict.unknown else found

    def causes(self, verdict: meeting.Verdict) -> Causes:
        """What a trial shows, in the words of the model."""
        layers, losses = self._places(verdict.layers, verdict.values)
        return Causes(layers, losses, *self._places(verdict.sized_layers, verdict.sized))

    def _places(
        self, of_layers: Sequence[str], values: Sequence[str]
    ) -> Tuple[List[str], List[str]]:
        """The layers, and the losses, of some values."""
        layers: List[str] = list(of_layers)
        losses: List[str] = []
        kinds = [value.split()[:2] for value in values]
        if any(kind == PREDICTIONS for kind, _ in kinds):  # Losses have it from them.
            return layers or [self.model.name], []
        for _, index in kinds:
            term = self.terms[int(index)]
            (layers if term.is_added else losses).append(term.name)
        return list(dict.fromkeys(layers)), list(dict.fromkeys(losses))


def _rows_of(y_pred: Any) -> Found:
    """The predictions by name."""
    return {
        f"{PREDICTIONS} {index}": leaf
        for index, leaf in enumerate(tree.flatten(y_pred))
        if ops.is_tensor(leaf) and len(leaf.shape)
    }


def _part_of(y_pred: Any, rows: slice) -> Any:
    """The predictions for some examples, with their masks."""

    def part(leaf: Any) -> Any:
        mask, found = _internals.mask_of(leaf), leaf[rows]
        if mask is not None:
            _internals.set_mask(found, mask[rows])
        return found

    return tree.map_structure(part, y_pred)

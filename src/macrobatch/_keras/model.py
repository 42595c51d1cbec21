"""A Keras model as a function: forward pass, loss and metrics of a micro-batch, from values to
values. No variable is written, and only the trained ones are read.
"""

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Set

import keras
from keras import ops, tree

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._keras import batch_norm, checks, losses, report, sequences, stateless
from macrobatch._keras.added import AddedLosses
from macrobatch._keras.report import overrides
from macrobatch._keras.scope import Scope, Written, is_seed, without
from macrobatch._types import Batch, Logs, Tensor, Variable, Whole, names

# Of a micro-batch: what fraction of the positions that have some weights was not cut off.
UncutFraction = Callable[[Batch, Tensor], Any]


class Outcome(NamedTuple):
    """What a model makes of a micro-batch.

    Attributes:
        losses: what to take gradients of: the part of this micro-batch in the loss of the whole
            batch. If the counts of the whole batch are not known, one for each of them, divided by
            its guess, and before them one for the rest.
        counts: the denominators that are counted, of this micro-batch.
        reported: the numerators of the reported values of all terms.
        written: for each value that went in, the value after the micro-batch; None if it did not
            change.
        moments: of the inputs of BatchNormalization layers.
        logs: what compute_metrics returned, if the model brings its own.
        is_there: whether the micro-batch counts, where all of its loss has a weight of the user's
            that may be 0: then gradients may be 0 / 0. None elsewhere.
    """

    losses: List[Tensor]
    counts: List[Tensor]
    reported: List[Tensor]
    written: List[Optional[Tensor]]
    moments: List[batch_norm.Moments]
    logs: Logs
    is_there: Optional[Tensor] = None


class ModelStep:
    """A compiled model, in training or in testing.

    Attributes:
        trained: the variables to be trained.
        written: the other variables, and what is known of how they are written.
        terms: the terms of the loss in the latest run, and its counts.
        brings_logs: whether the model brings its own compute_metrics.
    """

    def __init__(
        self,
        model: Any,
        training: bool,
        engine: Engine,
        micro_batch_weight: Optional[Callable[..., Any]] = None,
        uncut_fraction: Optional[UncutFraction] = None,
    ):
        self.model, self.training = model, training
        self._engine, self._weight = engine, micro_batch_weight
        self._uncut_fraction = uncut_fraction
        self.is_overridden = overrides(model, "compute_loss")
        self.trained = list(model.trainable_weights) if training else []
        # Of variables that no run writes, no values have to go into it.
        variables = without(variables_of(model), model.trainable_weights)
        self.written = Written(variables, self.trained, engine)
        self._compiled = _internals.compiled_loss(model)
        self.terms: List[losses.Term] = []
        self.counts: List[losses.Count] = []
        layers = functools.partial(_internals.layers_of, model)
        self._added = AddedLosses(layers, self._forward, self.written, engine)
        self._scalars: Set[str] = set()
        # An own compute_metrics may ask for the loss. Then each run needs the reported values of
        # the micro-batches before.
        self.brings_logs = overrides(model, "compute_metrics")
        if self.brings_logs:
            self.written.passing = [v for m in report.trackers_of(model) for v in m.variables]
        self.reaches_loss = False  # whether a mask or sample weights do

    def values(self) -> List[Tensor]:
        """What goes into the first run: nothing reported yet, and the values of all variables that
        are not trained.
        """
        size = len(self.terms) + len(self.counts) if self.brings_logs else 0
        return [ops.zeros([size], keras.config.floatx()), *self.written.values()]

    def fits(self, values: List[Tensor]) -> bool:
        """Whether a run has found nothing more that must go into it."""
        size = len(self.terms) + len(self.counts) if self.brings_logs else 0
        return len(values) == 1 + len(self.written.variables) and values[0].shape[0] == size

    def suits(self, other: "ModelStep") -> bool:
        """Whether another step of the model is compiled and trained as this one."""
        compiled = [_internals.compiled_loss(step.model) for step in (self, other)]
        same = list(map(id, self.trained)) == list(map(id, other.trained))
        return same and compiled[0] is self._compiled is compiled[1]

    def learn_from(self, other: "ModelStep") -> None:
        """Knows of terms and of variables what another step has found out by running."""
        self.terms, self.counts, self.written = other.terms, other.counts, other.written

    def __call__(
        self,
        micro_batch: Batch,
        values: List[Tensor],
        whole: Whole,
        alone: bool = False,
        drops: bool = True,
        weights: Sequence[Tensor] = (),
    ) -> Outcome:
        """Runs a micro-batch.

        Args:
            micro_batch: x, y and sample_weight.
            values: the values of the variables after the micro-batch before.
            whole: what is known of the whole batch.
            alone: whether layers must not meet those of other replicas.
            drops: whether dropout drops anything.
            weights: values for the trained variables, if not their own.
        """

        def code() -> Logs:
            with _internals.without_replica_scaling():
                y_pred = self._forward(micro_batch)
                self._collect(micro_batch, y_pred, whole)
                reported.append(self._report(values[0], whole))
                return self._metrics(micro_batch, y_pred)

        reported: List[Optional[Tensor]] = []
        result = stateless.run(code, self.written, values[1:], alone, drops, weights)
        return Outcome(
            losses=self._trained_parts(whole) if self.training else [],
            counts=[count.own for count in self.counts],
            reported=[ops.stop_gradient(term.reported) for term in self.terms],
            written=[reported[-1], *result.written],
            moments=result.moments,
            logs=tree.map_structure(ops.convert_to_tensor, result.value) if result.value else {},
            is_there=self._is_there(),
        )

    def _forward(self, micro_batch: Batch) -> Any:
        return _internals.predictions(self.model, micro_batch[0], self.training)

    def _metrics(self, micro_batch: Batch, y_pred: Any) -> Logs:
        x, y, sample_weight = micro_batch
        with sequences.over_whole_sequences(self._uncut(micro_batch)):
            if self.brings_logs:
                return self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
            # As Keras' own, but for the results, of which there will be others.
            compiled = _internals.compiled_metrics(self.model)
            if compiled is not None:
                compiled.update_state(y, y_pred, sample_weight)
            return {}

    def _report(self, so_far: Tensor, whole: Whole) -> Optional[Tensor]:
        """Tells Keras the losses so far, if anybody asks. At the batch's end they are right."""
        if not self.brings_logs:
            return None
        dtype = keras.config.floatx()
        own = [*(term.reported for term in self.terms), *(count.own for count in self.counts)]
        total = ops.stack([ops.stop_gradient(ops.cast(value, dtype)) for value in own])
        total = total if so_far.shape[0] == 0 else so_far + total
        sums = [total[i] for i in range(len(own))]
        numerators, denominators = sums[: len(self.terms)], sums[len(self.terms) :]
        values = report.values_of(
            self.terms, self.counts, numerators, denominators, self.regularization()
        )
        report.update_trackers(self, values, whole.examples)
        return total

    def _uncut(self, micro_batch: Batch) -> Optional[Callable[[Tensor], Any]]:
        if self._uncut_fraction is None:
            return None
        return functools.partial(self._uncut_fraction, micro_batch)

    def _collect(self, micro_batch: Batch, y_pred: Any, whole: Whole) -> None:
        """The terms of the loss of a micro-batch, and its counts."""
        (x, y, sample_weight), model = micro_batch, self.model
        examples = self._engine.examples(micro_batch)
        counts = (
            [] if self._weight is None else [user_weight(self._weight, micro_batch, self._engine)]
        )
        found = losses.Terms(
            losses.MicroBatch(
                examples,
                whole.examples,
                None if self._weight is None else 0,
                self._uncut(micro_batch) or (lambda weights: 1.0),
            ),
            counts,
            self._engine,
            self._scalars,
        )
        if self.is_overridden:
            # Metrics get the weights too, before the gradient of the loss is taken.
            own = tree.map_structure(self._engine.copied, sample_weight)
            value = _internals.compute_loss(model, x, y, y_pred, own, self.training)
            found.add_overridden(value)
        else:
            compiled = _internals.compiled_loss(model)
            if compiled is not None:
                if not compiled.built:
                    compiled(y, y_pred)
                found.add_compiled(compiled, y, y_pred, sample_weight)
            found.add_added(self._added.of(micro_batch, examples))
            checks.has_loss(found.terms, model.trainable_weights)
        self.terms, self.counts = found.terms, found.counts
        masks = [_internals.mask_of(leaf) for leaf in tree.flatten(y_pred)]
        self.reaches_loss = sample_weight is not None or any(mask is not None for mask in masks)

    def _trained_parts(self, whole: Whole) -> List[Tensor]:
        """What to take gradients of."""
        dtype = keras.config.floatx()
        parts = [ops.zeros([], dtype)] * (1 + len(self.counts))
        for term in self.terms:
            place = 0 if term.counted is None else 1 + term.counted
            is_plain = isinstance(term.weight, float) and term.weight == 1.0
            own = term.numerator if is_plain else term.numerator * term.weight
            parts[place] = parts[place] + ops.cast(own, dtype)
        if whole.counts is None:
            return [parts[0], *(part / guess for part, guess in zip(parts[1:], self._guess(whole)))]
        for place, count in enumerate(self.counts):
            total = ops.cast(whole.counts[place], dtype) + count.padding
            parts[0] = parts[0] + ops.divide_no_nan(parts[1 + place], total)
        return parts[:1]

    def _is_there(self) -> Optional[Tensor]:
        if self._weight is None or any(term.counted != 0 for term in self.terms):
            return None
        return self.counts[0].own > 0

    def _guess(self, whole: Whole) -> List[Tensor]:
        """About what the counts of the whole batch will be, from the first micro-batch."""
        assert whole.guesses is not None
        if not whole.guesses:
            for count in self.counts:  # K times too small, which does no harm
                own = ops.stop_gradient(ops.cast(count.own, keras.config.floatx()))
                whole.guesses.append(ops.where(own > 0, own, ops.ones_like(own)))
        return whole.guesses

    def regularization(self) -> Tensor:
        """The sum of the weight regularisers."""
        dtype = keras.config.floatx()
        total = ops.zeros([], dtype)
        if self.is_overridden:  # then that is where they are added to the loss
            return total
        with Scope():
            # In a scope where no layer has been called, these are all the losses that there are.
            for loss in self.model.losses:
                total = total + ops.cast(ops.sum(loss), dtype)
        return total

    @property
    def inexact(self) -> List[str]:
        """What cannot equal the whole batch, and the way out, after a run."""
        written, weight = self.written, self._weight
        scalars = [term for term in self.terms if term.is_scalar]
        if weight is not None:  # The user's weight says what they are means over.
            scalars = [term for term in scalars if term.counted != 0]
        return checks.inexact(
            normalizing=names(written.normalizing),
            decaying=names(written.decaying),
            scalars=[term.name for term in scalars if not term.is_added],
            added=[term.name for term in scalars if term.is_added],
            overridden=self.is_overridden and weight is None and not self.terms[0].rank,
        )

    def unexplained(self, written: Sequence[Optional[Tensor]]) -> List[str]:
        """The paths of variables that layers write once per micro-batch, for no known reason."""
        return unexplained(self.model, self.written, written[1:])


def unexplained(model: Any, written: Written, values: Sequence[Optional[Tensor]]) -> List[str]:
    """The paths of variables that layers write once per micro-batch, for no known reason.

    Args:
        model: the model.
        written: what is known of how its variables are written.
        values: what a run has left in them, where they changed.
    """
    changed = [v for v, value in zip(written.variables, values) if value is not None]
    known = [v for layer in written.decaying for v in layer.non_trainable_variables]
    known += [v for v in changed if is_seed(v)]
    return [v.path for v in without(changed, [*model.metrics_variables, *known])]


def user_weight(weight: Callable[..., Any], micro_batch: Batch, engine: Engine) -> losses.Count:
    """The weight of a micro-batch (x, y, sample_weight) that a function of the user gives."""
    found = ops.cast(checks.scalar_weight(weight(*micro_batch)), keras.config.floatx())
    good = ops.logical_and(ops.isfinite(found), found >= 0)
    return losses.Count(engine.checked(found, (good, checks.MICRO_BATCH_WEIGHT)))


def inputs_of(model: Any) -> List[Any]:
    """The inputs that a model declares, if it does: a functional one, or one that is built."""
    return getattr(model, "inputs", None) or []


def is_built(model: Any) -> bool:
    """Whether there is nothing more to learn from a batch."""
    compiled = [_internals.compiled_loss(model), _internals.compiled_metrics(model)]
    parts = [*_internals.layers_of(model), *compiled]
    return all(part is None or part.built for part in parts)


def all_variables(model: Any) -> List[Variable]:
    """The variables of a model, its metrics and its optimizer."""
    of_optimizer = model.optimizer.variables if model.optimizer else ()
    return [*model.variables, *model.metrics_variables, *of_optimizer]


def metrics_of(model: Any) -> List[Any]:
    """The metrics of a model, those that are compiled into one each."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", [metric])]


def variables_of(model: Any) -> List[Variable]:
    """All variables of the model, its seeds and its metrics."""
    compiled = _internals.compiled_loss(model)
    metrics = [_internals.loss_tracker(model), *(compiled.metrics if compiled else [])]
    return [
        *model.variables,
        *model.metrics_variables,
        *(variable for metric in metrics for variable in metric.variables),
    ]


def unmasked(model: Any) -> List[str]:
    """The names of what takes no part in masking, in the order of the model."""
    parts = getattr(model, "operations", None) or _internals.layers_of(model)[1:]
    parts = [part for part in parts if not isinstance(part, keras.layers.InputLayer)]
    return [part.name for part in parts if not getattr(part, "supports_masking", False)]

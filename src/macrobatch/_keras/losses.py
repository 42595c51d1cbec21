"""The loss as terms: what each micro-batch brings to the loss of the whole batch.

Keras computes the value L(S) = N(S) / D(S) of each term of the loss on a micro-batch S. Its value
on the whole batch B is

    sum_j N(B_j) / D(B),   D(B) = sum_j D(B_j)    for means,
    sum_j N(B_j)                                  for sums.

Keras' own losses are called as they are. N(B_j) is what they return times D(B_j). D is a number of
examples, which is known before the first micro-batch runs, or is counted: tokens that are not
masked, sums of weights.
"""

import functools
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Set

from keras import ops, tree

from macrobatch import _internals
from macrobatch._engine import Engine
from macrobatch._keras import checks
from macrobatch._keras.added import Added
from macrobatch._keras.probes import mask_padding
from macrobatch._types import Size, Tensor

# The reductions that divide by the number of elements, or of unmasked ones.
COUNTING = ("sum_over_batch_size", "mean")
MEANS = (*COUNTING, "mean_with_sample_weight")


class Term(NamedTuple):
    """A term of the loss, as far as a micro-batch goes.

    Attributes:
        name: the name of the loss, which Keras may name after its output, or of the layer that
            added it.
        numerator: N(B_j). Where D is a number of examples, it is already divided by D(B).
        reported: the same for the value that is reported: reduction=None is reported as a mean.
        counted: the place of D among the denominators that are counted; None if it is not counted.
        weight: the loss weight.
        is_scalar: whether the loss is one number for the batch, which counts as a mean.
        rank: of the values that Keras trains on the sum of, and reports the mean of; 0 if none.
        is_tracked: whether Keras reports the term by itself.
        is_added: whether a layer gave it to `add_loss`.
        values: those of the loss before weights, masks and reduction; None if they are not known.
        own_name: the name that the loss has itself.
    """

    name: str
    numerator: Tensor
    reported: Tensor
    counted: Optional[int] = None
    weight: Any = 1.0
    is_scalar: bool = False
    rank: int = 0
    is_tracked: bool = False
    is_added: bool = False
    values: Optional[Tensor] = None
    own_name: str = ""


class Count(NamedTuple):
    """A denominator that is counted: D(B_j), and what Keras adds to it."""

    own: Tensor
    padding: float = 0.0


class MicroBatch(NamedTuple):
    """What terms need to know of a micro-batch.

    Attributes:
        examples: the number of its examples.
        examples_of_all: that of the whole batch.
        weight: the place of the user's weight among the counts; None if examples are the weight.
        uncut_fraction: a function of weights of positions: what fraction of the positions there is,
            where sequences are cut; 1.0 where all are there.
        is_whole: whether losses are of all of its examples, each once.
    """

    examples: Size
    examples_of_all: Size
    weight: Optional[int]
    uncut_fraction: Callable[[Tensor], Any]
    is_whole: bool = True


class Terms:
    """The terms of a loss, collected for one micro-batch.

    Attributes:
        terms: the terms.
        counts: the denominators that are counted, each once.
    """

    def __init__(
        self, micro_batch: MicroBatch, counts: List[Count], engine: Engine, scalars: Set[str]
    ):
        """Starts with no terms.

        Args:
            micro_batch: what is known of the micro-batch.
            counts: the user's weight of the micro-batch, if there is one.
            engine: the backend.
            scalars: the names of losses that are one number for the batch, as far as other
                micro-batches have shown. Added to here.
        """
        self._micro_batch, self._engine, self._scalars = micro_batch, engine, scalars
        self.counts = counts
        self.terms: List[Term] = []

    def add_compiled(self, compiled: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
        """Adds the terms of a compiled loss. Keras does the paths and the structures."""
        entries = _internals.flat_losses(compiled)
        trackers = [_Tracker() for _ in compiled.metrics]
        losses = [entry._replace(loss=functools.partial(self.add_loss, entry)) for entry in entries]
        _internals.with_losses(compiled, losses, trackers)(y, y_pred, sample_weight)
        updated = [tracker.updated for tracker in trackers]
        # For a single output, Keras uses the first loss and no other.
        counting = self.terms if any(updated) else self.terms[:1]
        repeats = self._repeats(counting)
        for i, term in enumerate(self.terms):
            self.terms[i] = term._replace(
                weight=term.weight if i < len(counting) else 0.0,
                numerator=term.numerator if term.rank else term.numerator * repeats,
                is_tracked=i < len(updated) and updated[i],
            )

    def _repeats(self, terms: List[Term]) -> Any:
        """How often Keras counts a scalar: once for each value of a vector that it is added to."""
        ranks = {term.name: term.rank for term in terms}
        if len(set(ranks.values())) <= 1:
            return 1
        checks.vectors_beside_scalars(ranks)
        return ops.cast(self._micro_batch.examples_of_all, terms[0].numerator.dtype)

    def add_loss(self, entry: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Tensor:
        """Adds a term, in place of Keras' own loss."""
        if not tree.is_nested(y_pred):  # Labels of the only output may be in a list of their own.
            y_true, sample_weight = _only(y_true), _only(sample_weight)
        loss = _internals.shallow_copy(entry.loss)
        reduction = getattr(loss, "reduction", None)
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            # The weights of a micro-batch may add up to 0: take the sum, and divide it ourselves.
            loss.reduction = "sum"
        given = None if sample_weight is None else self._engine.copied(sample_weight)
        value, values, is_number = _value_and_values(loss, y_true, y_pred, given)
        if values is None:  # A loss that brings its own __call__ is taken for what it returns.
            values, reduction = value, None
        masks = _masks(y_pred, values)
        weight = 1.0 if entry.loss_weights is None else entry.loss_weights
        examples = self._micro_batch.examples
        is_scalar = len(values.shape) == 0
        if reduction in MEANS and not is_scalar:
            # In a micro-batch of one example, one value may be either. Others have shown which.
            may_be = not _is_one(examples) or entry.name in self._scalars
            is_scalar = values.shape[0] == 1 and may_be
            if not is_scalar and self._micro_batch.is_whole:
                value = self._per_example(value, values)
        if is_scalar:
            self._scalars.add(entry.name)
        # A number of Python's is the same for all batches.
        term = Term(entry.name, value, value, weight=weight, is_scalar=is_scalar and not is_number)
        term = term._replace(values=values, own_name=getattr(entry.loss, "name", None) or "")
        if is_scalar and sample_weight is None and (reduction in MEANS or not masks):
            term = self._mean(term, self._micro_batch.weight)
        elif reduction not in MEANS:
            term = self._sum(term, sample_weight)
        else:
            term = self._mean_of_values(term, entry.loss, masks, sample_weight)
        self.terms.append(term)
        return ops.zeros([], value.dtype)

    def _mean_of_values(self, term: Term, loss: Any, masks: List[Any], sample_weight: Any) -> Term:
        """A mean over elements, over those that are not masked, or over weights."""
        if loss.reduction in COUNTING:
            weights: List[Any] = []  # they divide by a number of elements, not by weights
        else:
            weights = [] if sample_weight is None else [sample_weight]
        if not masks and not weights:
            uncut = self._uncut_fraction(sample_weight)
            return self._mean(term, None, uncut)
        # Keras multiplies masks and weights before it broadcasts them to the shape of the losses.
        factors = [ops.cast(factor, loss.dtype) for factor in (*masks, *weights)]
        own = ops.sum(functools.reduce(_multiply, factors))
        padding = mask_padding() if masks and loss.reduction in COUNTING else 0.0
        self.counts.append(Count(own, padding))
        term = term._replace(counted=len(self.counts) - 1)
        if weights:
            return term
        return _times(term, ops.cast(own, term.numerator.dtype) + padding)

    def _mean(self, term: Term, count: Optional[int], uncut: Any = 1.0) -> Term:
        """A mean over the examples, or over what is counted."""
        dtype = term.numerator.dtype
        if count is not None:
            # A mean over nothing may be 0 / 0, and counts nothing.
            own = ops.cast(self.counts[count].own, dtype)
            term = _times(term._replace(counted=count), own)
            return term._replace(
                numerator=ops.where(own > 0, term.numerator, ops.zeros_like(term.numerator)),
                reported=ops.where(own > 0, term.reported, ops.zeros_like(term.reported)),
            )
        share = share_of(self._micro_batch.examples, self._micro_batch.examples_of_all, dtype)
        return _times(term, share if isinstance(uncut, float) else share * ops.cast(uncut, dtype))

    def _sum(self, term: Term, sample_weight: Any) -> Term:
        """A sum. What has several values is reported as their mean."""
        value = term.numerator
        if len(value.shape) == 0:
            return term
        mean = ops.mean(value)
        uncut = self._uncut_fraction(sample_weight)
        mean = mean if isinstance(uncut, float) else mean * ops.cast(uncut, mean.dtype)
        reported = self._mean(term._replace(numerator=mean, reported=mean), None).reported
        return term._replace(numerator=ops.sum(value), reported=reported, rank=len(value.shape))

    def _uncut_fraction(self, weights: Any) -> Any:
        """What fraction of the positions there is, where some were cut off that had no weight.

        Without weights for positions all of them count, and none could be cut off.
        """
        return 1.0 if weights is None else self._micro_batch.uncut_fraction(weights)

    def _per_example(self, value: Tensor, values: Tensor) -> Tensor:
        """The value of a mean, once its values are known to be as many as there are examples."""
        examples = self._micro_batch.examples
        if values.shape[0] is not None:
            checks.values_per_example(values.shape[0], examples)
            return value
        equal = ops.equal(ops.shape(values)[0], examples)
        return self._engine.checked(value, (equal, checks.VALUES_PER_EXAMPLE))

    def add_added(self, added: Sequence[Added]) -> None:
        """Adds what layers have given to `add_loss`.

        Scalars are means over the batch. Vectors with a value for each example are summed, as in
        Keras.
        """
        for layer, value, kind in added:
            total = ops.sum(value)
            term = Term(layer.name, total, total, is_added=True)
            if kind == "mean":
                term = self._mean(term, None)
            elif kind == "scalar":
                term = self._mean(term._replace(is_scalar=True), self._micro_batch.weight)
            self.terms.append(term)

    def add_overridden(self, value: Tensor) -> None:
        """Adds what an overridden compute_loss has returned."""
        name, value = "compute_loss", ops.convert_to_tensor(value)
        may_be_scalar = not _is_one(self._micro_batch.examples) or name in self._scalars
        if len(value.shape) == 0 or (value.shape[0] == 1 and may_be_scalar):
            self._scalars.add(name)
            value = ops.sum(value)
            term = self._mean(Term(name, value, value), self._micro_batch.weight)
        else:  # Keras takes the gradient of the sum of the values.
            value = self._per_example(value, value)
            term = self._sum(Term(name, value, value), None)
        self.terms.append(term)


def _only(nest: Any) -> Any:
    return nest[0] if isinstance(nest, (list, tuple)) and len(nest) == 1 else nest


class _Tracker:
    """Stands in for the metric of a term, which must be updated once per batch, not here."""

    updated = False

    def update_state(self, *_: Any, **__: Any) -> None:
        self.updated = True


def share_of(own: Size, whole: Size, dtype: Any) -> Any:
    """own / whole, or 0 where the whole is 0: then there is nothing to learn from."""
    if isinstance(own, int) and isinstance(whole, int):  # A number takes no time.
        return own / whole if whole else 0.0
    return ops.divide_no_nan(ops.cast(own, dtype), ops.cast(whole, dtype))


def _times(term: Term, factor: Tensor) -> Term:
    return term._replace(numerator=term.numerator * factor, reported=term.reported * factor)


def _is_one(examples: Size) -> bool:
    return isinstance(examples, int) and examples == 1


def _value_and_values(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The loss, its values before weights, masks and reduction, and whether it is a number."""
    seen, are_numbers = [], [False]

    def call(*args: Any) -> Tensor:
        found = loss.call(*args)
        are_numbers.append(isinstance(found, (int, float)))
        values = ops.convert_to_tensor(found, loss.dtype if are_numbers[-1] else None)
        for mask in _masks(y_pred, values):
            checks.weights_fit_losses(mask, values, "mask")
        if sample_weight is not None:
            checks.weights_fit_losses(sample_weight, values, "sample_weight")
        seen.append(values)
        return values

    watched = _internals.shallow_copy(loss)
    watched.call = call
    value = ops.convert_to_tensor(watched(y_true, y_pred, sample_weight))
    return value, seen[0] if seen else None, are_numbers[-1]


def _masks(y_pred: Any, values: Tensor) -> List[Any]:
    masks = [_internals.mask_of(tensor) for tensor in (y_pred, values)]
    return [mask for mask in masks if mask is not None]


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """The product; where one has a last dimension of 1 more than the other, that is dropped."""
    if len(left.shape) > len(right.shape):
        left = ops.squeeze(left, -1)
    elif len(right.shape) > len(left.shape):
        right = ops.squeeze(right, -1)
    return left * right

"""The loss as parts: what each micro-batch brings to the loss of the whole batch.

Keras computes the value L(S) = N(S) / D(S) of each term of the loss on a micro-batch S. Its value
on the whole batch B is

    sum_j  D(B_j) / D(B) * L(B_j)          for means,
    sum_j  L(B_j)                          for sums,

so Keras' own losses are called as they are, and all that has to be known about a term is D. What
macrobatch knows about the inside of Keras' losses is in this file.
"""

import functools
from typing import Any, Callable, List, NamedTuple, Optional

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import split as _split
from macrobatch._keras import patch as _patch

# The reductions that divide by the number of elements, or of unmasked ones.
COUNTING = ("sum_over_batch_size", "mean")


class Denominators(NamedTuple):
    """D, for a micro-batch or for the whole batch.

    Attributes:
        examples: for means over examples.
        weight: for scalars: the number of examples, or what `micro_batch_weight` returns.
        terms: for each term of the compiled loss; it is `None` for a sum.
    """

    examples: Any
    weight: Any
    terms: List[Any]


class Terms:
    """A compiled loss with its terms taken apart, for one micro-batch.

    Attributes, after a call:
        part: the denominators D(B_j) of this micro-batch.
        reported: the part of this micro-batch in each term, without loss weights.
        counts: those D that are counts of tokens or sums of weights, not numbers of examples.
        scalars: the names of losses that return one scalar for the batch.
    """

    def __init__(
        self,
        compiled: Any,
        part: Denominators,
        whole: Optional[Denominators] = None,
        kept: Optional[Callable[[Any], Any]] = None,
    ):
        """Takes a loss apart.

        Args:
            compiled: Keras' compiled loss.
            part: the denominators of the micro-batch that do not depend on the loss.
            whole: the denominators of the whole batch; if None, those of the micro-batch.
            kept: what part of the positions with some weights there is, where sequences are cut.
        """
        # Keras does the paths, structures and loss weights, over terms of ours.
        self._compiled = _shallow_copy(compiled)
        self._compiled._flat_losses = [
            entry._replace(loss=functools.partial(self._term, entry))
            for entry in compiled._flat_losses
        ]
        self._compiled._metrics = [_Tracked() for _ in compiled.metrics]
        self._whole, self._kept = whole, kept
        self._unreported: List[Any] = []
        self._vectors: List[bool] = []
        self.part = part._replace(terms=[])
        self.reported: List[Any] = []
        self.counts: List[Any] = []
        self.scalars: List[str] = []

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        """The part of this micro-batch in the compiled loss of the whole batch."""
        return self._compiled(y, y_pred, sample_weight)

    @property
    def unreported(self) -> Any:
        """What the loss has more than the reported one: reduction=None is reported as a mean."""
        # For a single output, Keras uses the first loss and no other.
        single = not any(metric.updated for metric in self._compiled._metrics)
        return sum(self._unreported[:1] if single else self._unreported)

    @property
    def tracked(self) -> List[Any]:
        """For each term: None if Keras does not track its value, else whether it is a vector."""
        metrics = self._compiled._metrics
        return [is_vector if m.updated else None for m, is_vector in zip(metrics, self._vectors)]

    def _term(self, entry: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        """The part of this micro-batch in a term, in place of Keras' own loss."""
        loss = _shallow_copy(entry.loss)
        by_weights = _reduction(loss) == "mean_with_sample_weight" and sample_weight is not None
        if by_weights:
            # The weights of a micro-batch may add up to 0: take the sum, and divide it ourselves.
            loss.reduction = "sum"
        value, values = _value_and_values(loss, y_true, y_pred, sample_weight)
        masks = _masks(y_pred, values)
        denominator = self._denominator(entry, values, masks, sample_weight)
        index = len(self.part.terms)
        self.part.terms.append(denominator)
        whole = self.part if self._whole is None else self._whole
        is_vector = denominator is None and len(value.shape) > 0
        trained = reported = tf.reduce_sum(value)
        if by_weights:
            trained = reported = value * share(1.0, whole.terms[index], value.dtype)
        elif denominator is not None:
            padding = mask_padding() if masks and _reduction(loss) in COUNTING else 0.0
            fraction = share(denominator, whole.terms[index], value.dtype, padding)
            trained = reported = fraction * self._checked(value, values)
        elif is_vector:
            mean = tf.reduce_mean(value) * self._kept_of(sample_weight)
            reported = share(self.part.examples, whole.examples, value.dtype) * mean
        loss_weight = 1.0 if entry.loss_weights is None else entry.loss_weights
        self._unreported.append((trained - reported) * loss_weight)
        self._vectors.append(is_vector)
        self.reported.append(reported)
        return trained

    def _denominator(self, entry: Any, values: Any, masks: List[Any], sample_weight: Any) -> Any:
        reduction, kept = _reduction(entry.loss), self._kept_of(sample_weight)
        is_mean = reduction in (*COUNTING, "mean_with_sample_weight")
        is_scalar = len(values.shape) == 0
        if is_mean and not is_scalar:
            is_scalar = values.shape[0] == 1 and self.part.examples != 1
            if not is_scalar and values.shape[0] is not None:
                message = _checks.VALUES_PER_EXAMPLE
                _checks.values_per_example(values.shape[0], self.part.examples, message)
        if is_scalar:
            self.scalars.append(entry.name)
            if sample_weight is None and (is_mean or not masks):
                return self.part.weight
        if not is_mean:
            return None
        if reduction in COUNTING:
            sample_weight = None  # they divide by a number of elements, not by weights
        if sample_weight is None and not masks:
            if isinstance(kept, float):
                return self.part.examples
            return tf.cast(self.part.examples, kept.dtype) * kept
        # Keras multiplies masks and weights before it broadcasts them to the shape of the losses.
        factors = [*masks, *([] if sample_weight is None else [sample_weight])]
        factors = [tf.cast(factor, entry.loss.dtype) for factor in factors]
        self.counts.append(tf.reduce_sum(functools.reduce(_multiply, factors)))
        return self.counts[-1]

    def _kept_of(self, weights: Any) -> Any:
        """What part of the positions there is, where some were cut off that had no weight.

        Without weights for positions all of them count, and none could be cut off. Where
        denominators are counted, they are those of whole sequences.
        """
        counting = self._whole is None
        return 1.0 if counting or self._kept is None or weights is None else self._kept(weights)

    def _checked(self, value: Any, values: Any) -> Any:
        """The value of a mean, once its values are known to be as many as there are examples."""
        # Counting denominators must not depend on predictions, or nothing of it could be pruned.
        counting = self._whole is None
        if counting or len(values.shape) == 0 or values.shape[0] is not None:
            return value
        message = _checks.VALUES_PER_EXAMPLE
        return _split.asserted(value, tf.shape(values)[0], self.part.examples, message)


class _Tracked:
    """Stands in for the metric of a term, which must be updated once per batch, not here."""

    updated = False

    def update_state(self, *_: Any, **__: Any) -> None:
        self.updated = True


def added_losses(layers: List[Any], part: Denominators, whole: Denominators) -> List[Any]:
    """The part of this micro-batch in the losses that layers have added.

    Scalars are means over the batch; vectors with a value for each example are summed, as in Keras.
    """
    added = []
    for layer in layers:
        for loss in layer._get_own_losses():
            loss = loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())
            total = tf.reduce_sum(loss)
            if per_example(loss, part.examples):
                added.append(total)
            elif layer.activity_regularizer is None:
                added.append(share(part.weight, whole.weight, loss.dtype) * total)
            elif activity_losses_are_means():
                added.append(share(part.examples, whole.examples, loss.dtype) * total)
            else:
                added.append(total)
    return added


def layers_adding_scalars(layers: List[Any], examples: Any) -> List[str]:
    """The layers with scalar `add_loss` values other than activity regularisers."""
    return [
        layer.name
        for layer in layers
        if layer.activity_regularizer is None
        and any(not per_example(loss, examples) for loss in layer._get_own_losses())
    ]


# Lets means be means on replicas too, where Keras divides each by the number of replicas, so that
# their sum is the mean of means; here each has a share of its own. Whether a loss is divided
# depends on its reduction, and of what an overridden compute_loss returns nobody knows. All of
# Keras divides with this function.
undivided = _patch.Patch(
    keras.losses.Loss.__module__,
    "scale_loss_for_distribution",
    lambda divide, entered, value: value,
)


@functools.lru_cache(maxsize=None)
def activity_losses_are_means() -> bool:
    """Whether Keras divides activity regularisers by the batch size, as it does since 3.14."""
    with tf.init_scope(), keras.StatelessScope(collect_losses=True) as scope:
        keras.layers.ActivityRegularization(l1=1.0)(tf.ones([2, 1]))
        return float(scope.losses[0]) == 1.0


@functools.lru_cache(maxsize=None)
def _pads_masks() -> bool:
    with tf.init_scope():
        prediction = tf.ones([1, 1], tf.float64)
        prediction._keras_mask = tf.ones([1], tf.bool)
        loss = keras.losses.MeanAbsoluteError(dtype="float64")
        return float(loss(tf.zeros([1, 1], tf.float64), prediction)) != 1.0


def mask_padding() -> float:
    """What Keras adds to the number of unmasked elements: an epsilon, up to 3.12."""
    return float(keras.config.epsilon()) if _pads_masks() else 0.0


def share(part: Any, whole: Any, dtype: Any, padding: float = 0.0) -> Any:
    """part / whole, or 0 where the whole is 0: then there is nothing to learn from."""
    part, whole = tf.cast(part, dtype) + padding, tf.cast(whole, dtype) + padding
    return tf.math.divide_no_nan(part, whole)


def per_example(values: Any, examples: Any) -> bool:
    """Whether the first dimension of these values is the examples, as far as can be known."""
    if len(values.shape) == 0:
        return False
    known = examples if isinstance(examples, int) else None
    # A size that is known although the number of examples is not, is not that number.
    return values.shape[0] == known or (values.shape[0] is None)


def _value_and_values(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
    """The loss, and its values before weights, masks and reduction."""
    seen = []

    def call(*args: Any) -> Any:
        values = loss.call(*args)
        for mask in _masks(y_pred, values):
            _checks.weights_fit_losses(mask, values, "mask")
        if sample_weight is not None:
            _checks.weights_fit_losses(sample_weight, values, "sample_weight")
        seen.append(values)
        return values

    watched = _shallow_copy(loss)
    watched.call = call
    value = watched(y_true, y_pred, sample_weight)
    # A loss that brings its own __call__ is taken for what it returns.
    return value, seen[0] if seen else value


def _reduction(loss: Any) -> Any:
    return getattr(loss, "reduction", None)


def _masks(y_pred: Any, values: Any) -> List[Any]:
    masks = [getattr(tensor, "_keras_mask", None) for tensor in (y_pred, values)]
    return [mask for mask in masks if mask is not None]


def _shallow_copy(loss: Any) -> Any:
    copied = object.__new__(type(loss))  # copy.copy would serialise a Keras object
    vars(copied).update(vars(loss))
    return copied


def _multiply(left: Any, right: Any) -> Any:
    """The product; where one has a last dimension of 1 more than the other, that is dropped."""
    if len(left.shape) > len(right.shape):
        left = tf.squeeze(left, -1)
    elif len(right.shape) > len(left.shape):
        right = tf.squeeze(right, -1)
    return left * right

"""Whether what comes of a micro-batch depends on its padding. Then it must not be cut shorter.

Nobody can see it from a model or a loss, so one micro-batch is run cut and whole, once, before
anything is trained on.
"""

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import by_length as _lengths
from macrobatch._batches import checks as _length_checks
from macrobatch._keras import patch as _patch
from macrobatch._tensorflow import replicas as _replicas

# What rounding may bring, over the largest number; padding brings more, since the shortest
# examples are compared.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 5e-2


class Trial(NamedTuple):
    """What to compare.

    Attributes:
        outcomes: functions of a micro-batch. Each returns tensors by name: the loss, and metrics.
        drew: whether, in the last of them, random numbers were drawn that dropout does not draw.
        owner: the model or function that this is about, for warnings.
        coarse: whether numbers are of less than 32 bits somewhere.
        additive: whether, in the last of them, no example should depend on other ones.
        hint: what is known after them of why a loss might depend on padding.
    """

    outcomes: Sequence[Callable[[Any], Dict[str, List[Any]]]]
    drew: Callable[[], bool]
    owner: Any
    coarse: bool
    additive: Callable[[], bool]
    hint: Callable[[], str] = str


def check(micro_batches: _lengths.ByLength, trial: Trial, checked: Any) -> None:
    """Raises, here or when the graph runs, if a micro-batch comes to something else when it is cut.

    Micro-batches that are taken afterwards are there only once this is known.

    Args:
        micro_batches: a batch that is cut.
        trial: what to compare.
        checked: a variable that is not 0 when there is nothing to be done, and set here.
    """
    start, end, needed = _compared(micro_batches)
    needed = tf.logical_and(needed, tf.equal(_replicas.read(checked), 0))
    names: List[str] = []

    def compare() -> List[Any]:
        equal: Dict[str, List[Any]] = {}
        for outcome in trial.outcomes:
            # One trace, for all lengths.
            run = outcome if tf.executing_eagerly() else tf.function(outcome, autograph=False)
            with without_dropout():
                of_whole, others = _outcomes(run, micro_batches, start, end, trial)
            for other in others:
                for name, values in other.items():
                    close = _close(of_whole[name], values, trial.coarse)
                    equal.setdefault(name, []).append(close)
        unknown = _length_checks.not_compared(
            trial.drew(), bool(micro_batches.sequences.ragged) and not trial.additive()
        )
        if unknown is not None:
            _checks.warn_once(trial.owner, unknown)
        if trial.drew():
            return []
        names[:] = list(equal)
        return [tf.reduce_all(tf.stack(each)) for each in equal.values()]

    def refusal(name: str) -> str:
        hint = trial.hint() if name == "loss" else ""
        return _length_checks.depends_on_padding(name, hint, micro_batches.lengths_are_given)

    if tf.executing_eagerly():
        equal = compare() if bool(needed) else []
        for name, is_equal in zip(names, equal):
            if not is_equal:
                raise ValueError(refusal(name))
        asserts = []
    else:
        # The names are known once the comparison has been traced.
        equal = tf.cond(needed, compare, lambda: [tf.constant(True)] * len(names))
        asserts = [
            tf.debugging.Assert(is_equal, [refusal(name)])
            for name, is_equal in zip(names, tf.nest.flatten(equal))
        ]
    with tf.control_dependencies(asserts):
        checked.assign(tf.where(needed, 1, _replicas.read(checked)))
        micro_batches.order = tf.identity(micro_batches.order)


_known: "weakref.WeakKeyDictionary[Any, Set[Any]]" = weakref.WeakKeyDictionary()


def check_once(
    function: Any, variables: List[Any], micro_batches: _lengths.ByLength, trial: Trial
) -> None:
    """Checks a function of a user, once for its variables; in a graph, once for each trace."""
    # A lambda may be made anew for each call, a closure for each model.
    code = getattr(function, "__code__", function)
    key = (micro_batches.sequences.axis, *map(id, variables))
    if tf.executing_eagerly() and key in _known.get(code, ()):
        return
    checked = _replicas.variable(None, [], tf.int32, "padding_checked")
    if not tf.executing_eagerly():
        # Functions refer to variables, but do not keep them.
        tf.compat.v1.add_to_collection("macrobatch", checked)
    check(micro_batches, trial, checked)
    if tf.executing_eagerly() and int(checked):
        _known.setdefault(code, set()).add(key)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Lets what a graph refuses be the error that it is in eager mode."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        refusals = [line for line in error.message.splitlines() if _length_checks.REFUSAL in line]
        if not refusals:
            raise
        message = refusals[0].partition("assertion failed: [")[2].rpartition("]")[0]
        raise ValueError(message.replace("\\'", "'")) from None


def gradients(tape: tf.GradientTape, loss: Any, variables: List[Any]) -> List[Any]:
    """The gradients of a loss, of those that have any; of rows of a table, their sum."""
    found = [gradient for gradient in tape.gradient(loss, variables) if gradient is not None]
    return [tf.reduce_sum(g.values, 0) if isinstance(g, tf.IndexedSlices) else g for g in found]


def _compared(micro_batches: _lengths.ByLength) -> Tuple[Any, Any, Any]:
    """Which examples to compare, no more than can be in memory whole: some of the shortest.

    Their places in the order, and whether there is any padding to compare them with and without.
    """
    examples, size = micro_batches.examples, micro_batches.sequences.size
    most = micro_batches.examples_at(size)
    if not micro_batches.sequences.ragged:
        start = tf.maximum(examples - most, 0)
        lengths = [micro_batches.lengths[start], *micro_batches.longer()]
        is_padded = tf.reduce_any(tf.stack([tf.not_equal(length, size) for length in lengths]))
        return start, examples, tf.logical_and(is_padded, start < examples)
    # Rows are padded only by a longer one beside them: the last one that is longer than others.
    lengths = micro_batches.lengths[:examples]
    longer = tf.reduce_sum(tf.cast(lengths > micro_batches.lengths[examples - 1], tf.int32))
    start = tf.maximum(longer - 1, 0)
    return start, tf.minimum(start + tf.maximum(most, 2), examples), longer > 0


def _outcomes(
    run: Any, micro_batches: _lengths.ByLength, start: Any, end: Any, trial: Trial
) -> Tuple[Any, List[Any]]:
    """What comes of examples with padding, and all that must be the same without."""

    def taken(start: Any, end: Any, length: Any) -> Any:
        return run(micro_batches.taken(start, end, _unknown(length)))

    longest, others = micro_batches.lengths[start], micro_batches.lengths[start + 1]
    if not micro_batches.sequences.ragged:
        of_whole = taken(start, end, micro_batches.sequences.size)
        return of_whole, [taken(start, end, each) for each in (longest, *micro_batches.longer())]
    together = taken(start, end, longest)
    if not trial.additive():
        return together, []
    parts = [taken(start, start + 1, longest), taken(start + 1, end, others)]
    sums = [tf.add_n(pair) for pair in zip(*(part["loss"] for part in parts))]
    return together, [{"loss": sums}]


def _unknown(length: Any) -> Any:
    """A length that a trace does not know."""
    return length if tf.executing_eagerly() else tf.compat.v1.placeholder_with_default(length, [])


def _close(some: List[Any], others: List[Any], coarse: bool) -> Any:
    """Whether values are the same but for rounding."""
    close = [tf.constant(True)]
    for one, other in zip(some, others):
        if not one.dtype.is_floating:
            close.append(tf.reduce_all(tf.equal(one, other)))
            continue
        tolerance = COARSE if coarse else TOLERANCES.get(one.dtype.name, COARSE)
        finite = tf.math.is_finite(one)
        close.append(tf.reduce_all(tf.equal(finite, tf.math.is_finite(other))))
        one, other = (tf.where(finite, value, tf.zeros_like(value)) for value in (one, other))
        size = tf.reduce_max(tf.maximum(tf.abs(one), tf.abs(other))) + 0.01
        close.append(tf.reduce_all(tf.abs(one - other) <= tolerance * size))
    return tf.reduce_all(tf.stack(close))


# Lets Keras' dropout keep everything: shorter sequences would draw other masks. All layers drop
# with this function of the backend.
without_dropout = _patch.Patch(
    "keras.src.backend.tensorflow.random",
    "dropout",
    lambda drop, entered, inputs, *args, **kwargs: inputs,
)


def _reduce_whole(
    reduce: Any, kept: Any, values: Any, sample_weight: Any, reduce_fn: Any, dtype: Any
) -> Any:
    positions = getattr(values, "_keras_mask", None) if sample_weight is None else sample_weight
    if reduce_fn is not keras.ops.mean:
        return reduce(values, sample_weight, reduce_fn, dtype)
    part = 1.0 if positions is None else kept(tf.cast(positions, dtype))
    if not isinstance(part, float):
        values, weights = reduce(values, sample_weight, reduce_fn, dtype)
        return values * part, weights * part
    if not tf.executing_eagerly():  # There, sizes do not tell what they are the size of.
        _length_checks.metric_has_weights(isinstance(kept(tf.cast(values, dtype)), float))
    return reduce(values, sample_weight, reduce_fn, dtype)


# Lets metrics weigh each example as if its sequences had not been cut. Keras takes the mean over
# the positions of each example, and of their weights, so that examples of a shorter micro-batch
# would count more than others.
over_whole_sequences = _patch.Patch(
    keras.metrics.Mean.__module__, "reduce_to_samplewise_values", _reduce_whole
)


def low_precision(layers: List[Any]) -> bool:
    """Whether some of these layers compute with less than 32 bits."""
    dtypes = {getattr(layer, "compute_dtype", None) for layer in layers}
    dtypes.add(keras.config.dtype_policy().compute_dtype)
    return not dtypes.isdisjoint({"float16", "bfloat16"})

"""Whether what comes of a micro-batch depends on its padding. Then it must not be cut shorter.

Nobody can see it from a model or a loss, so one micro-batch is run cut and whole, once, before
anything is trained on.
"""

import contextlib
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Set, Tuple

import keras
import tensorflow as tf

from macrobatch import _checks, _length_checks, _lengths, _patch, _replicas

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
    """

    outcomes: Sequence[Callable[[Any], Dict[str, List[Any]]]]
    drew: Callable[[], bool]
    owner: Any
    coarse: bool


def check(micro_batches: _lengths.ByLength, trial: Trial, checked: Any) -> None:
    """Raises, here or when the graph runs, if a micro-batch comes to something else when it is cut.

    Micro-batches that are taken afterwards are there only once this is known.

    Args:
        micro_batches: a batch that is cut.
        trial: what to compare.
        checked: a variable that is not 0 when there is nothing to be done, and set here.
    """
    start, end, lengths, size = _shortest(micro_batches)
    others = tf.reduce_any(tf.stack([tf.not_equal(length, size) for length in lengths]))
    needed = tf.logical_and(
        others, tf.logical_and(start < end, tf.equal(_replicas.read(checked), 0))
    )
    names: List[str] = []

    def compare() -> List[Any]:
        equal: Dict[str, List[Any]] = {}
        for outcome in trial.outcomes:
            # One trace, for all lengths.
            run = outcome if tf.executing_eagerly() else tf.function(outcome, autograph=False)
            with without_dropout():
                of_whole = run(micro_batches.taken(start, end, _unknown(size)))
                for length in lengths:
                    of_cut = run(micro_batches.taken(start, end, _unknown(length)))
                    for name, values in of_whole.items():
                        close = _close(values, of_cut[name], trial.coarse)
                        equal.setdefault(name, []).append(close)
        if trial.drew():
            message = _length_checks.NOT_COMPARED
            _checks.warn_once(trial.owner, message)
            return []
        names[:] = list(equal)
        return [tf.reduce_all(tf.stack(each)) for each in equal.values()]

    if tf.executing_eagerly():
        equal = compare() if bool(needed) else []
        for name, is_equal in zip(names, equal):
            if not is_equal:
                raise ValueError(_length_checks.depends_on_padding(name))
        asserts = []
    else:
        # The names are known once the comparison has been traced.
        equal = tf.cond(needed, compare, lambda: [tf.constant(True)] * len(names))
        asserts = [
            tf.debugging.Assert(is_equal, [_length_checks.depends_on_padding(name)])
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


def _shortest(micro_batches: _lengths.ByLength) -> Tuple[Any, Any, List[Any], Any]:
    """Which examples to compare: as many of the shortest as can be in memory whole.

    Their places in the order, the lengths to which they are cut, and that of the whole.
    """
    examples, size = micro_batches.examples, micro_batches.sequences.size
    start = tf.maximum(examples - micro_batches.examples_at(size), 0)
    return start, examples, [micro_batches.lengths[start], *micro_batches.longer()], size


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

"""Whether what comes of a micro-batch depends on its padding. Then it must not be cut shorter.

Nobody can see it from a model or a loss, so one micro-batch is run cut and whole, once, before
anything is trained on.
"""

import weakref
from typing import Any, Callable, Dict, List, Tuple

import keras
import tensorflow as tf

from macrobatch import _length_checks, _lengths, _patch, _replicas

# What rounding may bring; padding brings much more, as the shortest examples are compared.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 2e-2

# What comes of a micro-batch: by name, values to compare; and seeds, drawn from or not.
Outcome = Tuple[Dict[str, List[Any]], Any]


def check(
    micro_batches: _lengths.ByLength,
    outcome: Callable[[Any], Outcome],
    checked: Any,
    coarse: bool = False,
) -> None:
    """Raises, here or when the graph runs, if a micro-batch comes to something else when it is cut.

    Micro-batches that are taken afterwards are there only once this is known.

    Args:
        micro_batches: a batch that is cut.
        outcome: a function of a micro-batch.
        checked: a variable that is not 0 when there is nothing to be done, and set here.
        coarse: whether numbers are of less than 32 bits somewhere.
    """
    start, end, length, whole_size = _shortest(micro_batches)
    some = tf.logical_and(start < end, length < whole_size)
    needed = tf.logical_and(tf.equal(_replicas.read(checked), 0), some)

    def compare() -> List[Any]:
        with without_dropout():
            of_cut, seeds = outcome(micro_batches.taken(start, end, length))
            of_whole, _ = outcome(micro_batches.taken(start, end, None))
        names[:] = list(of_cut)
        # Other random numbers cannot be switched off, and so nothing can be compared.
        return [tf.logical_or(seeds, _equal(of_cut[n], of_whole[n], coarse)) for n in of_cut]

    names: List[str] = []
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
            tf.debugging.Assert(e, [_length_checks.depends_on_padding(n)])
            for n, e in zip(names, equal)
        ]
    with tf.control_dependencies(asserts):
        checked.assign(tf.where(needed, 1, _replicas.read(checked)))
        micro_batches.order = tf.identity(micro_batches.order)


_known: "weakref.WeakSet[Any]" = weakref.WeakSet()


def check_once(function: Any, micro_batches: _lengths.ByLength, outcome: Any) -> None:
    """Checks what a function of a user comes to, once for each; in a graph, once for each trace."""
    key = getattr(function, "__code__", function)  # A lambda may be made anew for each call.
    if tf.executing_eagerly() and key in _known:
        return
    checked = _replicas.variable(None, [], tf.int32, "padding_checked")
    if not tf.executing_eagerly():
        # Functions refer to variables, but do not keep them.
        tf.compat.v1.add_to_collection("macrobatch", checked)
    check(micro_batches, outcome, checked, coarse=low_precision([]))
    if tf.executing_eagerly() and int(checked):
        _known.add(key)


def _shortest(micro_batches: _lengths.ByLength) -> Any:
    """Which examples to compare: as many of the shortest as can be in memory whole.

    Their places in the order, their length, and the size of the sequences they are in.
    """
    examples, size = micro_batches.examples, micro_batches.sequences.size
    start = tf.maximum(examples - micro_batches.examples_at(size), 0)
    return start, examples, micro_batches.lengths[start], size


def _equal(some: List[Any], others: List[Any], coarse: bool) -> Any:
    close = [_close(*pair, coarse=coarse) for pair in zip(some, others)]
    return tf.reduce_all(tf.stack([tf.constant(True), *close]))


def _close(one: Any, other: Any, coarse: bool) -> Any:
    if one.dtype.is_integer or one.dtype.is_bool:
        return tf.reduce_all(tf.equal(one, other))
    tolerance = COARSE if coarse else TOLERANCES.get(one.dtype.name, COARSE)
    size = tf.maximum(tf.abs(one), tf.abs(other)) + 0.01
    # What is not finite is no matter of padding.
    distance = tf.where(tf.math.is_finite(one - other), tf.abs(one - other), tf.zeros_like(one))
    return tf.reduce_all(distance <= tolerance * size)


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
    if _is_whole(part):
        _length_checks.metric_has_weights(_is_whole(kept(tf.cast(values, dtype))))
    values, weights = reduce(values, sample_weight, reduce_fn, dtype)
    return (values, weights) if _is_whole(part) else (values * part, weights * part)


def _is_whole(part: Any) -> bool:
    """Whether nothing was cut off, as far as can be known before a graph runs."""
    return isinstance(part, float) or (tf.executing_eagerly() and float(part) == 1.0)


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

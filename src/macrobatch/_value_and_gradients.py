"""value_and_gradients: the loss and the gradients of a whole batch, for loops of your own."""

from typing import Any, Callable, NamedTuple, Optional, Tuple

import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import by_length as _lengths
from macrobatch._batches import checks as _length_checks
from macrobatch._batches import padding as _padding
from macrobatch._batches import split as _split
from macrobatch._keras import stateless as _stateless
from macrobatch._tensorflow import loop as _loop
from macrobatch._tensorflow import replicas as _replicas
from macrobatch._tensorflow import sums as _sums


def value_and_gradients(
    loss_fn: Callable[[Any], Any],
    variables: Any,
    batch: Any,
    *,
    micro_batch_size: Optional[int] = None,
    micro_batch_tokens: Optional[int] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any], Any]] = None,
    has_aux: bool = False,
) -> Tuple[Any, Any]:
    """The loss of a whole batch and its gradients, in the memory of a micro-batch.

    What it computes, for losses with a value for each example, is

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(batch))
        return loss, tape.gradient(loss, variables)

    but `loss_fn` never sees more than `micro_batch_size` examples. It runs eagerly, in a
    `tf.function` and in one with `jit_compile=True`. Seeds and BatchNormalization's moving
    statistics of Keras 3 layers are written once, at the end, as in `accumulate`; if anything fails
    before, they have not changed. Other variables that `loss_fn` writes, it writes for each
    micro-batch.

    Inside `strategy.run`, where each replica has its part of the batch, maybe none, the loss is
    that of the whole batch, and the gradients are this replica's part in them: their sum over
    replicas, which is what optimizers take, is the whole.

    Args:
        loss_fn: a function of a micro-batch, which has the structure of `batch`. It returns
            `losses`, with the examples first: their mean is the loss;
            or `(losses, weights)` of one shape: sum(losses * weights) / sum(weights) is the loss,
            also where weights depend on variables;
            or a scalar, which is a mean over the examples of the micro-batch;
            or `(scalar, weight)`, where the scalar is a mean over that weight (tokens, say).
        variables: a nest of variables.
        batch: a nest of tensors with the examples first. Ragged and sparse tensors may be in it.
        micro_batch_size: how many examples are in memory at one time. The batch need not be a
            multiple of it.
        micro_batch_tokens: in place of it, what the number of examples times the longest of them
            may be: few long ones, many short ones, and at least one. Needs `sequence_axis`.
        sequence_axis: the axis along which sequences are padded, 1 for tokens of shape (examples,
            positions). Micro-batches are then made of examples of similar length, and everything
            in them that has that axis is cut to their longest: the same result, for less work. An
            example ends where the last integer that is not 0 is, or the row of a ragged tensor, of
            a tuple `(x, y, weights)` in `x`, or where the last of the weights that is not 0 is.
            Refused if the loss depends on padding, which is tried once.
        lengths: a function of a batch that returns the length of each example, for batches that
            do not show it.
        has_aux: whether `loss_fn` returns `(one of the above, aux)`. `aux`, any nest, comes back
            for the whole batch: tensors concatenated along their first dimension, scalars stacked.
            With `sequence_axis` values for each example are in the order of the batch, and with
            zeros where positions were cut off.

    Returns:
        `(loss, gradients)`, or `((loss, aux), gradients)`. The gradients have the structure of
        `variables`; those of variables that the loss does not depend on are None, and those of
        embeddings are `tf.IndexedSlices` with each row once. (They are dense in a compiled
        function, and where a batch touches as many rows as the table has.)

    Raises:
        ValueError: if what `loss_fn` returned does not fit the micro-batch, or if the parts of the
            batch have different numbers of examples.

    Example:

    >>> import keras, macrobatch, tensorflow as tf
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> optimizer = keras.optimizers.Adam()
    >>> mse = keras.losses.MeanSquaredError(reduction=None)
    >>> def loss_fn(micro_batch):
    ...     x, y = micro_batch
    ...     return mse(y, model(x, training=True))
    >>> @tf.function
    ... def train_step(batch):
    ...     loss, gradients = macrobatch.value_and_gradients(
    ...         loss_fn, model.trainable_variables, batch, micro_batch_size=8
    ...     )
    ...     optimizer.apply(gradients, model.trainable_variables)
    ...     return loss
    >>> loss = train_step((tf.ones([100, 3]), tf.ones([100, 1])))
    """
    cut = _lengths.Cut(
        *_length_checks.sizes(
            micro_batch_size, micro_batch_tokens, sequence_axis, lengths, of=["batch"]
        )
    )
    conversion = _stateless.conversion()
    return _value_and_gradients(
        _checks.loss_fn(loss_fn), variables, batch, cut, has_aux, conversion
    )


# Only `loss_fn` may need to be converted; this code does not, and it takes a while.
@tf.autograph.experimental.do_not_convert
def _value_and_gradients(
    loss_fn: Callable[[Any], Any],
    variables: Any,
    batch: Any,
    cut: _lengths.Cut,
    has_aux: bool,
    conversion: Any,
) -> Tuple[Any, Any]:
    trained = [_checks.variable(variable) for variable in tf.nest.flatten(variables)]
    _checks.no_variables(trained)
    _checks.is_one_batch(batch)
    trained = [_replicas.tf_variable(variable) for variable in trained]
    batch = _split.to_tensors(batch)
    several = _replicas.in_several()
    _replicas.check_scope(_replicas.strategy_of(trained))
    examples = _split.examples_in(batch, may_be_empty=several)
    jit_compile = cut.axis is not None and _is_compiled(loss_fn)
    x, weights = _inputs_and_weights(batch)
    micro_batches = cut.apply(batch, examples, (batch,), x, weights, rounded=jit_compile)
    user_fn, loss_fn = loss_fn, _stateless.converted(loss_fn, conversion)
    function = _stateless.Function(loss_fn, tf.nest.flatten(variables))
    if several or not tf.executing_eagerly():  # Replicas must agree on what they write.
        _dry_run(function, micro_batches)

    def mean_of(micro_batch: Any, written: _stateless.State) -> Any:
        result, written = function(micro_batch, written)
        result, aux = _checks.with_aux(result) if has_aux else (result, ())
        return _mean(result, _split.size_of(micro_batch)), aux, written

    def outcome(micro_batch: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, *_ = mean_of(micro_batch, function.written.start())
        gradients = _padding.gradients(tape, mean.numerator, trained)
        return {"loss": [mean.numerator, mean.denominator, *gradients]}

    if isinstance(micro_batches, _lengths.ByLength):
        coarse = _padding.low_precision([])
        trial = _padding.Trial(
            [outcome],
            lambda: function.drew,
            user_fn,
            coarse,
            lambda: not function.written.normalizing,
        )
        _padding.check_once(user_fn, trained, micro_batches, trial)

    def step(micro_batch: Any, state: _State) -> _loop.Part:
        with tf.GradientTape() as tape, tf.GradientTape() as tape_of_weights:
            mean, aux, written = mean_of(micro_batch, state.written)
            scale = tf.stop_gradient(mean.scale(examples))
            scale = tf.where(state.scale > 0, state.scale, scale)
            numerator = mean.numerator / tf.cast(scale, mean.numerator.dtype)
            denominator = mean.denominator / tf.cast(scale, mean.denominator.dtype)
        # Mostly weights are constants, and these are None.
        of_denominator = _loop.gradients_of(tape_of_weights, denominator, trained)
        del tape_of_weights  # or it would keep activations that the other one is done with
        of_numerator = _loop.gradients_of(tape, numerator, trained)
        if mean.may_be_empty:
            there = tf.not_equal(mean.denominator, 0)
            of_numerator = [_sums.scaled(_sums.widened(g), there) for g in of_numerator]
        sums = [numerator, denominator, *of_numerator, *of_denominator]
        return _loop.Part(sums, _State(scale, written), aux=aux)

    start = _State(tf.zeros([]), function.written.start())
    (numerator, denominator, *sums), state, _, aux = _loop.sum_over_micro_batches(
        step, micro_batches, start, function.written.synchronized, jit_compile
    )
    scale = tf.cast(state.scale, denominator.dtype)
    whole = _replicas.total([numerator * scale, denominator * scale])
    loss = tf.math.divide_no_nan(*whole)
    # d(N / D) = (dN - N / D * dD) / D, and of that the part of this replica.
    factor = tf.math.divide_no_nan(scale, whole[1])
    gradients = []
    for variable, of_numerator, of_denominator in zip(trained, sums, sums[len(trained) :]):
        gradient = _sums.add(of_numerator, _sums.scaled(of_denominator, -loss))
        gradients.append(_sums.cast(_sums.scaled(gradient, factor), variable.dtype))
    with _loop.after((loss, gradients, aux)):
        function.written.write(state.written)
    gradients = tf.nest.pack_sequence_as(variables, gradients)
    return ((loss, aux) if has_aux else loss), gradients


def _is_compiled(function: Any) -> bool:
    # Private, and the only place where a tf.function tells; tests/test_lengths.py notices.
    return bool(getattr(function, "_jit_compile", False))


def _inputs_and_weights(batch: Any) -> Tuple[Any, Any]:
    """What of a batch tells the lengths of examples: of a tuple, as Keras means it."""
    if not isinstance(batch, tuple) or hasattr(batch, "_fields"):
        return batch, None
    return batch[0], batch[2:]


def _dry_run(function: _stateless.Function, micro_batches: _split.MicroBatches) -> None:
    if not isinstance(micro_batches, _lengths.ByLength):
        function.dry_run(micro_batches.first())
        return
    try:
        function.dry_run(micro_batches.shorter())
    except Exception as error:
        function.dry_run(micro_batches.whole())  # raises what has nothing to do with lengths
        axis = micro_batches.sequences.axis
        raise ValueError(_length_checks.cannot_be_shorter(axis, error)) from error


class _State(NamedTuple):
    # About the denominator of the whole batch, as the first micro-batch lets expect it. Losses are
    # divided by it before the backward pass, so that float16 gradients are of the size that they
    # have in the whole batch; what it is off by is mended at the end.
    scale: Any
    written: _stateless.State


class _Mean(NamedTuple):
    """The loss of a micro-batch, numerator / denominator."""

    numerator: Any
    denominator: Any
    elements_per_example: Any
    may_be_empty: bool  # Then its value, and gradients, may be 0 / 0.

    def scale(self, examples: Any) -> Any:
        """The denominator of the whole batch, if the rest is like this micro-batch."""
        examples = tf.cast(examples, tf.float32)
        scale = examples * tf.cast(self.elements_per_example, tf.float32)
        good = tf.logical_and(scale > 0, tf.math.is_finite(scale))
        return tf.where(good, scale, examples)


def _mean(result: Any, examples: Any) -> _Mean:
    """What `loss_fn` returned, as a mean."""
    losses, weights = _checks.losses_and_weights(result)
    losses = _sums.widened(losses)
    count = tf.cast(examples, losses.dtype)
    if len(losses.shape) == 0:
        if weights is None:
            return _Mean(losses * count, count, 1.0, may_be_empty=False)
        weight = tf.cast(weights, losses.dtype)
        numerator = tf.math.multiply_no_nan(losses, weight)
        return _Mean(numerator, weight, weight / count, may_be_empty=True)
    losses = _of_examples(losses, examples)
    elements = tf.cast(tf.size(losses), losses.dtype)
    if weights is None:
        return _Mean(tf.reduce_sum(losses), elements, elements / count, may_be_empty=False)
    weights = tf.cast(_of_shape_of(losses, weights), losses.dtype)
    numerator, denominator = tf.reduce_sum(losses * weights), tf.reduce_sum(weights)
    return _Mean(numerator, denominator, elements / count, may_be_empty=False)


def _of_examples(losses: Any, examples: Any) -> Any:
    """The losses, once it is known that their first dimension is the examples."""
    message = _checks.LOSSES_PER_EXAMPLE
    if losses.shape[0] is not None:
        _checks.values_per_example(losses.shape[0], examples, message)
        return losses
    if _split.in_xla():  # It drops assertions, but gives no tensor a shape of another size.
        rest = tf.shape(losses)[1:]
        return tf.reshape(losses, tf.concat([[examples], rest], 0), name="losses_per_example")
    return _split.asserted(losses, _split.size_of(losses), examples, message)


def _of_shape_of(losses: Any, weights: Any) -> Any:
    """The weights, once it is known that they have the shape of the losses."""
    message = _checks.WEIGHTS_LIKE_LOSSES
    if isinstance(losses, tf.RaggedTensor):
        _checks.ragged_weights(weights)
        lengths = zip(weights.nested_row_lengths(), losses.nested_row_lengths())
        flat = weights.flat_values
        for actual, expected in lengths:
            flat = _split.asserted(flat, actual, expected, message)
        return weights.with_flat_values(flat)
    _checks.weights_like_losses(weights, losses)
    if weights.shape.is_fully_defined() and losses.shape.is_fully_defined():
        return weights
    if _split.in_xla():
        return tf.reshape(weights, tf.shape(losses), name="weights_like_losses")
    return _split.asserted(weights, tf.shape(weights), tf.shape(losses), message)

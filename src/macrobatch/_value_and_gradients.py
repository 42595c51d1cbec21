"""value_and_gradients: the loss and the gradients of a whole batch, for loops of your own."""

import functools
from typing import Any, Callable, List, Literal, Optional, Tuple, Union

import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches import checks as batch_checks
from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._gradients import functions
from macrobatch._gradients.auto import auto_size
from macrobatch._gradients.whole_batch import WholeBatch
from macrobatch._keras import stateless
from macrobatch._keras.scope import Written
from macrobatch._keras.sequences import low_precision
from macrobatch._meeting import OfForward, OfLossFn
from macrobatch._noise import checks as noise_checks
from macrobatch._noise.meter import Meter
from macrobatch._noise.scale import NoiseScale, checked
from macrobatch._own_steps import patches
from macrobatch._sizes import limit as limits
from macrobatch._tensorflow import checks, graph, replicas, sums, trial
from macrobatch._tensorflow import loss_fn as loss_fns
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._tensorflow.memory import memory_of
from macrobatch._tensorflow.parts import gradients_of
from macrobatch._types import Batch, How, Part, Tensor


def value_and_gradients(
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Any,
    *,
    micro_batch_size: Union[int, Literal["auto"], None] = None,
    micro_batch_tokens: Union[int, Literal["auto"], None] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any], Any]] = None,
    has_aux: bool = False,
    forward: Optional[Callable[[Any], Any]] = None,
    memory_limit: Union[int, float, str, None] = None,
    noise_scale: Optional[NoiseScale] = None,
) -> Tuple[Any, Any]:
    """The loss of a whole batch and its gradients, in the memory of a micro-batch.

    For losses with a value for each example, it computes

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_fn(batch))
        return loss, tape.gradient(loss, variables)

    but `loss_fn` never sees more than `micro_batch_size` examples. It runs eagerly, in a
    `tf.function` and in a `tf.function` with `jit_compile=True`. Seeds and moving statistics of
    BatchNormalization, in Keras 3 layers, are written once, at the end, as in `accumulate`. If
    anything fails before, they have not changed. `loss_fn` writes other variables once for each
    micro-batch.

    `loss_fn` is called eagerly, once, with a few examples, to find out whether examples meet in it.
    An `ExactnessWarning` says so. (Not with `jit_compile=True`, where there is no Python.)

    Losses in which examples meet (contrastive losses, for instance) need the whole batch. With
    `forward=` they get it: it computes

        with tf.GradientTape() as tape:
            loss = loss_fn(forward(batch), batch)
        return loss, tape.gradient(loss, variables)

    but `forward` never sees more than `micro_batch_size` examples. It runs twice on each of them.

    Inside `strategy.run`, each replica passes its part of the batch, which may be empty. The loss
    is that of the whole batch. The gradients are the part of this replica: optimizers sum them over
    replicas, and the sum is the gradient of the whole batch.

    Args:
        loss_fn: a function of a micro-batch, which has the structure of `batch`. It returns
            `losses`, with the examples first: their mean is the loss;
            or `(losses, weights)` of one shape: sum(losses * weights) / sum(weights) is the loss,
            also where weights depend on variables;
            or a scalar, which is a mean over the examples of the micro-batch;
            or `(scalar, weight)`: the scalar is a mean over the weight, a number of tokens for
            instance. The weight is finite, and 0 or more.
        variables: a nest of variables.
        batch: a nest of tensors with the examples first. Ragged and sparse tensors may be in it.
        micro_batch_size: the number of examples in memory at one time. The batch need not be a
            multiple of it. "auto", the default, looks for the fastest that fits. If a batch runs
            out of memory, it is run again with a smaller size. A `tf.function` can do neither, and
            takes what calls outside have found, or the largest: the error goes to its caller,
            nothing has been written, and the next call has half the size, so call it again with the
            same batch.
        micro_batch_tokens: instead of `micro_batch_size`, the most that the number of examples
            times the longest of them may be: few long examples, many short ones, and at least one.
            Needs `sequence_axis`. "auto" finds it, as for `micro_batch_size`.
        sequence_axis: the axis along which sequences are padded, 1 for tokens of shape (examples,
            positions). A micro-batch then has examples of similar length, and all tensors that are
            as wide as the sequences are cut to the longest: the same result, for less work. An
            example ends at its last integer that is not 0, or at the end of its ragged row. In a
            tuple `(x, y, weights)` only `x` counts, and weights that are not 0. Refused if the loss
            depends on padding, which is tried once.
        lengths: a function of a batch that returns the length of each example, as integers, for
            batches that do not show it.
        has_aux: whether `loss_fn` returns `(one of the above, aux)`. `aux`, any nest, comes back
            for the whole batch: tensors concatenated along their first dimension, scalars stacked.
            With `sequence_axis`, values for each example are in the order of the batch, with zeros
            for positions that were cut off.
        forward: a function of a micro-batch that returns any nest of tensors, with the examples
            first. Then `loss_fn` is a function of `(outputs, batch)`: what `forward` returns for
            all examples, in the order of the batch, and the batch. It is called once, returns the
            loss of the whole batch in one of the forms above, and may use variables itself;
            `aux` comes back as it is. On replicas, outputs and batch are those of all of them.
            Random numbers must be drawn from seeds, as layers and `keras.random` do: `forward`
            must come to the same both times, or is refused.
        memory_limit: with "auto", how much memory the process may take: "6GiB", bytes, or a
            fraction of what is there. With it, and on a CPU, sizes grow from call to call, outside
            of a `tf.function`. Inside, the size is what such calls have found.
        noise_scale: a `macrobatch.GradientNoiseScale()`, made once before the loop, that measures
            the gradient noise scale of these batches. Not with `forward`, with `sequence_axis` or
            inside `strategy.run`.

    Returns:
        `(loss, gradients)`, or `((loss, aux), gradients)`. The gradients have the structure of
        `variables`. A variable that the loss does not depend on has None. An embedding has
        `tf.IndexedSlices` with each row once. (Rows are dense in a compiled function, and where a
        batch touches as many rows as the table has.)

    Raises:
        ValueError: if the result of `loss_fn` does not fit the micro-batch, if a weight is not
            finite, or if the parts of the batch have different numbers of examples. In a graph, a
            fault that shows only when the graph runs is an InvalidArgumentError. XLA drops checks
            of numbers.

    Examples:
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
    loss_fns.is_whole_batch(patches.gradients.is_entered)
    cut = Cut(
        *batch_checks.sizes(
            micro_batch_size, micro_batch_tokens, sequence_axis, lengths, of=["batch"]
        )
    )
    sizes: Any = (cut.size, cut.tokens)
    limits.parsed(memory_limit)
    if batch_checks.AUTO not in sizes:
        limits.no_limit_with_size(memory_limit, cut.size or cut.tokens)
    status = _internals.autograph_status()
    loss_fns.checked(loss_fn, forward is not None)
    if forward is not None:
        loss_fns.checked_forward(forward)
    if noise_scale is not None:
        checked(noise_scale)
        noise_checks.whole_gradient(forward is not None, replicas.in_several())
        noise_checks.in_any_order(sequence_axis)
    arguments = (loss_fn, variables, batch, cut, has_aux, forward, status, noise_scale)
    if batch_checks.AUTO in sizes:
        return _with_auto_size(arguments, sizes[1] == batch_checks.AUTO, memory_limit)
    return _value_and_gradients(*arguments)


@tf.autograph.experimental.do_not_convert
def _with_auto_size(arguments: Any, in_tokens: bool, memory_limit: Any) -> Tuple[Any, Any]:
    loss_fn, variables, batch, cut, has_aux, forward, *rest = arguments
    batch, examples = in_order.checked(
        graph.to_tensors(batch), ENGINE, may_be_empty=replicas.in_several()
    )
    cut = cut._replace(size=None, tokens=None)

    function = loss_fn if forward is None else forward
    trained = tf.nest.flatten(variables)
    sizes = auto_size(function, trained, in_tokens, cut.axis, memory_limit)

    def shown(shows: bool) -> None:
        if shows:
            sizes.only_fits()

    def compute(cut: Cut) -> Tuple[Any, Any]:
        return _value_and_gradients(loss_fn, variables, batch, cut, has_aux, forward, *rest, shown)

    found: Tuple[Any, Any] = sizes.run(compute, cut, batch, examples)
    return found


# Only `loss_fn` may need to be converted; this code does not, and it takes a while.
@tf.autograph.experimental.do_not_convert
def _value_and_gradients(
    loss_fn: Callable[..., Any],
    variables: Any,
    batch: Batch,
    cut: Cut,
    has_aux: bool,
    forward: Optional[Callable[[Any], Any]],
    status: Any,
    noise_scale: Optional[NoiseScale],
    shown: Callable[[bool], None] = lambda shows: None,
) -> Tuple[Any, Any]:
    trained = [checks.variable(variable) for variable in tf.nest.flatten(variables)]
    checks.no_variables(trained)
    loss_fns.is_one_batch(batch)
    weights = [replicas.tf_variable(variable) for variable in trained]
    replicas.check_scope(replicas.strategy_of(weights))
    batch = graph.to_tensors(batch)
    batch, examples = in_order.checked(batch, ENGINE, may_be_empty=replicas.in_several())
    user_fn = loss_fn if forward is None else forward  # which micro-batches go into
    jit_compile = cut.axis is not None and _internals.is_compiled(user_fn)
    x, sample_weight = _inputs_and_weights(batch)
    memory = None if cut.axis is None else memory_of(user_fn)
    micro_batches = cut.apply(
        batch, examples, ENGINE, (batch,), x, sample_weight, (), jit_compile, memory
    )
    loss_fn = functions.converted(loss_fn, status)
    if forward is not None:
        forward = functions.converted(forward, status)
        passes = WholeBatch(forward, loss_fn, has_aux, trained, micro_batches, jit_compile)
        tried = OfForward(user_fn, trained)
        loss, aux, found = passes.run(user_fn, lambda: tried.check(batch, examples, cut))
        shown(passes.shows_size or tried.has_warned)
        found = tf.nest.pack_sequence_as(variables, found)
        return ((loss, aux) if has_aux else loss), found
    written = Written([], trained, ENGINE)
    noise = (
        None
        if noise_scale is None
        else noise_scale.meter(functools.partial(Meter, None)).start(examples)
    )

    def step(micro_batch: Batch, values: Any, counts: Any, how: How) -> Part:
        scale, *own = values
        with tf.GradientTape() as tape, tf.GradientTape() as tape_of_weights:
            result = stateless.run(lambda: loss_fn(micro_batch), written, own, *how)
            value, aux = loss_fns.with_aux(result.value) if has_aux else (result.value, ())
            mean = loss_fns.mean_of(value, ENGINE.examples(micro_batch))
            # Losses are divided by about the denominator of the whole batch before the backward
            # pass, so that float16 gradients are of the size that they have in the whole batch.
            # The first micro-batch tells it. The difference is mended at the end.
            first_scale = tf.stop_gradient(mean.scale(examples))
            scale = tf.where(scale > 0, scale, first_scale)
            numerator = mean.numerator / tf.cast(scale, mean.numerator.dtype)
            denominator = mean.denominator / tf.cast(scale, mean.denominator.dtype)
        # Mostly weights are constants, and these are None.
        of_denominator = gradients_of(tape_of_weights, denominator, weights)
        del tape_of_weights  # or it would keep activations that the other one is done with
        of_numerator = gradients_of(tape, numerator, weights)
        if mean.may_be_empty:
            there = tf.not_equal(mean.denominator, 0)
            of_numerator = [sums.scaled(sums.widened(g), there) for g in of_numerator]
        measured = []
        if noise is not None:
            of_both = [of_numerator, of_denominator]
            measured = noise.of_micro_batch(of_both, ENGINE.examples(micro_batch))
        return Part(
            [numerator, denominator, *of_numerator, *of_denominator, *measured],
            written=[scale, *result.written],
            moments=result.moments,
            aux=aux,
        )

    def values() -> List[Tensor]:
        return [tf.zeros([]), *written.values()]  # no scale yet

    def fits(values: List[Tensor]) -> bool:
        return len(values) == 1 + len(written.variables)

    def outcome(micro_batch: Batch) -> trial.Found:
        part = loop.part(micro_batch, [], written.dropped)
        # The scale is about the denominator of a batch like this micro-batch.
        scale = tf.cast(part.written[0], tf.float64)
        values = trial.comparable(part.sums)
        return {"loss": [value * tf.cast(scale, value.dtype) for value in values]}

    def dry_run(like: Batch) -> None:
        functions.dry_run(loss_fn, trained, like)

    with batch_checks.explaining(micro_batches, dry_run):
        likes = micro_batches.whole_and_shorter()
        if likes is not None and not tf.executing_eagerly():
            # TensorFlow notices while it traces what does not fit sequences of a known length.
            dry_run(likes[1])
        loop = Loop(step, micro_batches, values, fits, jit_compile)
        check = trial.Trial(
            [outcome],
            lambda: written.drew,
            user_fn,
            low_precision([]),
            lambda: not written.normalizing,
        )
        trial.check_once(user_fn, weights, micro_batches, check)
        part = loop.run([], functions.synchronized(written))
    functions.warn(written)
    numerator: Tensor
    denominator: Tensor
    numerator, denominator, *gradients = part.sums
    scale = tf.cast(part.written[0], denominator.dtype)
    whole = replicas.sum_over_replicas([numerator * scale, denominator * scale])
    loss = tf.math.divide_no_nan(*whole)
    # d(N / D) = (dN - N / D * dD) / D, and of that the part of this replica.
    factor = tf.math.divide_no_nan(scale, whole[1])
    found = []
    for weight, of_numerator, of_denominator in zip(weights, gradients, gradients[len(weights) :]):
        gradient = sums.add(of_numerator, sums.scaled(of_denominator, -loss))
        gradient = sums.merge_rows(sums.scaled(gradient, factor))
        found.append(sums.cast(gradient, weight.dtype))
    tried_loss = OfLossFn(user_fn, trained, has_aux)
    with functions.tried(
        (loss, found, part), lambda: tried_loss.check(batch, examples, cut)
    ) as waiting:
        written.write(part.written[1:], part.moments)
        if noise is not None:
            noise.look(found)
            noise.finish(part.sums[-2:], [factor, -loss * factor])
        found = waiting(found)
    shown(functions.shows_size(written) or tried_loss.has_warned)
    found = tf.nest.pack_sequence_as(variables, found)
    return ((loss, part.aux) if has_aux else loss), found


def _inputs_and_weights(batch: Batch) -> Tuple[Any, Any]:
    """What of a batch tells the lengths of examples: of a tuple, as Keras means it."""
    if not isinstance(batch, tuple) or hasattr(batch, "_fields"):
        return batch, None
    return batch[0], batch[2:]

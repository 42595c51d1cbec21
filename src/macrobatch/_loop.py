"""The loop: micro-batch -> gradients -> sum. It goes from values to values and writes no variable,
so whatever fails in it has changed nothing.

What the loop means, whichever way it runs:

    for micro_batch in batch:
        part = step(micro_batch, state)
        sums += part.gradients
        state, latest = part.state, part.latest
        aux.append(part.aux)
    return Part(sums, state, latest, concatenated(aux))
"""

from typing import Any, Callable, List, NamedTuple, Sequence

import tensorflow as tf

from macrobatch import _checks, _replica_checks, _replicas, _split, _sums


class Part(NamedTuple):
    """What a step makes of a micro-batch, and the loop of the whole batch.

    Attributes:
        gradients: to be summed.
        state: for the next micro-batch: a nest of tensors of fixed shapes.
        latest: values of which the last micro-batch's are kept.
        aux: values of which all are kept, one after the other.
    """

    gradients: List[Any]
    state: Any
    latest: Any = ()
    aux: Any = ()


Step = Callable[[Any, Any], Part]


def sum_over_micro_batches(
    step: Step,
    batch: Any,
    examples: Any,
    micro_batch_size: int,
    state: Any,
    synchronized: Sequence[str] = (),
) -> Part:
    """Runs `step` on each micro-batch and sums the gradients that it returns.

    Args:
        step: a function of a micro-batch and the state.
        batch: a nest of tensors with the examples first.
        examples: their number, from `_split.examples_in(batch)`.
        micro_batch_size: examples in a micro-batch; the last one may have fewer.
        state: before the first micro-batch.
        synchronized: the names of layers in which replicas meet. In a loop of a graph they cannot.

    Returns:
        The part of the whole batch.
    """
    runs = _split.runs(examples, micro_batch_size)
    if synchronized:
        _replica_checks.static_batch(examples, synchronized)
        _replicas.compare(examples, lambda all: _replica_checks.even_replicas(all, synchronized))
    if synchronized or (tf.executing_eagerly() and any(run.count for run in runs)):
        return _run_one_by_one(step, batch, runs, state)
    if tf.executing_eagerly():  # A replica without examples: only a trace can tell what is summed.
        return tf.function(lambda: _run_in_graph(step, batch, runs, state), autograph=False)()
    return _run_in_graph(step, batch, runs, state)


def gradients_of(tape: tf.GradientTape, loss: Any, variables: List[Any]) -> List[Any]:
    """The gradients of a loss, with the shapes of the variables, which the tape may not know."""
    gradients = tape.gradient(loss, variables)
    return [_shaped(gradient, v.shape) for gradient, v in zip(gradients, variables)]


def after(values: Any) -> Any:
    """A context whose operations run once all of these values are there.

    Without it a variable could change, or the optimizer count an update, although another
    micro-batch is about to fail.
    """
    everything = tf.nest.flatten(values, expand_composites=True)
    with tf.control_dependencies([tensor for tensor in everything if tensor is not None]):
        ready = tf.no_op()
    return tf.control_dependencies([] if tf.executing_eagerly() else [ready])


def _shaped(gradient: Any, shape: tf.TensorShape) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        dense_shape = tf.constant(shape.as_list(), gradient.indices.dtype)
        return tf.IndexedSlices(gradient.values, gradient.indices, dense_shape)
    if gradient is not None:
        gradient.set_shape(shape)
    return gradient


def _run_one_by_one(step: Step, batch: Any, runs: List[_split.Run], state: Any) -> Part:
    sums: List[Any] = []
    latest: Any = None
    collected: List[Any] = []
    for run in runs:
        for index in range(int(run.count)):
            with after((sums, state)):  # or in a graph they could be in memory side by side
                part = step(_split.micro_batch(batch, run, index), state)
            state, latest = part.state, part.latest
            gradients = [_sums.widened(gradient) for gradient in part.gradients]
            sums = [_sums.add(*pair) for pair in zip(sums, gradients)] if sums else gradients
            sums = [_sums.merge_rows(total) for total in sums]
            collected.append(part.aux)
    aux = tf.nest.map_structure(_joined, *collected)
    return Part(sums, state, latest, aux)


def _joined(*leaves: Any) -> Any:
    if leaves[0] is None:
        return None
    taken = [_split.pieces(leaf) for leaf in leaves]
    parts = zip(*(each.parts for each in taken))
    joined = [tf.concat(p, 0) if p[0].shape.rank else tf.stack(p) for p in parts]
    return _split.join(taken[0].kind, joined)


def _run_in_graph(step: Step, batch: Any, runs: List[_split.Run], state: Any) -> Part:
    traces = []

    def traced_step(micro_batch: Any, state: Any) -> Any:
        part = step(micro_batch, state)
        gradients = part.gradients
        if _split.in_xla():  # XLA has no tensors of unknown size, so no sparse sums.
            gradients = [_sums.dense(gradient) for gradient in gradients]
        leaves = [leaf for leaf in tf.nest.flatten(part.aux) if leaf is not None]
        aux = [_split.pieces(leaf) for leaf in leaves]
        traces.append(part._replace(gradients=gradients, aux=(part.aux, aux)))
        return gradients, part.state, part.latest, [each.parts for each in aux]

    # Tracing the step before the loop tells which gradients are None or sparse, and what shape the
    # rest has; the loop then calls that same trace.
    traced = tf.function(traced_step, autograph=False)
    traced.get_concrete_function(_split.first_micro_batch(batch, runs), state)
    likes, _, latest_like, (aux_like, aux_pieces) = traces[0]
    count = sum(run.count for run in runs)
    # Replicas with different numbers of examples must have gradients of the same kinds.
    may_be_dense = not _replicas.in_several()
    sums = [_sums.start(like, count, may_be_dense) for like in likes]
    latest = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), latest_like)

    def run_all(run: _split.Run, done: Any, sums: Any, state: Any, latest: Any) -> Any:
        def body(index: Any, sums: Any, state: Any, latest: Any, aux: Any) -> Any:
            micro_batch = _split.micro_batch(batch, run, index)
            gradients, state, latest, parts = traced(micro_batch, state)
            gradients = [g for g in gradients if g is not None]
            sums = [_sums.push(total, g, done + index) for total, g in zip(sums, gradients)]
            aux = tf.nest.map_structure(lambda array, part: array.write(index, part), aux, parts)
            return index + 1, sums, state, latest, aux

        aux = [[_array(run, part) for part in each.parts] for each in aux_pieces]
        # The default of 10 parallel iterations would let their activations overlap in memory.
        _, sums, state, latest, aux = tf.while_loop(
            lambda index, *_: index < run.count,
            body,
            (tf.constant(0), sums, state, latest, aux),
            parallel_iterations=1,
        )
        parts = [each.parts for each in aux_pieces]
        aux = tf.nest.map_structure(lambda a, p: _collected(run, a, p), aux, parts)
        return sums, state, latest, aux

    present = [total for total in sums if total is not None]
    done = 0
    collected = []
    for run in runs:
        present, state, latest, aux = run_all(run, done, present, state, latest)
        collected.append(aux)
        done += run.count
    remaining = iter(present)
    sums = [None if like is None else _sums.finish(next(remaining), like) for like in likes]
    joined = tf.nest.map_structure(lambda *runs: tf.concat(runs, 0), *collected)
    leaves = iter([_split.join(each.kind, parts) for each, parts in zip(aux_pieces, joined)])
    aux = [None if leaf is None else next(leaves) for leaf in tf.nest.flatten(aux_like)]
    return Part(sums, state, latest, tf.nest.pack_sequence_as(aux_like, aux))


def _array(run: _split.Run, like: Any) -> tf.TensorArray:
    """Room for a value of each micro-batch of a run."""
    _checks.aux_has_rank(like)
    shape = [None, *like.shape[1:]] if like.shape.rank else []
    # XLA compiles the loop also for a tail that is empty, and writes to an array that must not be.
    size = run.count if isinstance(run.count, int) else tf.maximum(run.count, 1)
    return tf.TensorArray(like.dtype, size, element_shape=shape, infer_shape=False)


def _collected(run: _split.Run, array: tf.TensorArray, like: Any) -> Any:
    """The values of all micro-batches of a run: one after the other, scalars stacked."""
    if like.shape.rank and not run.static:
        return array.concat()
    values = array.stack()[: run.count]  # In XLA, where sizes are static, arrays can be stacked.
    if not like.shape.rank:
        return values
    shape = tf.shape(values)
    return tf.reshape(values, tf.concat([shape[:1] * shape[1:2], shape[2:]], 0))

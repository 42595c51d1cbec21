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

from macrobatch import _checks
from macrobatch._batches import split as _split
from macrobatch._tensorflow import checks as _replica_checks
from macrobatch._tensorflow import replicas as _replicas
from macrobatch._tensorflow import sums as _sums

# Zeros that the first gradients are added to are a pass over memory as large as the model. Leaving
# it out takes a second copy of the step in the graph, which is some 20 MiB of what kernels keep: so
# it pays where sums are larger than caches. Measured: 14 M parameters, 10 % of a step.
LARGE_SUMS = 2**25  # bytes


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
    micro_batches: _split.MicroBatches,
    state: Any,
    synchronized: Sequence[str] = (),
    jit_compile: bool = False,
    pruned: bool = False,
) -> Part:
    """Runs `step` on each micro-batch and sums the gradients that it returns.

    Args:
        step: a function of a micro-batch and the state.
        micro_batches: the batch, and how it is cut.
        state: before the first micro-batch.
        synchronized: the names of layers in which replicas meet. In a loop of a graph they cannot.
        jit_compile: whether XLA compiles the step, and not what is around it.
        pruned: whether a graph leaves out what the parts of a step do not depend on, although it
            may fail or write.

    Returns:
        The part of the whole batch.
    """
    if synchronized:
        examples = micro_batches.examples
        _replica_checks.static_batch(examples, synchronized)
        _replicas.compare(examples, lambda all: _replica_checks.even_replicas(all, synchronized))
    some = any(run.count for run in micro_batches.runs) if tf.executing_eagerly() else False
    if synchronized or some:
        return _run_one_by_one(step, micro_batches, state)

    def run_in_graph() -> Part:
        return _run_in_graph(step, micro_batches, state, jit_compile, pruned)

    if tf.executing_eagerly():  # A replica without examples: only a trace can tell what is summed.
        return tf.function(run_in_graph, autograph=False)()
    return run_in_graph()


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


def _run_one_by_one(step: Step, micro_batches: _split.MicroBatches, state: Any) -> Part:
    sums: List[Any] = []
    latest: Any = None
    collected: List[Any] = []
    lengths: List[Any] = []
    for run in micro_batches.runs:
        for index in range(int(run.count)):
            with after((sums, state)):  # or in a graph they could be in memory side by side
                micro_batch = micro_batches.get(run, index)
                part = step(micro_batch, state)
            state, latest = part.state, part.latest
            gradients = [_sums.widened(gradient) for gradient in part.gradients]
            sums = [_sums.add(*pair) for pair in zip(sums, gradients)] if sums else gradients
            sums = [_sums.merge_rows(total) for total in sums]
            collected.append(part.aux)
            lengths.append(micro_batches.length_of(micro_batch))
    probe = micro_batches.probe(lengths) if tf.nest.flatten(collected) else None
    if probe is not None:
        collected.append(step(probe, state).aux)
        lengths.append(micro_batches.length_of(probe))
    count = len(lengths) - (probe is not None)
    aux = tf.nest.map_structure(
        lambda *leaves: _joined(micro_batches.padded(list(leaves), lengths)[:count]), *collected
    )
    return Part(sums, state, latest, micro_batches.in_order(aux))


def _joined(leaves: List[Any]) -> Any:
    if leaves[0] is None:
        return None
    taken = [_split.pieces(leaf) for leaf in leaves]
    parts = zip(*(each.parts for each in taken))
    joined = [tf.concat(p, 0) if p[0].shape.rank else tf.stack(p) for p in parts]
    return _split.join(taken[0].kind, joined)


def _run_in_graph(
    step: Step, micro_batches: _split.MicroBatches, state: Any, jit_compile: bool, pruned: bool
) -> Part:
    traces = []

    def traced_step(micro_batch: Any, state: Any) -> Any:
        part = step(micro_batch, state)
        gradients = part.gradients
        if _split.in_xla():  # XLA has no tensors of unknown size, so no sparse sums.
            gradients = [_sums.dense(gradient) for gradient in gradients]
        leaves = [leaf for leaf in tf.nest.flatten(part.aux) if leaf is not None]
        length = micro_batches.length_of(micro_batch)
        leaves = [micro_batches.padded([leaf], [length])[0] for leaf in leaves]
        aux = [_split.pieces(leaf) for leaf in leaves]
        traces.append(part._replace(gradients=gradients, aux=(part.aux, aux)))
        return gradients, part.state, part.latest, [each.parts for each in aux]

    # Tracing the step before the loop tells which gradients are None or sparse, and what shape the
    # rest has; the loop then calls that same trace.
    first = micro_batches.first()
    if pruned and not _split.in_xla():  # which leaves it out by itself
        traced = _pruned(traced_step, first, state)
    else:
        traced = tf.function(traced_step, autograph=False, jit_compile=jit_compile or None)
        traced.get_concrete_function(first, state)
    likes, _, latest_like, (aux_like, aux_pieces) = traces[0]
    runs = micro_batches.runs
    count = sum(run.count for run in runs)
    # Replicas with different numbers of examples must have gradients of the same kinds.
    may_be_dense = not _replicas.in_several()
    sums = [_sums.start(like, count, may_be_dense) for like in likes]
    latest = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), latest_like)
    # A replica may be without examples; XLA would compile the step twice.
    starts_with_first = _sums.dense_bytes(likes) >= LARGE_SUMS and not (
        _replicas.in_several() or _split.in_xla()
    )

    def run_all(run: _split.Run, done: Any, sums: Any, state: Any, latest: Any) -> Any:
        def after_one(index: Any, micro_batch: Any, push: Any, loop: Any) -> Any:
            sums, state, _, aux = loop
            gradients, state, latest, parts = traced(micro_batch, state)
            gradients = [g for g in gradients if g is not None]
            sums = [push(total, g) for total, g in zip(sums, gradients)]
            aux = tf.nest.map_structure(lambda array, part: array.write(index, part), aux, parts)
            return sums, state, latest, aux

        def body(index: Any, *loop: Any) -> Any:
            def push(total: Any, gradient: Any) -> Any:
                return _sums.push(total, gradient, done + index)

            return (index + 1, *after_one(index, micro_batches.get(run, index), push, loop))

        aux = [[_array(run, part) for part in each.parts] for each in aux_pieces]
        index, loop = tf.constant(0), (sums, state, latest, aux)
        if starts_with_first and run is runs[0]:
            loop = after_one(0, first, _sums.first, loop)
            with after(loop[:3]):  # or its activations could be in memory beside the next ones'
                index = tf.constant(1)
        # The default of 10 parallel iterations would let their activations overlap in memory.
        _, sums, state, latest, aux = tf.while_loop(
            lambda index, *_: index < run.count, body, (index, *loop), parallel_iterations=1
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
    aux = micro_batches.in_order(tf.nest.pack_sequence_as(aux_like, aux))
    return Part(sums, state, latest, aux)


def _pruned(function: Callable[..., Any], *like: Any) -> Callable[..., Any]:
    """A function traced for arguments like these, without what its values do not depend on.

    A `tf.function` keeps every operation that may fail. Where shapes are not known, TensorFlow
    asserts them of predictions, which would be made for the sake of it.
    """
    results: List[Any] = []

    def of_tensors(*tensors: Any) -> Any:
        results.append(function(*_packed(like, tensors)))
        return _tensors(results[0])

    signature = [tf.TensorSpec.from_tensor(tensor) for tensor in _tensors(like)]
    traced = tf.compat.v1.wrap_function(of_tensors, signature)
    pruned = traced.prune(traced.inputs, traced.outputs)
    return lambda *arguments: _packed(results[0], pruned(*_tensors(arguments)))


def _tensors(nest: Any) -> List[Any]:
    """The dense tensors of a nest with None, ragged and sparse tensors in it."""
    leaves = tf.nest.flatten(nest, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def _packed(like: Any, tensors: Sequence[Any]) -> Any:
    """A nest like another one, with these dense tensors."""
    remaining = iter(tensors)
    leaves = tf.nest.flatten(like, expand_composites=True)
    leaves = [None if leaf is None else next(remaining) for leaf in leaves]
    return tf.nest.pack_sequence_as(like, leaves, expand_composites=True)


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

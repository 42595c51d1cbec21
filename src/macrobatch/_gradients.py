"""The loop: micro-batch -> gradients -> sum. It goes from values to values and writes no variable,
so whatever fails in it has changed nothing.

What the loop means, whichever way it runs:

    for micro_batch in batch:
        gradients, state, latest = step(micro_batch, state)
        sums += gradients
    return sums, state, latest
"""

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from macrobatch import _split, _sums

Step = Callable[[Any, Any], Tuple[List[Any], Any, Any]]


def sum_over_micro_batches(
    step: Step, batch: Any, examples: Any, micro_batch_size: int, state: Any
) -> Tuple[List[Any], Any, Any]:
    """Runs `step` on each micro-batch and sums the gradients that it returns.

    Args:
        step: a function of a micro-batch and the state, which returns gradients, the state for
            the next micro-batch, and values of which the last micro-batch's are kept.
        batch: a nest of tensors with the examples first.
        examples: their number, from `_split.examples_in(batch)`.
        micro_batch_size: examples in a micro-batch; the last one may have fewer.
        state: a nest of tensors of fixed shapes.

    Returns:
        The summed gradients, the last state, the last values.
    """
    runs = _split.runs(examples, micro_batch_size)
    if tf.executing_eagerly():
        return _run_eagerly(step, batch, runs, state)
    return _run_in_graph(step, batch, runs, state)


def gradients_of(tape: tf.GradientTape, loss: Any, variables: List[Any]) -> List[Any]:
    """The gradients of a loss, with the shapes of the variables, which the tape may not know."""
    gradients = tape.gradient(loss, variables)
    return [_shaped(gradient, v.shape) for gradient, v in zip(gradients, variables)]


def _shaped(gradient: Any, shape: tf.TensorShape) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        dense_shape = tf.constant(shape.as_list(), gradient.indices.dtype)
        return tf.IndexedSlices(gradient.values, gradient.indices, dense_shape)
    if gradient is not None:
        gradient.set_shape(shape)
    return gradient


def _run_eagerly(step: Step, batch: Any, runs: List[_split.Run], state: Any) -> Any:
    sums: List[Any] = []
    latest: Any = None
    for run in runs:
        for index in range(int(run.count)):
            gradients, state, latest = step(_split.micro_batch(batch, run, index), state)
            gradients = [g if g is None else _sums.cast(g, _sums.wide(g.dtype)) for g in gradients]
            sums = [_sums.add(*pair) for pair in zip(sums, gradients)] if sums else gradients
            sums = [_sums.merge_rows(total) for total in sums]
    return sums, state, latest


def _run_in_graph(step: Step, batch: Any, runs: List[_split.Run], state: Any) -> Any:
    traces = []

    def traced_step(micro_batch: Any, state: Any) -> Any:
        gradients, state, latest = step(micro_batch, state)
        if _split.in_xla():  # XLA has no tensors of unknown size, so no sparse sums.
            gradients = [_sums.dense(gradient) for gradient in gradients]
        traces.append((gradients, latest))
        return gradients, state, latest

    # Tracing the step before the loop tells which gradients are None or sparse, and what shape the
    # rest has; the loop then calls that same trace.
    traced = tf.function(traced_step, autograph=False)
    traced.get_concrete_function(_split.first_micro_batch(batch, runs), state)
    likes, latest_like = traces[0]
    count = sum(run.count for run in runs)
    sums = [_sums.start(like, count) for like in likes]
    latest = tf.nest.map_structure(lambda t: tf.zeros(t.shape, t.dtype), latest_like)

    def run_all(run: _split.Run, done: Any, sums: Any, state: Any, latest: Any) -> Any:
        def body(index: Any, sums: Any, state: Any, latest: Any) -> Any:
            micro_batch = _split.micro_batch(batch, run, index)
            gradients, state, latest = traced(micro_batch, state)
            gradients = [g for g in gradients if g is not None]
            sums = [_sums.push(total, g, done + index) for total, g in zip(sums, gradients)]
            return index + 1, sums, state, latest

        # The default of 10 parallel iterations would let their activations overlap in memory.
        return tf.while_loop(
            lambda index, *_: index < run.count,
            body,
            (tf.constant(0), sums, state, latest),
            parallel_iterations=1,
        )[1:]

    present = [total for total in sums if total is not None]
    done = 0
    for run in runs:
        present, state, latest = run_all(run, done, present, state, latest)
        done += run.count
    remaining = iter(present)
    sums = [None if like is None else _sums.finish(next(remaining), like) for like in likes]
    return sums, state, latest

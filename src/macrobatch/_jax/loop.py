"""The loop: micro-batch -> gradients -> sum. It goes from values to values.

What the loop means, compiled or not:

    for micro_batch in batch:
        part = step(micro_batch, values)
        sums, counts += part.sums, part.counts
        values = part.written, where it is not None
        moments = moments.merged(part.moments)
        latest = part.latest
        aux.append(part.aux)

Compiled, `lax.scan` runs the full micro-batches, so that one is in memory at a time. The tail is a
second call of the step.
"""

from typing import Any, Callable, List, Optional

import jax
from jax import lax
from jax import numpy as jnp

from macrobatch._types import Batch, MicroBatches, Part, Run, Tensor

# A function of a micro-batch and of the values of the step's variables.
Step = Callable[[Batch, List[Tensor]], Part]


def run(step: Step, micro_batches: MicroBatches, values: List[Tensor], compiled: bool) -> Part:
    """The part of the whole batch.

    Args:
        step: the step.
        micro_batches: the batch, and how it is cut.
        values: the values of the step's variables before the batch.
        compiled: whether this is traced. Otherwise micro-batches run one by one, at once.
    """
    total: Optional[Part] = None
    kept: List[Any] = []
    for each in micro_batches.runs:
        if compiled and each.count > 1:
            total, aux = _scanned(step, micro_batches, each, values, total)
            kept.append(aux)
        else:
            for index in range(int(each.count)):
                part = step(micro_batches.get(each, index), after(values, total))
                kept.append(part.aux)
                total = added(total, part)
    assert total is not None
    aux = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept)
    return total._replace(aux=aux)


def _scanned(
    step: Step, micro_batches: MicroBatches, run: Run, values: List[Tensor], total: Optional[Part]
) -> Any:
    """The part of the micro-batches of a run, on top of a total, and what they have kept."""
    if total is None:
        first = jax.eval_shape(step, micro_batches.get(run, 0), values)
        total = nothing_like(first, values)

    def body(total: Part, index: Tensor) -> Any:
        part = step(micro_batches.get(run, index), after(values, total))
        return added(total, part), part.aux

    total, aux = lax.scan(body, total, jnp.arange(run.count))
    # From (micro-batches, examples, ...) to (examples, ...).
    return total, jax.tree.map(lambda leaf: leaf.reshape((-1, *leaf.shape[2:])), aux)


def after(values: List[Tensor], total: Optional[Part]) -> List[Tensor]:
    """The values of the variables, after some micro-batches."""
    if total is None:
        return values
    pairs = zip(values, total.written)
    return [old if new is None else new for old, new in pairs]


def nothing_like(part: Part, values: List[Tensor]) -> Part:
    """The part of no micro-batch at all, in memory of its own."""
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), added(None, part))
    pairs = zip(part.written, values)
    # A copy: whoever adds to this may write into its memory.
    return zeros._replace(written=[None if new is None else jnp.copy(old) for new, old in pairs])


def added(total: Any, part: Any) -> Part:
    if total is None:
        return Part(
            list(part.sums),
            list(part.counts),
            list(part.written),
            list(part.moments),
            part.latest,
        )
    return Part(
        [one + other for one, other in zip(total.sums, part.sums)],
        [one + other for one, other in zip(total.counts, part.counts)],
        [old if new is None else new for old, new in zip(total.written, part.written)],
        [one.merged(other) for one, other in zip(total.moments, part.moments)],
        part.latest,
    )

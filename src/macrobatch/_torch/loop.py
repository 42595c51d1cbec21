"""The loop: micro-batch -> part -> sum, in Python, from values to values.

    for micro_batch in batch:
        part = step(micro_batch, values)
        sums, counts += part.sums, part.counts
        values = part.written, where it is not None
        moments = moments.merged(part.moments)
        latest = part.latest
        aux.append(part.aux)

Micro-batches are views of a batch that may be on the host: only the current one is on the device.
"""

import gc
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from keras import tree

from macrobatch._shown.line import HERE
from macrobatch._torch.engine import on_device
from macrobatch._types import Batch, MicroBatches, Part, Run, Tensor

# A function of a micro-batch, and of the values of the step's variables.
Step = Callable[[Batch, List[Tensor]], Part]


def places(micro_batches: MicroBatches) -> Iterator[Tuple[Run, int]]:
    """The runs of micro-batches, and the places of the micro-batches in them. Says where it is."""
    done, count = 0, sum(int(run.count) for run in micro_batches.runs)
    for run in micro_batches.runs:
        for index in range(int(run.count)):
            HERE.at(done, count)
            yield run, index
            done += 1
    HERE.at(0, 0)


def run(
    step: Step,
    micro_batches: MicroBatches,
    read: Callable[[], List[Tensor]],
) -> Part:
    """The part of the whole batch. `aux` is a list, with one nest for each micro-batch.

    Args:
        step: the step.
        micro_batches: the batch, and how it is cut.
        read: a function that reads the variables whose values go into the step. A run may find
            more of them.
    """
    values, total = read(), None
    for place in places(micro_batches):
        part = detached(step(on_device(micro_batches.get(*place)), values))
        if len(part.written) > len(values):
            values = [*values, *read()[len(values) :]]
        values = [old if new is None else new for new, old in zip(part.written, values)]
        total = added(total, part)
        free_outputs()
    assert total is not None
    return total


def free_outputs() -> None:
    """Lets go of the outputs of a micro-batch.

    torch's pytrees, with which Keras flattens them, leave cycles that hold what was flattened, so
    that outputs of several micro-batches would be in memory. Of young objects there are few.
    """
    if gc.isenabled():
        gc.collect(1)


def detached(part: Part) -> Part:
    """A part that keeps no activations in memory. What it has of variables are copies."""

    def free(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A variable may be written before another one that was given its value.
        return value.detach().clone() if isinstance(value, torch.nn.Parameter) else value.detach()

    return part._replace(
        sums=[None if value is None else value.detach() for value in part.sums],
        counts=[count.detach() for count in part.counts],
        written=[None if value is None else free(value) for value in part.written],
        moments=[type(each)(*map(free, each)) for each in part.moments],
        latest=tree.map_structure(free, part.latest) if part.latest else part.latest,
    )


def added(total: Optional[Part], part: Part) -> Part:
    """The part of all micro-batches so far."""
    if total is None:
        return part._replace(aux=[part.aux])
    if len(part.sums) != len(total.sums):
        raise ValueError(
            "Every micro-batch must have a loss of the same terms. Received: a micro-batch with "
            f"{len(part.sums)} values to be summed, after one with {len(total.sums)}. Look for "
            "masks or sample weights that only some batches have."
        )
    pairs: Any = zip(total.sums, part.sums)
    known = len(total.moments)
    before = [*total.written, *[None] * len(part.written)]
    return Part(
        sums=[one + other for one, other in pairs],
        counts=[one + other for one, other in zip(total.counts, part.counts)],
        written=[old if new is None else new for new, old in zip(part.written, before)],
        moments=[
            *(one.merged(other) for one, other in zip(total.moments, part.moments)),
            *part.moments[known:],
        ],
        latest=part.latest,
        aux=[*total.aux, part.aux],
    )

"""Batch -> micro-batches of one size, in the order of the batch."""

from typing import Any, List, Tuple

from keras import ops, tree

from macrobatch._batches import checks
from macrobatch._batches.nests import mapped
from macrobatch._batches.sequences import larger, smaller
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, MicroBatches, Run, Size


def checked(batch: Batch, engine: BatchEngine, may_be_empty: bool = False) -> Tuple[Batch, Size]:
    """A batch and the number of its examples, once all parts of the batch have as many."""
    leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
    shapes = tree.map_structure(lambda leaf: None if leaf is None else tuple(leaf.shape), batch)
    checks.batch_shapes([tuple(leaf.shape) for leaf in leaves], shapes, may_be_empty)
    sizes = [engine.examples_of(leaf) for leaf in leaves]
    return engine.agreed_size(
        batch,
        sizes,
        least=0 if may_be_empty else 1,
        uneven=checks.uneven_batch(shapes),
        empty=checks.empty_batch(shapes),
    )


def runs_of(examples: Size, micro_batch_size: Size, static: bool) -> List[Run]:
    """How a batch is cut: one run, or full micro-batches and a tail where sizes must be static."""
    if not isinstance(micro_batch_size, int):
        size = smaller(micro_batch_size, larger(examples, 1))
        return [Run(0, size, (examples + size - 1) // size, static=False)]
    if isinstance(examples, int) and examples == 0:
        return [Run(0, micro_batch_size, 0, static=False)]
    if isinstance(examples, int):
        size = min(micro_batch_size, examples)
        full, tail = divmod(examples, size)
        if tail == 0:
            return [Run(0, size, full, static=True)]
        if static:
            return [Run(0, size, full, static=True), Run(full * size, tail, 1, static=True)]
        return [Run(0, size, full + 1, static=False)]
    if static:
        # To a compiler these are constants. A tail that turns out to be empty runs no iteration.
        some = smaller(micro_batch_size, examples)
        full, rest = examples // larger(some, 1), examples % larger(some, 1)
        count = ops.cast(rest > 0, "int32")
        return [Run(0, some, full, static=True), Run(full * some, rest, count, static=True)]
    count = (examples + micro_batch_size - 1) // micro_batch_size
    return [Run(0, micro_batch_size, count, static=False)]


class InOrder(MicroBatches):
    """A batch that is cut into micro-batches of one size, in the order of the batch."""

    def __init__(self, batch: Batch, examples: Size, size: Size, engine: BatchEngine):
        self.whole = self.batch = batch
        self.examples, self._engine = examples, engine
        self.runs = runs_of(examples, size, engine.has_static_sizes())

    def get(self, run: Run, index: Size) -> Batch:
        return self.rows(self.batch, run, index)

    def rows(self, nest: Any, run: Run, index: Size) -> Any:
        start = run.start + index * run.size
        return mapped(
            lambda leaf: (
                None if leaf is None else self._engine.slice_of(leaf, start, run.size, run.static)
            ),
            nest,
        )

    def first_index(self) -> Size:
        # Slices at a constant index have a constant size, others have not.
        return 0 if self.runs[0].static else self._engine.unknown(0)


class Rest(MicroBatches):
    """All micro-batches of a batch but the first."""

    def __init__(self, whole: MicroBatches, engine: BatchEngine):
        self.batch, self.examples = whole.batch, whole.examples
        self._whole, self._engine = whole, engine
        first, *runs = whole.runs
        runs = [first._replace(start=first.start + first.size, count=first.count - 1), *runs]
        self.runs = [run for run in runs if not (isinstance(run.count, int) and run.count == 0)]
        self.may_be_empty = any(not isinstance(run.count, int) for run in self.runs)

    def get(self, run: Run, index: Size) -> Batch:
        return self._whole.get(run, index)

    def first(self) -> Batch:
        # A compiler knows all sizes, and refuses a slice behind the end, also if nobody needs it.
        if self._engine.has_static_sizes():
            return self._whole.first()
        run = self.runs[0]
        return self.get(run, 0 if run.static else self._engine.unknown(0))

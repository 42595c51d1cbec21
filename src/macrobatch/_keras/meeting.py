"""Whether examples meet: whether what comes of an example depends on others of its micro-batch.

A loss that is a sum over examples has, for groups of examples a, a', b, b' and the same draws,

    L(a, b) - L(a', b) - L(a, b') + L(a', b') = 0

and what has a row for each example has the same rows for `a` beside b and beside b'. Four runs of a
few examples tell it. Random layers draw the same in each of them, since no run writes anything, and
each example stays in its place. Layers are looked at one by one only if anything differs.
"""

from typing import Callable, Iterable, List, NamedTuple, Optional, Sequence

from keras import tree

from macrobatch._engine import BatchEngine
from macrobatch._keras import batch_norm, calls, pieces
from macrobatch._keras.comparison import NAMED, Comparison, Found, Groups
from macrobatch._types import Batch, Tensor

# Examples in a micro-batch of the trial. Of too few, none may have a partner, or lack room. Without
# gradients, some are in less memory than one is in training.
FEWEST, MOST = 8, 16


class Verdict(NamedTuple):
    """What a trial has shown. Examples do not meet where it is empty.

    Attributes:
        layers: the names of the layers, or of other operations, in which examples meet.
        values: the names of what was found in which they meet besides, or for no reason that a
            layer would give.
        is_random: whether two runs of the same examples differ, so that nothing is known.
        unknown: the names of sums that are not finite, so that nothing is known of them.
        sized_layers: the names of the layers that depend on how many examples there are, or on
            their places.
        sized: the names of what was found that depends on these for no reason that a layer gives.
    """

    layers: Sequence[str] = ()
    values: Sequence[str] = ()
    is_random: bool = False
    unknown: Sequence[str] = ()
    sized_layers: Sequence[str] = ()
    sized: Sequence[str] = ()


class Tried:
    """What is tried: a function of a micro-batch, which leaves everything as it was.

    Seeds, for one. So its random layers draw the same again.

    Attributes:
        alone_of: which of the examples together (0) and the two pieces of them (1, 2) to run alone.
    """

    alone_of: Sequence[int] = (0, 1, 2)

    def found(self, micro_batch: Batch) -> Found:
        """What comes of a micro-batch."""
        raise NotImplementedError

    def certain(
        self, names: List[str], compared: Callable[[Callable[[Batch], Found]], List[str]]
    ) -> List[str]:
        """Those of the values in which examples seem to meet in which they do.

        Args:
            names: the names of values that are not the same in four runs.
            compared: a function that runs a function on four micro-batches, and gives the names of
                values that are not the same.
        """
        return names

    def alone(self, micro_batch: Batch) -> Found:
        """The same of any number of examples, with nothing dropped. Nothing if it still draws.

        Of another number of examples, random layers draw other numbers.
        """
        return {}

    def apart(self, made: pieces.Pieces) -> Sequence[Found]:
        """What comes of examples together and of each piece, of one run of all of them.

        So random layers have drawn the same.
        """
        return [{} for _ in made.batches]


def size_of(micro_batch_size: int) -> int:
    """How many examples to try at a time, for micro-batches of a size. One alone meets nobody."""
    return max(FEWEST, min(micro_batch_size, MOST))


def groups(batch: Batch, examples: int, size: int, engine: BatchEngine) -> Optional[Groups]:
    """Groups of the first examples of a batch; None if there is only one.

    Args:
        batch: a nest with the examples first.
        examples: how many there are.
        size: examples in a micro-batch of the trial; fewer if the batch has fewer.
        engine: the backend.
    """
    size = min(size, examples)
    if size < 2:
        return None
    first, last = size // 2, size - size // 2
    # In a small batch the others are examples of the same micro-batch, in another order.
    others = (size, size + first) if examples >= 2 * size else (examples - first, 0)
    starts = [(0, first), (others[0], first), (0, others[1]), others]

    # Ragged rows become as wide as the longest, and random layers draw for all of the width: so the
    # widest examples are in all four, behind b and behind b'.
    widest = [(example, 1) for example in engine.widest(batch)]

    def joined(leaf: Tensor, start: int, start_of_last: int) -> Tensor:
        pieces = [(start, first), (start_of_last, last), *widest]
        return engine.concatenated([engine.slice_of(leaf, *piece, False) for piece in pieces])

    return Groups(
        [
            tree.map_structure(lambda leaf: None if leaf is None else joined(leaf, *pair), batch)  # noqa: B023
            for pair in starts
        ],
        first,
        size + len(widest),
    )


def find(tried: Tried, groups: Groups, engine: BatchEngine, is_coarse: bool = False) -> Verdict:
    """Runs a function of a micro-batch on groups of examples, and tells whether they meet.

    BatchNormalization normalises by the moments of the first run in all of them: it has a message
    of its own, and neither hides nor causes anything here.

    Args:
        tried: the function.
        groups: the examples.
        engine: the backend.
        is_coarse: whether numbers are of less than 32 bits somewhere.
    """
    compare = Comparison(groups, is_coarse)
    with batch_norm.frozen() as next_run:

        def found(micro_batch: Batch) -> Found:
            next_run()
            return tried.found(micro_batch)

        meeting, unknown = compare.outcome(found(each) for each in groups.micro_batches)

        def compared(function: Callable[[Batch], Found]) -> List[str]:
            return compare.outcome(function(each) for each in groups.micro_batches).meeting

        meeting = tried.certain(meeting, compared) if meeting else []
        if not meeting:
            made = pieces.of(groups, engine, is_coarse)
            sized = Verdict() if made is None else _of_sizes(tried, made, engine, next_run)
            return sized._replace(unknown=unknown)
        same = groups.micro_batches[0]
        if compare.differ(found(same), found(same)):
            return Verdict(is_random=True)
        named = _named(found, groups, engine, compare)
        values = [name for name in named.values if name in meeting]
        return named._replace(values=values, unknown=unknown)


def _of_sizes(
    tried: Tried, made: pieces.Pieces, engine: BatchEngine, next_run: Callable[[], None]
) -> Verdict:
    """What depends on how many examples there are, or on their places."""

    def alone(micro_batch: Batch) -> Found:
        next_run()
        return tried.alone(micro_batch)

    try:
        places = enumerate(made.batches)
        rows = made.differing([alone(b) if i in tried.alone_of else {} for i, b in places])
        next_run()
        sums = made.differing(tried.apart(made))
        layers = made.culprits(alone, engine) if rows else []
    except Exception:  # Some models take one number of examples only.
        return Verdict()
    return Verdict(sized_layers=layers, sized=[*([] if layers else rows), *sums])


def _named(
    run: Callable[[Batch], Found], groups: Groups, engine: BatchEngine, compare: Comparison
) -> Verdict:
    """The layers in which examples meet, and the values in which they still do without these.

    A layer that is known gets in further runs, for each example, what it made of the example in
    one of the first. What still differs has another cause.
    """
    layers: List[str] = []
    known: calls.Outputs = {}
    while True:
        recorded, passes = [], []
        for place, micro_batch in enumerate(groups.micro_batches):
            outputs = {index: made[place] for index, made in known.items()}
            with calls.watched(outputs, engine) as found:
                passes.append(run(micro_batch))
            recorded.append(found)
        culprits = compare.culprits(recorded)
        if not culprits:
            return Verdict(_unique(layers), compare.outcome(passes).meeting)
        for culprit in culprits:
            made = compare.as_if_apart(culprit) if len(layers) < NAMED else None
            if made is None:  # What follows cannot be told from what this layer causes.
                return Verdict(_unique([*layers, culprit[0].name])[:NAMED])
            layers.append(culprit[0].name)
            known[culprit[0].start] = made


def _unique(names: Iterable[str]) -> List[str]:
    return list(dict.fromkeys(names))

"""Which micro-batches to compare to find out whether anything depends on padding: some examples
with padding, and the same without.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from keras import ops

from macrobatch._batches.sequences import larger, smaller
from macrobatch._types import Batch, Size, Tensor

# What comes of a micro-batch, by name: the loss, and metrics.
Found = Dict[str, List[Tensor]]


class Comparison(NamedTuple):
    """Examples to compare, no more than can be in memory whole: some of the shortest.

    Attributes:
        micro_batches: the batch.
        start, end: places of the examples in the order.
        is_padded: whether there is any padding to compare them with and without.
    """

    micro_batches: Any  # by_length.ByLength, which imports this room
    start: Size
    end: Size
    is_padded: Tensor

    @property
    def is_ragged(self) -> bool:
        """Whether rows are padded only by longer ones beside them."""
        return bool(self.micro_batches.sequences.ragged)

    def run(
        self,
        function: Callable[[Batch], Found],
        is_additive: Callable[[], bool],
        beside_whole: bool = False,
    ) -> Tuple[Found, List[Found]]:
        """What comes of examples with padding, and all that must be the same without.

        Args:
            function: to be run on micro-batches.
            is_additive: whether, in the last run, no example depended on others.
            beside_whole: whether the function gets each micro-batch with the same one whole.
        """
        micro_batches, start, end = self.micro_batches, self.start, self.end

        def found(examples: Batch, length: Size) -> Found:
            # One trace, for all lengths.
            cut = micro_batches.cut(examples, micro_batches.unknown(length))
            return function((cut, examples) if beside_whole else cut)

        longest, next_longest = micro_batches.lengths[start], micro_batches.lengths[start + 1]
        if not self.is_ragged:
            # Without padding, all of an example shows what padding does to it. A maximum, for one,
            # is that of an example more often than that of its padding.
            examples = micro_batches.filled(start, end, longest)
            of_whole = found(examples, micro_batches.sequences.size)
            lengths = (longest, *micro_batches.longer())
            return of_whole, [found(examples, length) for length in lengths]
        together = found(micro_batches.uncut(start, end), longest)
        if not is_additive():
            return together, []
        first, others = ((start, start + 1), longest), ((start + 1, end), next_longest)
        parts = [found(micro_batches.uncut(*at), length) for at, length in (first, others)]
        sums = [one + other for one, other in zip(*(part["loss"] for part in parts))]
        return together, [{"loss": sums}]


def comparison_of(micro_batches: Any) -> Comparison:
    """What to compare of a batch."""
    examples, size = micro_batches.examples, micro_batches.sequences.size
    most = micro_batches.examples_at(size)
    if not micro_batches.sequences.ragged:
        start = larger(examples - most, 0)
        # Those that are as long as all sequences show nothing, if any are shorter.
        as_long = ops.sum(ops.cast(micro_batches.lengths[:examples] >= size, "int32"))
        start = larger(start, ops.where(as_long < examples, as_long, 0))
        lengths = [micro_batches.lengths[start], *micro_batches.longer()]
        differ = ops.any(ops.stack([ops.not_equal(length, size) for length in lengths]))
        return Comparison(micro_batches, start, examples, ops.logical_and(differ, start < examples))
    # Rows are padded only by a longer one beside them: the last one that is longer than others.
    lengths = micro_batches.lengths[:examples]
    longer = ops.sum(ops.cast(lengths > micro_batches.lengths[examples - 1], "int32"))
    start = larger(longer - 1, 0)
    end = smaller(start + larger(most, 2), examples)
    return Comparison(micro_batches, start, end, longer > 0)

"""Batches of sequences: micro-batches of examples of similar length, each cut to its own longest.

Order inside a batch is free, and padding that nothing depends on need not be computed:

    order  = the examples, longest first
    starts = 0, size, 2 * size, ...   where size may depend on the longest that is left
    k-th micro-batch = batch[order[starts[k] : starts[k + 1]], : the longest of them]

The trial (trial.py or padding.py of an engine) finds out whether nothing depends on padding.
"""

from typing import Any, Callable, List, Optional, Tuple

from keras import ops, tree

from macrobatch._batches import checks, padding
from macrobatch._batches.sequences import (
    Sequences,
    Truth,
    larger,
    largest,
    same,
    size_along,
    smaller,
)
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, MicroBatches, Run, Size, Tensor

# XLA compiles for each shape, so lengths are rounded up to one of these: by a fifth on average.
BUCKETS = [size for power in range(3, 30) for size in (2**power, 3 * 2 ** (power - 1))]


class ByLength(MicroBatches):
    """A batch that is cut into micro-batches of examples of similar length.

    Attributes, beside those of all micro-batches:
        sequences: the parts of the batch that are cut along the axis.
        order: of the examples, longest first.
        lengths: to which each example is cut if its micro-batch starts with it, in that order.
        starts: of the micro-batches in that order, and the end.
    """

    def __init__(
        self,
        batch: Batch,
        examples: Size,
        sequences: Sequences,
        lengths: Tensor,
        engine: BatchEngine,
        size: Optional[Size],
        tokens: Optional[Size] = None,
        lengths_are_given: bool = False,
        few_shapes: bool = False,
    ):
        self.whole = batch
        self.examples, self.sequences, self._engine = examples, sequences, engine
        self.axis = sequences.axis
        self._size, self._tokens, self._few_shapes = size, tokens, few_shapes
        self.lengths_are_given = lengths_are_given
        # Numbers on which the sizes of other tensors depend are needed on the host.
        with engine.on_host():
            self.order = ops.argsort(-lengths)
            self._own_lengths: Tensor = larger(ops.take(lengths, self.order), 1)
            lengths = self._own_lengths
            if few_shapes:
                lengths = _rounded_up(lengths)
            if isinstance(sequences.size, int) or not few_shapes:
                lengths = smaller(lengths, larger(sequences.size, 1))
            # One more, since a replica without examples asks for a first micro-batch too.
            self.lengths = ops.concatenate([lengths, ops.ones([1], lengths.dtype)], 0)
            starts, count = self._starts()
            end = ops.reshape(ops.cast(examples, "int32"), [1])
            self.starts = ops.concatenate([starts, end, end], 0)
        self.runs = [Run(0, 0, count, static=False)]
        self.batch = tree.map_structure(
            lambda leaf: None if leaf is None else engine.in_order(leaf, self.order), batch
        )

    def comparison(self) -> Any:
        return padding.comparison_of(self)

    def hold(self, function: Callable[[Tensor], Tensor]) -> None:
        self.order = function(self.order)

    def unknown(self, number: Size) -> Size:
        """A number that a trace does not know."""
        return self._engine.unknown(number)

    def whole_and_shorter(self) -> Optional[Tuple[Batch, Batch]]:
        size = self.sequences.size
        if not isinstance(size, int):
            return None
        return self._like(size), self._like(max(1, size // 2))

    def _like(self, length: int) -> Batch:
        """The types and shapes of a micro-batch whose sequences have a length."""

        def spec(leaf: Any, is_sequence: Truth) -> Any:
            shape = [None, *leaf.shape[1:]]
            if is_sequence is not False:
                shape[self.sequences.axis] = length
            return self._engine.spec(leaf, shape)

        return self._mapped(spec, self.batch)

    def longer(self) -> List[Size]:
        """Lengths to which sequences of this size are made longer, so that shapes are few."""
        if not self._few_shapes or isinstance(self.sequences.size, int):
            return []
        return [_rounded_up(self.sequences.size)]

    def examples_at(self, length: Size) -> Size:
        """How many examples make a micro-batch whose longest has this length."""
        if self._tokens is None:
            assert self._size is not None
            return self._size
        return larger(self._tokens // larger(length, 1), 1)

    def _starts(self) -> Any:
        """Where micro-batches start, one after the other, and how many there are."""
        examples, size = self.examples, self._size
        if size is not None and not self._few_shapes:
            starts = ops.arange(0, examples, size, dtype="int32")
            is_known = isinstance(examples, int) and isinstance(size, int)
            return starts, -(-examples // size) if is_known else ops.shape(starts)[0]
        if self._engine.is_eager():
            return self._starts_at_once()
        total = ops.cast(examples, "int32")

        def size_at(start: Tensor) -> Tensor:
            size = ops.cast(self.examples_at(ops.take(self.lengths, start)), "int32")
            if not self._few_shapes:
                return size
            # A tail of any size would be another shape: it is cut into powers of two.
            remaining = total - start
            return ops.where(remaining >= size, size, _power_of_two(remaining))

        places = ops.arange(examples, dtype="int32")

        def body(start: Tensor, count: Tensor, starts: Tensor) -> Any:
            starts = ops.where(places == count, start, starts)
            return start + size_at(start), count + 1, starts

        zero = ops.zeros([], "int32")
        _, count, starts = ops.while_loop(
            lambda start, *_: start < total, body, (zero, zero, ops.zeros_like(places))
        )
        return starts[:count], count

    def _starts_at_once(self) -> Any:
        """The same where all numbers are known."""
        lengths, starts, start = ops.convert_to_numpy(self.lengths), [], 0
        while start < int(self.examples):
            starts.append(start)
            size = int(self.examples_at(int(lengths[start])))
            remaining = int(self.examples) - start
            if self._few_shapes and remaining < size:
                size = 1 << (remaining.bit_length() - 1)
            start += size
        return ops.convert_to_tensor(starts, "int32"), len(starts)

    def get(self, run: Run, index: Size) -> Batch:
        start = self.starts[index]
        return self.taken(start, self.starts[index + 1], self.lengths[start])

    def taken(self, start: Size, end: Size, length: Size) -> Batch:
        """The examples at these places of the order, cut to a length."""
        return self.cut(self.uncut(start, end), length)

    def cut(self, examples: Batch, length: Size) -> Batch:
        """Some examples that are not cut yet, cut to a length."""
        exactly = self._few_shapes
        return self._mapped(
            lambda leaf, truth: self.sequences.cut(leaf, truth, length, exactly), examples
        )

    def uncut(self, start: Size, end: Size) -> Batch:
        """The examples at these places of the order."""
        places = self.order, start, end
        return self._mapped(lambda leaf, _: self._engine.taken(leaf, *places), self.batch)

    def filled(self, start: Size, end: Size, length: Size) -> Batch:
        """The examples at these places of the order, not cut, and each of them as long as that.

        What there is of an example comes again and again up to the length, which is that of the
        longest of them, or more. Behind it is the padding of the example. Of every other example,
        it is the first position alone that comes again and again.
        """
        axis, engine = self.sequences.axis, self._engine
        uncut, own = self.uncut(start, end), self._own_lengths[start:end]
        pairs = zip(tree.flatten(uncut), self.sequences.are_sequences)
        if not all(engine.kind_of(leaf) == "dense" for leaf, truth in pairs if truth is not False):
            return uncut
        period = ops.where(ops.arange(ops.shape(own)[0]) % 2 == 0, ops.ones_like(own), own)

        def fill(leaf: Any, is_sequence: Truth) -> Any:
            if is_sequence is False:
                return leaf
            positions = ops.arange(size_along(axis, leaf), dtype="int32")
            again = ops.logical_and(is_sequence, positions < length)
            return engine.rearranged(
                leaf, axis, ops.where(again, positions % period[:, None], positions)
            )

        with engine.on_host():
            return self._mapped(fill, uncut)

    def _mapped(self, function: Any, batch: Batch) -> Batch:
        """A batch of the same structure, of what a function makes of its leaves but None."""
        found = [
            None if leaf is None else function(leaf, truth)
            for leaf, truth in zip(tree.flatten(batch), self.sequences.are_sequences)
        ]
        return tree.pack_sequence_as(batch, found)

    def rows(self, nest: Any, run: Run, index: Size) -> Any:
        places = self.starts[index], self.starts[index + 1]
        return tree.map_structure(
            lambda leaf: None if leaf is None else self._engine.taken(leaf, self.order, *places),
            nest,
        )

    def first_index(self) -> Size:
        return self._engine.unknown(0)

    def length_of(self, micro_batch: Batch) -> Optional[Size]:
        axis, engine = self.sequences.axis, self._engine
        pairs = list(zip(tree.flatten(micro_batch), self.sequences.are_sequences))
        pairs = [(leaf, truth) for leaf, truth in pairs if leaf is not None]
        sizes = [
            (size_along(axis, leaf), truth)
            for leaf, truth in pairs
            if truth is not False and engine.kind_of(leaf) == "dense"
        ]
        sure = [size for size, truth in sizes if truth is True]
        if sure:
            return sure[0]
        found = [ops.where(truth, size, 0) for size, truth in sizes]
        # Those that are made dense become as long as their longest row.
        rows = [leaf for leaf, _ in pairs if engine.kind_of(leaf) == "ragged"]
        found += [self.sequences.longest_row(leaf) for leaf in rows if len(leaf.shape) > axis]
        return largest(found) if found else None

    def uncut_fraction(self, micro_batch: Batch, weights: Tensor, doubtful: bool = False) -> Any:
        axis, length = self.sequences.axis, self.length_of(micro_batch)
        if len(weights.shape) <= axis or length is None:
            return 1.0
        if doubtful and self._engine.is_eager():  # Sizes do not tell what they are the size of.
            return 1.0
        is_cut = self._is_length(size_along(axis, weights), length)
        for leaf, truth in zip(tree.flatten(micro_batch), self.sequences.are_sequences):
            is_cut = truth if leaf is weights else is_cut
        if is_cut is False:
            return 1.0
        size = self.sequences.size
        part = ops.cast(length, weights.dtype) / ops.cast(size, weights.dtype)
        return ops.where(is_cut, part, ops.ones_like(part))

    def padded(self, leaves: List[Tensor], lengths: List[Optional[Size]]) -> List[Tensor]:
        size = self.sequences.size
        dense = all(leaf is not None and self._engine.kind_of(leaf) == "dense" for leaf in leaves)
        if not dense or any(length is None for length in lengths):
            return leaves
        for axis in range(1, len(leaves[0].shape)):  # of attention, more than one are positions
            pairs = [(size_along(axis, leaf), length) for leaf, length in zip(leaves, lengths)]
            is_cut = [self._is_length(*pair) for pair in pairs]
            # In eager mode some other size may happen to be the length of one micro-batch.
            if all(each is not False for each in is_cut):
                leaves = [
                    self._sized(leaf, axis, size if cut is True else ops.where(cut, size, own))
                    for leaf, cut, (own, _) in zip(leaves, is_cut, pairs)
                ]
        return leaves

    def _sized(self, leaf: Tensor, axis: int, size: Size) -> Tensor:
        """The leaf with a size along an axis. Few shapes may be longer than the sequences."""
        if self.longer():
            leaf = self._engine.shortened(leaf, axis, size, exactly=False)
        return self._engine.lengthened(leaf, axis, size)

    def _is_length(self, size: Size, length: Size) -> Truth:
        """Whether a size is the length that sequences are cut to, as far as can be known."""
        # A size that is known although that of sequences is not, is not that size.
        if isinstance(size, int) and not isinstance(length, int):
            return False
        return same(size, length)

    def probe(self, lengths: List[Optional[Size]]) -> Optional[Batch]:
        size = self.sequences.size
        known = [length for length in lengths if length is not None]
        if not self._engine.is_eager() or known != lengths or {size} == {*known, size}:
            return None  # In a graph, sizes that depend on lengths are those that are not known.
        return self.taken(0, 1, known[0] + 1) if len(set(known)) == 1 else None

    def restored(self, values: Any) -> Any:
        inverse = ops.argsort(self.order)

        def restore(leaf: Any) -> Any:
            if leaf is None or len(leaf.shape) == 0:
                return leaf
            count = self._engine.examples_of(leaf)
            if isinstance(count, int) and isinstance(self.examples, int):
                is_per_example = count == self.examples
                return self._engine.permuted(leaf, inverse) if is_per_example else leaf
            # Nothing is known of the order of values that are not one for each example.
            rows = ops.cond(
                ops.equal(count, self.examples),
                lambda: inverse,
                lambda: ops.arange(count, dtype="int32"),
            )
            return self._engine.permuted(leaf, rows)

        return tree.map_structure(restore, values)


def given_lengths(lengths: Any, examples: Size, engine: BatchEngine) -> Tensor:
    """What the user's function `lengths` has returned, as a tensor."""
    lengths = checks.given_lengths(lengths)
    lengths = ops.cast(lengths, "int32")
    equal = ops.equal(ops.shape(lengths)[0], examples)
    return engine.checked(lengths, (equal, checks.ONE_PER_EXAMPLE))


def _rounded_up(lengths: Tensor) -> Tensor:
    """The smallest bucket sizes that are not below these lengths."""
    buckets = ops.convert_to_tensor(BUCKETS, "int32")
    flat = ops.reshape(ops.cast(lengths, "int32"), [-1])
    return ops.reshape(ops.take(buckets, ops.searchsorted(buckets, flat)), ops.shape(lengths))


def _power_of_two(value: Tensor) -> Tensor:
    """The largest power of two that is not above a positive integer."""
    powers = ops.convert_to_tensor([2**i for i in range(31)], "int32")
    return ops.max(ops.where(powers <= value, powers, 1))

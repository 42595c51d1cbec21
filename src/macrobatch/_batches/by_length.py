"""Batches of sequences: micro-batches of examples of similar length, each cut to its own longest.

Order inside a batch is free, and padding that nothing depends on need not be computed:

    order  = the examples, longest first
    starts = 0, size, 2 * size, ...   where size may depend on the longest that is left
    k-th micro-batch = batch[order[starts[k] : starts[k + 1]], : the longest of them]

Whether nothing does depend on it is found out in _padding.
"""

from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import tensorflow as tf

from macrobatch._batches import checks as _length_checks
from macrobatch._batches import split as _split
from macrobatch._batches.sequences import Sequences, largest, longest_row, padded, same, size_along

# XLA compiles for each shape, so lengths are rounded up to one of these: by a fifth on average.
BUCKETS = [size for power in range(3, 30) for size in (2**power, 3 * 2 ** (power - 1))]


class Cut(NamedTuple):
    """How batches are to be cut. One of `size` and `tokens` is given.

    Attributes:
        size: examples in a micro-batch.
        tokens: what examples times longest may be in a micro-batch.
        axis: along which sequences lie, if micro-batches are made by length.
        lengths: a function that gives the lengths of examples, in place of what they contain.
    """

    size: Optional[int]
    tokens: Optional[int] = None
    axis: Optional[int] = None
    lengths: Optional[Callable[..., Any]] = None

    def apply(
        self,
        batch: Any,
        examples: Any,
        of: Sequence[Any] = (),
        x: Any = None,
        weights: Any = None,
        fixed: Sequence[Any] = (),
        rounded: bool = False,
    ) -> _split.MicroBatches:
        """Cuts a batch.

        Args:
            batch: a nest of tensors with the examples first.
            examples: their number.
            of: the arguments of `lengths`.
            x: what of the batch says, by integers that are not 0, how long examples are.
            weights: what of the batch says so by numbers of any kind.
            fixed: tensors of the batch that are not to be cut along the axis.
            rounded: whether there may be few different shapes only.
        """
        if self.axis is None:
            assert self.size is not None
            return _split.MicroBatches(batch, examples, self.size)
        _length_checks.outside_of_xla(_split.in_xla())
        sequences = Sequences(self.axis, batch, x, weights, fixed)
        if self.lengths is None:
            lengths = sequences.lengths()
        else:
            lengths = _given_lengths(self.lengths(*of), examples)
        return ByLength(batch, examples, sequences, lengths, self, rounded)


class ByLength(_split.MicroBatches):
    """A batch that is cut into micro-batches of examples of similar length.

    Attributes, beside those of all micro-batches:
        sequences: what of the batch is cut along the axis.
        order: of the examples, longest first.
        lengths: to which each example is cut if its micro-batch starts with it, in that order.
        starts: of the micro-batches in that order, and the end.
    """

    def __init__(
        self,
        batch: Any,
        examples: Any,
        sequences: Sequences,
        lengths: Any,
        cut: Cut,
        rounded: bool,
    ):
        self.batch, self.examples, self.sequences = batch, examples, sequences
        self._cut, self._rounded = cut, rounded
        # Numbers on which the sizes of other tensors depend are needed on the host.
        with tf.device("CPU:0"):
            self.order = tf.argsort(lengths, direction="DESCENDING", stable=True)
            lengths = tf.maximum(tf.gather(lengths, self.order), 1)
            if rounded:
                lengths = _rounded_up(lengths)
            if isinstance(sequences.size, int) or not rounded:
                lengths = tf.minimum(lengths, tf.maximum(sequences.size, 1))
            # One more, since a replica without examples asks for a first micro-batch too.
            self.lengths = tf.concat([lengths, [1]], 0)
            starts, count = self._starts()
            self.starts = tf.concat([starts, [examples, examples]], 0)
        self.runs = [_split.Run(0, None, count, static=False)]
        self.batch = tf.nest.map_structure(self._reordered, batch)

    @property
    def lengths_are_given(self) -> bool:
        """Whether a function of the user tells them."""
        return self._cut.lengths is not None

    def longer(self) -> List[Any]:
        """Lengths to which sequences of this size are made longer, so that shapes are few."""
        if not self._rounded or isinstance(self.sequences.size, int):
            return []
        return [_rounded_up(self.sequences.size)]

    def examples_at(self, length: Any) -> Any:
        """How many examples make a micro-batch whose longest has this length."""
        if self._cut.tokens is None:
            return self._cut.size
        return tf.maximum(self._cut.tokens // tf.maximum(length, 1), 1)

    def _starts(self) -> Any:
        """Where micro-batches start, one after the other, and how many there are."""
        examples, size = self.examples, self._cut.size
        if size is not None and not self._rounded:
            starts = tf.range(0, examples, size)
            return starts, -(-examples // size) if isinstance(examples, int) else tf.size(starts)
        total = tf.convert_to_tensor(examples)

        def size_at(start: Any) -> Any:
            size = self.examples_at(self.lengths[start])
            if not self._rounded:
                return size
            # A tail of any size would be another shape: it is cut into powers of two.
            remaining = total - start
            power = tf.bitwise.left_shift(1, _log2(remaining))
            return tf.where(remaining >= size, size, power)

        def body(start: Any, count: Any, starts: Any) -> Any:
            return start + size_at(start), count + 1, starts.write(count, start)

        starts = tf.TensorArray(tf.int32, 0, dynamic_size=True, element_shape=[])
        _, count, starts = tf.while_loop(
            lambda start, *_: start < total, body, (tf.constant(0), tf.constant(0), starts)
        )
        return starts.stack(), count

    def _reordered(self, leaf: Any) -> Any:
        # Rows of a sparse tensor cannot be gathered, so that it is put in order beforehand.
        if not isinstance(leaf, tf.SparseTensor):
            return leaf
        return reordered_rows(leaf, tf.math.invert_permutation(self.order))

    def get(self, run: _split.Run, index: Any) -> Any:
        start = self.starts[index]
        return self.taken(start, self.starts[index + 1], self.lengths[start])

    def taken(self, start: Any, end: Any, length: Any) -> Any:
        """The examples at these places of the order, cut to a length, or not if it is None."""
        rows = self.order[start:end]

        def take(leaf: Any, shares: Any) -> Any:
            if leaf is None:
                return None
            if isinstance(leaf, tf.SparseTensor):
                part = _split.cut_sparse(leaf, start, end - start)
            else:
                part = tf.gather(leaf, rows)
            if length is None:
                return part
            return self.sequences.cut(part, shares, length, exactly=self._rounded)

        leaves = tf.nest.flatten(self.batch)
        taken = [take(*pair) for pair in zip(leaves, self.sequences.shares)]
        return tf.nest.pack_sequence_as(self.batch, taken)

    def whole(self, any_length: bool = False) -> Any:
        """A micro-batch that is not cut; in a graph, its types and shapes."""
        return self._like(None if any_length else _known(self.sequences.size))

    def shorter(self) -> Any:
        """A micro-batch that is cut; in a graph, its types and shapes, with a length if possible.

        TensorFlow notices while it traces what does not fit sequences of that length.
        """
        size = _known(self.sequences.size)
        if tf.executing_eagerly():
            return self.first()
        return self._like(None if size is None else max(1, size // 2))

    def _like(self, length: Optional[int]) -> Any:
        if tf.executing_eagerly():
            return self.taken(0, 1, None)

        def spec(leaf: Any, shares: Any) -> Any:
            if not isinstance(leaf, tf.Tensor):
                return None if leaf is None else tf.type_spec_from_value(leaf)
            shape = [None, *leaf.shape[1:]]
            if shares is not False:
                shape[self.sequences.axis] = length
            return tf.TensorSpec(shape, leaf.dtype)

        leaves = tf.nest.flatten(self.batch)
        specs = [spec(*pair) for pair in zip(leaves, self.sequences.shares)]
        return tf.nest.pack_sequence_as(self.batch, specs)

    def length_of(self, micro_batch: Any) -> Any:
        axis = self.sequences.axis
        leaves = list(zip(tf.nest.flatten(micro_batch), self.sequences.shares))
        sizes = [
            (size_along(axis, leaf), shares)
            for leaf, shares in leaves
            if shares is not False and isinstance(leaf, tf.Tensor)
        ]
        sure = [size for size, shares in sizes if shares is True]
        if sure:
            return sure[0]
        found = [tf.where(shares, size, 0) for size, shares in sizes]
        # Those that are made dense become as long as their longest row.
        rows = [leaf for leaf, _ in leaves if isinstance(leaf, tf.RaggedTensor)]
        found += [longest_row(axis, leaf) for leaf in rows if leaf.shape.rank > axis]
        return largest(found) if found else None

    def kept(self, micro_batch: Any, weights: Any) -> Any:
        """What part of the positions that have these weights there is: the rest was cut off.

        It is 1.0, and not a tensor, where that is known to be all.
        """
        axis, length = self.sequences.axis, self.length_of(micro_batch)
        if len(weights.shape) <= axis or length is None:
            return 1.0
        is_cut = _same_size(size_along(axis, weights), length)
        for leaf, shares in zip(tf.nest.flatten(micro_batch), self.sequences.shares):
            is_cut = shares if leaf is weights else is_cut
        if is_cut is False:
            return 1.0
        part = tf.cast(length, weights.dtype) / tf.cast(self.sequences.size, weights.dtype)
        return tf.where(is_cut, part, tf.ones_like(part))

    def padded(self, leaves: List[Any], lengths: List[Any]) -> List[Any]:
        size = self.sequences.size
        dense = all(isinstance(leaf, tf.Tensor) for leaf in leaves)
        if not dense or any(length is None for length in lengths):
            return leaves
        for axis in range(1, len(leaves[0].shape)):  # of attention, more than one are positions
            pairs = [(size_along(axis, leaf), length) for leaf, length in zip(leaves, lengths)]
            is_cut = [_same_size(*pair) for pair in pairs]
            # In eager mode some other size may happen to be the length of one micro-batch.
            if all(each is not False for each in is_cut):
                leaves = [
                    padded(leaf, axis, size if cut is True else tf.where(cut, size, own))
                    for leaf, cut, (own, _) in zip(leaves, is_cut, pairs)
                ]
        return leaves

    def probe(self, lengths: List[Any]) -> Any:
        size = self.sequences.size
        if not tf.executing_eagerly() or None in lengths or {size} == {*lengths, size}:
            return None  # In a graph, sizes that depend on lengths are those that are not known.
        return self.taken(0, 1, lengths[0] + 1) if len(set(lengths)) == 1 else None

    def in_order(self, values: Any) -> Any:
        inverse = tf.math.invert_permutation(self.order)

        def restored(leaf: Any) -> Any:
            if leaf is None or len(leaf.shape) == 0:
                return leaf
            count = _split.size_of([leaf])
            if isinstance(count, int) and isinstance(self.examples, int):
                return _permuted(leaf, inverse) if count == self.examples else leaf
            # Nothing is known of the order of values that are not one for each example.
            is_per_example = tf.equal(count, self.examples)
            rows = tf.cond(is_per_example, lambda: inverse, lambda: tf.range(count))
            return _permuted(leaf, rows)

        return tf.nest.map_structure(restored, values)


def reordered_rows(tensor: tf.SparseTensor, places: Any) -> tf.SparseTensor:
    """A sparse tensor whose i-th row goes to the i-th of these places."""
    rows = tf.gather(tf.cast(places, tf.int64), tensor.indices[:, 0])
    indices = tf.concat([rows[:, None], tensor.indices[:, 1:]], 1)
    moved = tf.sparse.reorder(tf.SparseTensor(indices, tensor.values, tensor.dense_shape))
    moved.set_shape(tensor.shape)
    return moved


def _same_size(size: Any, length: Any) -> Any:
    """Whether a size is the length that sequences are cut to, as far as can be known."""
    # A size that is known although that of sequences is not, is not that size.
    if isinstance(size, int) and not isinstance(length, int):
        return False
    return same(size, length)


def _known(size: Any) -> Optional[int]:
    return size if isinstance(size, int) else None


def _permuted(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        return reordered_rows(leaf, tf.math.invert_permutation(rows))
    return tf.gather(leaf, rows)


def _given_lengths(lengths: Any, examples: Any) -> Any:
    lengths = tf.convert_to_tensor(lengths)
    _length_checks.given_lengths(lengths)
    lengths = tf.cast(lengths, tf.int32)
    return _split.asserted(lengths, tf.size(lengths), examples, _length_checks.ONE_PER_EXAMPLE)


def _rounded_up(lengths: Any) -> Any:
    """The smallest bucket sizes that are not below these lengths."""
    buckets = tf.constant(BUCKETS)
    found = tf.searchsorted(buckets, tf.reshape(lengths, [-1]))
    return tf.reshape(tf.gather(buckets, found), tf.shape(lengths))


def _log2(value: Any) -> Any:
    """The exponent of the largest power of two that is not above a positive integer."""
    powers = tf.constant([2**i for i in range(31)])
    return tf.searchsorted(powers, value[None], side="right")[0] - 1

"""The names of what passes between the rooms."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

# A value of the backend: an array that is there, or a symbolic one in a graph.
Tensor = Any
# A number of examples or of positions: an int where it is known, else a scalar tensor.
Size = Union[int, Tensor]
Variable = Any  # of Keras, or a tf.Variable
# None where a loss does not depend on a variable; a tf.IndexedSlices for some rows of a table.
Gradient = Optional[Tensor]
Batch = Any  # a nest of tensors with the examples first
Logs = Dict[str, Tensor]  # metrics by name
Check = Tuple[Any, str]  # a condition, and what to say if it is false


class Whole(NamedTuple):
    """What is known of the whole batch when a micro-batch runs.

    Attributes:
        examples: the number of examples, over all replicas.
        counts: the denominators that are counted, in the order in which they are met; None if
            they are not known before the last micro-batch has run.
        guesses: where `counts` is None, about what they will be. The first micro-batch fills them
            in, so that gradients are of about the size that they have in the whole batch.
    """

    examples: Size
    counts: Optional[Tensor] = None
    guesses: Optional[List[Tensor]] = None


class Part(NamedTuple):
    """What a step makes of a micro-batch, and the loop of the whole batch.

    Attributes:
        sums: gradients and other values, to be added up.
        counts: denominators that are counted, to be added up. In a graph they can be had without
            the rest.
        written: for each variable of the step, the value after it; None where it did not change.
        moments: of the inputs of BatchNormalization layers, to be pooled.
        latest: values of which the last micro-batch's are kept.
        aux: values of which all are kept, one after the other.
    """

    sums: List[Gradient]
    counts: Sequence[Tensor] = ()
    written: Sequence[Optional[Tensor]] = ()
    moments: Sequence[Any] = ()
    latest: Any = ()
    aux: Any = ()


class How(NamedTuple):
    """How a step is to run.

    Attributes:
        alone: whether replicas must not meet in it.
        drops: whether dropout drops anything.
    """

    alone: bool = False
    drops: bool = True


# A function of a micro-batch, of the values of the step's variables, of the counts of the whole
# batch (None if they are not known), and of how to run.
Step = Callable[[Batch, List[Tensor], Optional[Tensor], How], Part]


class Forward(NamedTuple):
    """What a forward pass makes of a micro-batch, where the loss sees the whole batch.

    Attributes:
        outputs: a nest with the examples first.
        totals: values of which the sum over all micro-batches counts.
        written: for each variable of the pass, the value after it; None where it did not change.
        moments: of the inputs of BatchNormalization layers, to be pooled.
    """

    outputs: Any
    totals: Sequence[Tensor] = ()
    written: Sequence[Optional[Tensor]] = ()
    moments: Sequence[Any] = ()


# A function of a micro-batch, of the values of the pass's variables, and of how to run.
ForwardPass = Callable[[Batch, List[Tensor], How], Forward]


class Run(NamedTuple):
    """`count` micro-batches of `size` examples; if not `static`, the last one may be smaller."""

    start: Size
    size: Size
    count: Any  # a Size; a tuple has a method of that name
    static: bool


class MicroBatches:
    """A batch and how it is cut.

    Attributes:
        whole: the batch as it came.
        batch: the batch in the order in which it is cut.
        examples: the number of its examples.
        runs: of micro-batches, one after the other.
    """

    whole: Batch
    batch: Batch
    examples: Size
    runs: List[Run]

    def get(self, run: Run, index: Size) -> Batch:
        """The micro-batch of a run with that index."""
        raise NotImplementedError

    def rows(self, nest: Any, run: Run, index: Size) -> Any:
        """What belongs to the examples of that micro-batch in a nest with all examples first."""
        raise NotImplementedError

    def first(self) -> Batch:
        """The first micro-batch. In a graph, as little is known of its shape as of the others."""
        return self.get(self.runs[0], self.first_index())

    def first_index(self) -> Size:
        """The index of the first micro-batch, which a graph knows only if sizes are static."""
        raise NotImplementedError

    def uncut_fraction(self, micro_batch: Batch, weights: Tensor, doubtful: bool = False) -> Any:
        """What fraction of the positions that have these weights there is: the rest was cut off.

        It is 1.0, and not a tensor, where that is known to be all; also if it cannot be known and
        is `doubtful`.
        """
        return 1.0

    # Whether it is known only when a graph runs that there are any micro-batches.
    may_be_empty = False
    # Along which axis sequences lie, if there are any.
    axis: Optional[int] = None
    # Whether a function of the user tells the lengths.
    lengths_are_given = False

    def whole_and_shorter(self) -> Optional[Tuple[Batch, Batch]]:
        """The types and shapes of a micro-batch that is not cut, and of one that is.

        None where nothing is cut, or where no length is known.
        """
        return None

    def comparison(self) -> Any:
        """What to compare to find out whether anything depends on padding; None if none is cut."""
        return None

    def hold(self, function: Callable[[Tensor], Tensor]) -> None:
        """Lets all micro-batches that are taken later depend on what a function returns."""

    def length_of(self, micro_batch: Batch) -> Optional[Size]:
        """The length to which the sequences of a micro-batch are cut, if they are."""
        return None

    def padded(self, leaves: List[Tensor], lengths: List[Optional[Size]]) -> List[Tensor]:
        """What came of micro-batches of these lengths, in shapes that can be joined."""
        return leaves

    def probe(self, lengths: List[Optional[Size]]) -> Optional[Batch]:
        """A further micro-batch, where micro-batches of these lengths leave `padded` in doubt."""
        return None

    def restored(self, values: Any) -> Any:
        """What came of all micro-batches, joined, in the order of the batch."""
        return values


def names(things: Sequence[Any]) -> List[str]:
    """The names of layers."""
    return [thing.name for thing in things]

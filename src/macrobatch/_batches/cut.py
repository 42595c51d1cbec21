"""How batches are to be cut: what the user has asked for, and the micro-batches that come of it."""

from typing import Any, Callable, NamedTuple, Optional, Protocol, Sequence, Tuple

from macrobatch._batches import checks
from macrobatch._batches.by_length import ByLength, given_lengths
from macrobatch._batches.in_order import InOrder
from macrobatch._batches.sequences import Memory, Sequences
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, MicroBatches, Size, Tensor


class Chosen(Protocol):
    """A size of micro-batches that is not given, but found while training.

    Attributes:
        in_tokens: whether it is examples times the longest of them, and not examples.
        current: the size of now, as a number, where there is one.
    """

    in_tokens: bool
    current: Any

    def now(self) -> Size:
        """The size of now: of a graph that can run with any size, a tensor."""


class Cut(NamedTuple):
    """How batches are to be cut. One of `size`, `tokens` and `chosen` is given.

    Attributes:
        size: examples in a micro-batch.
        tokens: what examples times longest may be in a micro-batch.
        axis: along which sequences lie, if micro-batches are made by length.
        lengths: a function that gives the lengths of examples, in place of what they contain.
        chosen: what says the size, or the tokens, if the user does not.
    """

    size: Optional[int]
    tokens: Optional[int] = None
    axis: Optional[int] = None
    lengths: Optional[Callable[..., Any]] = None
    chosen: Optional[Chosen] = None

    def now(self) -> Tuple[Optional[Size], Optional[Size]]:
        """The examples in a micro-batch, or what examples times longest may be: those of now."""
        if self.chosen is None:
            return self.size, self.tokens
        now = self.chosen.now()
        return (None, now) if self.chosen.in_tokens else (now, None)

    def named(self) -> Tuple[str, Optional[int]]:
        """The size of now, and what it is called."""
        size, tokens, chosen = self.size, self.tokens, self.chosen
        if chosen is not None:
            size, tokens = (None, chosen.current) if chosen.in_tokens else (chosen.current, None)
        return ("micro_batch_tokens", tokens) if size is None else ("micro_batch_size", size)

    def apply(
        self,
        batch: Batch,
        examples: Size,
        engine: BatchEngine,
        of: Sequence[Any] = (),
        x: Any = None,
        weights: Any = None,
        fixed: Sequence[Tensor] = (),
        few_shapes: bool = False,
        memory: Any = None,
    ) -> MicroBatches:
        """Cuts a batch.

        Args:
            batch: the batch.
            examples: the number of its examples.
            engine: the backend.
            of: the arguments of `lengths`.
            x: the part of the batch that tells, by integers that are not 0, how long examples are.
            weights: the part of the batch that tells so by numbers of any kind.
            fixed: tensors of the batch that are not to be cut along the axis.
            few_shapes: whether there may be few different shapes only.
            memory: what earlier batches have shown.
        """
        size, tokens = self.now()
        if self.axis is None:
            assert size is not None
            return InOrder(batch, examples, size, engine)
        checks.outside_of_xla(engine.has_static_sizes())
        sequences = Sequences(self.axis, batch, x, weights, fixed, engine, memory or Memory())
        if self.lengths is None:
            lengths = sequences.lengths()
        else:
            lengths = given_lengths(self.lengths(*of), examples, engine)
        return ByLength(
            batch,
            examples,
            sequences,
            lengths,
            engine,
            size=size,
            tokens=tokens,
            lengths_are_given=self.lengths is not None,
            few_shapes=few_shapes,
        )

"""What an engine offers: a backend, to the Keras arithmetic and to batches."""

import contextlib
from typing import Any, Callable, ContextManager, List, Optional, Sequence, Tuple

from macrobatch._types import Batch, Check, Size, Tensor


class Engine:
    """What a backend offers to the Keras arithmetic.

    This one has one replica and runs at once, which is all that NumPy needs.
    """

    def replicas(self) -> int:
        """The number of replicas that make this update together."""
        return 1

    def read(self, value: Any) -> Tensor:
        """What a variable of the backend holds, as a tensor."""
        return value

    def copied(self, value: Tensor) -> Tensor:
        """A copy, where Keras may change a value in place: it multiplies masks into weights."""
        return value

    def assigned(self, value: Tensor) -> Tensor:
        """What a variable holds once a value is assigned to it. No gradient flows through it."""
        from keras import ops

        return ops.stop_gradient(value)

    def sum_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        """The sums of values over all replicas."""
        return values

    def from_first_replica(self, values: List[Tensor]) -> List[Tensor]:
        """The values that the first replica has."""
        return values

    def max_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        """The largest of the values, element by element, that any replica has."""
        return values

    def on_first_replica(self, value: Tensor) -> Tensor:
        """The value on the first replica, and zeros on the others."""
        return value

    def checked(self, values: Tensor, *checks: Check) -> Tensor:
        """The values, once all conditions are known to hold. Raises a ValueError otherwise."""
        for condition, message in checks:
            if not condition:
                raise ValueError(message)
        return values

    def examples(self, micro_batch: Batch) -> Size:
        """The number of examples in a micro-batch."""
        from keras import tree

        return int(next(leaf for leaf in tree.flatten(micro_batch) if leaf is not None).shape[0])

    def with_other_size(self, function: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        """What a function returns for a batch like this one with another number of examples."""
        from keras import ops, tree

        def twice(leaf: Any) -> Any:
            return None if leaf is None else ops.repeat(leaf, 2, 0)

        return function(tree.map_structure(twice, micro_batch))

    def gradients_of(
        self, function: Callable[[List[Tensor]], List[Tensor]], tensors: List[Tensor]
    ) -> List[List[Tensor]]:
        """The gradient of each of the numbers that a function makes of tensors, outside of graphs.

        Args:
            function: the function.
            tensors: with respect to these, each of which is a float.
        """
        raise NotImplementedError


class BatchEngine(Engine):
    """What a backend offers to batches besides: how its kinds of tensors are cut and joined."""

    def is_eager(self) -> bool:
        """Whether everything runs at once. In a graph, sizes may not be known."""
        return True

    def has_static_sizes(self) -> bool:
        """Whether all sizes must be known when a step is compiled."""
        return False

    def unknown(self, number: Size) -> Size:
        """A number that a trace does not know."""
        return number

    def is_traced(self, value: Any) -> bool:
        """Whether a value stands for numbers that are not there yet, even if all runs at once."""
        return False

    def on_host(self) -> ContextManager[Any]:
        """A context for numbers on which the sizes of other tensors depend."""
        return contextlib.nullcontext()

    def kind_of(self, leaf: Tensor) -> str:
        """The kind of a tensor: "dense", "ragged" or "sparse"."""
        return "dense"

    def examples_of(self, leaf: Tensor) -> Size:
        """The size of the first dimension."""
        return int(leaf.shape[0])

    def agreed_size(
        self, batch: Batch, sizes: List[Size], least: int, uneven: str, empty: str
    ) -> Tuple[Batch, Size]:
        """The batch, and the one size that all parts of the batch have.

        Args:
            batch: the batch.
            sizes: the numbers of examples of its parts.
            least: the smallest that is allowed.
            uneven: what to say if sizes differ.
            empty: what to say if the size is too small.
        """
        return batch, sizes[0]

    def slice_of(self, leaf: Tensor, start: Size, size: Size, static: bool) -> Tensor:
        """`size` examples from one on; if not `static`, maybe fewer at the end."""
        raise NotImplementedError

    def widest(self, batch: Batch) -> List[int]:
        """The examples that make a batch as wide as it is, where the rows of others are shorter."""
        return []

    def concatenated(self, leaves: List[Tensor]) -> Tensor:
        """Leaves of several batches as one."""
        from keras import ops

        return ops.concatenate(leaves, 0)

    def in_order(self, leaf: Tensor, order: Tensor) -> Tensor:
        """The leaf in a form that `taken` can take from."""
        raise NotImplementedError

    def taken(self, leaf: Tensor, order: Tensor, start: Size, end: Size) -> Tensor:
        """The examples at these places of the order."""
        raise NotImplementedError

    def permuted(self, leaf: Tensor, rows: Tensor) -> Tensor:
        """The leaf with these of its rows."""
        raise NotImplementedError

    def rearranged(self, leaf: Tensor, axis: int, places: Tensor) -> Tensor:
        """For each example, what is at these places along an axis, in that order."""
        raise NotImplementedError

    def shortened(self, leaf: Tensor, axis: int, length: Size, exactly: bool) -> Tensor:
        """The leaf without what is behind a length along an axis; if `exactly`, that long."""
        raise NotImplementedError

    def lengthened(self, leaf: Tensor, axis: int, size: Size) -> Tensor:
        """The leaf with zeros behind it, up to a size along an axis."""
        raise NotImplementedError

    def lengths_of(self, leaf: Tensor, axis: int) -> Tensor:
        """For each example, the last position where anything is not 0, or the end of the row."""
        raise NotImplementedError

    def spec(self, leaf: Tensor, shape: Sequence[Optional[int]]) -> Any:
        """The type of a leaf, with another shape."""
        raise NotImplementedError

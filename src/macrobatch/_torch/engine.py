"""torch as an engine: what it offers to the Keras arithmetic and to the batches."""

import contextlib
from typing import Any, Callable, ContextManager, Iterator, List, Sequence, Tuple

import keras
import torch
from keras import ops, tree

from macrobatch._batches.nests import mapped
from macrobatch._engine import BatchEngine
from macrobatch._types import Batch, Size, Tensor


class Torch(BatchEngine):
    """torch, which runs everything at once, on one device."""

    def read(self, value: Any) -> Tensor:
        return value.detach()

    def copied(self, value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else value

    def examples(self, micro_batch: Batch) -> Size:
        first = micro_batch[0] if isinstance(micro_batch, tuple) and micro_batch else None
        # To flatten a nest takes its time here.
        return first.shape[0] if isinstance(first, torch.Tensor) else super().examples(micro_batch)

    def with_other_size(self, function: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        # One example, or two: no more memory than the micro-batch takes.
        one = self.examples(micro_batch) == 1

        def other(leaf: Any) -> Any:
            if leaf is None:
                return None
            return torch.cat([leaf, leaf]) if one else leaf[:1]

        with torch.no_grad(), same_draws():
            return function(tree.map_structure(other, micro_batch))

    def gradients_of(
        self, function: Callable[[List[Tensor]], List[Tensor]], tensors: List[Tensor]
    ) -> List[List[Tensor]]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            numbers = function(leaves)
            return [
                torch.autograd.grad(n, leaves, retain_graph=True, materialize_grads=True)
                if n.requires_grad
                else [torch.zeros_like(leaf) for leaf in leaves]
                for n in numbers
            ]

    def is_traced(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return False
        try:
            value.untyped_storage()
            return False
        except NotImplementedError:  # Inside of torch.vmap, for one, there is none.
            return True

    def on_host(self) -> ContextManager[Any]:
        context: ContextManager[Any] = keras.device("cpu")
        return context

    def slice_of(self, leaf: Tensor, start: Size, size: Size, static: bool) -> Tensor:
        return leaf[start : start + size]  # a view

    def in_order(self, leaf: Tensor, order: Tensor) -> Tensor:
        return leaf

    def taken(self, leaf: Tensor, order: Tensor, start: Size, end: Size) -> Tensor:
        return leaf[order[start:end].to(leaf.device)]

    def permuted(self, leaf: Tensor, rows: Tensor) -> Tensor:
        return leaf[rows.to(leaf.device)]

    def rearranged(self, leaf: Tensor, axis: int, places: Tensor) -> Tensor:
        shape = [size if i in (0, axis) else 1 for i, size in enumerate(leaf.shape)]
        return torch.take_along_dim(leaf, places.to(leaf.device).long().view(shape), axis)

    def shortened(self, leaf: Tensor, axis: int, length: Size, exactly: bool) -> Tensor:
        length = min(int(length), leaf.shape[axis])
        return leaf.narrow(axis, 0, length)

    def lengthened(self, leaf: Tensor, axis: int, size: Size) -> Tensor:
        missing = int(size) - leaf.shape[axis]
        if missing <= 0:
            return leaf
        shape = [missing if i == axis else each for i, each in enumerate(leaf.shape)]
        return torch.cat([leaf, leaf.new_zeros(shape)], axis)

    def lengths_of(self, leaf: Tensor, axis: int) -> Tensor:
        there = leaf != 0
        for other in sorted(set(range(1, leaf.ndim)) - {axis}, reverse=True):
            there = there.any(other)
        positions = torch.arange(1, there.shape[1] + 1, dtype=torch.int32, device=leaf.device)
        lengths = torch.where(there, positions, torch.zeros_like(positions))
        if lengths.shape[1] == 0:
            return lengths.new_zeros([lengths.shape[0]]).cpu()
        return lengths.amax(1).cpu()

    def spec(self, leaf: Tensor, shape: Sequence[Any]) -> Any:
        # Not 2: two examples of half the length have as many elements as one of all of it.
        sizes = [3 if size is None else size for size in shape]
        return torch.zeros(sizes, dtype=leaf.dtype)

    def agreed_size(
        self, batch: Batch, sizes: List[Size], least: int, uneven: str, empty: str
    ) -> Tuple[Batch, Size]:
        return batch, sizes[0]  # All sizes are known, so they have been compared.


ENGINE = Torch()


def to_tensors(nest: Any) -> Any:
    """A nest with its arrays as tensors. Arrays stay on the host, tensors where they are."""

    def convert(leaf: Any) -> Any:
        if leaf is None or isinstance(leaf, torch.Tensor):
            return leaf
        with keras.device("cpu"):
            return ops.convert_to_tensor(leaf)

    return mapped(convert, nest)


def on_device(micro_batch: Batch) -> Batch:
    """A micro-batch on the device that Keras computes on, with weights of its own.

    Keras multiplies masks into sample weights in place, and a micro-batch is a view.
    """
    x, y, sample_weight = mapped(
        lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), micro_batch
    )
    return x, y, mapped(ENGINE.copied, sample_weight)


class Draws:
    """The states of torch's global generators, from which layers without a seed draw."""

    def __init__(self) -> None:
        modules = [torch, *(getattr(torch, name, None) for name in ("cuda", "mps", "xpu"))]
        there = [each for each in modules if each is torch or (each and each.is_available())]
        self._states = [(module, module.get_rng_state()) for module in there]

    def put_back(self) -> None:
        """Lets the generators draw from here on what they drew after the object was made."""
        for module, state in self._states:
            module.set_rng_state(state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context that draws the same as the code after this object was made, and no more."""
        now = Draws()
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def same_draws() -> ContextManager[None]:
    """A context after which the generators are as before."""
    return Draws().again()

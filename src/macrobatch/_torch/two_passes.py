"""Two passes, for losses in which examples meet: the loss sees the outputs of the whole batch, and
activations are those of one micro-batch.

    outputs_j = forward(B_j)                   first pass: for all j, nothing is kept but outputs
    G         = d loss(outputs) / d outputs    the loss of the whole batch, once
    gradient  = sum_j d <forward(B_j), G_j>    second pass: with a graph

Both passes start from the same values of seeds, and from the same states of torch's generators, so
that random layers draw the same.
"""

from typing import Any, Callable, List

import torch
from keras import tree

from macrobatch._torch import checks, loop, sums
from macrobatch._torch.engine import ENGINE, Draws, on_device, same_draws
from macrobatch._torch.trial import differ, sized_like
from macrobatch._types import Batch, Forward, MicroBatches, Part, Tensor

# A forward pass of a micro-batch, from the values of variables.
ForwardPass = Callable[[Batch, List[Tensor]], Forward]


class TwoPasses:
    """A batch, its forward pass, and gradients of a loss of all of its outputs.

    Attributes:
        part: what the first pass has brought.
        outputs: the outputs of all micro-batches, in the order of the batch.
        totals: the totals of the first pass.
    """

    def __init__(
        self,
        forward: ForwardPass,
        micro_batches: MicroBatches,
        read: Callable[[], List[Tensor]],
    ):
        """Runs the first pass.

        Args:
            forward: the forward pass.
            micro_batches: the batch, and how it is cut.
            read: a function that reads the variables whose values go into a forward pass.
        """
        self._forward, self._micro_batches, self._read = forward, micro_batches, read
        self._draws = Draws()
        self._lengths: List[Any] = []
        with torch.no_grad():
            part = loop.run(self._first, micro_batches, read)
            joined = self._joined(list(part.aux))
        self.part = part._replace(aux=())
        # Gradients of the loss end here.
        self.outputs = tree.map_structure(_watched, joined)
        self.totals = [_watched(total) for total in part.sums]

    def _first(self, micro_batch: Batch, values: List[Tensor]) -> Part:
        found = self._forward(micro_batch, values)
        for leaf in tree.flatten(found.outputs):
            if leaf is not None:
                checks.outputs_of_examples(tuple(leaf.shape), ENGINE.examples(micro_batch))
        self._lengths.append(self._micro_batches.length_of(micro_batch))
        return Part(list(found.totals), (), found.written, found.moments, aux=found.outputs)

    def _joined(self, nests: List[Any]) -> Any:
        """What came of all micro-batches, in the order of the batch."""
        lengths, count = list(self._lengths), len(nests)
        probe = self._micro_batches.probe(lengths)
        if probe is not None:  # Which sizes depend on lengths, only other lengths can tell.
            with same_draws():
                nests.append(self._forward(on_device(probe), self._read()).outputs)
            lengths.append(self._micro_batches.length_of(probe))

        def join(*leaves: Any) -> Any:
            if leaves[0] is None:
                return None
            return torch.cat(self._micro_batches.padded(list(leaves), lengths)[:count])

        return self._micro_batches.restored(tree.map_structure(join, *nests))

    @property
    def watched(self) -> List[Tensor]:
        """The outputs and totals that the loss has gradients for."""
        leaves = [*tree.flatten(self.outputs), *self.totals]
        return [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]

    def run_again(self, gradients: sums.Gradients) -> None:
        """Runs the second pass, once the loss has left its gradients in what is watched."""
        outputs = [leaf for leaf in tree.flatten(self.outputs) if _has_gradient(leaf)]
        of_outputs = [leaf.grad for leaf in outputs]
        of_totals = [total.grad for total in self.totals]
        if all(gradient is None for gradient in (*of_outputs, *of_totals)):
            return
        places = loop.places(self._micro_batches)

        def step(micro_batch: Batch, values: List[Tensor]) -> Part:
            found = self._forward(micro_batch, values)
            rows, before = self._micro_batches.rows([of_outputs, outputs], *next(places))
            own = [leaf for leaf in tree.flatten(found.outputs) if _has_gradient(leaf)]
            for output, other in zip(own, before):
                if differ(sized_like(other[:1], output), output[:1]):
                    raise ValueError(checks.PASSES_DIFFER)
            pairs = [*zip(own, rows), *zip(found.totals, of_totals)]
            products = [
                (output * sized_like(gradient, output).to(output)).sum()
                for output, gradient in pairs
                if gradient is not None
            ]
            gradients.add([torch.stack([each.to(products[0]) for each in products]).sum()])
            return Part([], written=found.written)

        with self._draws.again():
            loop.run(step, self._micro_batches, self._read)


def _has_gradient(leaf: Any) -> bool:
    return leaf is not None and bool(leaf.is_floating_point() or leaf.is_complex())


def _watched(leaf: Any) -> Any:
    return leaf.detach().requires_grad_() if _has_gradient(leaf) else leaf

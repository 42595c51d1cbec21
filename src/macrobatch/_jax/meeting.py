"""The trial of fit() whether examples meet, on JAX."""

from typing import Any, Dict, Iterator, List, Tuple

import jax
import numpy as np
from jax import numpy as jnp

from macrobatch._batches.cut import Cut
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.state import State, StateScope
from macrobatch._keras import batch_norm, comparison, meeting, pieces
from macrobatch._keras.first_batch import FirstBatch
from macrobatch._keras.tried import Tried
from macrobatch._types import Batch, Tensor


class Meeting(FirstBatch):
    """The trial of one model. In a fit its variables have no values: the state has them."""

    def __init__(self, model: Any, cut: Cut, with_losses: bool):
        super().__init__(model, cut, with_losses, ENGINE)
        self.state: Any = None
        self.compiled: Any = None

    def verdict(self, tried: Tried, groups: comparison.Groups, is_coarse: bool) -> meeting.Verdict:
        if self._model.jit_compile and not self._model.run_eagerly:
            compare = comparison.Comparison(groups, is_coarse)
            if not is_coarse and self._are_apart(tried, groups, compare):
                return self._of_sizes(tried, groups, is_coarse)
            outcome = compare.outcome(self._runs(tried, groups))
            if not outcome.meeting:
                return self._of_sizes(tried, groups, is_coarse)._replace(unknown=outcome.unknown)
        # Which layer it is, is seen at once only. JAX compiles each operation then, for itself.
        with StateScope(self._model, State(*self.state)):
            return super().verdict(tried, groups, is_coarse)

    def _are_apart(
        self, tried: Tried, groups: comparison.Groups, compare: comparison.Comparison
    ) -> bool:
        """Whether the losses and the gradients of micro-batches are sums over examples.

        What gives them is compiled already. BatchNormalization has moments of each micro-batch
        there. False if that is not known, or hard to tell from rounding.
        """
        if self.compiled is None or tried.normalizing():
            return False
        sums = self.compiled.sums_of_each(State(*self.state), groups)
        return sums is not None and compare.are_sums(sums)

    def _runs(self, tried: Tried, groups: comparison.Groups) -> Iterator[comparison.Found]:
        """What comes of the groups, from one function that is compiled.

        BatchNormalization normalises by the moments of the first run in all of them.
        """
        layers = tried.normalizing()

        def run(
            micro_batch: Batch, state: Tuple[Any, ...], moments: List[Any], is_first: Tensor
        ) -> Tuple[comparison.Found, List[Any]]:
            known: Dict[Any, List[Any]] = dict(zip(layers, map(list, moments)))
            with StateScope(self._model, State(*state)), batch_norm.frozen_at(known, is_first):
                found = tried.found(micro_batch)
            layers[:] = known
            return found, list(known.values())

        # A state has memory of the optimizer too, which is of no use here.
        state: Any = (self.state[0], self.state[1], [], self.state[3])
        # Nearly all layers are called once. Should it be otherwise, it is compiled once more.
        moments: List[Any] = [[batch_norm.nothing(layer)[1:]] for layer in layers]
        compiled = jax.jit(run, compiler_options=_quickly())
        for index, micro_batch in enumerate(groups.micro_batches):
            found, moments = compiled(micro_batch, state, moments, jnp.asarray(index == 0))
            yield found
            del found  # It may be large.

    def _of_sizes(
        self, tried: Tried, groups: comparison.Groups, is_coarse: bool
    ) -> meeting.Verdict:
        """Which losses depend on how many examples there are, or on their places.

        Nothing is compiled but the losses. So layers are not tried, and losses get predictions that
        are made up.
        """
        made = pieces.of(groups, ENGINE, is_coarse)
        if made is None or not tried.with_losses:
            return meeting.Verdict()

        def predicted(micro_batch: Batch, state: Tuple[Any, ...]) -> Any:
            with StateScope(self._model, State(*state)):
                return tried.predicted(micro_batch)

        def losses(batches: List[Batch], y_pred: Any, state: Tuple[Any, ...]) -> Any:
            with StateScope(self._model, State(*state)):
                return tried.losses_of(made._replace(batches=batches), y_pred)

        random = np.random.default_rng(0)
        state: Any = (self.state[0], self.state[1], [], self.state[3])
        try:
            y_pred = jax.tree.map(
                lambda leaf: jnp.asarray(random.uniform(0.05, 0.95, leaf.shape), leaf.dtype),
                jax.eval_shape(predicted, made.batches[0], state),
            )
            compiled = jax.jit(losses, compiler_options=_quickly())
            return meeting.Verdict(sized=made.differing(compiled(made.batches, y_pred, state)))
        except Exception:  # Some losses take one number of examples only.
            return meeting.Verdict()


def _quickly() -> Dict[str, Any]:
    """Options for code that runs four times only: good code takes longer to compile than to run."""
    # Nobody has tried whether compilers of other devices know this option.
    is_known = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0} if is_known else {}

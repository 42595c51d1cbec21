"""Sequences on JAX: which parts of a batch are cut, and the trial whether anything depends on
padding. Then nothing must be cut shorter: one micro-batch is run cut and whole, once, before
anything is trained on.
"""

import contextlib
from typing import Any, Dict, Iterator, List

import numpy as np

from macrobatch import _internals, _loop_checks
from macrobatch._batches import checks
from macrobatch._batches.by_length import ByLength
from macrobatch._batches.cut import Cut
from macrobatch._batches.sequences import MemoryAtOnce
from macrobatch._checks import warn_once
from macrobatch._jax.host import HOST
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import report
from macrobatch._keras.scope import without
from macrobatch._keras.sequences import fixed_parts, low_precision
from macrobatch._types import Batch, Size, Tensor

# What rounding may bring, over the largest number; padding brings more, since the shortest
# examples are compared.
TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
COARSE = 5e-2


class Padding:
    """What is known of the padding of a model's batches.

    Attributes:
        done: whether it is known that nothing depends on padding, in testing and in training.
    """

    def __init__(self, cut: Cut):
        self._cut, self._memory = cut, MemoryAtOnce()
        self.done = [False, False]

    def cut(self, model: Any, batch: Batch, examples: Size) -> ByLength:
        """Cuts a batch of x, y and sample_weight."""
        (x, y, sample_weight), axis = batch, self._cut.axis
        assert axis is not None
        checks.free_lengths(models.inputs_of(model), axis)
        fixed = fixed_parts(models.inputs_of(model), x, axis)
        fixed += fixed_parts(getattr(model, "outputs", None) or [], y, axis)
        found: Any = self._cut.apply(
            *(batch, examples, HOST, batch, x, sample_weight, fixed),
            few_shapes=True,
            memory=self._memory,
        )
        for name in ("order", "lengths", "starts"):
            setattr(found, name, np.asarray(getattr(found, name)))
        made: ByLength = found
        return made

    def check(self, micro_batches: ByLength, parts: Any) -> None:
        """Tries, once, whether anything depends on padding.

        Args:
            micro_batches: the batch.
            parts: what micro-batches come to: `by_length.PartsOfBatch`.
        """
        step = parts.model
        comparison = micro_batches.comparison()
        if self.done[step.training] or not bool(comparison.is_padded):
            return
        parts.learn()
        is_coarse = low_precision(_internals.layers_of(step.model))
        own = parts.weights if step.trained else []
        equal: Dict[str, bool] = {}
        for weights in [own, moved(own)][: 1 + bool(own)]:

            def outcome(micro_batch: Batch, weights: List[Tensor] = weights) -> Any:
                return _by_name(step, *parts.tried(micro_batch, weights))

            of_whole, others = comparison.run(outcome, lambda: not step.inexact)
            for other in others:
                for name, values in other.items():
                    close = all(
                        _are_close(*pair, is_coarse) for pair in zip(of_whole[name], values)
                    )
                    equal[name] = equal.get(name, True) and close
        self.done[step.training] = True
        unknown = _loop_checks.not_compared(step.written.drew, False) if step.written.drew else None
        if unknown is not None:
            warn_once(step.model, unknown)
            return
        for name, is_equal in equal.items():
            if not is_equal:
                self.done[step.training] = False
                unmasked = keras_checks.no_mask(models.unmasked(step.model))
                hint = unmasked if name == "loss" and not step.reaches_loss else ""
                given = micro_batches.lengths_are_given
                raise ValueError(_loop_checks.depends_on_padding(name, hint, given))

    @contextlib.contextmanager
    def explaining(self, micro_batches: ByLength, parts: Any) -> Iterator[None]:
        """Says so where a model fails on sequences that are cut, and not on whole ones."""

        def dry_run(like: Batch) -> None:
            parts.like(like, parts.values())

        with checks.explaining(micro_batches, dry_run):
            yield


def _by_name(step: Any, losses: List[Tensor], written: List[Any]) -> Dict[str, List[Tensor]]:
    """What a micro-batch comes to, by name: the loss with its gradients, and the metrics."""
    found = {"loss": list(losses)}
    after = dict(zip(map(id, step.written.variables), written))
    for metric in without(models.metrics_of(step.model), report.trackers_of(step.model)):
        # Not its result: what is wrong by a factor would go unnoticed there.
        values = [after.get(id(variable)) for variable in metric.variables]
        found.setdefault(metric.name, []).extend(v for v in values if v is not None)
    return found


def _are_close(one: Tensor, other: Tensor, is_coarse: bool) -> bool:
    """Whether values are the same but for rounding."""
    tolerance = COARSE if is_coarse else TOLERANCES.get(str(one.dtype), COARSE)
    if "float" not in str(one.dtype):
        return bool(np.array_equal(one, other))
    one, other = (np.asarray(each, "float64") for each in (one, other))
    finite = np.isfinite(one)
    # Where it is not finite with padding, of which there may be none without, nothing is known.
    if not (~finite | np.isfinite(other)).all():
        return False
    one, other = one[finite], other[finite]
    size = np.maximum(np.abs(one), np.abs(other)).max(initial=0.0) + 0.01
    return bool((np.abs(one - other) <= tolerance * size).all())


def moved(weights: List[Tensor]) -> List[Tensor]:
    """The values of weights, and as much again in random directions; large ones as they are.

    At the start of training much is the same for all inputs.
    """
    found, random = [], np.random.default_rng(0)
    for weight in weights:
        if 1 < weight.size <= 2**20:
            value = np.asarray(weight, "float32" if weight.dtype != "float64" else "float64")
            value = value + max(value.std(), 0.05) * random.normal(size=value.shape)
            found.append(value.astype(weight.dtype))
        else:
            found.append(weight)
    return found

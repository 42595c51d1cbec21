"""Why an update differs: each cause is tried by itself, with the ones found before put aside."""

import contextlib
import functools
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

from keras import ops, tree

from macrobatch import _backends, _internals
from macrobatch._keras.report import trackers_of
from macrobatch._keras.tried import Causes
from macrobatch._types import Tensor
from macrobatch._verify import messages
from macrobatch._verify.compare import COARSE, TOLERANCES, Context, Distance, Outcome, Runs
from macrobatch._verify.look import Look, Term, candidates
from macrobatch._verify.report import Cause

# In another order the examples have the same sum, but for rounding. That rounding, times this, is
# what a difference may be, up to a limit.
TIMES = 8
MOST = {"float64": 1e-4, "float32": 1e-3}
# Of what fit() reports, which is rounded once more.
OF_LOGS = 1e-7


class Found(NamedTuple):
    """What is known of a difference.

    Attributes:
        exact: whether there is none but rounding; None if it cannot be told.
        tolerance: up to which differences are rounding.
        causes: of the difference, and what else there is to know.
    """

    exact: Optional[bool]
    tolerance: float
    causes: List[Cause]


class Inquiry:
    """The search for causes of one difference."""

    def __init__(
        self, runs: Runs, settings: Dict[str, Any], whole: Outcome, distance: Distance, look: Look
    ):
        self._runs, self._settings, self._look = runs, settings, look
        self._trials = _backends.trials()
        self._whole, self._distance = whole, distance
        self._dtype = runs.subject.dtype
        self._tolerance = TOLERANCES.get(self._dtype, COARSE)

    def found(self) -> Found:
        """The verdict and its causes."""
        distance = self._distance
        if distance.largest <= self._tolerance:
            return Found(True, self._tolerance, [*self._metrics(distance), *self._repeated_rows()])
        if self._runs.distance(self._runs.whole(), self._whole).of_gradients > self._tolerance:
            return Found(None, self._tolerance, [messages.random()])
        rounding = self._rounding()
        most = MOST.get(self._dtype, 10 * COARSE)
        self._tolerance = max(self._tolerance, min(TIMES * rounding, most))
        exact = distance.largest <= self._tolerance
        if exact:
            is_double = self._dtype == "float64"
            causes = [messages.hidden_precision(rounding)] if is_double else []
            causes += self._metrics(distance)
        else:
            causes = self._causes()
        return Found(exact, self._tolerance, [*causes, *self._repeated_rows()])

    def _rounding(self) -> float:
        """By how much the whole batch in another order differs."""
        batch, engine = self._runs.subject.batch, self._trials.engine
        leaves = [leaf for leaf in tree.flatten(batch) if leaf is not None]
        if not all(engine.kind_of(leaf) == "dense" for leaf in leaves):
            return 0.0
        turned = tree.map_structure(lambda leaf: None if leaf is None else ops.flip(leaf, 0), batch)
        return self._runs.distance(self._runs.whole(batch=turned), self._whole).largest

    def _causes(self) -> List[Cause]:
        """What changes the update, one cause at a time."""
        if self._runs.is_own:  # which nobody can look into but the train step of accumulate
            ranked = sorted(self._distance.trained.items(), key=lambda item: -item[1].largest)
            return [messages.own_step([path for path, _ in ranked[:3]], self._runs.warned)]
        normalizing = self._seen(self._look.normalizing) or []
        rest = self._distance
        context: Context = contextlib.nullcontext
        found: List[Cause] = []
        if normalizing:
            context = fixed_statistics
            rest = self._compared(self._settings, context)
            remains = rest.of_gradients > self._tolerance
            found.append(messages.batch_normalization(normalizing, remains))
        layers: List[Cause] = []
        losses: List[Cause] = []
        if rest.of_gradients > self._tolerance:
            layers, losses = self._meeting(context)
            found += [*layers, *losses]
        if not layers:
            written = [p for p, d in rest.state.items() if d.update > self._tolerance]
            found += [messages.state(written)] if written else []
            found += self._metrics(rest, bool(losses))
        if not any(cause.affects in ("update", "statistics") for cause in found):
            ranked = sorted(rest.trained.items(), key=lambda item: -item[1].largest)
            found.append(messages.unknown([path for path, _ in ranked[:3]]))
        return found

    def _compared(self, settings: Dict[str, Any], context: Context) -> Distance:
        whole = self._runs.whole(context)
        return self._runs.distance(self._runs.accumulated(settings, context), whole)

    def _meeting(self, context: Context) -> Tuple[List[Cause], List[Cause]]:
        """The layers, and the losses, of which micro-batches come to something else."""
        met: Causes = self._seen(self._look.meeting, context) or Causes()
        terms: List[Term] = self._seen(self._look.terms, context) or []
        added = {term.name for term in terms if term.is_added}
        layers = [name for name in met.layers if name not in added]
        of_layers = [messages.layers_meet(layers)] if layers else []
        if met.sized_layers:
            of_layers.append(messages.layers_and_size(met.sized_layers))
        # Behind such a layer every value differs. Then losses count only if examples meet in them,
        # or if they depend on sizes, whatever the layer makes.
        wrong = [term for term in terms if term.differs or term.name in met.losses]
        if of_layers:
            known = (*met.losses, *met.layers, *met.sized_losses)
            wrong = [term for term in terms if term.name in known]
        if self._settings.get("whole_batch_loss"):  # Then only what layers add is by micro-batch.
            wrong = [term for term in wrong if term.is_added]
        scalars = _names(term for term in wrong if term.is_scalar)
        others = [name for name in _names(wrong) if name not in scalars]
        sized = [name for name in others if name in met.sized_losses]
        others = [name for name in others if name not in sized]
        repair = self._repair(context, []) if others or sized else ""
        causes = [messages.losses_meet(others, repair)] if others else []
        causes += [messages.losses_and_size(sized, repair)] if sized else []
        causes += [messages.scalar_loss(scalars, self._repair(context, scalars))] if scalars else []
        return of_layers, causes

    def _repair(self, context: Context, scalars: List[str]) -> str:
        """What makes it exact, tried: a weight of micro-batches for scalars, or two passes."""
        if self._settings.keys() & {"micro_batch_weight", "whole_batch_loss"}:
            return ""
        found = []
        for code, weight in candidates(self._runs.subject.batch).items() if scalars else ():
            if self._is_right(context, weight) and self._helps(context, micro_batch_weight=weight):
                found.append(messages.weight(code))
                break
        if self._helps(context, whole_batch_loss=True):
            found.append(messages.WHOLE_BATCH_LOSS)
        return messages.repair(found)

    def _helps(self, context: Context, **setting: Any) -> bool:
        """Whether the update is exact with one more setting."""
        settings = {**self._settings, **setting}
        return self._compared(settings, context).of_gradients <= self._tolerance

    def _is_right(self, context: Context, weight: Any) -> bool:
        """Whether, with this weight, micro-batches come to the value of the batch."""
        # A weight may be refused: negative numbers, for one.
        terms = self._seen(functools.partial(self._look.terms, weight), context)
        return bool(terms) and not any(term.differs for term in terms)

    def _seen(self, look: Callable[[], Any], context: Context = contextlib.nullcontext) -> Any:
        """What a look into the model shows; None if the model runs in graphs only."""
        with self._runs.running(context), self._trials.looking():
            try:
                return look()
            except Exception:  # The verdict is known: without a look, its cause is not.
                return None

    def _metrics(self, distance: Distance, without_losses: bool = False) -> List[Cause]:
        tolerance = max(self._tolerance, OF_LOGS)
        names = [name for name, value in distance.logs.items() if value > tolerance]
        if without_losses:
            of_losses = {metric.name for metric in trackers_of(self._runs.model)}
            names = [name for name in names if name not in of_losses]
        if not names:
            return []
        by_the_step = self._seen(self._look.metrics_of_the_step) or []
        own = [name for name in names if name in by_the_step]
        others = [name for name in names if name not in by_the_step]
        causes = [messages.metrics(own, True)] if own else []
        return [*causes, *([messages.metrics(others, False)] if others else [])]

    def _repeated_rows(self) -> List[Cause]:
        """Tables of which plain Keras hands rows to the optimizer one by one."""
        if not self._whole.is_sparse:
            return []
        plain = self._runs.whole(as_keras_does=True)
        apart = self._runs.distance(plain, self._whole).trained
        names = [path for path, each in apart.items() if each.update > 1e-6]
        largest = max((each.update for each in apart.values()), default=0.0)
        return [messages.repeated_rows(names, largest)] if names else []


def _names(terms: Iterable[Term]) -> List[str]:
    return list(dict.fromkeys(term.name for term in terms))


@contextlib.contextmanager
def fixed_statistics() -> Iterator[None]:
    """Lets BatchNormalization layers normalise by 0 and 1, whatever their inputs are."""

    def fixed(plain: Any, layer: Any, inputs: Tensor, mask: Any) -> Tuple[Tensor, Tensor]:
        mean, variance = plain(layer, inputs, mask)
        return ops.zeros_like(mean), ops.ones_like(variance)

    with _internals.with_moments.beneath(fixed):
        yield


def of_schedule(optimizer: Any, updates: Optional[int], micro_batches: int) -> List[Cause]:
    """Whether a schedule ends about where it would if each micro-batch were a step of it."""
    if updates is None or micro_batches < 2:
        return []
    for each in _internals.with_inner_optimizers(optimizer):
        with contextlib.suppress(Exception):  # an optimizer without a config
            rate = each.get_config()["learning_rate"]
            config = rate["config"] if isinstance(rate, dict) else {}
            steps = int(config["decay_steps"]) + int(config.get("warmup_steps") or 0)
            if abs(steps - updates * micro_batches) <= 0.1 * updates * micro_batches:
                return [messages.schedule(steps, updates, micro_batches)]
    return []

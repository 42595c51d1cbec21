"""verify: is the accumulated update that of the whole batch, for this model and this batch?"""

import math
from typing import Any, Callable, Dict, List, Literal, NamedTuple, Optional, Tuple, Union

import keras
import numpy as np
from keras import tree

from macrobatch import _backends, _internals
from macrobatch._batches import checks as batch_checks
from macrobatch._checks import one_line
from macrobatch._keras import model_checks as checks
from macrobatch._keras import probes
from macrobatch._keras.finite import not_finite_parts
from macrobatch._no_trace.compiled import SHORT
from macrobatch._no_trace.data import first_batch
from macrobatch._no_trace.unchanged import unchanged
from macrobatch._settings import settings_of
from macrobatch._types import Batch
from macrobatch._verify import causes, messages, subject
from macrobatch._verify.causes import Found, Inquiry
from macrobatch._verify.compare import COARSE, TOLERANCES, Distance, Outcome, Runs
from macrobatch._verify.look import Look
from macrobatch._verify.report import Cause, Report
from macrobatch._verify.subject import FLOATS, Subject

# A float64 model that differs by more has something narrower in it.
DOUBLE = 1e-10


def verify(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    micro_batch_size: Union[int, Literal["auto"], None] = None,
    micro_batch_tokens: Union[int, Literal["auto"], None] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None,
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None,
    whole_batch_loss: bool = False,
    updates: Optional[int] = None,
) -> Report:
    """Compares the accumulated update with that of the whole batch, and explains a difference.

    Plain Keras makes one update from the whole batch, and the train step of `accumulate` makes one
    from its micro-batches: from the same weights, with the same random draws. This is done in
    float64, on a copy of the model, so that rounding is told from a real difference. A model that
    cannot be copied is compared itself, in its own dtype. Afterwards weights, optimizer, metrics,
    moving statistics and seeds are as before. The batch must fit into memory: a part of a large
    one tells as much.

    Args:
        model: a compiled Keras 3 model on TensorFlow, JAX or torch, accumulated or not.
        x: the inputs of one batch; or a dataset as `fit` takes it, of which the first batch is
            taken. A generator then has lost it.
        y: the targets.
        sample_weight: the sample weights, if there are any.
        micro_batch_size: as in `accumulate`; for "auto", the default, a quarter of the batch. Of
            an accumulated model, its own settings are taken if no setting is given here.
        micro_batch_tokens: as in `accumulate`.
        sequence_axis: as in `accumulate`.
        lengths: as in `accumulate`.
        micro_batch_weight: as in `accumulate`.
        whole_batch_loss: as in `accumulate`.
        updates: how many updates the training will have, epochs times steps per epoch. With it, a
            learning rate schedule that seems to count micro-batches is noticed.

    Returns:
        A report. `print(report)` shows a table. `report.exact` is True, False, or None if it could
        not be told. `report.causes` says why, each with `kind`, `names`, `explanation`, `advice`
        and `affects`. `report.differences` has the difference of each trained variable, of
        `gradient` and `update`. `report.to_json()` has all of it.

    Raises:
        ValueError: if the model is not compiled, or if `accumulate` or `fit` would raise one. Not
            for numbers that are not finite: then `exact` is None, and a cause says where.

    Examples:
        >>> import keras, macrobatch, numpy as np
        >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> x, y = np.ones([10, 3]), np.ones([10, 1])
        >>> report = macrobatch.verify(model, x, y, micro_batch_size=4)
        >>> report.exact
        True
    """
    settings: Dict[str, Any] = {
        "micro_batch_size": micro_batch_size,
        "micro_batch_tokens": micro_batch_tokens,
        "sequence_axis": sequence_axis,
        "lengths": lengths,
        "micro_batch_weight": micro_batch_weight,
        "whole_batch_loss": whole_batch_loss or None,
    }
    checks.keras_model(model)
    _check(model)
    if isinstance(sample_weight, (int, float, str)):
        raise ValueError(
            "sample_weight must have a weight for each example. Received: "
            f"sample_weight={sample_weight!r}. To say how large micro-batches are, name the "
            "argument: verify(model, x, y, micro_batch_size=8)."
        )
    settings = {name: value for name, value in settings.items() if value is not None}
    accumulated = settings_of(model)
    if not settings and accumulated is not None:
        settings = accumulated.arguments()
    batch_checks.sizes(
        settings.get("micro_batch_size"),
        settings.get("micro_batch_tokens"),
        settings.get("sequence_axis"),
        settings.get("lengths"),
        of=["x", "y", "sample_weight"],
    )
    probes.probe()
    trials = _backends.trials()
    batch = first_batch(x, y, sample_weight)
    examples = int(trials.engine.examples(batch))
    settings = _with_number(settings, examples)
    try:
        with unchanged(model):
            return _Verification(model, batch, settings, updates).report()
    except Exception as error:
        if not trials.is_out_of_memory(error):
            raise
        raise ValueError(
            "The whole batch must fit into memory, since it is what is compared with. Received: a "
            f"batch of {examples} examples, which does not. Pass fewer of them, of several "
            "micro-batches."
        ) from error


def _with_number(settings: Dict[str, Any], examples: int) -> Dict[str, Any]:
    """The settings with a size, where it would be found while training: about a quarter."""
    sizes = ("micro_batch_size", "micro_batch_tokens")
    if any(settings.get(name, batch_checks.AUTO) != batch_checks.AUTO for name in sizes):
        return settings
    others = {k: v for k, v in settings.items() if k not in (*sizes, "memory_limit")}
    return {"micro_batch_size": -(-examples // 4), **others}


def _check(model: Any) -> None:
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"The model {model.name!r} must be compiled: verify makes an update with its loss and "
            "its optimizer. Received: a model without compile()."
        )
    _backends.trials().check()


class _Compared(NamedTuple):
    """A comparison on a subject."""

    runs: Runs
    whole: Outcome
    distance: Distance


class _Verification:
    """One call of `verify`."""

    def __init__(self, model: Any, batch: Batch, settings: Dict[str, Any], updates: Optional[int]):
        self._model, self._batch, self._settings = model, batch, settings
        self._updates = updates
        self._notes: List[str] = []
        self._trials = _backends.trials()
        self._examples = int(self._trials.engine.examples(batch))
        self._refusal: Optional[Cause] = None

    def report(self) -> Report:
        """The verdict. There is none if plain Keras' own update is not finite."""
        try:
            compared = self._compared()
        except _NotFinite as error:
            return self._without_verdict(error.where, error.subject)
        return self._judged(compared)

    def _without_verdict(self, where: str, made: Subject) -> Report:
        return Report(
            exact=None,
            causes=[messages.not_finite(where, not_finite_parts(self._batch))],
            differences={},
            statistics={},
            metrics={},
            model=self._model.name,
            examples=self._examples,
            settings={name: _shown(value) for name, value in self._settings.items()},
            dtype=made.dtype,
            tolerance=TOLERANCES.get(made.dtype, COARSE),
            notes=self._notes,
        )

    def _judged(self, compared: _Compared) -> Report:
        runs, distance = compared.runs, compared.distance
        look = Look(
            runs.model,
            runs.subject.batch,
            self._size(),
            self._settings.get("micro_batch_weight"),
            runs.subject.dtype,
        )
        found = Inquiry(runs, self._settings_used, compared.whole, distance, look).found()
        count = math.ceil(self._examples / look.size) if "micro_batch_size" in self._settings else 1
        if self._examples <= self._size():
            self._notes.append(
                "This shows little: one micro-batch takes the whole batch. Choose a larger batch, "
                "or a smaller micro-batch."
            )
        hints = causes.of_schedule(self._model.optimizer, self._updates, count)
        own = self._precision(compared, found)
        refusals = [] if self._refusal is None else [self._refusal]
        return Report(
            exact=found.exact if self._refusal is None else False,
            causes=[*refusals, *found.causes, *own, *hints],
            differences=distance.trained,
            statistics=distance.state,
            metrics=distance.logs,
            model=self._model.name,
            examples=self._examples,
            settings={name: _shown(value) for name, value in self._settings.items()},
            dtype=runs.subject.dtype,
            tolerance=found.tolerance,
            notes=self._notes,
        )

    def _compared(self) -> _Compared:
        """The comparison, on a copy in float64 if there can be one."""
        try:
            made = subject.copied(self._model, self._batch, self._settings.get("sequence_axis"))
            runs, whole = self._whole(made)
        except (subject.CannotCopy, *_FAILURES, *self._trials.failures) as error:
            if self._trials.is_out_of_memory(error):
                raise
            is_known = isinstance(error, subject.CannotCopy)
            reason = str(error) if is_known else one_line(error, SHORT)
            made = subject.itself(self._model, self._batch, reason)
            tolerance = TOLERANCES.get(made.dtype, COARSE)
            self._notes.append(
                f"Compared on the model itself, in {made.dtype}, because it cannot be copied "
                f"({reason}). Differences below {tolerance:.0e} cannot be told from rounding."
            )
            runs, whole = self._whole(made)
        self._notes += made.notes
        if _internals.strategy_of(self._model) is not None:
            self._notes.append("Compared on one device, without the strategy of the model.")
        return _Compared(runs, whole, self._cut(runs, whole))

    def _whole(self, made: Subject) -> Tuple[Runs, Outcome]:
        runs = Runs(made, self._settings.get("sequence_axis"))
        whole = runs.whole()
        found = {
            "loss": [whole.logs.get("loss", 0.0)],
            "gradient": whole.gradients.values(),
            "update": whole.weights.values(),
        }
        for where, values in found.items():
            # Narrow floats of some kinds are unknown to NumPy.
            if not all(np.isfinite(np.asarray(each, "float64")).all() for each in values):
                raise _NotFinite(where, made)
        return runs, whole

    def _cut(self, runs: Runs, whole: Outcome) -> Distance:
        self._settings_used = self._settings
        try:
            return runs.distance(runs.accumulated(self._settings), whole)
        except ValueError as error:
            if "sequence_axis" not in self._settings or not _is_of_padding(error):
                raise
            refused = error
        kept = ("micro_batch_weight", "whole_batch_loss")
        others = {name: value for name, value in self._settings.items() if name in kept}
        self._settings_used = {"micro_batch_size": self._size(), **others}
        distance = runs.distance(runs.accumulated(self._settings_used), whole)
        is_exact = distance.largest <= TOLERANCES.get(runs.subject.dtype, COARSE)
        self._refusal = messages.padding(str(refused), is_exact)
        return distance

    def _size(self) -> int:
        """Examples in a micro-batch; about as many where tokens are counted."""
        if "micro_batch_size" in self._settings:
            return int(self._settings["micro_batch_size"])
        axis = self._settings["sequence_axis"]
        leaves = [leaf for leaf in tree.flatten(self._batch) if leaf is not None]
        longest = max(
            (leaf.shape[axis] or 1 for leaf in leaves if len(leaf.shape) > axis), default=1
        )
        return max(1, int(self._settings["micro_batch_tokens"]) // longest)

    def _precision(self, compared: _Compared, found: Found) -> List[Cause]:
        """Narrower numbers inside a float64 model, if they show."""
        layers = _internals.layers_of(self._model)
        dtypes = {
            layer.name: layer.compute_dtype
            for layer in layers
            if not isinstance(layer, (keras.Model, keras.layers.InputLayer))
        }
        if "float64" not in dtypes.values() or not found.exact:
            return []
        names = [name for name, dtype in dtypes.items() if dtype in FLOATS[:-1]]
        if not names and keras.config.floatx() == "float64":
            return []
        distance = compared.distance
        if compared.runs.subject.dtype == "float64":
            made = subject.itself(self._model, self._batch, "")
            runs, whole = self._whole(made)
            distance = runs.distance(runs.accumulated(self._settings_used), whole)
        if distance.largest <= DOUBLE:
            return []
        losses = [] if names else ["the loss"]
        return [messages.precision([*names, *losses], distance.largest)]


class _NotFinite(Exception):
    """Plain Keras' own update of the whole batch is not finite: there is nothing to compare with.

    Attributes:
        where: "loss", "gradient" or "update".
        subject: what was updated.
    """

    def __init__(self, where: str, made: Subject):
        super().__init__(where)
        self.where, self.subject = where, made


# What a model may raise in another dtype.
_FAILURES = (TypeError, ValueError, AttributeError)


def _is_of_padding(error: ValueError) -> bool:
    return any(text in str(error) for text in ("depends on padding", "fixed sequence length"))


def _shown(value: Any) -> Any:
    return getattr(value, "__name__", type(value).__name__) if callable(value) else value

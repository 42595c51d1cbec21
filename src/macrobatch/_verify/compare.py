"""One update of the whole batch by plain Keras, and one of its micro-batches by this package's own
train step, from the same weights with the same random draws; and how far apart they are.
"""

import contextlib
import sys
import warnings
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from macrobatch import _backends
from macrobatch._accumulate import accumulate, release
from macrobatch._checks import ExactnessWarning
from macrobatch._keras import installed
from macrobatch._keras.report import overrides
from macrobatch._keras.scope import is_seed, without
from macrobatch._keras.trials import Seen
from macrobatch._keras.written import variables_of
from macrobatch._no_trace.compiled import value_of
from macrobatch._no_trace.unchanged import Values
from macrobatch._verify.replay import Replay
from macrobatch._verify.report import Difference
from macrobatch._verify.subject import Subject

# What rounding may bring, over the size of a gradient or the length of a step.
TOLERANCES = {"float64": 1e-9, "float32": 1e-5}
COARSE = 2e-2
# Some gradients are 0 but for rounding (of a bias that a softmax does not see, for instance). So
# a variable's gradient counts as at least this part of the gradient of all variables.
LEAST = 1e-6
# An element of a gradient whose digits are lost gives any update with some optimizers (Lion).
DETERMINED = 1e-6

# What is infinitely far, or not a number at all. JSON has no infinity.
LARGEST = sys.float_info.max

Context = Callable[[], ContextManager[Any]]


class Outcome(NamedTuple):
    """What one update has brought.

    Attributes:
        gradients: by path, of trained variables, dense. Empty where no optimizer told any.
        weights: by path, of trained variables, after the update.
        state: by path, of variables that the step may write otherwise.
        logs: what the step reported.
        is_sparse: whether the gradient of a table came as some of its rows.
    """

    gradients: Dict[str, Any]
    weights: Dict[str, Any]
    state: Dict[str, Any]
    logs: Dict[str, float]
    is_sparse: bool


class Distance(NamedTuple):
    """How far one outcome is from another: by path of variables, and by name of logs."""

    trained: Dict[str, Difference]
    state: Dict[str, Difference]
    logs: Dict[str, float]

    @property
    def of_gradients(self) -> float:
        """The largest difference of a gradient; of an update where there are no gradients."""
        found = [d.update if d.gradient is None else d.gradient for d in self.trained.values()]
        return max(found, default=0.0)

    @property
    def largest(self) -> float:
        """The largest difference of any variable."""
        both = [*self.trained.values(), *self.state.values()]
        return max((each.largest for each in both), default=0.0)


class Runs:
    """Updates of one model, each from the same start.

    Attributes:
        is_own: whether the model has a train step of its own.
        warned: the texts of the ExactnessWarnings so far.
    """

    def __init__(self, subject: Subject, sequence_axis: Optional[int] = None):
        self.subject, self.model = subject, subject.model
        # A step of the user's own may do anything with gradients: its weights are compared.
        self.is_own = overrides(self.model, "train_step")
        self.warned: List[str] = []
        self._replay = Replay(sequence_axis)
        self._values = Values(variables_of(self.model))
        trained = list(self.model.trainable_variables)
        self._trained = self._by_path(trained)
        others = [v for v in without(self.model.variables, trained) if not is_seed(v)]
        self._others = self._by_path(without(others, self.model.metrics_variables))
        self._start = {p: value_of(v) for p, v in {**self._trained, **self._others}.items()}
        self._trials = _backends.trials()
        self._gradients = self._trials.gradients(trained)
        # The function of the plain step, and what its trace has seen of gradients.
        self._plain: Tuple[Any, Seen] = (None, [])

    def whole(
        self,
        context: Context = contextlib.nullcontext,
        batch: Any = None,
        as_keras_does: bool = False,
    ) -> Outcome:
        """The update of plain Keras.

        Args:
            context: in which it runs.
            batch: another batch than that of the subject.
            as_keras_does: whether the optimizer gets the rows of a table as Keras gives them, one
                by one. Otherwise it gets their sum, the true gradient.
        """
        release(self.model)
        usual = context is contextlib.nullcontext and not (as_keras_does or self.is_own)
        self.model.train_function, seen = self._plain if usual else (None, [])
        batch = self.subject.batch if batch is None else batch
        with self._trials.afresh(self.model):
            outcome = self._run(context, batch, seen, as_keras_does)
        if usual:
            self._plain = self.model.train_function, seen
        return outcome

    def accumulated(
        self, settings: Dict[str, Any], context: Context = contextlib.nullcontext
    ) -> Outcome:
        """The update of `accumulate` with these settings."""
        self.model.train_function = None  # or accumulate would make another one, and start a trial
        accumulate(self.model, **settings)
        accumulation = installed.accumulation_of(self.model)
        assert accumulation is not None
        # It is tried for its own sake, except in a step of the user's own.
        accumulation.meeting.is_wanted = self.is_own
        accumulation.is_logged = True
        try:
            return self._run(context, self.subject.batch, [])
        finally:
            release(self.model)

    @contextlib.contextmanager
    def running(self, context: Context = contextlib.nullcontext) -> Any:
        """A context in which the model runs quietly, from the start, with the same draws."""
        with contextlib.ExitStack() as stack:
            settings = self.subject.settings()
            for each in (settings, self._replay(), context(), self._trials.quiet()):
                stack.enter_context(each)
            seen = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            try:
                yield
            finally:
                self._values.put_back()
                own = [each for each in seen if issubclass(each.category, ExactnessWarning)]
                self.warned += [str(each.message) for each in own]  # each comes once

    def _run(self, context: Context, batch: Any, seen: Seen, as_keras_does: bool = True) -> Outcome:
        self.subject.renew()
        self._gradients.forget()
        with self.running(context), self._recording(seen, as_keras_does):
            # With fit: a train step of the user's own may rely on how fit packs a batch.
            logs = installed.fit(self.model, self._trials.data_of(batch), verbose=0).history
            trained = {id(variable) for variable in self._trained.values()}
            told = any(variable in trained for variable, _ in seen)
            return Outcome(
                {p: self._gradients.of(v) for p, v in self._trained.items()} if told else {},
                {p: value_of(v) for p, v in self._trained.items()},
                {p: value_of(v) for p, v in self._others.items()},
                {name: float(value[0]) for name, value in logs.items() if np.ndim(value[0]) == 0},
                any(is_sparse for _, is_sparse in seen),
            )

    def _recording(self, seen: Seen, as_keras_does: bool) -> ContextManager[Any]:
        """Keeps the gradients that the optimizer gets."""
        optimizer = self.model.optimizer
        if optimizer is None or self.is_own:
            return contextlib.nullcontext()
        return self._gradients.recorded(optimizer, seen, as_keras_does)

    def distance(self, one: Outcome, other: Outcome) -> Distance:
        """How far `one` is from `other`, the whole batch's."""
        gradients = {
            path: _relative(one.gradients[path] - right, right, _size(other.gradients))
            for path, right in other.gradients.items()
        }
        moved = _size({p: v - self._start[p] for p, v in other.weights.items()})
        trained = {}
        for path, right in other.weights.items():
            left = one.weights[path]
            if gradients and gradients[path] <= TOLERANCES.get(self.subject.dtype, COARSE):
                pair = one.gradients[path], other.gradients[path]
                known = np.abs(pair[0] - pair[1]) <= DETERMINED * np.abs(pair[1])
                left = np.where(known, left, right)
            update = self._moved(path, left, right, moved)
            trained[path] = Difference(gradients.get(path), update)
        state = {
            path: Difference(None, self._moved(path, one.state[path], right, 0.0))
            for path, right in other.state.items()
        }
        logs = {
            name: _relative(one.logs[name] - value, value, 0.0)
            for name, value in other.logs.items()
            if name in one.logs
        }
        return Distance(trained, state, logs)

    def _by_path(self, variables: List[Any]) -> Dict[str, Any]:
        found: Dict[str, Any] = {}
        for variable in variables:
            path = self.subject.paths.get(id(variable), variable.path)
            same = sum(each.split(" (")[0] == path for each in found)
            found[f"{path} ({same + 1})" if same else path] = variable
        return found

    def _moved(self, path: str, left: Any, right: Any, of_all: float) -> float:
        """The distance of two values, over how far the second has moved."""
        if right.dtype.kind not in "fV":
            return float(not np.array_equal(left, right))
        start = self._start[path].astype("float64")
        left, right = left.astype("float64"), right.astype("float64")
        # Of a step that is short beside the weight, rounding leaves few digits.
        rounding = 8 * _epsilon(self.subject.dtype) * (np.abs(right) + np.abs(start))
        apart = np.maximum(np.abs(left - right) - rounding, 0)
        return _relative(apart, right - start, of_all)


def _epsilon(dtype: str) -> float:
    known: Dict[str, Any] = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11}
    return float(known.get(dtype, 2.0**-8))


def _size(arrays: Dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.asarray(a, "float64"))) for a in arrays.values())))


def _relative(difference: Any, of: Any, of_all: float) -> float:
    apart = _size({"": difference})
    if apart == 0.0:
        return 0.0
    size = max(_size({"": of}), LEAST * of_all)
    return apart / size if size and np.isfinite(apart) else LARGEST

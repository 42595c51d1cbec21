"""How the steps get into a Keras model on JAX, and what goes with them in fit()."""

import functools
from typing import Any, Callable, Dict, List, Optional

import jax
import keras

from macrobatch import _internals
from macrobatch._batches.cut import Cut
from macrobatch._found_sizes import with_chosen
from macrobatch._jax import checks, devices, predict, turns
from macrobatch._jax.auto import Auto
from macrobatch._jax.by_length import LengthSteps
from macrobatch._jax.engine import ENGINE
from macrobatch._jax.finite import Finite
from macrobatch._jax.halves import Halves, once, train_step
from macrobatch._jax.meeting import Meeting
from macrobatch._jax.noise import NoiseWatch
from macrobatch._jax.state import State
from macrobatch._jax.steps import Steps, batch_of
from macrobatch._jax.whole_batch import WholeBatchSteps
from macrobatch._keras import model_checks
from macrobatch._keras.build import BuildsOpen
from macrobatch._keras.fit_call import FitCall
from macrobatch._keras.guard import Guard
from macrobatch._keras.installed import Installed, fit_of
from macrobatch._keras.ran import Ran
from macrobatch._keras.report import overrides
from macrobatch._keras.tried import Tried
from macrobatch._noise import checks as noise_checks
from macrobatch._noise.host import HostMeter

# The names of the parts of a state that Keras passes to steps.
TRAINING = [
    *("trainable_variables", "non_trainable_variables"),
    *("optimizer_variables", "metrics_variables"),
]
TESTING = [name for name in TRAINING if name != "optimizer_variables"]
PREDICTING = TRAINING[:2]


class Accumulation(Installed, BuildsOpen):
    """What Keras calls of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        steps: the train step and the test step.
        meeting: the trial whether examples meet.
        auto: what finds the size of micro-batches, if asked for.
        finite: runs batches without examples that are not finite, if asked for.
        noise: measures the gradient noise scale, if asked for.
        ran: how many batches and micro-batches there were.
    """

    def __init__(
        self,
        model: Any,
        cut: Cut,
        micro_batch_weight: Optional[Callable[..., Any]],
        nonfinite: str,
        memory_limit: Any,
        whole_batch_loss: bool,
    ):
        checks.no_nnx(keras.config.is_nnx_enabled())
        checks.no_own_train_step(overrides(model, "train_step"))
        cut = with_chosen(cut)
        found = devices.distribution()
        checks.by_length(cut.axis, found, whole_batch_loss)
        self.model, self.cut, self.micro_batch_weight = model, cut, micro_batch_weight
        kind = WholeBatchSteps if whole_batch_loss else Steps if cut.axis is None else LengthSteps
        self.steps = kind(model, cut, micro_batch_weight)
        self.meeting = Meeting(model, cut, not whole_batch_loss)
        self.auto = None if cut.chosen is None else Auto(self.steps, memory_limit)
        self.noise, self.ran = NoiseWatch(), Ran()
        self.steps.guard = Guard(nonfinite)
        self.finite = Finite(
            model,
            self.steps.guard,
            lambda: Tried(model, ENGINE, micro_batch_weight, not whole_batch_loss),
            self.steps.remember,
        )
        self._looks = False  # whether the size of the first batch of a fit is to be looked at

    def methods(self) -> Dict[str, Callable[..., Any]]:
        """The methods of the model that this one stands in for, by name."""
        methods: Dict[str, Callable[..., Any]] = {
            "train_step": self.train_step,
            "make_train_function": self.make_train_function,
        }
        if self.cut.axis is not None:
            methods[_internals.BUILDING_AT_ONCE] = self.build
        if not overrides(self.model, "test_step"):  # One of its own sees the whole batch.
            methods["test_step"] = self.test_step
            methods["make_test_function"] = self.make_test_function
        if not overrides(self.model, "predict_step"):
            methods["make_predict_function"] = self.make_predict_function
        if self.steps.guard.is_wanted:
            methods["reset_metrics"] = self.reset_metrics
        if self.steps.guard.is_wanted or self.auto is not None:
            methods["fit"] = self.fit
        return methods

    @property
    def devices(self) -> int:
        """The number of devices that share each batch."""
        return devices.count()

    def count(self) -> Ran:
        """The counts of batches and of micro-batches."""
        return self.ran

    def meter(self, every: int, decay: float) -> HostMeter:
        """What can measure the gradient noise scale of this model."""
        return HostMeter(ENGINE, every, decay)

    def measure(self, meter: Optional[HostMeter]) -> None:
        """Measures the gradient noise scale from the next batch on, or no more."""
        if meter is not None:
            model_checks.can_be_measured(False, isinstance(self.steps, WholeBatchSteps))
            noise_checks.in_any_order(self.cut.axis)
        self.noise.meter = meter

    def train_step(self, state: Any, data: Any) -> Any:
        """As Keras', on micro-batches."""
        return self.steps.train_step(state, data)

    def test_step(self, state: Any, data: Any) -> Any:
        """As Keras', on micro-batches."""
        return self.steps.test_step(state, data)

    def make_train_function(self, force: bool = False) -> None:
        """As Keras', which calls it once at the start of a fit."""
        self._looks = True
        self.noise.meter = None  # A fit that measured may have been interrupted.
        if self.model.train_function is None or force:
            self.meeting.start()
            self.steps.forget(training=True)
            halves = self.noise.watching(self._halves(), self._halves(measures=True).found)
            if self.auto is not None:
                self.auto.forget(halves.found)
                halves = self.auto.writing(halves)
            step = self.finite.train_step if self.steps.guard.is_wanted else train_step
            step = functools.partial(step, halves, self.auto or once)
            step = self._looking_at_first_batch(self._keeping_state(step, TRAINING))
            self.model.train_function = _internals.step_by_step(self.model, step)

    def make_test_function(self, force: bool = False) -> None:
        """As Keras'."""
        if self.model.test_function is None or force:
            self.steps.forget(training=False)
            step: Callable[..., Any] = self.test_step
            if self._is_compiled():
                step = self._compiled_test_step()
            if self.auto is not None:
                step = self.auto.testing(step)
            step = self._keeping_state(step, TESTING)
            self.model.test_function = _internals.step_by_step(self.model, step)

    def make_predict_function(self, force: bool = False) -> None:
        """As Keras'."""
        model = self.model
        if model.predict_function is not None and not force:
            return
        step = predict.step_of(model, self.cut, self._has_size, self._compiles())
        step = self._keeping_state(step, PREDICTING)
        model.predict_function = _internals.step_by_step(model, step, joins=True)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', with warnings of its own, and with sizes that are looked for."""
        self.finite.start()
        call = FitCall(fit_of(self.model), self.model, args, kwargs)
        return call.run() if self.auto is None else self.auto.fit(call)

    def reset_metrics(self) -> None:
        """As Keras', which calls it at the start of an epoch."""
        type(self.model).reset_metrics(self.model)
        self.finite.reset()

    def _has_size(self) -> bool:
        return self.auto is None or self.auto.has_size

    def _is_compiled(self) -> bool:
        if isinstance(self.steps, LengthSteps):  # which compile their parts themselves
            return False
        return self._compiles()

    def _compiles(self) -> bool:
        return bool(self.model.jit_compile) and not self.model.run_eagerly

    def _halves(self, measures: bool = False) -> Halves:
        """Gradients and update of a train step, compiled if steps are.

        Gradients are computed first. The update then writes into the memory of the weights, so that
        there is one copy of them and of the optimizer's variables, as in Keras' own step: nothing
        may fail in it.
        """
        if isinstance(self.steps, LengthSteps):  # which compile their parts themselves
            return self.steps.halves()
        if not self._is_compiled():
            return Halves(
                functools.partial(self.steps.found, measures=measures), self.steps.updated
            )
        found_of = turns.Compiled(self.steps, training=True, measures=measures)
        if not measures:
            self.meeting.compiled = found_of
        updated = jax.jit(self.steps.updated, donate_argnums=(0, 1))
        return Halves(lambda state, data: found_of(State(*state), data), updated)

    def _compiled_test_step(self) -> Callable[..., Any]:
        found_of = turns.Compiled(self.steps, training=False)

        def test_step(state: Any, data: Any) -> Any:
            trained, others, metrics = state
            found = found_of(State(trained, others, [], metrics), data)
            return found.logs, (trained, found.others, found.metrics)

        return test_step

    def _keeping_state(self, step: Callable[..., Any], names: List[str]) -> Callable[..., Any]:
        """A step after whose failure the variables have the values from before it.

        In a fit they have none. Keras would leave them so.
        """

        def keeping(state: Any, data: Any) -> Any:
            try:
                logs, state_after = step(state, data)
                return logs, tuple(state_after)
            except BaseException:
                _internals.keep_state(self.model, names, state)
                self.model.jax_state_sync()
                raise

        return keeping

    def _looking_at_first_batch(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def looking(state: Any, data: Any) -> Any:
            logs, after = step(state, data)
            result = {**logs, **self.noise.logs()}, after
            self.ran.add(self.steps.micro_batches_of(data))
            if self._looks:
                self._looks = False
                self.report_first_batch(ENGINE.examples(data))
            trained_on = self.finite.latest if self.steps.guard.is_wanted else data
            if trained_on is not None and self.meeting.is_due:
                self.meeting.state = result[1]
                self.meeting.try_once(batch_of(trained_on), self.micro_batch_weight)
                self.meeting.state = None
            return result

        return looking

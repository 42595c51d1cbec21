"""How the steps get into a Keras model on torch, and what goes with them in fit()."""

import functools
from typing import Any, Callable, Dict, Optional

import keras

from macrobatch import _internals
from macrobatch._batches import predicted
from macrobatch._batches.cut import Cut
from macrobatch._found_sizes import with_chosen
from macrobatch._keras import model_checks
from macrobatch._keras.build import BuildsOpen
from macrobatch._keras.fit_call import FitCall
from macrobatch._keras.installed import Installed, fit_of
from macrobatch._keras.ran import Ran
from macrobatch._keras.report import overrides
from macrobatch._keras.tried import Tried
from macrobatch._noise import checks as noise_checks
from macrobatch._noise.host import HostMeter
from macrobatch._shown import fit as shown
from macrobatch._shown.line import HERE, Line
from macrobatch._torch import checks
from macrobatch._torch.auto import Auto
from macrobatch._torch.compiled import left_to_steps
from macrobatch._torch.engine import ENGINE, to_tensors
from macrobatch._torch.finite import Finite, Guard
from macrobatch._torch.meeting import Meeting
from macrobatch._torch.steps import Steps
from macrobatch._torch.whole_batch import WholeBatchSteps
from macrobatch._types import Logs


class Accumulation(Installed, BuildsOpen):
    """What Keras calls of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        steps: the train step and the test step.
        meeting: the trial whether examples meet.
        auto: what finds the size of micro-batches, if asked for.
        finite: runs batches without examples that are not finite, if asked for.
        line: shows updates that take long.
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
        checks.no_own_train_step(overrides(model, "train_step"))
        cut = with_chosen(cut)
        self.model, self.cut, self.micro_batch_weight = model, cut, micro_batch_weight
        kind = WholeBatchSteps if whole_batch_loss else Steps
        self.steps = kind(model, cut, micro_batch_weight)
        self.meeting = Meeting(model, cut, not whole_batch_loss, self.steps.modules)
        self.auto = None if cut.chosen is None else Auto(self.steps, memory_limit)
        self.steps.guard = Guard(nonfinite)
        self.finite = Finite(
            model,
            self.steps.guard,
            self.steps.modules,
            lambda: cut.size or 0,
            lambda: Tried(model, ENGINE, micro_batch_weight, not whole_batch_loss),
            self._on_trial_again,
        )
        self._had_tried = False  # whether padding had been tried before the current batch
        self.line, self.ran = Line(HERE.read), Ran()
        self._looks = False  # whether the size of the first batch of a fit is to be looked at

    def methods(self) -> Dict[str, Callable[..., Any]]:
        """The methods of the model that this one stands in for, by name."""
        methods: Dict[str, Callable[..., Any]] = {
            "fit": self.fit,
            "train_step": self.train_step,
            "make_train_function": self.make_train_function,
            "make_test_function": self.make_test_function,
        }
        if self.cut.axis is not None:
            methods[_internals.BUILDING_AT_ONCE] = self.build
        if not overrides(self.model, "test_step"):  # One of its own sees the whole batch.
            methods["test_step"] = self.test_step
        if not overrides(self.model, "predict_step"):
            methods["make_predict_function"] = self.make_predict_function
        if self.steps.guard.is_wanted:
            methods["reset_metrics"] = self.reset_metrics
        return methods

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
        self.steps.meter = meter

    def train_step(self, data: Any) -> Logs:
        """As Keras', on micro-batches."""
        steps, batch = self.steps, self.steps.batch_of(data)
        step = steps.train_step if self.auto is None else self.auto.train_step
        with self.line.update():
            if steps.guard.is_wanted:
                self._had_tried = steps.padding.done[True]
                logs = self.finite.train_step(step, batch)
                trained_on = self.finite.latest
            else:
                logs, trained_on = step(batch), batch
        self.ran.add(steps.micro_batches)
        if trained_on is not None and self.meeting.is_due:
            self.meeting.try_once(trained_on, self.micro_batch_weight)
        if self._looks:
            self._looks = False
            self.report_first_batch(ENGINE.examples(batch))
        return logs if steps.meter is None else {**logs, **steps.meter.logs()}

    def _on_trial_again(self, examples: int) -> None:
        """Lets the trial of padding be made with other examples, if it was made with these."""
        self.steps.padding.done[True] = self._had_tried

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', with what is shown of it, and with sizes that are looked for."""
        self.finite.start()
        call = FitCall(fit_of(self.model), self.model, args, kwargs)
        with shown.shown(call, self.line, self.cut.named):
            return call.run() if self.auto is None else self.auto.fit(call)

    def reset_metrics(self) -> None:
        """As Keras', which calls it at the start of an epoch."""
        type(self.model).reset_metrics(self.model)
        self.finite.reset()

    def test_step(self, data: Any) -> Logs:
        """As Keras', on micro-batches."""
        return (self.auto or self.steps).test_step(data)

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras', which calls it once at the start of a fit."""
        self._looks = True
        self.steps.meter = None  # A fit that measured may have been interrupted.
        if self.model.train_function is None or force:
            self.meeting.start()
            self.steps.forget(training=True)
            if self.auto is not None:
                self.auto.finder.forget()
        with left_to_steps(self.model):
            return type(self.model).make_train_function(self.model, force=force)

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras'."""
        if self.model.test_function is None or force:
            self.steps.forget(training=False)
        with left_to_steps(self.model):
            return type(self.model).make_test_function(self.model, force=force)

    def make_predict_function(self, force: bool = False) -> Any:
        """As Keras'."""
        model = self.model
        if model.predict_function is None or force:
            type(model).make_predict_function(model, force=force)
            model.predict_function = functools.partial(self._predict, model.predict_function)
        return model.predict_function

    def _predict(self, plain: Callable[..., Any], data: Any) -> Any:
        """What Keras' function predicts for a batch, called with one micro-batch at a time."""
        if self.auto is not None and not self.auto.has_size:
            return plain(data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data[0])
        return predicted.in_turns(lambda x: plain([(x,)]), to_tensors(x), self.cut, ENGINE)

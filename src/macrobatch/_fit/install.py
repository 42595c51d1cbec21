"""How the steps get into a Keras model, and what goes with them in fit()."""

import contextlib
from typing import Any, Callable, Dict, Iterator, Optional

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._batches.cut import Cut
from macrobatch._fit import build, own, predict
from macrobatch._fit.auto import Auto
from macrobatch._fit.finite import Finite
from macrobatch._fit.fitting import Fitting
from macrobatch._fit.meeting import Meeting
from macrobatch._fit.ran import Ran
from macrobatch._keras import model as models
from macrobatch._keras import model_checks
from macrobatch._keras.installed import Installed
from macrobatch._keras.report import overrides
from macrobatch._keras.tried import Tried
from macrobatch._noise import checks as noise_checks
from macrobatch._noise.meter import Meter
from macrobatch._tensorflow import checks as replica_checks
from macrobatch._tensorflow import graph, replicas
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._types import Batch
from macrobatch._workers import callbacks


class Accumulation(Installed, Fitting):
    """What Keras calls of one model.

    Attributes, beside those of the steps:
        tries_losses: whether examples must not meet in losses.
        looks: whether the size of the first batch of a fit is still to be looked at.
        meeting: the trial whether examples meet.
        finite: runs batches without examples that are not finite, if asked for.
    """

    tries_losses = True

    def __init__(
        self,
        model: Any,
        cut: Cut,
        micro_batch_weight: Optional[Callable[..., Any]],
        nonfinite: str = "propagate",
        memory_limit: Any = None,
    ):
        super().__init__(model, cut, micro_batch_weight, nonfinite)
        self.auto = None if cut.chosen is None else Auto(self, memory_limit)
        self.looks = False
        self._is_measured = False
        self._own = own.own_steps(model, cut, micro_batch_weight, self.begun)
        self._types: Optional[Callable[[], Batch]] = None  # of the batches that come next
        step = self._own.get("train_step")
        tried = None if step is None else step.tried
        if step is not None:
            self.can_rehearse, self.own_code = False, step.code()
        self.meeting = Meeting(model, cut, self.strategy, self.tries_losses, tried)
        self.finite = Finite(
            model,
            self.guard,
            self.strategy,
            lambda: self.cut.size or 0,
            lambda: Tried(model, ENGINE, self.micro_batch_weight, self.tries_losses),
            self._on_trial_again,
            self.ran,
        )

    def methods(self) -> Dict[str, Callable[..., Any]]:
        """The methods of the model that this one stands in for, by name."""
        methods: Dict[str, Callable[..., Any]] = {
            "fit": self.fit,
            "train_step": self.train_step,
            "make_train_function": self.make_train_function,
            "make_test_function": self.make_test_function,
            _internals.BUILDING: self.build_before_tracing,
        }
        if "train_step" in self._own:
            methods["train_step"] = self.own_train_step
        own_test = "test_step" in self._own
        methods["test_step"] = self.own_test_step if own_test else self.test_step
        if not overrides(self.model, "predict_step"):
            methods["predict_step"] = self.predict_step
            methods["make_predict_function"] = self.make_predict_function
        if self.guard.is_wanted:
            methods["reset_metrics"] = self.reset_metrics
        return methods

    @property
    def devices(self) -> int:
        """The number of devices that share each batch."""
        return 1 if self.strategy is None else int(self.strategy.num_replicas_in_sync)

    def measure(self, noise: Optional[Meter]) -> None:
        """Measures the gradient noise scale from the next batch on, or no more."""
        if noise is not None:
            model_checks.can_be_measured("train_step" in self._own, not self.tries_losses)
            noise_checks.in_any_order(self.cut.axis)
        self._measure(noise)
        self.model.train_function = None
        self.model.make_train_function()

    def _measure(self, noise: Optional[Meter]) -> None:
        self.noise.start(noise)
        self._is_measured = noise is not None
        self._latest.clear()

    def own_train_step(self, data: Any) -> Any:
        """The model's own, on gradients of the whole batch."""
        step = self._own["train_step"]
        self.first_loop()
        logs = step(data)
        self.shows_size = step.shows_size
        self._remember(step.examples)
        self.ran.add(step.micro_batches())
        return logs

    def own_test_step(self, data: Any) -> Any:
        """The model's own, cut if it only evaluates losses and metrics, and whole otherwise."""
        step = self._own["test_step"]
        # Keras would not reduce logs over workers.
        return replicas.for_reduction(step(data) if step.can_be_cut(data) else step.whole(data))

    def predict_step(self, data: Any) -> Any:
        """As Keras', in micro-batches. A size that is looked for must have been found."""
        if self.auto is not None and not self.auto.has_size:
            return type(self.model).predict_step(self.model, data)
        return predict.predictions(self.model, self.cut, data)

    def count(self) -> Ran:
        """Counts batches and micro-batches from the next fit on."""
        self.ran.start()
        self.model.train_function = None  # which was traced without
        return self.ran

    def has_written(self) -> bool:
        """Whether a batch has been trained with since the latest fit began."""
        return int(replicas.read(self.first_batch)) > 0

    def reset_metrics(self) -> None:
        """As Keras', which calls it at the start of an epoch."""
        type(self.model).reset_metrics(self.model)
        self.finite.reset()

    def build_before_tracing(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Makes all variables. In replicas, and in a trace, it would be too late."""
        model, strategy = self.model, self.strategy
        if iterator is not None:  # It is fit() that calls.
            self.finite.start()
        if "train_step" in self._own:
            self._types = lambda: self._types_of(iterator, data_batch)
            return
        if strategy is not None:
            replica_checks.fits_replicas(model, strategy)
            self.check_scope()
            if iterator is not None and replicas.has_several_workers(strategy):
                callbacks.check_length(iterator.data_adapter.get_tf_dataset())
        with self._scope():
            if self.is_new and not models.is_built(model):
                self.build(self._types_of(iterator, data_batch))
                if strategy is not None and not models.is_built(model):
                    self._build_on_replicas(iterator, data_batch)

    def _scope(self) -> Any:
        return (
            tf.distribute.get_strategy().scope() if self.strategy is None else self.strategy.scope()
        )

    def _types_of(self, iterator: Any, data_batch: Any) -> Batch:
        """The types and shapes of the batches, of which a generator has each only once."""
        if iterator is None:
            return graph.specs_of(data_batch)
        return replicas.element_spec(self.strategy, iterator.data_adapter.get_tf_dataset())

    def _build_on_replicas(self, iterator: Any, data_batch: Any) -> None:
        """Builds by running the model on one replica's part of a batch."""
        specs = self._types_of(iterator, data_batch)
        try:
            self._run_once(specs)
        except Exception:
            if not self.model.run_eagerly:
                raise
            # A model that runs eagerly may have code that no graph can have.
            if iterator is not None:
                data_batch = next(next(batches for *_, batches in iterator))
            batch = graph.to_tensors(replicas.first_part(self.strategy, data_batch))
            self._run_once(batch)

    def _run_once(self, batch: Batch) -> None:
        micro_batch = keras.utils.unpack_x_y_sample_weight(batch)
        build.by_running(self._step_to_build_with(True), micro_batch)

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras', which calls it once at the start of a fit."""
        if self._is_measured and self.model.train_function is not None:
            # A fit that measured was interrupted, and this is another one.
            self._measure(None)
            self.model.train_function = None
        self.first_batch.assign(0)
        self.looks = True
        self._build_optimizer()
        if self.model.train_function is None or force:
            self.is_new = True  # It may have been compiled with another loss.
            self.show_progress()
            self._look_at_own_step()
            self.padding.done[True].assign(0)
            self.meeting.start()
            self.meets = False
            if self.auto is not None:
                self.auto.forget()
            with self._watching():
                function = self.made("make_train_function", force)
            self.model.train_function = self._looking_at_first_batch(function)
        return self.model.train_function

    def _on_trial_again(self, examples: int) -> None:
        """Lets trials be made with other examples: numbers that are not finite show nothing."""
        self.meeting.forget()
        self.padding.done[True].assign(0)
        if self.looks:  # at the batch as it came
            self.first_batch.assign(examples)

    def _look_at_own_step(self) -> None:
        """Sees what the model's own train step does. That makes all variables, too."""
        step = self._own.get("train_step")
        if step is not None:
            step.forget()
            if self._types is not None:
                step.plan(self._types())

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Lets the trial whether examples meet have the batches of a function that Keras makes."""
        passing = getattr(self.model, _internals.STEPPING)
        setattr(self.model, _internals.STEPPING, lambda step: passing(self.meeting.watching(step)))
        try:
            yield
        finally:
            delattr(self.model, _internals.STEPPING)

    def _build_optimizer(self) -> None:
        """Makes the variables of the optimizer, which Keras' own step would make in its trace."""
        model, optimizer = self.model, self.model.optimizer
        if "train_step" in self._own:  # which may have an optimizer that it never uses
            return
        is_built = all(layer.built for layer in _internals.layers_of(model))
        if is_built and optimizer is not None and not optimizer.built:
            with self._scope():
                optimizer.build(model.trainable_variables)

    def _looking_at_first_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def train_function(iterator: Any) -> Any:
            with self.line.update():
                logs = function(iterator)
            self.meets = self.meeting.try_once(self.micro_batch_weight) or self.meets
            if self.looks:
                self.looks = False
                self.report_first_batch(int(replicas.read(self.first_batch)))
            return logs

        return train_function

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras'."""
        if self.model.test_function is None or force:
            self.is_new = True
            for name, step in self._own.items():
                if name == "test_step":
                    step.forget()
            self.padding.done[False].assign(0)
            self.model.test_function = self.made("make_test_function", force)
        return self.model.test_function

    def make_predict_function(self, force: bool = False) -> Any:
        """As Keras', with refusals that are ValueErrors."""
        model = self.model
        if model.predict_function is None or force:
            type(model).make_predict_function(model, force=force)
            model.predict_function = graph.with_refusals(model.predict_function)
        return model.predict_function

"""A train step and a test step that cut their batch into micro-batches. No arithmetic of their own:
the loop is in _tensorflow, the loss and the metrics are in _keras.
"""

import contextlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import keras
import tensorflow as tf

from macrobatch import _checks, _internals, _loop_checks, _optimizer_checks
from macrobatch._batches import checks as batch_checks
from macrobatch._batches import in_order
from macrobatch._batches.cut import Cut
from macrobatch._fit import build, padding
from macrobatch._fit.guard import Guard
from macrobatch._fit.noise import Turns
from macrobatch._fit.ran import Ran
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import model as models
from macrobatch._keras import model_checks, probes, report
from macrobatch._keras.model import ModelStep
from macrobatch._tensorflow import graph, parts, progress, replicas, sums, update
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.loop import Loop
from macrobatch._tensorflow.parts import after, gradients_of, nothing_like
from macrobatch._types import Batch, Gradient, How, Logs, MicroBatches, Part, Size, Tensor, Whole


class Steps:
    """The steps of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        strategy: in whose scope the model was made, or None.
        guard: what keeps numbers that are not finite from being written, if asked for.
        padding: what is known of padding, in testing and in training.
        first_batch: the number of examples in the first batch of a fit.
        begun: how many batches have begun to write, where a batch may be run again.
        is_rehearsal: whether steps are traced, or run, up to where they would write.
        can_rehearse: whether there are rehearsals.
        shows_size: whether the size of micro-batches shows in the update; None if not yet known.
        meets: whether a trial has shown, or could not rule out, that examples meet.
        own_code: what tells a train step of the model's own from others.
        noise: measures the gradient noise scale, if asked for.
        ran: how many batches and micro-batches there were, if they are counted.
        progress: where loops of train steps say how far they are, if anybody can see it.
    """

    def __init__(
        self,
        model: Any,
        cut: Cut,
        micro_batch_weight: Optional[Callable[..., Any]],
        nonfinite: str = "propagate",
    ):
        probes.probe()
        self.model = model
        self.cut = cut
        self.micro_batch_weight = micro_batch_weight
        self.strategy = _internals.strategy_of(model)
        self.guard = Guard(nonfinite, self.strategy)
        self.padding = padding.Padding(cut, self.strategy)
        self.first_batch = replicas.variable(
            self.strategy, [], tf.int32, "first_batch", summed=False
        )
        self.begun: Any = None
        if cut.chosen is not None:
            self.begun = replicas.variable(self.strategy, [], tf.int64, "begun", summed=False)
        self.is_rehearsal, self.can_rehearse, self.own_code = False, True, ""
        self.shows_size: Optional[bool] = None
        self.meets = False
        self.is_new = True  # whether nothing has been built for what is compiled
        self._has_run = False
        # In eager mode on replicas, the latest part of each kind of batch, and its step.
        self._latest: Dict[Any, Tuple[Part, ModelStep]] = {}
        self.noise = Turns()
        self.ran = Ran(self.strategy)
        self.progress: Optional[progress.Progress] = None

    def train_step(self, data: Any) -> Logs:
        """Makes the update that the whole batch would have made; a replica has a part of it."""
        micro_batches, whole = self._prepare(data, training=True)
        model = self._model_step(True, micro_batches)
        weights = [variable.value for variable in model.trained]
        scale = self._loss_scale(model.trained)
        with tf.GradientTape() as tape:
            penalty = model.regularization()
            scaled_penalty = penalty * scale / replicas.count()  # this replica's part of it
        penalties = tape.gradient(scaled_penalty, weights)
        noise = self.noise.of_step(whole.examples, len(weights))

        def step(micro_batch: Batch, values: Any, counts: Optional[Tensor], how: How) -> Part:
            known = whole._replace(counts=counts)
            # Counts that are not known may leave several losses to take gradients of.
            with tf.GradientTape(persistent=counts is None) as tape:
                outcome = model(micro_batch, values, known, *how)
                scaled = [loss * tf.cast(scale, loss.dtype) for loss in outcome.losses]
            of_losses = [gradients_of(tape, loss, weights) for loss in scaled]
            there = outcome.is_there
            if there is not None:
                of_losses = [
                    [sums.scaled(sums.widened(g), there) for g in own] for own in of_losses
                ]
            latest = outcome.logs, known.guesses if counts is None else []
            measured = noise.of_micro_batch(of_losses, ENGINE.examples(micro_batch))
            return Part(
                [*(g for own in of_losses for g in own), *measured, *outcome.reported],
                outcome.counts,
                outcome.written,
                outcome.moments,
                latest,
            )

        part = self._run(step, model, micro_batches)
        logs, guesses = part.latest
        factors = self._factors(part, guesses, model)
        gradients = parts.whole_gradients(part, factors, len(model.trained))
        gradients = [sums.merge_rows(sums.add(*pair)) for pair in zip(gradients, penalties)]
        if self.is_rehearsal:
            return self._rehearsed((gradients, part))
        told = self._told(model, part, penalty, logs, micro_batches.examples)

        def write() -> None:
            told.write()
            model.written.write(part.written[1:], part.moments)
            self._remember(whole.examples)
            self._update(model.trained, gradients, noise.looking(penalties))
            noise.finish(part.sums, factors, scale)

        with self._writing((gradients, part)):
            outcome = self.guard.write(gradients, list(told.values), write)
            measured = noise.logs()
        return replicas.for_reduction({**told.logs, **measured, **outcome})

    def test_step(self, data: Any) -> Logs:
        """Reports the loss and the metrics of the whole batch."""
        micro_batches, whole = self._prepare(data, training=False)
        model = self._model_step(False, micro_batches)

        def step(micro_batch: Batch, values: Any, counts: Optional[Tensor], how: How) -> Part:
            found = model(micro_batch, values, whole, *how)
            return Part(found.reported, found.counts, found.written, found.moments, found.logs)

        penalty = model.regularization()
        part = self._run(step, model, micro_batches)
        told = self._told(model, part, penalty, part.latest, micro_batches.examples)
        with self._writing(part):
            told.write()
            model.written.write(part.written[1:], part.moments)
        return replicas.for_reduction(told.logs)

    def rehearse(self, data: Any) -> Any:
        """What a train step does with a batch, up to where it would write. Outside of replicas."""
        self.is_rehearsal = True
        try:
            return self.train_step(data)
        finally:
            self.is_rehearsal = False

    def _rehearsed(self, values: Any) -> Logs:
        with after(values):
            return {"done": tf.constant(True)}

    @contextlib.contextmanager
    def _writing(self, values: Any) -> Iterator[None]:
        """A context in which a step writes. All values are there before, so steps fail before."""
        with after(values):
            begun = [] if self.begun is None else [self.begun.assign_add(1)]
            with tf.control_dependencies([] if tf.executing_eagerly() else begun):
                yield

    def _prepare(self, data: Any, training: bool) -> Tuple[MicroBatches, Whole]:
        """This replica's micro-batches, and what is known of the whole batch."""
        model = self.model
        self.check_scope()
        _optimizer_checks.optimizer(model.optimizer)
        if training:
            self.guard.start(model.optimizer)
            self.first_loop()
        model_checks.splittable_layers(_internals.layers_of(model))
        model_checks.no_overwriting_variables(model.trainable_weights)
        batch = graph.to_tensors(keras.utils.unpack_x_y_sample_weight(data))
        self.build(batch)
        several = replicas.in_several()
        batch, examples = in_order.checked(batch, ENGINE, may_be_empty=several)
        micro_batches = self.padding.cut(model, batch, examples, self.compiles_steps())
        if not models.is_built(model) and not self._has_run:
            self._has_run = True
            first = micro_batches.first()
            build.by_running(self._step_to_build_with(training), first)
        (examples_of_all,) = replicas.total_counts([examples])
        if training and not self.is_rehearsal:
            self.ran.add(sum(run.count for run in micro_batches.runs))
        return micro_batches, Whole(examples_of_all, guesses=[])

    def first_loop(self) -> None:
        """Says that the next loop over micro-batches is the first one of a step."""
        if self.progress is not None:
            self.progress.restart()

    def build(self, batch: Batch) -> None:
        """Makes what the model lacks, once for what is compiled."""
        if self.is_new and not models.is_built(self.model):
            build.from_types(self.model, batch, self.cut.axis)
        self.is_new = False

    def _model_step(self, training: bool, micro_batches: MicroBatches) -> ModelStep:
        uncut = micro_batches.uncut_fraction
        return ModelStep(self.model, training, ENGINE, self.micro_batch_weight, uncut)

    def _step_to_build_with(self, training: bool) -> Any:
        """What can run a micro-batch, where only what the run makes is needed."""
        return ModelStep(self.model, training, ENGINE, self.micro_batch_weight)

    def compiles_steps(self) -> bool:
        """Whether XLA compiles the steps of the loop, not the train step as a whole.

        Shapes inside of what it compiles cannot depend on data, as lengths do.
        """
        return self.cut.axis is not None and bool(self.model.jit_compile)

    def _run(self, step: Any, model: ModelStep, micro_batches: MicroBatches) -> Part:
        """The part of the whole batch, once it is known that the batch may be cut."""
        with self.padding.explaining(model, micro_batches):
            loop = Loop(step, micro_batches, model.values, model.fits, self.compiles_steps())
            if tf.executing_eagerly():
                self.padding.check(loop, model, micro_batches)
                part = self._run_eagerly(loop, model)
                self._warn(model, part)
                return part
            self._warn(model, loop.like)
            if model.training and _loop_checks.drawing_anew(loop.operations()):
                self.shows_size = True
            self.padding.check(loop, model, micro_batches)
            counts = loop.counts() if model.training and model.counts else []
            return loop.run(replicas.total_counts(counts), self._synchronized(model))

    def _run_eagerly(self, loop: Loop, model: ModelStep) -> Part:
        """Runs a loop. A replica without examples learns from an earlier one what is summed."""
        kinds = batch_checks.kinds_of(loop.micro_batches.batch)
        key = model.training, self.noise.measures, kinds
        latest = self._latest.get(key)
        if loop.is_empty() and latest is not None and latest[1].suits(model):
            part, other = latest
            model.learn_from(other)
            return nothing_like(part, model.values())
        part = loop.run(synchronized=self._synchronized(model))
        if replicas.in_several():
            self._latest[key] = nothing_like(part, model.values()), model
        return part

    def _synchronized(self, model: Any) -> List[str]:
        """The names of layers in which replicas meet."""
        if not replicas.in_several() or not model.training:
            return []
        kind = keras.layers.BatchNormalization
        layers = [layer for layer in _internals.layers_of(self.model) if isinstance(layer, kind)]
        meeting = [layer.name for layer in layers if layer.synchronized and layer.trainable]
        if not tf.executing_eagerly():
            names = [layer.name for layer in model.written.normalizing]
            meeting = [name for name in meeting if name in names]
        if meeting:
            self.guard.check_replicas(meeting)
            _loop_checks.not_synchronized(self.cut.tokens, self.cut.chosen, meeting)
        return meeting

    def _warn(self, model: Any, part: Part) -> None:
        written = keras_checks.written_by_layers(model.unexplained(part.written))
        messages = [*model.inexact, *written]
        for message in messages:
            _checks.warn_once(self.model, message)
        if model.training:
            self.shows_size = bool(messages) or model.written.drew or model.written.dropped

    def _factors(self, part: Part, guesses: List[Tensor], model: ModelStep) -> List[Tensor]:
        if not tf.executing_eagerly() or not part.counts:
            return []
        paddings = [count.padding for count in model.counts]
        return parts.factors_of(replicas.total_counts(part.counts), guesses, paddings)

    def _told(
        self, model: ModelStep, part: Part, penalty: Tensor, logs: Logs, examples: Size
    ) -> report.Told:
        """What Keras is told of the batch."""
        numerators = part.sums[len(part.sums) - len(model.terms) :]
        written = part.written[1:]
        return report.told(model, penalty, numerators, part.counts, written, logs, examples, ENGINE)

    def _loss_scale(self, trained: List[Any]) -> Any:
        optimizer = self.model.optimizer
        if trained and not optimizer.built:
            # A loss scale is a constant before, and a variable after the optimizer is built.
            with tf.init_scope():
                optimizer.build(trained)
            _optimizer_checks.optimizer(optimizer)  # a MultiOptimizer knows its parts only now
        return optimizer.scale_loss(tf.ones([], keras.config.floatx()))

    def _update(
        self,
        variables: List[Any],
        gradients: List[Gradient],
        look: Optional[Callable[[List[Gradient]], None]] = None,
    ) -> None:
        if not variables:
            _checks.warn("The model does not have any trainable weights.")
            return

        def apply(gradients: List[Gradient]) -> None:
            update.apply_gradients(self.model.optimizer, gradients, variables, look)

        if self.compiles_steps():
            tf.function(apply, autograph=False, jit_compile=True)(gradients)
        else:
            apply(gradients)

    def _remember(self, examples: Size) -> None:
        # How large the first batch is may be known in the graph only.
        first = replicas.read(self.first_batch)
        self.first_batch.assign(tf.where(first > 0, first, tf.cast(examples, first.dtype)))

    def check_scope(self) -> None:
        """Raises in a replica if the model's variables are not made for its strategy."""
        replicas.check_scope(replicas.strategy_of(models.all_variables(self.model)))

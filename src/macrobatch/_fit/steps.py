"""A train step and a test step that cut their batch into micro-batches. No arithmetic of their own:
the loop is in _loop, the loss in _losses, the model as a function in _model.
"""

import warnings
from typing import Any, Callable, Dict, List, Optional

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import by_length as _lengths
from macrobatch._batches import checks as _length_checks
from macrobatch._batches import padding as _padding
from macrobatch._batches import split as _split
from macrobatch._keras import model as _model
from macrobatch._keras.losses import Denominators
from macrobatch._tensorflow import loop as _loop
from macrobatch._tensorflow import replicas as _replicas
from macrobatch._tensorflow import sums as _sums
from macrobatch._tensorflow import update as _update


class Steps:
    """The steps of one model.

    Attributes:
        model, cut, micro_batch_weight: what the user gave.
        strategy: in whose scope the model was made, or None.
        checked: whether it is known that nothing depends on padding, in testing and in training.
        first_batch: the number of examples in the first batch of a fit.
    """

    def __init__(
        self, model: Any, cut: _lengths.Cut, micro_batch_weight: Optional[Callable[..., Any]]
    ):
        self.model = model
        self.cut = cut
        self.micro_batch_weight = micro_batch_weight
        self.strategy = _model.strategy_of(model)
        self.checked = [
            _replicas.variable(self.strategy, [], tf.int32, f"padding_checked_{i}", summed=False)
            for i in range(2)
        ]
        self.first_batch = _replicas.variable(
            self.strategy, [], tf.int32, "first_batch", summed=False
        )

    def train_step(self, data: Any) -> Dict[str, Any]:
        """Makes the update that the whole batch would have made; a replica has a part of it."""
        function, micro_batches, whole = self._prepare(data, training=True)
        scale = self._loss_scale(function)
        with tf.GradientTape() as tape:
            penalty = function.regularization() / _replicas.count()  # this replica's part of it
            scaled = penalty * scale
        penalties = tape.gradient(scaled, function.weights)

        def step(micro_batch: Any, state: _model.State) -> Any:
            with tf.GradientTape() as tape:
                loss, state, logs = function(micro_batch, state, whole)
                scaled = loss * tf.cast(scale, loss.dtype)
            gradients = _loop.gradients_of(tape, scaled, function.weights)
            return _loop.Part(gradients, state, logs)

        sums, state, logs, _ = self._sum(step, function.start(penalty), function, micro_batches)
        gradients = [_sums.add(*pair) for pair in zip(sums, penalties)]
        with _loop.after((gradients, state, logs)):
            logs = function.finish(state, logs, micro_batches.examples)
            self._remember(whole.examples)
            self._update(function.trained, gradients)
        return _replicas.for_reduction(logs)

    def test_step(self, data: Any) -> Dict[str, Any]:
        """Reports the loss and the metrics of the whole batch."""
        function, micro_batches, whole = self._prepare(data, training=False)

        def step(micro_batch: Any, state: _model.State) -> Any:
            _, state, logs = function(micro_batch, state, whole)
            return _loop.Part([], state, logs)

        start = function.start(function.regularization() / _replicas.count())
        _, state, logs, _ = self._sum(step, start, function, micro_batches)
        with _loop.after((state, logs)):
            logs = function.finish(state, logs, micro_batches.examples)
        return _replicas.for_reduction(logs)

    def _prepare(self, data: Any, training: bool) -> Any:
        """The model as a function, this replica's micro-batches, and the denominators of the whole
        batch.
        """
        model = self.model
        self.check_scope()
        _checks.optimizer(model.optimizer)
        _checks.splittable_layers(_model.layers_of(model))
        batch = _split.to_tensors(keras.utils.unpack_x_y_sample_weight(data))
        examples = _split.examples_in(batch, may_be_empty=_replicas.in_several())
        if self.cut.axis is None:
            micro_batches = self.cut.apply(batch, examples)
            first = micro_batches.first()
            function = _model.ModelFunction(model, first, training, self.micro_batch_weight)
        else:
            x, _, sample_weight = batch
            fixed = _model.fixed_inputs(model, x, self.cut.axis)
            micro_batches = self.cut.apply(
                batch, examples, batch, x, sample_weight, fixed, rounded=self.compiles_steps()
            )
            assert isinstance(micro_batches, _lengths.ByLength)
            function = self._function_of_sequences(micro_batches, training)
        _checks.no_overwriting_variables(function.trained)
        for message in function.inexact:
            _checks.warn_once(model, message)
        return function, micro_batches, self._whole(function, micro_batches)

    def _function_of_sequences(self, micro_batches: _lengths.ByLength, training: bool) -> Any:
        """The model as a function of micro-batches that are cut shorter, once it is known that
        they may be.
        """
        model = self.model

        def function(like: Any) -> Any:
            return _model.ModelFunction(
                model, like, training, self.micro_batch_weight, micro_batches.kept
            )

        if not _model.is_built(model):
            try:  # what Keras builds from a length, it takes no other length for
                function(micro_batches.whole(any_length=True))
            except Exception:
                function(micro_batches.whole())
        try:
            found = function(micro_batches.shorter())
        except Exception as error:
            function(micro_batches.whole())  # raises what has nothing to do with lengths
            raise ValueError(_length_checks.cannot_be_shorter(self.cut.axis, error)) from error
        _padding.check(micro_batches, found.trial(), self.checked[training])
        return found

    def compiles_steps(self) -> bool:
        """Whether XLA compiles the steps of the loop, not the train step as a whole.

        Shapes inside of what it compiles cannot depend on data, as lengths do.
        """
        return self.cut.axis is not None and bool(self.model.jit_compile)

    def _sum(
        self,
        step: _loop.Step,
        state: Any,
        function: Any,
        micro_batches: _split.MicroBatches,
        pruned: bool = False,
    ) -> _loop.Part:
        synchronized = function.written.synchronized
        if synchronized:
            _length_checks.not_synchronized(self.cut.tokens, synchronized)
        return _loop.sum_over_micro_batches(
            step, micro_batches, state, synchronized, self.compiles_steps(), pruned
        )

    def _whole(self, function: Any, micro_batches: _split.MicroBatches) -> Denominators:
        """The denominators of the whole batch: the sums of those of its micro-batches."""
        examples = micro_batches.examples
        if not function.counted:  # Then they are numbers of examples.
            (examples,) = _replicas.total_counts([examples])
            return Denominators(examples, examples, [examples] * function.terms)

        def count(micro_batch: Any, carried: Any) -> Any:
            part, carried = function.denominators(micro_batch, carried)
            counts = [part.weight, *part.terms]
            counts = [d if d is None else tf.cast(d, keras.config.floatx()) for d in counts]
            return _loop.Part(counts, carried)

        carried = function.written.start().carried
        counts = self._sum(count, carried, function, micro_batches, pruned=True).gradients
        examples, weight, *terms = _replicas.total_counts([examples, *counts])
        return Denominators(examples, weight, terms)

    def _loss_scale(self, function: Any) -> Any:
        optimizer = self.model.optimizer
        if function.trained and not optimizer.built:
            # A loss scale is a constant before, and a variable after the optimizer is built.
            with tf.init_scope():
                optimizer.build(function.trained)
            _checks.optimizer(optimizer)  # a MultiOptimizer knows its parts only now
        return optimizer.scale_loss(tf.ones([], keras.config.floatx()))

    def _update(self, variables: List[Any], gradients: List[Any]) -> None:
        if not variables:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
            return

        def update(gradients: List[Any]) -> None:
            _update.apply_gradients(self.model.optimizer, gradients, variables)

        if self.compiles_steps():
            tf.function(update, autograph=False, jit_compile=True)(gradients)
        else:
            update(gradients)

    def _remember(self, examples: Any) -> None:
        # How large the first batch is may be known in the graph only.
        first = _replicas.read(self.first_batch)
        self.first_batch.assign(tf.where(first > 0, first, tf.cast(examples, first.dtype)))

    def check_scope(self) -> None:
        """Raises in a replica if the model's variables are not made for its strategy."""
        _replicas.check_scope(_replicas.strategy_of(_model.all_variables(self.model)))

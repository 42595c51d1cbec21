"""fit(): a train step and a test step that cut their batch into micro-batches. No arithmetic of
its own: the loop is in _loop, the loss in _losses, the model as a function in _model.
"""

import inspect
import warnings
from typing import Any, Callable, Dict, List, Optional, TypeVar

import keras
import tensorflow as tf

from macrobatch import (
    _checks,
    _cluster,
    _length_checks,
    _lengths,
    _loop,
    _model,
    _padding,
    _replica_checks,
    _replicas,
    _split,
    _sums,
)
from macrobatch._losses import Denominators

Model = TypeVar("Model")


def accumulate(
    model: Model,
    micro_batch_size: Optional[int] = None,
    *,
    micro_batch_tokens: Optional[int] = None,
    sequence_axis: Optional[int] = None,
    lengths: Optional[Callable[[Any, Any, Any], Any]] = None,
    micro_batch_weight: Optional[Callable[[Any, Any, Any], Any]] = None,
) -> Model:
    """Makes a Keras model train on whole batches in the memory of micro-batches.

    From the next `fit` on, each batch is cut into micro-batches inside the train step, their
    gradients are summed, and the optimizer is called once, with the gradient of the whole batch.
    `batch_size`, callbacks, schedules and metrics keep their meaning: one step is one update.
    `evaluate` and `validation_data` are cut in the same way; `predict` is left alone.

    Args:
        model: a Keras 3 model on the TensorFlow backend, compiled or not. It is changed in place.
        micro_batch_size: how many examples are in memory at one time. Batches need not be a
            multiple of it.
        micro_batch_tokens: in place of it, what the number of examples times the longest of them
            may be: few long ones, many short ones, and at least one. Needs `sequence_axis`.
        sequence_axis: the axis along which sequences are padded, 1 for tokens of shape (examples,
            positions). Micro-batches are then made of examples of similar length, and everything
            in them that has that axis is cut to their longest: the same update, for less work. An
            example ends where the last integer input that is not 0 is, or the last sample weight
            that is not 0, or the row of a ragged input. Refused if a loss, layer or metric
            depends on padding, which is tried once.
        lengths: a function of `x, y, sample_weight` that returns the length of each example, for
            batches that do not show it.
        micro_batch_weight: a function of `x, y, sample_weight` that returns the weight of a
            micro-batch, for losses that are one scalar per batch and not a mean over examples:
            an overridden `compute_loss`, a loss such as `Dice`, scalars given to `add_loss`. The
            number of tokens, for instance.

    Returns:
        The model.

    Raises:
        ValueError: if the model cannot be cut into micro-batches from outside. What is found only
            at the first step (a stateful layer, inputs of different lengths) is raised there,
            before any weight has changed.

    Example:

    >>> import keras, macrobatch, numpy as np
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model.compile("adam", "mse")
    >>> model = macrobatch.accumulate(model, micro_batch_size=8)
    >>> x, y = np.ones([128, 3]), np.ones([128, 1])
    >>> history = model.fit(x, y, batch_size=64, verbose=0)  # the updates of batches of 64
    >>> int(model.optimizer.iterations)
    2
    """
    sizes = _length_checks.sizes(micro_batch_size, micro_batch_tokens, sequence_axis, lengths)
    cut = _lengths.Cut(*sizes)
    weight = _checks.micro_batch_weight(micro_batch_weight)
    _checks.keras_model(model)
    if cut.axis is not None:
        _length_checks.free_lengths(_model.inputs_of(model), cut.axis)
    release(model)
    _replica_checks.parameter_servers(
        isinstance(_model.strategy_of(model), tf.distribute.ParameterServerStrategy)
    )
    _checks.plain_train_step(model)
    _Accumulation(model, cut, weight).install()
    return model


def release(model: Model) -> Model:
    """Gives a model its plain train step back. On a plain model it does nothing.

    Args:
        model: a Keras model.

    Returns:
        The model.

    Example:

    >>> import keras, macrobatch
    >>> model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model = macrobatch.release(macrobatch.accumulate(model, micro_batch_size=8))
    """
    _checks.keras_model(model)
    accumulation = getattr(vars(model).get("train_step"), "__self__", None)
    if isinstance(accumulation, _Accumulation):
        accumulation.uninstall()
    return model


class _Accumulation:
    """The steps of one model. They are set on the instance, so that its class stays as it is."""

    def __init__(
        self, model: Any, cut: _lengths.Cut, micro_batch_weight: Optional[Callable[..., Any]]
    ):
        self.model = model
        self.cut = cut
        self.micro_batch_weight = micro_batch_weight
        self.strategy = _model.strategy_of(model)
        # Whether it is known that nothing depends on padding, in testing and in training.
        self.checked = [
            _replicas.variable(self.strategy, [], tf.int32, f"padding_checked_{i}", summed=False)
            for i in range(2)
        ]
        # The number of examples in the first batch of a fit, and whether it has been looked at.
        self.first_batch = _replicas.variable(
            self.strategy, [], tf.int32, "first_batch", summed=False
        )
        self.looked_at = True

    def install(self) -> None:
        methods = {"train_step": self.train_step, "make_train_function": self.make_train_function}
        if not _model.overrides(self.model, "test_step"):
            methods["test_step"] = self.test_step
        elif _replicas.has_several_workers(self.strategy):
            methods["test_step"] = self.own_test_step
        if self.strategy is not None or self.cut.axis is not None:
            methods["make_test_function"] = self.make_test_function
        if self.strategy is not None:
            # Private, and what keeps Keras from fitting batches that replicas do not divide, and
            # from fitting on several workers at all: it takes the mean of the replicas' examples.
            methods["_maybe_symbolic_build"] = self.build
        if isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy):
            methods["fit"] = self.fit
        for name, method in methods.items():
            setattr(self.model, name, method)
        self._forget_traces()

    def uninstall(self) -> None:
        for name, method in list(vars(self.model).items()):
            if getattr(method, "__self__", None) is self:
                delattr(self.model, name)
        self._forget_traces()

    def _forget_traces(self) -> None:
        self.model.train_function = self.model.test_function = None

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

    def own_test_step(self, data: Any) -> Any:
        """The model's own, whose logs Keras would not reduce over workers."""
        return _replicas.for_reduction(type(self.model).test_step(self.model, data))

    def _prepare(self, data: Any, training: bool) -> Any:
        """The model as a function, this replica's micro-batches, and the denominators of the whole
        batch.
        """
        model = self.model
        self._check_scope()
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
                batch, examples, batch, x, sample_weight, fixed, rounded=self._compiles_steps()
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

    def _compiles_steps(self) -> bool:
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
            step, micro_batches, state, synchronized, self._compiles_steps(), pruned
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
            _replicas.apply_gradients(self.model.optimizer, gradients, variables)

        if self._compiles_steps():
            tf.function(update, autograph=False, jit_compile=True)(gradients)
        else:
            update(gradients)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', on one of the workers of a cluster."""
        fit = type(self.model).fit
        call = inspect.signature(fit).bind(self.model, *args, **kwargs)
        call.apply_defaults()
        if _replicas.has_several_workers(self.strategy):
            _replica_checks.shuffles_alike(call.arguments["x"], call.arguments["shuffle"])
        callbacks = _cluster.callbacks_of(self.strategy, call.arguments["callbacks"])
        call.arguments["callbacks"] = callbacks
        return fit(*call.args, **call.kwargs)

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Makes all variables. In replicas, which come next, it would be too late."""
        model, strategy = self.model, self.strategy
        _replica_checks.fits_replicas(model, strategy)
        self._check_scope()
        if iterator is not None and _replicas.has_several_workers(strategy):
            _cluster.check_length(iterator.data_adapter.get_tf_dataset())
        with strategy.scope():
            if not _model.is_built(model):
                self._dry_run(iterator, data_batch)
            if model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)

    def _dry_run(self, iterator: Any, data_batch: Any) -> None:
        def run(data: Any) -> None:
            batch = keras.utils.unpack_x_y_sample_weight(data)
            _model.ModelFunction(self.model, batch, True, self.micro_batch_weight)

        specs = _split.specs_of(data_batch)
        if iterator is not None:
            # Not its first batch: a generator has each only once.
            dataset = iterator.data_adapter.get_tf_dataset()
            specs = _replicas.element_spec(self.strategy, dataset)
        try:
            tf.function(run, autograph=False).get_concrete_function(specs)
        except Exception:
            if not self.model.run_eagerly:
                raise
            # A model that runs eagerly may have code that no graph can have.
            if iterator is not None:
                data_batch = next(next(batches for *_, batches in iterator))
            run(_split.to_tensors(_replicas.first_part(self.strategy, data_batch)))

    def _check_scope(self) -> None:
        _replicas.check_scope(_replicas.strategy_of(_model.all_variables(self.model)))

    def make_train_function(self, force: bool = False) -> Any:
        """As Keras', which calls it once at the start of a fit; also looks at the first batch."""
        self.first_batch.assign(0)
        self.looked_at = False
        model = self.model
        if model.train_function is None or force:
            self._make("make_train_function", force)
            self.checked[True].assign(0)  # It may have been compiled with another loss.
            model.train_function = self._looking_at_first_batch(model.train_function)
        return model.train_function

    def _looking_at_first_batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def train_function(iterator: Any) -> Any:
            with _padding.explained():
                logs = function(self._shared_out(iterator))
            if not self.looked_at:
                self.looked_at = True
                examples = int(_replicas.read(self.first_batch))
                replicas = 1 if self.strategy is None else self.strategy.num_replicas_in_sync
                if self.cut.size and 0 < examples <= self.cut.size * replicas:
                    message = _checks.no_accumulation(examples, self.cut.size, replicas)
                    warnings.warn(message, stacklevel=2)
            return logs

        return train_function

    def make_test_function(self, force: bool = False) -> Any:
        """As Keras'."""
        model = self.model
        if model.test_function is None or force:
            self._make("make_test_function", force)
            self.checked[False].assign(0)
            function = model.test_function

            def test_function(iterator: Any) -> Any:
                with _padding.explained():
                    return function(self._shared_out(iterator))

            model.test_function = test_function
        return model.test_function

    def _make(self, name: str, force: bool) -> None:
        """Lets Keras make a function, which it compiles as a whole unless its steps are."""
        model = self.model
        before = model.jit_compile
        if self._compiles_steps():
            model.jit_compile = False
        try:
            getattr(type(model), name)(model, force=force)
        finally:
            model.jit_compile = before

    def _shared_out(self, iterator: Any) -> Any:
        """The batches. Those of `train_on_batch` each replica would get whole."""
        kinds = (tf.data.Iterator, tf.distribute.DistributedIterator)
        if self.strategy is None or isinstance(iterator, kinds):
            return iterator
        return (_replicas.shared_out(self.strategy, batch) for batch in iterator)

    def _remember(self, examples: Any) -> None:
        # How large the first batch is may be known in the graph only.
        first = _replicas.read(self.first_batch)
        self.first_batch.assign(tf.where(first > 0, first, tf.cast(examples, first.dtype)))

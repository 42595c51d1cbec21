"""accumulate: how the steps of _steps get into a Keras model, and what goes with them in fit()."""

import inspect
import warnings
from typing import Any, Callable, Optional, TypeVar

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import by_length as _lengths
from macrobatch._batches import checks as _length_checks
from macrobatch._batches import padding as _padding
from macrobatch._batches import split as _split
from macrobatch._fit import steps as _steps
from macrobatch._keras import model as _model
from macrobatch._tensorflow import checks as _replica_checks
from macrobatch._tensorflow import replicas as _replicas
from macrobatch._workers import callbacks as _callbacks
from macrobatch._workers import checks as _worker_checks

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
    arguments = ["x", "y", "sample_weight"]
    sizes = _length_checks.sizes(
        micro_batch_size, micro_batch_tokens, sequence_axis, lengths, of=arguments
    )
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


class _Accumulation(_steps.Steps):
    """What Keras calls of one model. It is set on the instance, so that its class stays as it is.

    Attributes, beside those of the steps:
        looked_at: whether the size of the first batch of a fit has been looked at.
    """

    def __init__(
        self, model: Any, cut: _lengths.Cut, micro_batch_weight: Optional[Callable[..., Any]]
    ):
        super().__init__(model, cut, micro_batch_weight)
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

    def own_test_step(self, data: Any) -> Any:
        """The model's own, whose logs Keras would not reduce over workers."""
        return _replicas.for_reduction(type(self.model).test_step(self.model, data))

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', on one of the workers of a cluster."""
        fit = type(self.model).fit
        call = inspect.signature(fit).bind(self.model, *args, **kwargs)
        call.apply_defaults()
        if _replicas.has_several_workers(self.strategy):
            _worker_checks.shuffles_alike(call.arguments["x"], call.arguments["shuffle"])
        callbacks = _callbacks.callbacks_of(self.strategy, call.arguments["callbacks"])
        call.arguments["callbacks"] = callbacks
        return fit(*call.args, **call.kwargs)

    def build(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Makes all variables. In replicas, which come next, it would be too late."""
        model, strategy = self.model, self.strategy
        _replica_checks.fits_replicas(model, strategy)
        self.check_scope()
        if iterator is not None and _replicas.has_several_workers(strategy):
            _callbacks.check_length(iterator.data_adapter.get_tf_dataset())
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
        if self.compiles_steps():
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

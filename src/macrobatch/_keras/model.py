"""A Keras model as a function: forward pass, loss and metrics of a micro-batch, from values to
values. No variable is written, and only the trained ones are read. What macrobatch knows about the
inside of keras.Model is here.
"""

import functools
from typing import Any, Callable, Iterable, List, NamedTuple, Optional

import keras
import tensorflow as tf

from macrobatch import _checks
from macrobatch._batches import checks as _length_checks
from macrobatch._batches import padding as _padding
from macrobatch._batches import split as _split
from macrobatch._keras import batch_norm as _batch_norm
from macrobatch._keras import losses as _losses
from macrobatch._keras import stateless as _stateless
from macrobatch._keras.losses import Denominators
from macrobatch._keras.stateless import Scope
from macrobatch._tensorflow import replicas as _replicas


class State(NamedTuple):
    """What goes from one micro-batch to the next, and is written when the batch is through.

    Attributes:
        loss: the reported loss of the batch so far.
        terms: the reported terms of the compiled loss so far.
        written: the variables that layers and metrics write, such as seeds.
    """

    loss: Any
    terms: List[Any]
    written: _stateless.State


class ModelFunction:
    """A model, compiled, at the current values of its variables.

    Attributes:
        trained: the variables to be trained.
        counted: whether denominators must be counted before the first micro-batch.
        inexact: what cannot equal the whole batch, and the way out.
    """

    def __init__(
        self,
        model: Any,
        micro_batch: Any,
        training: bool,
        micro_batch_weight: Optional[Callable[..., Any]],
        kept: Optional[Callable[[Any, Any], Any]] = None,
    ):
        """Makes a dry run on a micro-batch to see what the model does.

        In a graph, it is traced into a graph that is thrown away. It also builds whatever is not
        built yet: the model, its losses, its metrics.

        Args:
            model: the model.
            micro_batch: a micro-batch; in a graph, its types and shapes are enough.
            training: whether the model is trained, or tested.
            micro_batch_weight: a function that gives the weight of a micro-batch, for scalars.
            kept: where sequences are cut, a function of a micro-batch and weights of positions:
                what part of them there is.
        """
        self.model, self.training = model, training
        self.micro_batch_weight, self._kept = micro_batch_weight, kept
        self.overridden = overrides(model, "compute_loss")
        if not all(layer.built for layer in layers_of(model)):
            with Scope(), keras.SymbolicScope(), _batch_norm.recorded(alone=True):
                self._dry_run(micro_batch)
        # In a symbolic scope, weights may also be regularised that the scope has no value of.
        with Scope() as scope, keras.SymbolicScope(), _batch_norm.recorded(alone=True) as calls_of:
            terms, scalars = self._dry_run(micro_batch)
        _checks.writes_no_trained_variable(scope.written.values(), model.trainable_weights)
        self.trackers = [v for metric in self._loss_metrics() for v in metric.variables]
        self.written = written = _stateless.Written()
        written.learn(scope, calls_of, but=self.trackers)
        # The global seed generator, for one, belongs to no layer.
        self.variables = _variables_of(model)
        self.variables += _stateless.without(written.carried, self.variables)
        self.values = _stateless.read(self.variables)
        self.trained = list(model.trainable_weights) if training else []
        self.terms = len(terms.part.terms) if terms else 0
        self.tracked = terms.tracked if terms else []
        self.counted = micro_batch_weight is not None or bool(terms and terms.counts)
        explained = [v for layer in written.decaying for v in layer.non_trainable_variables]
        explained += [v for v in written.carried if _stateless.is_seed(v)]
        unexplained = _stateless.without(written.carried, [*model.metrics_variables, *explained])
        self.inexact = _checks.inexact(
            normalizing=[layer.name for layer in written.normalizing],
            decaying=[layer.name for layer in written.decaying],
            writing=[v.path for v in unexplained],
            scalars=[] if micro_batch_weight else (terms.scalars if terms else []) + scalars,
            overridden=self.overridden and micro_batch_weight is None,
        )

    @property
    def weights(self) -> List[Any]:
        """The TensorFlow variables behind the trained variables."""
        return [variable.value for variable in self.trained]

    def part(self, micro_batch: Any) -> Denominators:
        """The denominators of a micro-batch that do not depend on the model."""
        examples = _split.size_of(micro_batch)
        if self.micro_batch_weight is None:
            return Denominators(examples, examples, [])
        weight = tf.cast(self.micro_batch_weight(*micro_batch), keras.config.floatx())
        _checks.scalar_weight(weight)
        return Denominators(examples, weight, [])

    @_losses.undivided()
    def denominators(self, micro_batch: Any, carried: List[Any]) -> Any:
        """All denominators of a micro-batch, and the carried variables after it.

        Only masks are needed for them, so that in a graph most of the forward pass is pruned.
        """
        part = self.part(micro_batch)
        if self.overridden:
            return part, carried
        values = [*zip(self.variables, self.values), *zip(self.written.carried, carried)]
        with Scope(values) as scope:
            terms = self._loss(micro_batch, self._forward(micro_batch), part).terms
        return terms.part if terms else part, scope.values_of(self.written.carried)

    def regularization(self) -> Any:
        """The sum of the weight regularisers."""
        dtype = keras.config.floatx()
        if self.overridden:  # then that is where they are added to the loss
            return tf.zeros([], dtype)
        with self._scope():
            # In a scope where no layer has been called, these are all the losses that there are.
            losses = [tf.cast(tf.reduce_sum(loss), dtype) for loss in self.model.losses]
        return tf.add_n([tf.zeros([], dtype), *losses])

    def start(self, loss: Any) -> State:
        """The state before the first micro-batch, where the loss is what regularisers add."""
        return State(loss, [tf.zeros_like(loss)] * self.terms, self.written.start())

    @_losses.undivided()
    def __call__(self, micro_batch: Any, state: State, whole: Denominators) -> Any:
        """Runs a micro-batch.

        Args:
            micro_batch: a micro-batch.
            state: the state after the micro-batch before.
            whole: the denominators of the whole batch.

        Returns:
            The micro-batch's part in the loss of the whole batch, without weight regularisers; the
            state after it; and the logs of the batch so far.
        """
        x, y, sample_weight = micro_batch
        with self._scope(zip(self.written.carried, state.written.carried)) as scope:
            with _batch_norm.recorded() as calls_of:
                y_pred = self._forward(micro_batch)
            loss = self._loss(micro_batch, y_pred, self.part(micro_batch), whole)
            total = state.loss + tf.stop_gradient(loss.reported)
            terms = state.terms
            if loss.terms:
                terms = [
                    before + tf.cast(tf.stop_gradient(now), before.dtype)
                    for before, now in zip(terms, loss.terms.reported)
                ]
            self._update_trackers(total, terms, whole.examples)
            with _padding.over_whole_sequences(self._kept_of(micro_batch)):
                logs = self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        state = State(total, terms, self.written.after(state.written, scope, calls_of))
        return loss.trained, state, tf.nest.map_structure(tf.convert_to_tensor, logs)

    def trial(self) -> _padding.Trial:
        """What to compare of a micro-batch that is cut and of the same one whole."""
        layers = layers_of(self.model)
        coarse = _padding.low_precision(layers)
        outcomes: List[Callable[[Any], Any]] = [self.outcome]
        if self.trained:
            outcomes.append(functools.partial(self.outcome, moved=True))
        return _padding.Trial(
            outcomes,
            lambda: self._drew,
            self.model,
            coarse,
            lambda: not self.inexact,
            lambda: self._hint,
        )

    @_losses.undivided()
    def outcome(self, micro_batch: Any, moved: bool = False) -> Any:
        """What a micro-batch comes to, by name: the loss with its gradients, and the metrics.

        If `moved`, it is not what it comes to here, but where the weights are some way off, and
        without gradients: at the start of training much is the same for all inputs.
        """
        x, y, sample_weight = micro_batch
        part = self.part(micro_batch)
        elsewhere = zip(self.trained, _moved(self.weights)) if moved else ()
        with tf.GradientTape() as tape, self._scope() as scope:
            scope.state_mapping.update({id(v): value for v, value in elsewhere})
            y_pred = self._forward(micro_batch)
            # Over 1, shares are sums.
            loss = self._loss(micro_batch, y_pred, part, Denominators(1, 1, [1] * self.terms))
            with tape.stop_recording(), _padding.over_whole_sequences(self._kept_of(micro_batch)):
                self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        values = [loss.trained, part.weight]
        if loss.terms:
            values += [*loss.terms.reported, *loss.terms.counts]
        found = {"loss": [tf.cast(value, keras.config.floatx()) for value in values]}
        if not moved and self.trained:
            found["loss"] += _padding.gradients(tape, loss.trained, self.weights)
        for metric in _stateless.without(_metrics_of(self.model), self._loss_metrics()):
            # Not its result: what is wrong by a factor would go unnoticed there.
            found.setdefault(metric.name, []).extend(scope.values_of(metric.variables))
        self._drew = any(map(_stateless.is_seed, scope.written.values()))
        masks = [getattr(leaf, "_keras_mask", None) for leaf in tf.nest.flatten(y_pred)]
        told = sample_weight is not None or any(mask is not None for mask in masks)
        self._hint = "" if told else _length_checks.no_mask(_unmasked(self.model))
        return found

    def finish(self, state: State, logs: Any, examples: Any) -> Any:
        """Writes the state after the last micro-batch to the variables.

        Args:
            state: the state.
            logs: the logs of the last micro-batch.
            examples: the number of examples; in a replica, of its own.

        Returns:
            The logs of the whole batch, over all replicas.
        """
        loss, *terms = _replicas.total([state.loss, *state.terms])
        with self._scope(zip(self.written.carried, state.written.carried)) as scope:
            self._update_trackers(loss, terms, examples)
        self.written.write(state.written)
        for variable, value in zip(self.trackers, scope.values_of(self.trackers)):
            variable.assign(value)
        if not _replicas.in_several():
            return logs
        metrics = list(self.model.metrics_variables)
        values = _stateless.shared(metrics, scope.values_of(metrics), whole=True)
        with self._scope(zip(metrics, values)):
            results = self.model.get_metrics_result()
        others = {name: value for name, value in logs.items() if name not in results}
        for message in _checks.logs_of_one_replica(others):
            _checks.warn_once(self.model, message)
        return {name: results.get(name, value) for name, value in logs.items()}

    def _scope(self, carried: Iterable[Any] = ()) -> Scope:
        # Where a variable appears twice, the later value counts.
        scope = Scope([*zip(self.variables, self.values), *carried])
        for variable, weight in zip(self.trained, self.weights):
            # Trained variables stay themselves: no step writes them, and gradients through
            # recomputation (RematScope), custom gradients and tf.function see variables only.
            scope.state_mapping[id(variable)] = weight
        return scope

    def _kept_of(self, micro_batch: Any) -> Any:
        """What part of some positions of a micro-batch there is, as a function; None if all are."""
        return None if self._kept is None else functools.partial(self._kept, micro_batch)

    def _forward(self, micro_batch: Any) -> Any:
        x, model = micro_batch[0], self.model
        return model(x, training=self.training) if model._call_has_training_arg else model(x)

    def _loss(
        self, micro_batch: Any, y_pred: Any, part: Denominators, whole: Optional[Any] = None
    ) -> "_Loss":
        """The micro-batch's part in the loss. Without `whole` it stands for the whole batch."""
        (x, y, sample_weight), model = micro_batch, self.model
        of_all = part if whole is None else whole
        dtype = keras.config.floatx()
        if self.overridden:
            value = model._compute_loss(x, y, y_pred, sample_weight, training=self.training)
            value = _losses.share(part.weight, of_all.weight, value.dtype) * value
            return _Loss(value, tf.cast(value, dtype), None)
        terms, losses = None, []
        if model._compile_loss is not None:
            if not model._compile_loss.built:
                model._compile_loss(y, y_pred)
            terms = _losses.Terms(model._compile_loss, part, whole, self._kept_of(micro_batch))
            losses = [loss for loss in [terms(y, y_pred, sample_weight)] if loss is not None]
        losses += _losses.added_losses(layers_of(model), part, of_all)
        if not losses and not any(v.regularizer for v in model.trainable_weights):
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        trained = tf.add_n([tf.zeros([], dtype), *(tf.cast(loss, dtype) for loss in losses)])
        unreported = tf.cast(terms.unreported, dtype) if terms else 0
        return _Loss(trained, trained - unreported, terms)

    def _update_trackers(self, loss: Any, terms: List[Any], examples: Any) -> None:
        """Tells Keras the losses of the batch so far, as its own step tells those of the batch."""
        tracker, *term_trackers = self._loss_metrics()
        tracker.update_state(loss, sample_weight=examples)
        for metric, value, weighted in zip(term_trackers, terms, self.tracked):
            # Keras weights a scalar by the batch size only where the graph knows it.
            if weighted is not None:
                known = isinstance(examples, int) or weighted
                metric.update_state(value, sample_weight=examples if known else None)

    def _loss_metrics(self) -> List[Any]:
        """The metrics of reported losses: updated once per batch, with the value of the whole."""
        compiled = None if self.overridden else self.model._compile_loss
        return [self.model._loss_tracker, *(compiled.metrics if compiled else [])]

    @_losses.undivided()
    def _dry_run(self, micro_batch: Any) -> Any:
        found: List[Any] = []

        def run(micro_batch: Any) -> None:
            x, y, sample_weight = micro_batch
            part = self.part(micro_batch)
            y_pred = self._forward(micro_batch)
            found.append(self._loss(micro_batch, y_pred, part).terms)
            found.append(_losses.layers_adding_scalars(layers_of(self.model), part.examples))
            self.model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

        if tf.executing_eagerly() and _split.size_of(micro_batch):
            run(micro_batch)
            return found
        if tf.executing_eagerly():  # A replica without examples: others have some.
            micro_batch = _split.specs_of(micro_batch, any_size=True)
        tf.function(run, autograph=False).get_concrete_function(micro_batch)
        return found


class _Loss(NamedTuple):
    trained: Any  # its gradient is the micro-batch's part in the gradient of the whole batch
    reported: Any
    terms: Optional[_losses.Terms]


def overrides(model: Any, method: str) -> bool:
    """Whether the model, or its class, brings its own version of a method of keras.Model."""
    own_class = getattr(type(model), method) is not getattr(keras.Model, method)
    return own_class or method in vars(model)


def layers_of(model: Any) -> List[Any]:
    """The model and all layers in it."""
    return list(model._flatten_layers())


def inputs_of(model: Any) -> List[Any]:
    """The inputs that a model declares, if it does: a functional one, or one that is built."""
    return getattr(model, "inputs", None) or []


def fixed_inputs(model: Any, x: Any, axis: int) -> List[Any]:
    """What of `x` has a size along an axis that the model declares: no sequences, then."""
    declared = inputs_of(model)
    names = [tensor.name for tensor in declared]
    leaves = tf.nest.flatten(x)
    if isinstance(x, dict) and set(names) <= set(x):
        leaves = [x[name] for name in names]
    if len(leaves) != len(declared):
        return []
    return [
        leaf
        for tensor, leaf in zip(declared, leaves)
        if len(tensor.shape) > axis and tensor.shape[axis] is not None
    ]


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope the model was made, or None."""
    return model._distribute_strategy


def is_built(model: Any) -> bool:
    """Whether there is nothing more to learn from a batch."""
    parts = [*layers_of(model), model._compile_loss, model._compile_metrics]
    return all(part is None or part.built for part in parts)


def all_variables(model: Any) -> List[Any]:
    """The variables of a model, its metrics and its optimizer."""
    of_optimizer = model.optimizer.variables if model.optimizer else ()
    return [*model.variables, *model.metrics_variables, *of_optimizer]


def _moved(weights: List[Any]) -> List[Any]:
    """The values of weights, and as much again in random directions; large ones as they are."""
    moved = []
    for seed, weight in enumerate(weights):
        value = tf.convert_to_tensor(weight)
        if value.shape.num_elements() > 2**20:
            moved.append(value)
            continue
        noise = tf.random.stateless_normal(tf.shape(value), [seed, 0], dtype=value.dtype)
        size = tf.maximum(tf.math.reduce_std(value), tf.cast(0.05, value.dtype))
        moved.append(value + size * noise)
    return moved


def _unmasked(model: Any) -> List[str]:
    """The names of what takes no part in masking, in the order of the model."""
    parts = getattr(model, "operations", None) or layers_of(model)[1:]
    parts = [part for part in parts if not isinstance(part, keras.layers.InputLayer)]
    return [part.name for part in parts if not getattr(part, "supports_masking", False)]


def _metrics_of(model: Any) -> List[Any]:
    """The metrics of a model, those that are compiled into one each."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", [metric])]


def _variables_of(model: Any) -> List[Any]:
    """All variables of the model, its seeds and its metrics, each once."""
    compiled = model._compile_loss.metrics if model._compile_loss else []
    metrics = [v for metric in (model._loss_tracker, *compiled) for v in metric.variables]
    variables = [*model.variables, *model.metrics_variables, *metrics]
    return list({id(variable): variable for variable in variables}.values())

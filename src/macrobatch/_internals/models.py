"""Private names of Keras models, losses, masks and variables."""

import functools
from typing import Any, Callable, List, Optional, Tuple

# Models


def layers_of(model: Any) -> List[Any]:
    """The model and all layers in it. `model.layers` has only the outermost ones."""
    return list(model._flatten_layers())


def loss_tracker(model: Any) -> Any:
    """The metric "loss". `model.metrics` has it too, but does not tell which one it is."""
    return model._loss_tracker


def compiled_loss(model: Any) -> Any:
    """What `compile(loss=...)` was made into; None without a loss."""
    return model._compile_loss


def compiled_metrics(model: Any) -> Any:
    """What `compile(metrics=...)` was made into; None without metrics."""
    return model._compile_metrics


def compute_loss(model: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: Any) -> Any:
    """`model.compute_loss`, which may be overridden with or without an argument `training`."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def predictions(model: Any, x: Any, training: bool) -> Any:
    """`model(x)`, with `training` if the model's `call` takes it, as Keras' own steps do.

    Those of JAX call the model's `call` itself. Then `training` reaches no layer by itself.
    """
    import keras

    plain = model.dtype_policy.quantization_mode is None and model._remat_mode is None
    call = model.call if keras.backend.backend() == "jax" and plain else model
    return call(x, training=training) if model._call_has_training_arg else call(x)


def strategy_of(model: Any) -> Any:
    """The strategy in whose scope a model was made, or None. The public one is never None."""
    return getattr(model, "_distribute_strategy", None)


def build(model: Any, x: Any, y: Any, sample_weight: Any) -> None:
    """Builds a model, its loss and its metrics from symbolic tensors, as Keras does on replicas.

    The outputs of a built functional model are known without a forward pass.
    """
    from keras.src import backend

    if all(layer.built for layer in layers_of(model)) and getattr(model, "outputs", None):
        y_pred = getattr(model, "_functional", model)._outputs_struct
        if isinstance(y_pred, (list, tuple)) and len(y_pred) == 1:
            y_pred = y_pred[0]  # as a call of the model returns it
    else:
        y_pred = backend.compute_output_spec(model, x, training=False)
    arguments = (x, y, y_pred, sample_weight)
    metrics, loss = compiled_metrics(model), compiled_loss(model)
    if metrics is not None and not metrics.built:
        backend.compute_output_spec(model.compute_metrics, *arguments)
    if loss is not None and not loss.built:
        backend.compute_output_spec(model._compute_loss, *arguments, training=False)


def build_sequential(model: Any, shape: Tuple[Optional[int], ...]) -> None:
    """Builds a Sequential for inputs of a shape. Where that fails, it is as before."""
    layers = model._layers
    try:
        model.build(shape)
    except Exception:
        # Keras leaves an InputLayer of the shape there, and refuses other shapes from then on.
        model._layers = layers
        raise


def step_by_step(model: Any, step: Callable[..., Any], joins: bool = False) -> Callable[..., Any]:
    """A function of a state and an iterator that runs a step on JAX, `steps_per_execution` times.

    Keras makes it of its own step, which gives the memory of the state away. If the function
    `joins`, it returns what all of the steps have returned, and not the latest.
    """
    function: Callable[..., Any] = model._make_function(step, concatenate_outputs=joins)
    return function


def keep_state(model: Any, names: List[str], state: Any) -> None:
    """Lets `fit` on JAX put a state back into the variables at its end.

    In a fit Keras takes the values out of the variables, and puts back what the last step returned.
    """
    model._jax_state = dict(zip(names, state))
    model._jax_state_synced = False


# The method that Keras calls before it traces a step, and with which it builds on replicas. Keras'
# own takes the mean of the replicas' examples, which fails for batches that replicas do not divide,
# and on several workers always.
BUILDING = "_maybe_symbolic_build"


# The same on JAX and torch, before the first batch. It builds for the sizes of that batch: there is
# no argument for others.
BUILDING_AT_ONCE = "_symbolic_build"


def batch_to_build_with(iterator: Any) -> Any:
    """The first batch of what Keras iterates over, which it starts anew after building."""
    _, _, found = next(iter(iterator))
    return found[0] if isinstance(found, (list, tuple)) else next(found)


# The method through which Keras passes the function of one batch, outside of what XLA compiles. No
# other place sees the batches of all kinds of fit: of iterators, of replicas, and of one batch.
STEPPING = "_autoconvert_optionals"


_before_training: List[Callable[[Any], None]] = []


def before_training(function: Callable[[Any], None]) -> None:
    """Lets a function be called with each Keras model that is about to train.

    A model with an accumulated part knows nothing of it. All ways to train call this method.
    """
    import keras

    if not _before_training:
        make = keras.Model.make_train_function

        @functools.wraps(make)
        def make_train_function(self: Any, *args: Any, **kwargs: Any) -> Any:
            for each in _before_training:
                each(self)
            return make(self, *args, **kwargs)

        keras.Model.make_train_function = make_train_function
    if function not in _before_training:
        _before_training.append(function)


def set_initial_epoch(model: Any, epoch: Optional[int]) -> None:
    """Lets `fit` start at an epoch, as BackupAndRestore does."""
    model._initial_epoch = epoch


# Losses


def flat_losses(compiled: Any) -> List[Any]:
    """The terms of a compiled loss: records of path, loss, loss_weights and name."""
    return list(compiled._flat_losses)


def with_losses(compiled: Any, losses: List[Any], metrics: List[Any]) -> Any:
    """A compiled loss with other losses and other metrics, for one call."""
    copied = shallow_copy(compiled)
    copied._flat_losses = losses
    copied._metrics = metrics
    return copied


def shallow_copy(loss: Any) -> Any:
    """A copy of a Keras object. `copy.copy` would serialise it."""
    copied = object.__new__(type(loss))
    vars(copied).update(vars(loss))
    return copied


def own_losses(layer: Any) -> List[Any]:
    """What a layer itself gave to `add_loss` in this scope. `layer.losses` has more."""
    return list(layer._get_own_losses())


def clear_losses(model: Any) -> None:
    """Forgets what layers gave to `add_loss` before, as a call of the model does.

    Layers know their values by id, and a new value may have the id of one that is gone.
    """
    model._clear_losses()


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, as layers do."""
    from keras.src import backend

    backend.set_keras_mask(tensor, mask)


def mask_of(tensor: Any) -> Any:
    """The mask that Keras has attached to a tensor, or None."""
    from keras.src import backend

    get = getattr(backend, "get_keras_mask", None)
    return getattr(tensor, "_keras_mask", None) if get is None else get(tensor)


# Variables


def raw_value(variable: Any) -> Any:
    """What a variable holds outside of any scope. Within one, `value` asks the scope."""
    return variable._value


def variables_without_value() -> List[Any]:
    """The variables that were made in a scope, and get their values at its end."""
    from keras.src.backend.common import global_state

    return list(global_state.get_global_attribute("uninitialized_variables", []))

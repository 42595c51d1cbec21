"""A copy is compiled as its model is: same loss, and copies of its optimizer and its metrics."""

from typing import Any, Callable, Tuple

import keras
from keras import ops

from macrobatch import _backends, _internals
from macrobatch._checks import one_line

SHORT = 160  # characters of an error in a note


def alike(
    model: Any,
    other: Any,
    loss: Callable[[Any], Any] = lambda loss: loss,
    as_it_trains: bool = False,
) -> Tuple[str, ...]:
    """Compiles a model as another one is, with copies of its optimizer and metrics.

    Args:
        model: the one.
        other: the other.
        loss: makes a loss of a loss.
        as_it_trains: see `twin`.
    """
    arguments = _internals.compile_arguments(model)
    if not (as_it_trains or _backends.trials().compiles):
        arguments["jit_compile"] = False  # XLA would compile the same arithmetic, for minutes
    arguments["steps_per_execution"] = 1
    arguments["loss"] = _mapped(arguments["loss"], keras.losses.Loss, loss)
    for name in ("metrics", "weighted_metrics"):
        arguments[name] = _mapped(arguments[name], keras.metrics.Metric, _made_anew)
    notes: Tuple[str, ...] = ()
    arguments["optimizer"] = model.optimizer
    if not (as_it_trains and model.optimizer.built):
        arguments["optimizer"], notes = _optimizer_like(model.optimizer, other)
    # Keras wraps an optimizer in a loss scale, which the copy already is.
    keras.Model.compile(other, **arguments, auto_scale_loss=False)
    return notes


def by_own_compile(model: Any, other: Any, as_it_trains: bool = False) -> Tuple[str, ...]:
    """Gives a model that has its own compile other optimizers."""
    vars(other).update(train_function=None, test_function=None)
    _internals.set_compiled_apart(other)
    if not (as_it_trains or _backends.trials().compiles):
        vars(other)["_jit_compile"] = False
    renew_optimizers(model, other, only_unbuilt=as_it_trains)
    return ()


def renew_optimizers(model: Any, other: Any, only_unbuilt: bool = False) -> None:
    """Gives a model copies of all optimizers of another one of the same variables."""
    for name, value in vars(model).items():
        if isinstance(value, keras.optimizers.Optimizer) and not (only_unbuilt and value.built):
            made = type(value).from_config(value.get_config())
            if value.built:
                made.build(_internals.variables_of_optimizer(value))
                _give_values(value, made)
            vars(other)[name] = made


def _give_values(optimizer: Any, made: Any) -> None:
    for variable, other in zip(optimizer.variables, made.variables):
        other.assign(ops.cast(value_of(variable), other.dtype))


def _mapped(nest: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(nest, dict):
        return {key: _mapped(each, kind, function) for key, each in nest.items()}
    if isinstance(nest, (list, tuple)):
        return [_mapped(each, kind, function) for each in nest]
    return function(nest) if isinstance(nest, kind) else nest


def _made_anew(metric: Any) -> Any:
    try:
        return type(metric).from_config(metric.get_config())
    except Exception:  # a metric of the user's that has no config is shared, and put back
        return metric


def _optimizer_like(optimizer: Any, model: Any) -> Tuple[Any, Tuple[str, ...]]:
    """A copy of an optimizer, with its variables, for the variables of a model."""
    try:
        made = type(optimizer).from_config(optimizer.get_config())
    except Exception as error:
        made = keras.optimizers.SGD(1.0)
        note = (
            f"The optimizer cannot be copied ({one_line(error, SHORT)}). Updates of SGD stand "
            "in its place."
        )
        made.build(model.trainable_variables)
        return made, (note,)
    made.build(model.trainable_variables)
    if optimizer.built:
        _give_values(optimizer, made)
    return made, ()


def value_of(variable: Any) -> Any:
    """The value of a variable, as an array."""
    return _backends.trials().array(_internals.raw_value(variable))

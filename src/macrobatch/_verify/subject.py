"""The model that is compared: a copy of the user's in float64, where there can be one, or else
another model of the same layers, whose variables are put back.
"""

import contextlib
import functools
import inspect
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import keras
import numpy as np
from keras import ops, tree

from macrobatch import _backends, _internals
from macrobatch._checks import one_line
from macrobatch._keras import build
from macrobatch._keras.scope import Scope
from macrobatch._no_trace import compiled
from macrobatch._no_trace import twin as twins
from macrobatch._no_trace.compiled import SHORT, value_of
from macrobatch._no_trace.unchanged import in_float64
from macrobatch._types import Batch
from macrobatch._verify.replay import Replay

# Two forward passes, one of them in float32, are the same model's if they differ by less.
FAITHFUL = {"float64": 1e-9, "float32": 1e-3}
COARSE = 0.1

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
FLOATS = ("float16", "bfloat16", "float32", "float64")


class Subject(NamedTuple):
    """A model to compare on.

    Attributes:
        model: the model, compiled. Its optimizer is a copy.
        batch: x, y and sample_weight, in its dtype.
        dtype: the narrowest in which anything in it computes.
        settings: a context in which it runs.
        paths: of its variables, by id, as the user's model has them.
        notes: what is not as usual.
        renew: makes optimizers anew that may not have been built yet.
    """

    model: Any
    batch: Batch
    dtype: str
    settings: Callable[[], Any]
    paths: Dict[int, str]
    notes: Tuple[str, ...]
    renew: Callable[[], None] = lambda: None


class CannotCopy(Exception):
    """A model cannot be copied, and why."""


def copied(model: Any, batch: Batch, axis: Optional[int] = None) -> Subject:
    """A copy of a model in float64, with the same weights. Raises CannotCopy.

    Args:
        model: the model.
        batch: a batch.
        axis: the axis of sequences, if they are cut.
    """
    for name in ("train_step", "compile", "compute_loss", "compute_metrics"):
        own = vars(model).get(name)
        if own is not None and not twins.is_installed(model, own):
            raise CannotCopy(f"{name} is set on the model itself")
    if twins.compiles_itself(model):
        raise CannotCopy(f"{type(model).__name__} overrides compile")
    try:
        with in_float64():
            wide = _widened(batch)
            clone = _clone(model)
            if axis is not None and isinstance(clone, keras.Sequential) and not clone.built:
                build.open_along(clone, wide[0], axis)
            if not all(layer.built for layer in _internals.layers_of(clone)):
                _internals.predictions(clone, wide[0], False)
            has_weights = twins.has_weights(model)
            paths = _give_weights(model, clone) if has_weights else {}
            notes = compiled.alike(model, clone, _internals.in_float64)
            found = _results(clone, wide) if has_weights else []
        if has_weights:
            _check_faithful(found, _results(twins.twin(model)[0], batch), narrowest(model))
    except CannotCopy:
        raise
    except Exception as error:  # whatever the user's classes do when they are made anew
        raise CannotCopy(one_line(error, SHORT)) from error
    return Subject(clone, wide, "float64", in_float64, paths, notes)


def itself(model: Any, batch: Batch, why: str) -> Subject:
    """Another model of the same layers and variables."""
    if not twins.has_weights(model):
        raise ValueError(
            f"The model {model.name!r} has no weights yet, and cannot be copied ({why}). Build it "
            "first: call it on a batch, model(x)."
        )
    if _internals.strategy_of(model) is not None:
        raise ValueError(
            f"The model {model.name!r} was made in the scope of a strategy, and cannot be copied "
            f"({why}). Make it outside of strategy.scope() to verify it."
        )
    other, notes = twins.twin(model)
    renew = functools.partial(compiled.renew_optimizers, model, other)
    made = Subject(other, batch, narrowest(model), contextlib.nullcontext, {}, notes)
    return made._replace(renew=renew) if twins.compiles_itself(model) else made


def narrowest(model: Any) -> str:
    """The narrowest float dtype in which a layer computes, or Keras by default."""
    found = {getattr(layer, "compute_dtype", None) for layer in _internals.layers_of(model)}
    found.add(keras.config.floatx())
    return next(dtype for dtype in FLOATS if dtype in found)


# Copies


def _clone(model: Any) -> Any:
    """A model like another one, whose layers are made anew, in float64."""
    layers = _internals.layers_of(model)
    objects: Dict[str, Any] = {type(layer).__name__: type(layer) for layer in layers}
    # Functions of the user's, such as activations, are in configs by name.
    attributes = [value for layer in layers for value in vars(layer).values()]
    objects.update({v.__name__: v for v in attributes if inspect.isfunction(v)})
    with keras.utils.custom_object_scope(objects):
        clone = None
        if getattr(model, "inputs", None):
            clone = _clone_of_graph(model)
        if type(clone) is not type(model):
            clone = _made_again(model)
    if type(clone) is not type(model):
        raise CannotCopy(f"from_config of {type(model).__name__} makes another class")
    return clone


def _made_again(model: Any) -> Any:
    """A model of a class of the user's. Its layers have the dtype that new layers get."""
    kind = type(model)
    # Keras' own config of a model has defaults in place of what __init__ was called with.
    if kind.get_config is not keras.Model.get_config:
        return kind.from_config(_config_in_float64(model.get_config()))
    arguments = [p for p in inspect.signature(kind).parameters.values() if p.kind not in _VARIADIC]
    if arguments:
        raise CannotCopy(f"{kind.__name__} takes arguments, and has no get_config")
    return kind()


def _clone_of_graph(model: Any) -> Any:
    """A clone of a functional or sequential model, and of all such models inside it."""
    # Keras would compile the clone from a serialised config, which losses of users may not have.
    plain = _internals.copy_of_model(model)
    vars(plain)["compiled"] = False
    inputs = tree.map_structure(
        lambda tensor: keras.Input(
            batch_shape=tensor.shape, dtype=_wide(tensor.dtype), name=tensor.name
        ),
        model.inputs if isinstance(model, keras.Sequential) else model.input,
    )
    return keras.models.clone_model(plain, input_tensors=inputs, clone_function=_clone_of_layer)


def _clone_of_layer(layer: Any) -> Any:
    if isinstance(layer, keras.Model) and getattr(layer, "inputs", None):
        clone = _clone_of_graph(layer)
        clone.trainable = layer.trainable
        return clone
    if not isinstance(layer, keras.layers.Layer):
        return type(layer).from_config(layer.get_config())
    config = _config_in_float64(layer.get_config())
    if isinstance(layer, keras.layers.Lambda):  # whose functions Keras does not read from a config
        config = {**config, "function": layer.function}
        for name in ("output_shape", "mask"):
            config.pop(name, None)
        return keras.layers.Lambda(**config)
    return type(layer).from_config(config)


def _wide(dtype: str) -> str:
    return "float64" if dtype in FLOATS else dtype


def _config_in_float64(config: Any) -> Any:
    """A config of a layer, and of the layers inside it, with other dtypes."""
    if isinstance(config, dict):
        found = {key: _config_in_float64(value) for key, value in config.items()}
        dtype = config.get("dtype")
        if isinstance(dtype, dict) or dtype in (*FLOATS, "mixed_float16", "mixed_bfloat16"):
            found["dtype"] = "float64"
        return found
    if isinstance(config, (list, tuple)):
        return type(config)(map(_config_in_float64, config))
    return config


def _widened(batch: Batch) -> Batch:
    def widened(leaf: Any) -> Any:
        if leaf is None or _wide(keras.backend.standardize_dtype(leaf.dtype)) != "float64":
            return leaf
        return ops.cast(leaf, "float64")

    return tree.map_structure(widened, batch)


def _give_weights(model: Any, clone: Any) -> Dict[int, str]:
    """Gives a clone the weights of a model, and its names. Returns the paths of its variables."""
    shapes = [[tuple(v.shape) for v in each.variables] for each in (model, clone)]
    trained = [[v.trainable for v in each.variables] for each in (model, clone)]
    if shapes[0] != shapes[1] or trained[0] != trained[1]:
        raise CannotCopy(f"a copy of {type(model).__name__} has other variables")
    for variable, other in zip(model.variables, clone.variables):
        other.assign(ops.cast(value_of(variable), other.dtype))
    for layer, other in zip(_internals.layers_of(model), _internals.layers_of(clone)):
        other.name = layer.name
    return {id(other): v.path for v, other in zip(model.variables, clone.variables)}


def _results(model: Any, batch: Batch) -> List[Any]:
    """The predictions of a model and its loss, outside of training, and with nothing written."""
    x, y, sample_weight = batch
    with Replay()(), Scope(), _backends.trials().looking():
        y_pred = _internals.predictions(model, x, False)
        loss = _internals.compute_loss(model, x, y, y_pred, sample_weight, False)
    leaves = tree.flatten((y_pred, loss))
    return [np.asarray(ops.convert_to_numpy(leaf), "float64") for leaf in leaves]


def _check_faithful(found: List[Any], expected: List[Any], dtype: str) -> None:
    """Raises unless a copy comes to what the model comes to."""
    limit = FAITHFUL.get(dtype, COARSE)
    for one, other in zip(found, expected):
        size = np.abs(other).max(initial=0.0) + 1e-3
        if one.shape != other.shape or not np.abs(one - other).max(initial=0.0) <= limit * size:
            raise CannotCopy("a copy of the model predicts something else, or has another loss")

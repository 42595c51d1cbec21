"""Another model of the same layers and variables: it can be compiled and trained by itself."""

from typing import Any, Tuple

import keras

from macrobatch import _internals
from macrobatch._keras.installed import accumulation_of
from macrobatch._no_trace import compiled


def twin(model: Any, as_it_trains: bool = False) -> Tuple[Any, Tuple[str, ...]]:
    """Another model of the same layers and variables, plain, compiled alike; and notes.

    Args:
        model: a compiled model, which stays as it is, unless the twin trains: variables are shared.
        as_it_trains: whether XLA compiles it as it does the model, and an optimizer that is built
            is shared. Otherwise the twin has a copy of it, and XLA stays out.
    """
    other = _internals.copy_of_model(model)
    for name, method in list(vars(other).items()):
        if is_installed(model, method):
            del vars(other)[name]
    # A compile of the user's own has made more than the arguments of Keras' compile tell.
    compile_it = compiled.by_own_compile if compiles_itself(model) else compiled.alike
    return other, compile_it(model, other, as_it_trains=as_it_trains)


def has_weights(model: Any) -> bool:
    """Whether a model has all of its weights. One made of models, a GAN for instance, is not built:
    nobody calls it.
    """
    parts = [layer for layer in _internals.layers_of(model) if layer is not model]
    return bool(model.built or (parts and all(part.built for part in parts)))


def compiles_itself(model: Any) -> bool:
    """Whether the class of a model overrides `compile`."""
    return type(model).compile is not keras.Model.compile


def is_installed(model: Any, method: Any) -> bool:
    """Whether `accumulate` has put a method into a model."""
    accumulation = accumulation_of(model)
    return accumulation is not None and getattr(method, "__self__", None) is accumulation

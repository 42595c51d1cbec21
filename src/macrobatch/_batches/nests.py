"""Nests of tensors, as batches are, in a way that is fast where there are few leaves."""

from typing import Any, Callable


def mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """A nest with what a function makes of its leaves. None is a leaf, too.

    As keras.tree.map_structure, which takes long on torch for the small nests that batches are.
    """
    if type(nest) in (tuple, list):
        return type(nest)([mapped(function, each) for each in nest])
    if nest is None or hasattr(nest, "shape"):
        return function(nest)
    from keras import tree

    return tree.map_structure(function, nest)

"""What a size of micro-batches was found for: a model, its batches, and where it runs."""

import json
import platform
from typing import Any, Dict, List, Optional, Sequence

import keras
from keras import tree

import macrobatch
from macrobatch import _internals
from macrobatch._types import Batch


def key_of(
    model: Any,
    part: Batch,
    whole: int,
    how: Dict[str, Any],
    memory: Optional[int],
    devices: Sequence[str],
    version: str,
) -> Dict[str, Any]:
    """All that a size depends on, as text and numbers.

    Args:
        model: the model.
        part: a batch, or the part of a replica.
        whole: the size that takes all of it at once.
        how: what the user gave, and how the model runs.
        memory: bytes that there may be in all, whoever uses them; None if that is not known.
        devices: the names of accelerators; none on a CPU.
        version: of the backend.
    """
    leaves = [leaf for leaf in tree.flatten(part) if leaf is not None]
    return {
        "model": [_layer(layer) for layer in _internals.layers_of(model)],
        "weights": [[list(weight.shape), weight.dtype] for weight in model.weights],
        "trainable": len(model.trainable_weights),
        "optimizer": type(model.optimizer).__name__,
        "batch": [[list(leaf.shape[1:]), _name(leaf.dtype)] for leaf in leaves],
        "whole": whole,
        "how": {name: str(value) for name, value in how.items()},
        "devices": list(devices) or [platform.machine(), platform.processor()],
        "memory": memory,
        "versions": [macrobatch.__version__, version, keras.__version__],
    }


def _layer(layer: Any) -> List[Any]:
    """A layer: its kind and its settings, without names, which count up in a process."""
    kind, policy = type(layer).__name__, layer.dtype_policy.name
    if len(_internals.layers_of(layer)) > 1:  # its parts are in the list
        return [kind, policy]
    try:
        settings = {k: v for k, v in layer.get_config().items() if k not in ("name", "dtype")}
        text = json.dumps(settings, sort_keys=True, default=lambda value: type(value).__name__)
    except Exception:  # A layer of the user's need not say how it was made.
        text = ""
    return [kind, policy, text]


def _name(dtype: Any) -> str:
    """The name of a type of any backend."""
    return str(getattr(dtype, "name", dtype))

"""torch modules inside a Keras model: what they write by themselves, where no scope of Keras sees
it.
"""

from typing import Any, Iterable, List, Optional, Tuple

import keras
import torch

from macrobatch import _internals
from macrobatch._torch import checks


class Buffers:
    """What torch modules keep beside weights, running statistics for instance."""

    def __init__(self, buffers: Iterable[Any]):
        self._before = [(buffer, buffer.clone()) for buffer in buffers]

    def put_back(self) -> None:
        """Lets the buffers be as they were when the object was made."""
        with torch.no_grad():
            for buffer, value in self._before:
                buffer.copy_(value)


class Modules:
    """The torch modules in the layers of a model. Layers are modules too, but have no buffers."""

    def __init__(self, model: Any):
        self._model = model
        self._found: Optional[List[Tuple[str, Any]]] = None

    def forget(self) -> None:
        """Looks for modules again at the next step."""
        self._found = None

    def _modules(self) -> List[Tuple[str, Any]]:
        """The modules, with the names of their layers."""
        if self._found is None:
            self._found = [
                (layer.name, module)
                for layer in _internals.layers_of(self._model)
                for module in layer.modules()  # A layer does not list the layers in it.
                if not isinstance(module, keras.Layer)
                and not isinstance(module, torch.nn.ParameterDict)
            ]
            checks.no_distributed_modules(name for name, m in self._found if _is_distributed(m))
        return self._found

    def buffers(self) -> Buffers:
        """What the modules keep, as it is now."""
        return Buffers(
            buffer for _, module in self._modules() for buffer in module.buffers(recurse=False)
        )

    @property
    def may_draw(self) -> bool:
        """Whether there are any, whose random numbers no scope of Keras sees."""
        return bool(self._modules())

    def inexact(self, training: bool) -> List[str]:
        """What cannot equal the whole batch, and the way out."""
        names = [name for name, m in self._modules() if _is_batch_norm(m) and m.training]
        return [checks.batch_norm_of_torch(names)] if names and training else []


def _is_batch_norm(module: Any) -> bool:
    """Whether a module normalises over examples, and keeps statistics: BatchNorm1d and the like."""
    norm = torch.nn
    kinds = (norm.BatchNorm1d, norm.BatchNorm2d, norm.BatchNorm3d, norm.SyncBatchNorm)
    return isinstance(module, kinds)


def _is_distributed(module: Any) -> bool:
    kinds = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    return isinstance(module, kinds)

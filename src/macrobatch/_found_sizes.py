"""Sizes that are found while training, where a step runs batch by batch in Python: what JAX and
torch share. The search is in _sizes. An engine adds its errors, its memory and how a step runs.
"""

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import keras
from keras import tree

from macrobatch._batches import checks as batch_checks
from macrobatch._batches.cut import Cut
from macrobatch._keras.fit_call import FitCall
from macrobatch._keras.size_key import key_of
from macrobatch._keras.size_logged import SizeLogged
from macrobatch._sizes.finder import Engine, Finder
from macrobatch._sizes.paying import Paying
from macrobatch._types import Batch


class Chosen:
    """A size that is found: see _batches.cut.Chosen.

    Attributes:
        in_tokens: whether it is examples times the longest of them, and not examples.
        current: the size of now.
    """

    def __init__(self, in_tokens: bool):
        self.in_tokens, self.current = in_tokens, 1

    def now(self) -> int:
        """The size of now."""
        return self.current


def with_chosen(cut: Cut) -> Cut:
    """How batches are to be cut: if by "auto", then by a size that is found."""
    sizes: Any = (cut.size, cut.tokens)
    if batch_checks.AUTO not in sizes:
        return cut
    return cut._replace(size=None, tokens=None, chosen=Chosen(sizes[1] == batch_checks.AUTO))


class Backend(NamedTuple):
    """Where a model runs, for the key of what was found.

    Attributes:
        version: of the backend.
        devices: the names of accelerators; none on a CPU.
        replicas: the number of devices that share a batch.
    """

    version: str
    devices: Sequence[str]
    replicas: int = 1


class FoundSizes(Engine):
    """The sizes of one model: what the search has to know, whatever the backend."""

    def __init__(self, steps: Any, memory_limit: Any, backend: Backend):
        """Prepares a search.

        Args:
            steps: the steps of the model, with `model`, `cut` and `shows_size`.
            memory_limit: what the user gave.
            backend: where the model runs.
        """
        chosen = steps.cut.chosen
        assert isinstance(chosen, Chosen)
        self._steps, self._chosen, self._backend = steps, chosen, backend
        self.finder = Finder(self, chosen.in_tokens, memory_limit)
        self._paying = Paying()

    @property
    def has_size(self) -> bool:
        """Whether any batch has been trained with."""
        return self.finder.size is not None

    @property
    def is_settled(self) -> bool:
        """Whether a size for training has been found."""
        return self.finder.is_settled

    def fit(self, call: FitCall) -> Any:
        """As Keras', with the size of each epoch in the logs."""
        finder = self.finder
        own = SizeLogged(finder.unit, lambda: finder.size, self._paying.expect)
        try:
            with call.with_callback(own):
                return call.run()
        finally:
            self._paying.expect(None)

    def compiles(self) -> bool:
        """Whether each size is compiled anew."""
        raise NotImplementedError

    def pays(self, is_new: bool, seconds: float) -> bool:
        return self._paying(is_new, seconds) or not self.compiles()

    def compiles_each_size(self) -> bool:
        return self.compiles()

    def set(self, size: int) -> None:
        self._chosen.current = size

    def shows_size(self) -> bool:
        return bool(self._steps.shows_size)

    def is_typical(self) -> bool:
        # Otherwise it looks at parts of a batch, for numbers that are not finite.
        return not self._steps.guard.looks

    def measured(self, batch: Batch) -> Any:
        leaves = _leaves(batch)
        examples = -(-int(leaves[0].shape[0]) // self._backend.replicas)
        if self._chosen.in_tokens:
            length = self._length(batch)
            return examples * length, float(length)
        elements = sum(math.prod(leaf.shape) for leaf in leaves)
        return examples, elements / int(leaves[0].shape[0])

    def rows_of(self, batch: Batch, size: int) -> List[int]:
        """The rows of two micro-batches of a size, so that sums are in memory beside gradients."""
        if self._chosen.in_tokens:
            size = max(1, size // self._length(batch))
        examples = int(_leaves(batch)[0].shape[0])
        return [row % examples for row in range(2 * size * self._backend.replicas)]

    def _length(self, batch: Batch) -> int:
        axis = self._steps.cut.axis
        return max([1, *(int(leaf.shape[axis]) for leaf in _leaves(batch) if leaf.ndim > axis)])

    def of_update(self) -> int:
        weights = self._steps.model.trainable_weights
        return 2 * sum(math.prod(weight.shape) * _bytes_of(weight.dtype) for weight in weights)

    def key(self, batch: Batch, whole: int, memory: Optional[int]) -> Dict[str, Any]:
        steps, backend = self._steps, self._backend
        how = {
            "backend": keras.backend.backend(),
            "unit": self.finder.unit,
            "kind": type(steps).__name__,
            "axis": steps.cut.axis,
            "compiled": self.compiles(),
            "replicas": backend.replicas,
        }
        return key_of(steps.model, batch, whole, how, memory, backend.devices, backend.version)


def _leaves(batch: Batch) -> List[Any]:
    return [leaf for leaf in tree.flatten(batch) if leaf is not None]


def _bytes_of(dtype: str) -> int:
    """Bytes of one number, by the name of its type: float32, bfloat16."""
    digits = "".join(letter for letter in dtype if letter.isdigit())
    return -(-int(digits or 8) // 8)

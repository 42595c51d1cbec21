"""Random layers draw the same in the whole batch and in its micro-batches: one draw for all
examples. So they stay on, and are not taken for a difference.
"""

import contextlib
from typing import Any, Dict, Iterator, List, Optional

import keras
from keras import ops

from macrobatch import _backends, _internals
from macrobatch._types import Tensor


class Replay:
    """The draws of a comparison.

    A draw depends on the seed that the layer has, and on its shape without examples. It does not
    depend on how many examples there are, nor on what was drawn before.
    """

    def __init__(self, sequence_axis: Optional[int] = None):
        # Along these axes micro-batches have other sizes than the batch.
        self._shared = {0, *(() if sequence_axis is None else (sequence_axis,))}
        self._generators: Dict[int, int] = {}
        self._kept: List[Any] = []  # so that no other object gets its id

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """A context in which everything draws so."""
        with contextlib.ExitStack() as stack:
            for name, patch in _internals.with_draws.items():
                instead = self._chosen if name == "categorical" else self._drawn
                stack.enter_context(patch(instead))
            stack.enter_context(_internals.with_dropout.beneath(self._dropped))
            yield

    def _drawn(
        self, draw: Any, shape: Any, *args: Any, dtype: Any = None, seed: Any = None, **kwargs: Any
    ) -> Tensor:
        if not _is_of_layer(seed):
            return draw(shape, *args, dtype=dtype, seed=seed, **kwargs)
        # Drawn in float64, a copy of a model draws what the model draws.
        dtype = keras.backend.standardize_dtype(dtype)
        is_wide = keras.backend.is_float_dtype(dtype) and _backends.trials().can_draw_float64()
        kwargs["dtype"] = "float64" if is_wide else dtype
        values = draw(self._of_all_examples(shape), *args, seed=self._seed(seed), **kwargs)
        return ops.broadcast_to(ops.cast(values, dtype), shape)

    def _chosen(
        self, draw: Any, logits: Tensor, num_samples: int, dtype: Any = "int64", seed: Any = None
    ) -> Tensor:
        if not _is_of_layer(seed):
            return draw(logits, num_samples, dtype=dtype, seed=seed)
        # The largest of logits and Gumbel noise is a draw by these logits.
        shape = [1, num_samples, logits.shape[-1]]
        noise = keras.random.uniform(shape, 1e-20, 1.0, dtype=logits.dtype, seed=seed)
        return ops.cast(ops.argmax(logits[:, None, :] - ops.log(-ops.log(noise)), -1), dtype)

    def _dropped(
        self, drop: Any, inputs: Tensor, rate: Any, noise_shape: Any = None, seed: Any = None
    ) -> Tensor:
        if not _is_of_layer(seed):
            return drop(inputs, rate, noise_shape, seed)
        sizes = list(inputs.shape) if noise_shape is None else list(noise_shape)
        return drop(inputs, rate, self._of_all_examples(sizes), self._seed(seed))

    def _of_all_examples(self, shape: Any) -> List[Any]:
        rank = shape.shape[0] if hasattr(shape, "dtype") else len(shape)
        return [1 if axis in self._shared else shape[axis] for axis in range(rank)]

    def _seed(self, seed: Any) -> Any:
        """A number for each generator, in the order in which they are met."""
        if id(seed) not in self._generators:
            self._generators[id(seed)] = len(self._generators)
            self._kept.append(seed)
        return self._generators[id(seed)]


def _is_of_layer(seed: Any) -> bool:
    """Whether a seed changes from draw to draw. A number draws the same for each micro-batch."""
    return seed is None or isinstance(seed, keras.random.SeedGenerator)

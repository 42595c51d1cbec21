"""predict on JAX, in micro-batches: the predictions of the whole batch, in its order."""

from typing import Any, Callable, List, Tuple

import jax
import keras

from macrobatch._batches import predicted
from macrobatch._batches.cut import Cut
from macrobatch._jax import devices, loop
from macrobatch._jax.engine import ENGINE, arrays
from macrobatch._types import Batch, Part, Tensor

# The values of trained and of other variables.
State = Tuple[List[Tensor], List[Tensor]]


def step_of(
    model: Any, cut: Cut, has_size: Callable[[], bool], compiled: bool
) -> Callable[[State, Any], Tuple[Any, State]]:
    """A step that Keras calls with each batch, of the model's own step.

    Args:
        model: the model.
        cut: how batches are cut.
        has_size: whether a size is known. If not, a batch is not cut.
        compiled: whether JAX compiles steps.
    """

    def own(state: State, x: Batch) -> Any:
        return model.predict_step(state, (x,))

    def on_devices(size: Any, state: State, x: Batch) -> Any:
        def of_device(state: State, x: Batch) -> Any:
            def step(micro_batch: Batch, values: List[Tensor]) -> Part:
                outputs, _ = model.predict_step(state, (micro_batch,))
                predicted.check_rows(outputs, ENGINE.examples(micro_batch))
                return Part([], aux=outputs)

            return loop.run(step, predicted.of_batch(x, cut, ENGINE), [], compiled).aux

        return devices.spread(of_device, state, x, by_example=True)

    if compiled:
        own = jax.jit(own)
        on_devices = jax.jit(on_devices, static_argnums=0)

    def step(state: State, data: Any) -> Tuple[Any, State]:
        trained, others = state
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        x = arrays(x)
        if not has_size():
            outputs, others = own(state, x)
            return outputs, (trained, others)
        if devices.are_several():
            return on_devices(cut.now(), state, x), state

        def of_micro_batch(x: Batch) -> Any:
            nonlocal others
            outputs, others = own((trained, others), x)
            return outputs

        outputs = predicted.in_turns(of_micro_batch, x, cut, ENGINE)
        return outputs, (trained, others)

    return step

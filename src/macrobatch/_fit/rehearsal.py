"""Steps that write nothing, on few examples, to find out what a size takes."""

from typing import Any, Callable, Optional

import tensorflow as tf

from macrobatch._fit.steps import Steps
from macrobatch._tensorflow import graph
from macrobatch._types import Batch


class Rehearsal:
    """The train step of a model up to where it would write, traced once."""

    def __init__(self, steps: Steps):
        self._steps = steps
        self._function: Optional[Callable[[Batch], Any]] = None

    def __call__(self, rows: Batch) -> None:
        """Runs some examples, on one device. Replicas do not meet."""
        function = self._function
        if function is None:
            function = self._steps.rehearse
            if not self._steps.model.run_eagerly:
                specs = graph.specs_of(rows, any_size=True)
                function = tf.function(function, input_signature=[specs], autograph=False)
            self._function = function
        function(rows)

    def of_update(self) -> int:
        """About the bytes that an optimizer takes beyond gradients, while it writes."""
        weights = [variable.value for variable in self._steps.model.trainable_weights]
        return 2 * sum(weight.shape.num_elements() * weight.dtype.size for weight in weights)

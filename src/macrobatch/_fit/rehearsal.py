"""Steps that write nothing, on few examples, to find out what a size takes."""

from typing import Any, Callable, Dict, List

import tensorflow as tf

from macrobatch._fit.steps import Steps
from macrobatch._tensorflow import graph
from macrobatch._types import Batch


class Rehearsal:
    """The train step of a model up to where it would write, traced once for each kind of batch."""

    def __init__(self, steps: Steps):
        self._steps = steps
        self._functions: Dict[Any, Callable[[List[Any]], Any]] = {}

    def __call__(self, rows: Batch) -> None:
        """Runs some examples, on one device. Replicas do not meet."""
        if self._steps.model.run_eagerly:
            self._steps.rehearse(rows)
            return
        # None has no place in a signature.
        there = [leaf for leaf in tf.nest.flatten(rows) if leaf is not None]
        absent = tf.nest.map_structure(lambda leaf: leaf is None, rows)
        specs = graph.specs_of(there, any_size=True)
        key = (repr(absent), *specs)
        if key not in self._functions:

            def rehearse(there: List[Any]) -> Any:
                leaves = iter(there)
                return self._steps.rehearse(
                    tf.nest.map_structure(lambda gone: None if gone else next(leaves), absent)
                )

            function = tf.function(rehearse, input_signature=[specs], autograph=False)
            self._functions[key] = function
        self._functions[key](there)

    def of_update(self) -> int:
        """About the bytes that an optimizer takes beyond gradients, while it writes."""
        weights = [variable.value for variable in self._steps.model.trainable_weights]
        return 2 * sum(weight.shape.num_elements() * weight.dtype.size for weight in weights)

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
        flat = tf.nest.flatten(rows)
        absent = [leaf is None for leaf in flat]
        there = [leaf for leaf in flat if leaf is not None]  # None has no place in a signature.
        specs = graph.specs_of(there, any_size=True)
        places = tf.nest.map_structure(lambda leaf: leaf is None, rows)
        key = (repr(places), *specs)
        if key not in self._functions:

            def rehearse(there: List[Any]) -> Any:
                leaves = iter(there)
                full = [None if is_none else next(leaves) for is_none in absent]
                return self._steps.rehearse(tf.nest.pack_sequence_as(places, full))

            function = tf.function(rehearse, input_signature=[specs], autograph=False)
            self._functions[key] = function
        self._functions[key](there)

    def of_update(self) -> int:
        """About the bytes that an optimizer takes beyond gradients, while it writes."""
        weights = [variable.value for variable in self._steps.model.trainable_weights]
        return 2 * sum(weight.shape.num_elements() * weight.dtype.size for weight in weights)

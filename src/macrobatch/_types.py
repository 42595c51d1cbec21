"""The names of what passes between the rooms. Runs on TensorFlow 1.14 too, and needs none of it."""

from typing import Any, Optional, Tuple

# A value of the backend: an array that is there, or a symbolic one in a graph.
Tensor = Any
# A Keras variable or a tf.Variable.
Variable = Any
# None where a loss does not depend on a variable; a tf.IndexedSlices for some rows of a table.
Gradient = Optional[Tensor]
# A condition and what to say if it is false.
Check = Tuple[Any, str]

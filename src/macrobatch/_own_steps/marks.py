"""What each tensor in the trace of a step depends on."""

from typing import Any, Dict, FrozenSet, List

import tensorflow as tf

from macrobatch import _loop_checks
from macrobatch._tensorflow.trace import operations_of
from macrobatch._types import Tensor

# What a tensor may depend on: the examples, and these tuples:
# ("gradient", place): a gradient; ("applied", n): weights updated after n gradients;
# ("state", id): what a metric's variable holds before the step;
# ("metric", n, id): what it holds after n gradients.
Marks = FrozenSet[Any]
NONE: Marks = frozenset()
EXAMPLES = "examples"

# Operations that write a variable of TensorFlow.
WRITING = ("Assign", "ResourceScatter", "ResourceApply", "ResourceSparseApply")
# Those that know only how large a tensor is, that may divide a sum by that, and that put examples
# together: along an axis, or always.
SIZES = ("Shape", "ShapeN", "Size", "Rank")
SCALING = ("Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan", "Xdivy")
REDUCING = ("Sum", "Mean", "Prod", "Max", "Min", "EuclideanNorm")
MIXING = ("Segment", "UnsortedSegment", "SparseSegment")


class Flow:
    """What each tensor of a graph depends on."""

    def __init__(self, graph: Any, marks: Dict[str, Marks]):
        self.graph = graph
        self._of: Dict[str, Marks] = {}
        self._by_value: Dict[str, bool] = {}  # whether it depends on more than their number
        for operation in graph.get_operations():  # in an order in which inputs come first
            found = marks.get(operation.name, NONE)
            for each in operation.inputs:
                found = found | self._of[each.op.name]
            if _is_another_size(operation, marks):
                found = found - {EXAMPLES}
            self._of[operation.name] = found
            self._by_value[operation.name] = operation.type not in SIZES and (
                EXAMPLES in marks.get(operation.name, NONE)
                or any(self._by_value[each.op.name] for each in operation.inputs)
            )

    def of(self, nest: Any) -> Marks:
        """The marks that some tensors of a nest depend on. Others than of the graph have none."""
        flat = tf.nest.flatten(nest, expand_composites=True)
        here = [t for t in flat if tf.is_tensor(t) and getattr(t, "graph", None) is self.graph]
        return NONE.union(*(self._of[tensor.op.name] for tensor in here))

    def writes_variables(self) -> List[str]:
        """The names of TensorFlow variables that operations of the graph write."""
        names = {id(v.handle): v.name for v in self.graph.variables}
        outside = {id(inner): names.get(id(outer)) for outer, inner in self.graph.captures}
        found = [o for o in self.graph.get_operations() if o.type.startswith(WRITING)]
        return [str(outside.get(id(o.inputs[0])) or o.name) for o in found if len(o.inputs) > 1]

    def is_sum(self, target: Any) -> bool:
        """Whether a number is the sum of values of the examples, maybe times a constant.

        The gradient of such a number is that of the values, which the tape sums. A division by the
        number of examples makes a mean of it.
        """
        operation = getattr(target, "op", None) if EXAMPLES in self.of(target) else None
        while operation is not None and operation.type in (*SCALING, "Neg", "Cast", "Identity"):
            of_examples = [each for each in operation.inputs if EXAMPLES in self.of(each)]
            operation = of_examples[0].op if len(of_examples) == 1 else None
        if operation is None or operation.type != "Sum":
            return False
        values, axes = operation.inputs
        axes, rank = tf.get_static_value(axes), values.shape.rank
        if axes is None or not rank or values.shape[0] is not None:
            return False
        return 0 in axes % rank and not self._mixes_examples(values)

    def _mixes_examples(self, tensor: Tensor) -> bool:
        """Whether examples come together in a tensor, or their number scales it, or any number that
        depends on them.
        """
        seen, ahead = set(), [tensor.op]
        while ahead:
            operation = ahead.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            of_examples = [each for each in operation.inputs if EXAMPLES in self.of(each)]
            if operation.type in SCALING and any(
                each.shape.rank == 0 or not self._by_value[each.op.name] for each in of_examples
            ):
                return True
            if not self._by_value[operation.name]:
                continue
            if operation.type.startswith(MIXING) or _is_along_examples(operation):
                return True
            # With two sizes that are not known, nobody can tell which is that of the examples.
            if any(
                each.shape.rank is None or list(each.shape).count(None) > 1
                for each in operation.outputs
            ):
                return True
            ahead += [each.op for each in operation.inputs]
        return False

    def draws_anew(self) -> bool:
        """Whether tf.random is used, which draws other numbers whenever it runs."""
        return bool(_loop_checks.drawing_anew(operations_of(self.graph)))


def _is_another_size(operation: Any, marks: Dict[str, Marks]) -> bool:
    """Whether an operation takes a size of what the step is given that is no number of examples."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    # Of anything else, examples may lie along another axis.
    if EXAMPLES not in marks.get(operation.inputs[0].op.inputs[0].op.name, NONE):
        return False
    begin, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape[0]
    return begin is not None and rank is not None and bool((begin % rank != 0).all())


def _is_along_examples(operation: Any) -> bool:
    """Whether an operation reduces along the first axis, or nobody knows along which."""
    if operation.type not in REDUCING:
        return False
    axes, rank = tf.get_static_value(operation.inputs[1]), operation.inputs[0].shape.rank
    return axes is None or not rank or bool((axes % rank == 0).any())

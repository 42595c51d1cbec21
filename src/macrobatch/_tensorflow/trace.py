"""A step as a function of tensors, traced once. The loop calls that trace, counting uses a part of
it, and the trial of sequences calls it once more.
"""

from typing import Any, Callable, List, Sequence, Set

import tensorflow as tf


class Traced:
    """A function, traced for arguments like some tensors or their types and shapes.

    Attributes:
        result: what the function returned, with symbolic tensors.
    """

    def __init__(self, function: Callable[..., Any], *like: Any):
        self._like = like
        self.result: Any = None

        def of_tensors(*tensors: Any) -> List[Any]:
            self.result = function(*packed(like, tensors))
            return tensors_of(self.result)

        specs = [
            leaf if isinstance(leaf, tf.TensorSpec) else tf.TensorSpec.from_tensor(leaf)
            for leaf in tensors_of(like)
        ]
        traced = tf.function(of_tensors, autograph=False)
        self._concrete = traced.get_concrete_function(*specs)

    def __call__(self, *arguments: Any) -> Any:
        """What the function returns for these arguments."""
        return packed(self.result, self._concrete(*tensors_of(arguments)))

    def compiled(self) -> Callable[..., Any]:
        """The function, compiled by XLA by itself: for each shape of its arguments."""
        call = tf.function(lambda *t: self._concrete(*t), autograph=False, jit_compile=True)
        return lambda *arguments: packed(self.result, call(*tensors_of(arguments)))

    def only(self, of: Callable[[Any], Any]) -> Callable[..., Any]:
        """The function with only those operations that some of its results depend on.

        A tf.function keeps every operation that may fail. Where shapes are not known, TensorFlow
        asserts them of predictions, which would be made for the sake of it.

        Args:
            of: takes from the function's result what is wanted.
        """
        wanted = of(self.result)
        # Not the outputs of the tf.function: they wait for everything that may fail.
        outputs = tensors_of(wanted)
        whole = self._concrete.graph.as_graph_def()
        left = _ancestors(whole, [tensor.op.name for tensor in outputs])
        graph = tf.compat.v1.GraphDef(library=whole.library, versions=whole.versions)
        graph.node.extend(node for node in whole.node if node.name in left)
        captured = self._concrete.captured_inputs

        def call(*arguments: Any) -> Any:
            given = [*tensors_of(arguments), *captured]
            here = tf.compat.v1.get_default_graph()
            inputs = {
                inner.name: here.capture(value)
                for inner, value in zip(self._concrete.inputs, given)
                if inner.op.name in left
            }
            results = tf.graph_util.import_graph_def(graph, inputs, [t.name for t in outputs])
            return packed(wanted, results)

        return call

    def operations(self) -> Set[str]:
        """The types of all operations in the function, and in functions that it calls."""
        return operations_of(self._concrete.graph)

    def needs(self, of: Callable[[Any], Any], argument: int) -> List[bool]:
        """For each tensor of an argument, whether some of the results depend on it."""
        before = len(tensors_of(self._like[:argument]))
        own = self._concrete.inputs[before : before + len(tensors_of(self._like[argument]))]
        wanted = [tensor.op.name for tensor in tensors_of(of(self.result))]
        left = _ancestors(self._concrete.graph.as_graph_def(), wanted)
        return [tensor.op.name in left for tensor in own]


def operations_of(graph: Any) -> Set[str]:
    """The types of all operations in a graph, and in functions that it calls."""
    whole = graph.as_graph_def()
    inner = [node for function in whole.library.function for node in function.node_def]
    return {node.op for node in [*whole.node, *inner]}


def _ancestors(graph: Any, names: List[str]) -> Set[str]:
    """The names of all operations that some operations depend on, and their own."""
    inputs = {node.name: node.input for node in graph.node}
    found: Set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [each.partition(":")[0].lstrip("^") for each in inputs[name]]
    return found


def tensors_of(nest: Any) -> List[Any]:
    """The dense tensors of a nest with None, ragged and sparse tensors in it."""
    leaves = tf.nest.flatten(nest, expand_composites=True)
    return [leaf for leaf in leaves if leaf is not None]


def packed(like: Any, tensors: Sequence[Any]) -> Any:
    """A nest like another one, with these dense tensors."""
    remaining = iter(tensors)
    leaves = tf.nest.flatten(like, expand_composites=True)
    leaves = [None if leaf is None else next(remaining) for leaf in leaves]
    return tf.nest.pack_sequence_as(like, leaves, expand_composites=True)

"""TensorFlow as an engine: what it offers to the Keras arithmetic and to the batches."""

from typing import Any, Callable, List, Tuple

import tensorflow as tf

from macrobatch._engine import BatchEngine
from macrobatch._tensorflow import graph, leaves, replicas
from macrobatch._types import Batch, Check, Size, Tensor


class TensorFlow(BatchEngine):
    """TensorFlow, eager or in a graph, on one replica or several."""

    def replicas(self) -> int:
        return replicas.count() if replicas.in_several() else 1

    def read(self, value: Any) -> Tensor:
        return tf.convert_to_tensor(replicas.own_part(value))

    def sum_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        return replicas.sum_over_replicas(values)

    def from_first_replica(self, values: List[Tensor]) -> List[Tensor]:
        return replicas.from_first_replica(values)

    def max_over_replicas(self, values: List[Tensor]) -> List[Tensor]:
        return replicas.max_over_replicas(values)

    def on_first_replica(self, value: Tensor) -> Tensor:
        return replicas.on_first_replica(value)

    def checked(self, values: Tensor, *checks: Check) -> Tensor:
        return graph.checked(values, *checks)

    def examples(self, micro_batch: Batch) -> Size:
        sizes = [leaves.examples_of(t) for t in tf.nest.flatten(micro_batch) if t is not None]
        # A ragged or sparse tensor may not know what a dense one beside it does.
        known = [size for size in sizes if isinstance(size, int)]
        return known[0] if known else sizes[0]

    def with_other_size(self, function: Callable[[Batch], Any], micro_batch: Batch) -> Any:
        found = []

        def traced(micro_batch: Batch) -> None:
            found.append(function(micro_batch))

        specs = graph.specs_of(micro_batch, any_size=True)
        tf.function(traced, autograph=False).get_concrete_function(specs)
        return found[0]

    def is_traced(self, value: Any) -> bool:
        return bool(tf.is_tensor(value) and tf.is_symbolic_tensor(value))

    def examples_of(self, leaf: Tensor) -> Size:
        return leaves.examples_of(leaf)

    def slice_of(self, leaf: Tensor, start: Size, size: Size, static: bool) -> Tensor:
        return leaves.slice_of(leaf, start, size, static)

    def concatenated(self, leaves_of_batches: List[Tensor]) -> Tensor:
        return leaves.concatenated(leaves_of_batches)

    def gradients_of(
        self, function: Callable[[List[Tensor]], List[Tensor]], tensors: List[Tensor]
    ) -> List[List[Tensor]]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(tensors)
            numbers = function(tensors)
        zero = tf.UnconnectedGradients.ZERO
        return [tape.gradient(n, tensors, unconnected_gradients=zero) for n in numbers]

    def has_static_sizes(self) -> bool:
        return graph.in_xla()

    def unknown(self, number: Size) -> Tensor:
        return graph.unknown(number)

    def agreed_size(
        self, batch: Batch, sizes: List[Size], least: int, uneven: str, empty: str
    ) -> Tuple[Batch, Size]:
        return graph.agreed_size(batch, sizes, least, uneven, empty)

    def is_eager(self) -> bool:
        return tf.executing_eagerly()

    def kind_of(self, leaf: Tensor) -> str:
        return leaves.kind_of(leaf)

    def widest(self, batch: Batch) -> List[int]:
        return list(dict.fromkeys(int(example) for example in leaves.widest(batch)))

    def in_order(self, leaf: Tensor, order: Tensor) -> Tensor:
        return leaves.in_order(leaf, order)

    def taken(self, leaf: Tensor, order: Tensor, start: Size, end: Size) -> Tensor:
        return leaves.taken(leaf, order, start, end)

    def permuted(self, leaf: Tensor, rows: Tensor) -> Tensor:
        return leaves.permuted(leaf, rows)

    def rearranged(self, leaf: Tensor, axis: int, places: Tensor) -> Tensor:
        return tf.gather(leaf, places, axis=axis, batch_dims=1)

    def shortened(self, leaf: Tensor, axis: int, length: Size, exactly: bool) -> Tensor:
        return leaves.shortened(leaf, axis, length, exactly)

    def lengthened(self, leaf: Tensor, axis: int, size: Size) -> Tensor:
        return leaves.lengthened(leaf, axis, size)

    def lengths_of(self, leaf: Tensor, axis: int) -> Tensor:
        if leaves.kind_of(leaf) == "ragged":
            return leaves.row_lengths(leaf, axis)
        return leaves.last_positions(leaf, axis)

    def spec(self, leaf: Tensor, shape: Any) -> Any:
        if not isinstance(leaf, tf.Tensor):
            return tf.type_spec_from_value(leaf)
        return tf.TensorSpec(shape, leaf.dtype)

    def on_host(self) -> Any:
        return tf.device("CPU:0")


ENGINE = TensorFlow()

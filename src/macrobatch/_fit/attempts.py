"""Batches that are taken one by one, in Python, so that a batch can be run again.

Keras takes batches inside of its graph. A batch whose step fails there is gone.
"""

from typing import Any, Callable, Dict, Iterator

import tensorflow as tf

from macrobatch._types import Batch, Logs

# Runs a function of a batch on a batch, as often as it takes.
Attempt = Callable[[Callable[[Batch], Logs], Batch], Logs]


def nested(outer: Attempt, inner: Attempt) -> Attempt:
    """An attempt each of whose runs is an attempt."""

    def attempt(run: Callable[[Batch], Logs], batch: Batch) -> Logs:
        return outer(lambda part: inner(run, part), batch)

    return attempt


class OneByOne:
    """A train or test function of Keras, on batches that are taken one by one.

    A function that Keras makes takes batches from any iterator. From one that is no iterator of
    TensorFlow it takes them in Python, and runs the graph of a single step.
    """

    def __init__(
        self,
        function: Callable[[Iterator[Batch]], Logs],
        steps: int,
        is_eager: bool,
        attempt: Attempt,
        variant: Callable[[], Any] = lambda: None,
    ):
        """Prepares a function.

        Args:
            function: what Keras made.
            steps: of how many batches Keras wants to hear at a time: `steps_per_execution`.
            is_eager: whether steps run outside of graphs.
            attempt: runs a step on a batch, again if need be.
            variant: gives what graphs are made for, beside the types of batches.
        """
        self._function, self._steps, self._attempt = function, steps, attempt
        self._is_eager, self._variant = is_eager, variant
        self._next = tf.function(lambda iterator: iterator.get_next(), autograph=False)
        self._graphs: Dict[Any, Callable[[Batch], Logs]] = {}

    def __call__(self, iterator: Any) -> Logs:
        """Runs the next batches. Raises StopIteration if there is none."""
        logs = None

        def run(batch: Batch) -> Logs:
            return self._runner(iterator)(batch)

        for _ in range(self._steps):
            try:
                batch = self._taken(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
            logs = self._attempt(run, tf.nest.map_structure(_or_none, batch))
        if logs is None:
            raise StopIteration
        return logs

    def _taken(self, iterator: Any) -> Batch:
        """The next batch. Outside of a graph, replicas would start threads for each of them."""
        if self._is_eager or not isinstance(iterator, tf.distribute.DistributedIterator):
            return next(iterator)
        return self._next(iterator)

    def _runner(self, iterator: Any) -> Callable[[Batch], Logs]:
        kinds = (tf.data.Iterator, tf.distribute.DistributedIterator)
        if self._is_eager or not isinstance(iterator, kinds):
            return self._run
        # Batches have sizes of their own, and would be traced one by one.
        spec = iterator.element_spec
        key = (self._variant(), *tf.nest.flatten(spec, expand_composites=True))
        if key not in self._graphs:
            usual = tf.function(self._run, input_signature=[spec], autograph=False)
            # An attempt may run a part of a batch, where all batches have the same size.
            other = tf.function(self._run, reduce_retracing=True, autograph=False)
            self._graphs[key] = lambda batch: (usual if _fits(spec, batch) else other)(batch)
        return self._graphs[key]

    def _run(self, batch: Batch) -> Logs:
        return self._function(iter([batch]))


def _or_none(leaf: Any) -> Any:
    """A part of a batch. Keras makes an Optional of None that a generator yields."""
    return None if isinstance(leaf, tf.experimental.Optional) else leaf


def _fits(spec: Any, batch: Batch) -> bool:
    """Whether a batch is of these types and shapes."""
    flat = [tf.nest.flatten(nest, expand_composites=True) for nest in (spec, batch)]
    return len(flat[0]) == len(flat[1]) and all(
        each.is_compatible_with(leaf) for each, leaf in zip(*flat)
    )

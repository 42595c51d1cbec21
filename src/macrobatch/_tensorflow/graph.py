"""Now, in a graph, or in a graph that XLA compiles: what differs between the three stands here.
Runs on TensorFlow 1.14 too.
"""

import contextlib
from typing import Any, Callable, ContextManager, Iterator, List, Tuple

import tensorflow as tf

from macrobatch import _internals


def in_xla() -> bool:
    """Whether the graph being traced will be compiled by XLA."""
    if tf.executing_eagerly():
        return False
    return _internals.is_in_xla(tf.compat.v1.get_default_graph())


# How a refusal is found again in the message of a graph's error.
REFUSAL = "macrobatch refuses: "


def refuse_unless(*checks: Tuple[Any, str]) -> ContextManager[Any]:
    """Raises a ValueError now, or lets the graph raise one when it runs.

    Args:
        *checks: pairs of a condition, which may be a tensor, and what to say if it is false.

    Returns:
        A context. In a graph, operations made in it run only if all conditions hold. (XLA drops
        assertions.)
    """
    assertions = []
    for condition, message in checks:
        if tf.is_tensor(condition) and not tf.executing_eagerly():
            assertions.append(tf.debugging.Assert(condition, [REFUSAL + message]))
        elif not condition:
            raise ValueError(message)
    return tf.control_dependencies(assertions)


def checked(values: Any, *checks: Tuple[Any, str]) -> Any:
    """The values, once all conditions are known to hold."""
    with refuse_unless(*checks):
        return tf.identity(values)


@contextlib.contextmanager
def refusals_as_value_errors() -> Iterator[None]:
    """Lets what a graph refuses be the error that it is in eager mode."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        refusals = [line for line in error.message.splitlines() if REFUSAL in line]
        if not refusals:
            raise
        message = refusals[0].partition(REFUSAL)[2].rpartition("]")[0]
        raise ValueError(message.replace("\\'", "'").replace('\\"', '"')) from None


def when(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any] = tf.no_op) -> Any:
    """Calls one of two functions, now or in the graph. What it returns is there afterwards."""
    if tf.executing_eagerly():
        (then if condition else otherwise)()
        return tf.constant(True)

    def branch(function: Callable[[], Any]) -> Any:
        function()
        return tf.constant(True)

    return tf.cond(condition, lambda: branch(then), lambda: branch(otherwise))


def to_tensors(batch: Any) -> Any:
    """The batch with arrays as tensors; None, ragged and sparse tensors stay as they are."""
    return tf.nest.map_structure(
        lambda leaf: leaf if leaf is None or tf.is_tensor(leaf) else tf.convert_to_tensor(leaf),
        batch,
    )


def specs_of(batch: Any, any_size: bool = False) -> Any:
    """The types and shapes of a batch; if `any_size`, of any number of examples.

    A batch of types and shapes will do.
    """

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        found = leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)
        if not any_size:
            return found
        shape = [None, *found.shape[1:]]
        if isinstance(found, tf.RaggedTensorSpec):
            splits = found.row_splits_dtype
            return tf.RaggedTensorSpec(shape, found.dtype, found.ragged_rank, splits)
        return type(found)(shape, found.dtype)

    leaves_are_types = any(isinstance(leaf, tf.TypeSpec) for leaf in tf.nest.flatten(batch))
    return tf.nest.map_structure(spec, batch if leaves_are_types else to_tensors(batch))


def unknown(number: Any) -> Any:
    """A number that a trace does not know."""
    if tf.executing_eagerly():
        return number
    return tf.compat.v1.placeholder_with_default(number, [])


def agreed_size(
    batch: Any, sizes: List[Any], least: int, uneven: str, empty: str
) -> Tuple[Any, Any]:
    """The batch, and the one size that all parts of the batch have; an int if one part knows.

    Args:
        batch: a nest of tensors.
        sizes: their numbers of examples.
        least: the smallest that is allowed.
        uneven: what to say if sizes differ.
        empty: what to say if the size is too small.
    """
    known = [size for size in sizes if isinstance(size, int)]
    unknown_ones = [size for size in sizes if not isinstance(size, int)]
    first = known[0] if known else unknown_ones[0]
    if not unknown_ones:
        return batch, first
    if in_xla():
        # XLA drops assertions. It does refuse, before anything runs, to give a tensor a shape of
        # another size, or to take the first of no elements; its message shows the name.
        for size in unknown_ones:
            ones = tf.ones([first], tf.bool)
            first = tf.size(tf.reshape(ones, [size], name="parts_of_a_batch_differ_in_examples"))
        if least:
            first *= tf.size(tf.slice(tf.ones([first]), [0], [1], name="a_batch_is_empty"))
        return batch, known[0] if known else first
    equal = [(tf.equal(size, first), uneven) for size in unknown_ones]
    with refuse_unless(*equal, (tf.greater_equal(first, least), empty)):
        batch = tf.nest.map_structure(
            lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf, batch
        )
        return batch, known[0] if known else tf.identity(first)


def with_refusals(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a graph whose refusals are ValueErrors."""

    def refusing(*args: Any) -> Any:
        with refusals_as_value_errors():
            return function(*args)

    return refusing

"""What a step of a user's calls, and who answers: the parts of TensorFlow and Keras whose meaning
depends on the batch. While a step runs in a mode, the mode is asked instead.
"""

import contextlib
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Sequence

import keras
import tensorflow as tf

from macrobatch import _internals
from macrobatch._keras.scope import unique
from macrobatch._own_steps import checks, patches
from macrobatch._tensorflow import replicas
from macrobatch._types import Size, Tensor, Variable


class Mode:
    """How a step runs. Each method gets the function that it stands in for.

    Attributes:
        gradients: what the step has been given as gradients of variables, so far.
    """

    def __init__(self) -> None:
        self.gradients: List[Any] = []

    def gradient(
        self,
        plain: Callable[..., Any],
        tape: tf.GradientTape,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        **options: Any,
    ) -> Any:
        """Stands in for `tape.gradient`."""
        flat = tf.nest.flatten(sources)
        ask = (
            self.gradient_of_variables if any(map(is_variable, flat)) else self.gradient_of_tensors
        )
        arguments = (tape, target, tf.nest.map_structure(_raw, sources), output_gradients)
        return ask(lambda *given: plain(*given, **options), *arguments)

    def gradient_of_variables(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        """A gradient with respect to variables: that of the whole batch."""
        raise NotImplementedError

    def gradient_of_tensors(
        self, plain: Any, tape: Any, target: Any, sources: Any, output_gradients: Any
    ) -> Any:
        """A gradient with respect to tensors of the micro-batch."""
        raise NotImplementedError

    def jacobian(
        self, plain: Any, tape: Any, target: Any, sources: Any, *args: Any, **kw: Any
    ) -> Any:
        """Stands in for `tape.jacobian`."""
        checks.no_jacobian(any(map(is_variable, tf.nest.flatten(sources))))
        return plain(tape, target, sources, *args, **kw)

    def apply(self, plain: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Stands in for `optimizer.apply`."""
        raise NotImplementedError

    def update_state(self, plain: Any, metric: Any, values: Any, sample_weight: Any = None) -> Any:
        """Stands in for `update_state` of keras.metrics.Mean and keras.metrics.Sum."""
        raise NotImplementedError

    def loss(
        self, plain: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
    ) -> Any:
        """Stands in for the call of a Keras loss."""
        raise NotImplementedError

    def wrote(self, variable: Any, value: Tensor) -> Tensor:
        """What a variable reads as, once the step has assigned a value to it in a scope."""
        return value


@contextlib.contextmanager
def running(mode: Optional[Mode]) -> Iterator[None]:
    """Lets a mode answer what is called in this thread; None: everything is as it is plainly."""
    with contextlib.ExitStack() as stack:
        for patch in patches.ALL:
            stack.enter_context(patch(mode))
        yield


def plainly() -> ContextManager[None]:
    """A context in which no mode answers."""
    return running(None)


def is_variable(source: Any) -> bool:
    """Whether a source of a gradient is a variable, of Keras or of TensorFlow."""
    return isinstance(source, (keras.Variable, tf.Variable))


def _raw(source: Any) -> Any:
    """The TensorFlow variable behind a variable. In a scope Keras would give its value."""
    return _internals.raw_value(source) if isinstance(source, keras.Variable) else source


def weighted(
    target: Any, output_gradients: Any, share: Tensor, per_example: Sequence[bool]
) -> Optional[List[Tensor]]:
    """The gradients to start with, so that what comes out is the part in the whole batch.

    A value for each example is summed by the tape, over all micro-batches too. Anything else is a
    mean over the examples, and counts by the share of the micro-batch. The weights come before the
    backward pass, so that float16 gradients have the size that they have in the whole batch.
    """
    targets = tf.nest.flatten(target)
    given = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
    if output_gradients is None and all(per_example):
        return None
    started = []
    for value, start, is_sum in zip(targets, given, per_example):
        start = tf.ones_like(value) if start is None else tf.convert_to_tensor(start)
        started.append(start if is_sum else start * tf.cast(share, start.dtype))
    return started


def share_of(own: Size, whole: Size) -> Tensor:
    """The part of the whole that is in a micro-batch, as a number of 64 bits."""
    return tf.math.divide_no_nan(tf.cast(own, tf.float64), tf.cast(whole, tf.float64))


def variables_of(optimizer: Any, given: Any) -> List[Variable]:
    """The variables that a call of an optimizer is about."""
    return list(_internals.variables_of_optimizer(optimizer) if given is None else given)


def updated_by(optimizer: Any, variables: List[Variable]) -> List[Variable]:
    """What a call of an optimizer changes that a step may read: also the number of updates."""
    inner = _internals.with_inner_optimizers(optimizer)
    return unique([*variables, *(each.iterations for each in inner)])


def read(variable: Any) -> Tensor:
    """What a variable holds now, outside of any scope: in a replica, its part."""
    return tf.convert_to_tensor(replicas.tf_variable(_raw(variable)))

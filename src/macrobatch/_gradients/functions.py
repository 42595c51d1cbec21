"""Functions of the user's: how they are converted, tried and run, and what is said of them."""

import contextlib
from typing import Any, Callable, Iterator, List

import tensorflow as tf

from macrobatch import _checks, _internals
from macrobatch._keras import checks as keras_checks
from macrobatch._keras import stateless
from macrobatch._keras.scope import Written
from macrobatch._tensorflow import replicas
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.parts import after
from macrobatch._types import Batch, Gradient, names


def converted(function: Callable[..., Any], status: Any) -> Callable[..., Any]:
    """A user's function as a tf.function would trace it."""
    if tf.executing_eagerly():
        return function

    # A function that was made inside a tf.function is converted already, but what it calls is only
    # converted where converted code calls it, as this will be.
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return _internals.autograph_converted(call, status)


def dry_run(function: Callable[[Any], Any], trained: List[Any], like: Batch) -> None:
    """Traces the function into a graph that is thrown away."""
    written = Written([], trained, ENGINE)

    def run(micro_batch: Batch) -> None:
        stateless.run(lambda: function(micro_batch), written, [], alone=True)

    tf.function(run, autograph=False).get_concrete_function(like)


def synchronized(written: Written) -> List[str]:
    """The names of layers in which replicas meet."""
    if not replicas.in_several():
        return []
    return [layer.name for layer in written.normalizing if layer.synchronized]


def warn(written: Written) -> None:
    """Warns of layers that cannot equal the whole batch, once."""
    if written.normalizing:
        layers = names(written.normalizing), names(written.decaying)
        for message in keras_checks.inexact(*layers):
            _checks.warn_once(written.normalizing[0], message)


def shows_size(written: Written) -> bool:
    """Whether the size of micro-batches shows in what a function came to."""
    return bool(written.normalizing) or written.drew or written.dropped


@contextlib.contextmanager
def tried(
    values: Any, check: Callable[[], Any]
) -> Iterator[Callable[[List[Gradient]], List[Gradient]]]:
    """A context in which a function has been tried. Nothing is written while it is.

    Args:
        values: what is there before.
        check: makes the trial, and returns what is there after it.

    Yields:
        A function of gradients that gives them back, once the trial has been made.
    """
    with after(values):
        done = check()

    def waiting(gradients: List[Gradient]) -> List[Gradient]:
        if not tf.is_tensor(done):
            return gradients
        return [None if gradient is None else tf.identity(gradient) for gradient in gradients]

    with after((values, done)):
        yield waiting

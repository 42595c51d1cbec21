"""The functions that Keras makes of the steps: what they refuse, and batches that run again."""

import contextlib
from typing import Any, Callable, Dict, Optional

import tensorflow as tf

from macrobatch._fit.attempts import Attempt, OneByOne, nested
from macrobatch._fit.auto import Auto
from macrobatch._fit.finite import Finite
from macrobatch._fit.steps import Steps
from macrobatch._noise.meter import Meter
from macrobatch._own_steps.early import Undo
from macrobatch._tensorflow import graph, progress, replicas


class Functions(Steps):
    """Steps, and the functions that Keras makes of them.

    Attributes, beside those of the steps:
        auto: what finds the size of micro-batches, if asked for.
        finite: what runs batches without examples that are not finite.
    """

    auto: Optional[Auto]
    finite: Finite
    _own: Dict[str, Any]

    def meter(self, every: int, decay: float) -> Meter:
        """What can measure the gradient noise scale of this model."""
        return Meter(self.strategy, every, decay)

    def made(self, name: str, force: bool) -> Callable[..., Any]:
        """A function that Keras makes, whose refusals are ValueErrors.

        Keras compiles it as a whole, unless its steps are compiled. Where a batch may have to run
        again, batches are taken one by one.
        """
        model, auto = self.model, self.auto
        steps, training = model.steps_per_execution, name == "make_train_function"
        if auto is not None:
            auto.compiles = bool(model.jit_compile) and not self.compiles_steps()
        made = self._of_each_kind(name, force)
        attempt = self._attempt(training)
        if attempt is not None:
            made = OneByOne(made, steps, model.run_eagerly, attempt, self._kind)

        def function(iterator: Any) -> Any:
            # Updates that are timed, to find a size, must all do the same.
            is_timed = auto is not None and not auto.is_settled
            turn = self.noise.taking(steps, is_timed) if training else contextlib.nullcontext()
            with turn, graph.refusals_as_value_errors():
                try:
                    with progress.reported(self.progress if training else None):
                        return made(self._shared_out(iterator))
                except tf.errors.InvalidArgumentError as error:
                    explained = self.padding.diagnosed(error)
                    if explained is error:
                        raise
                    raise explained from error

        return function

    def _kind(self) -> Any:
        """What a graph is made for, beside its batches."""
        return self.noise.measures, None if self.auto is None else self.auto.variant()

    def _of_each_kind(self, name: str, force: bool) -> Callable[..., Any]:
        """A function of which there is one of each kind, made when it is first needed."""
        first = self._made_by_keras(name, force)
        functions: Dict[Any, Callable[..., Any]] = {}

        def function(iterator: Any) -> Any:
            kind = self._kind()
            if kind not in functions:
                functions[kind] = self._made_by_keras(name, True) if functions else first
            return functions[kind](iterator)

        return function

    def _made_by_keras(self, name: str, force: bool) -> Callable[..., Any]:
        model, kept = self.model, name.replace("make_", "")
        before, compiles = getattr(model, kept), model.jit_compile
        if self.compiles_steps():
            model.jit_compile = False
        try:
            getattr(type(model), name)(model, force=force)
            return getattr(model, kept)
        finally:
            model.jit_compile = compiles
            setattr(model, kept, before)

    def _shared_out(self, iterator: Any) -> Any:
        """The batches. Those of `train_on_batch` each replica would get whole."""
        kinds = (tf.data.Iterator, tf.distribute.DistributedIterator)
        if self.strategy is None or isinstance(iterator, kinds):
            return iterator
        return (replicas.shared_out(self.strategy, batch) for batch in iterator)

    def _attempt(self, training: bool) -> Optional[Attempt]:
        """What runs a batch as often as it takes; None if once is always enough."""
        auto, sizes = self.auto, None
        if auto is not None:
            can_be_again = training or "test_step" not in self._own
            sizes = auto.attempt(training) if can_be_again else auto.once
            if training and "train_step" in self._own:
                sizes = nested(sizes, Undo(self._own["train_step"].early, self.begun))
        if not training or not self.guard.is_wanted:
            return sizes
        return self.finite if sizes is None else nested(self.finite, sizes)

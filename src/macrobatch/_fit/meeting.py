"""The trial of fit() whether examples meet: once for what is compiled, after the first batch, with
some examples of that batch, outside of any graph. So one way serves all kinds of fit.
"""

from typing import Any, Callable, Iterator, List, Optional

import keras
import tensorflow as tf

from macrobatch import _checks, _internals
from macrobatch._batches.cut import Cut
from macrobatch._keras import comparison, meeting, meeting_checks
from macrobatch._keras import model as models
from macrobatch._keras.sequences import low_precision
from macrobatch._keras.tried import Tried
from macrobatch._meeting import is_cut, size_of, verdict_of
from macrobatch._tensorflow import replicas
from macrobatch._tensorflow.engine import ENGINE
from macrobatch._tensorflow.tap import Tap
from macrobatch._types import Batch


class Meeting:
    """The trial of one model.

    Attributes:
        with_losses: whether losses are tried too, and not only layers.
        is_wanted: whether there are to be trials at all.
    """

    def __init__(
        self,
        model: Any,
        cut: Cut,
        strategy: Any,
        with_losses: bool = True,
        tried: Optional[Callable[[Batch], Any]] = None,
    ):
        """Prepares a trial.

        Args:
            model: the model.
            cut: how batches are cut.
            strategy: in whose scope the model was made, or None.
            with_losses: whether losses are tried too, and not only layers.
            tried: a function of a batch that gives what is tried, if not the model: something with
                a method `found`, as Tried has, and a method `messages` of groups and a verdict.
        """
        self._model, self._cut, self._strategy = model, cut, strategy
        self.with_losses, self.is_wanted, self._tried = with_losses, True, tried
        self._tap = Tap(self._receive)
        self._rows: Optional[Batch] = None

    def start(self) -> None:
        """Lets a trial be made with the next batch."""
        self._rows = None
        if self.is_wanted:
            self._tap.open()

    def forget(self) -> None:
        """Waits for other examples, if the trial is still to be made."""
        self._rows = None

    def watching(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A function of a batch that lets the trial have its first examples."""

        @tf.autograph.experimental.do_not_convert
        def watched(data: Any) -> Any:
            # A step refuses a model that was made outside of the scope of its strategy.
            if self._strategy is not None or not tf.distribute.has_strategy():
                parts = replicas.parts_of_batch(self._strategy, data)
                self._tap(parts, 2 * (self._declared() or meeting.MOST))
            return step(data)

        return watched

    def _declared(self) -> Optional[int]:
        """The number of examples that the model says it takes, if it does."""
        sizes = [tensor.shape[0] for tensor in models.inputs_of(self._model) if tensor.shape]
        return next((size for size in sizes if size is not None), None)

    def _receive(self, rows: Batch, examples: int) -> None:
        several = self._strategy is not None and self._strategy.num_replicas_in_sync > 1
        if self._rows is None and is_cut(examples, self._cut, several):
            self._rows = rows

    def try_once(self, micro_batch_weight: Optional[Callable[..., Any]]) -> bool:
        """Makes the trial, once there are examples for it. Returns whether there was a warning."""
        if self._rows is None:
            return False
        batch = self._rows
        if self._tried is None:
            batch = keras.utils.unpack_x_y_sample_weight(batch)
        self._rows = None
        self._tap.close()
        tried: Any = Tried(self._model, ENGINE, micro_batch_weight, self.with_losses)
        if self._tried is not None:
            tried = self._tried(batch)
        messages = self._messages(tried, batch)
        for message in messages:
            _checks.warn_once(self._model, message)
        return bool(messages)

    def _messages(self, tried: Any, batch: Batch) -> List[str]:
        is_coarse = low_precision(_internals.layers_of(self._model))
        messages: List[str] = []
        for groups in self._groups(batch):
            try:
                verdict = verdict_of(tried, groups, is_coarse)
                found: List[str] = tried.messages(groups, verdict)
                return found
            except Exception as error:  # The model has been trained on a batch: that goes on.
                messages = [meeting_checks.failed(groups.size, error)]
        return messages

    def _groups(self, batch: Batch) -> Iterator[comparison.Groups]:
        """Groups of examples to try, of a size that suits the trial and of one that is trained."""
        declared, examples = self._declared(), ENGINE.examples(batch)
        sizes = [size_of(self._cut, batch), max(2, self._cut.size or 2)]
        for size in dict.fromkeys(sizes) if declared is None else [declared]:
            groups = meeting.groups(batch, examples, size, ENGINE)
            # A model that says how many examples it takes cannot be tried with fewer.
            if groups is not None and groups.size >= (declared or 0):
                yield groups

"""The trial of fit() whether examples meet: once for what is compiled, after the first batch, with
some examples of that batch, at once. For engines that have a batch in hand.
"""

from typing import Any, Callable, Iterator, List, Optional

from keras import tree

from macrobatch import _checks, _internals
from macrobatch._engine import BatchEngine
from macrobatch._keras import comparison, meeting, meeting_checks
from macrobatch._keras import model as models
from macrobatch._keras.sequences import low_precision
from macrobatch._keras.tried import Tried
from macrobatch._types import Batch


class FirstBatch:
    """The trial of one model.

    Attributes:
        is_wanted: whether there are to be trials at all.
    """

    def __init__(self, model: Any, cut: Any, with_losses: bool, engine: BatchEngine):
        """Prepares a trial.

        Args:
            model: the model.
            cut: how batches are cut: a `Cut`.
            with_losses: whether losses are tried too, and not only layers.
            engine: the backend.
        """
        self._model, self._cut, self._engine = model, cut, engine
        self._with_losses = with_losses
        self.is_wanted, self._is_done = True, False

    def start(self) -> None:
        """Lets a trial be made with the next batch."""
        self._is_done = False

    @property
    def is_due(self) -> bool:
        """Whether a trial is to be made with the next batch that is cut."""
        return self.is_wanted and not self._is_done

    def try_once(self, batch: Batch, weight: Optional[Callable[..., Any]]) -> None:
        """Makes the trial, if the batch is cut at all."""
        if not self.is_due:
            return
        examples = self._engine.examples(batch)
        if examples == 1 or (self._cut.size is not None and examples <= self._cut.size):
            return
        self._is_done = True
        most = 2 * (self._declared() or meeting.MOST)
        rows = self.rows(tree.map_structure(lambda v: None if v is None else v[:most], batch))
        tried = Tried(self._model, self._engine, weight, self._with_losses)
        for message in self._messages(tried, rows):
            _checks.warn_once(self._model, message)

    def rows(self, batch: Batch) -> Batch:
        """Some examples, where the model can run on them."""
        return batch

    def verdict(self, tried: Tried, groups: comparison.Groups, is_coarse: bool) -> meeting.Verdict:
        """What a trial shows. Nothing is changed by it, and all of its runs draw the same."""
        return meeting.find(tried, groups, self._engine, is_coarse)

    def _declared(self) -> Optional[int]:
        """The number of examples that the model says it takes, if it does."""
        sizes = [tensor.shape[0] for tensor in models.inputs_of(self._model) if tensor.shape]
        return next((size for size in sizes if size is not None), None)

    def _messages(self, tried: Tried, batch: Batch) -> List[str]:
        is_coarse = low_precision(_internals.layers_of(self._model))
        messages: List[str] = []
        for groups in self._groups(batch):
            try:
                verdict = self.verdict(tried, groups, is_coarse)
            except Exception as error:  # The model has been trained on a batch: that goes on.
                messages = [meeting_checks.failed(groups.size, error)]
                continue
            return tried.messages(groups, verdict)
        return messages

    def _groups(self, batch: Batch) -> Iterator[comparison.Groups]:
        """Groups of examples to try, of a size that suits the trial and of one that is trained."""
        declared, examples = self._declared(), self._engine.examples(batch)
        sizes = [self._size_of(batch), max(2, self._cut.size or 2)]
        for size in dict.fromkeys(sizes) if declared is None else [declared]:
            groups = meeting.groups(batch, examples, size, self._engine)
            # A model that says how many examples it takes cannot be tried with fewer.
            if groups is not None and groups.size >= (declared or 0):
                yield groups

    def _size_of(self, batch: Batch) -> int:
        """The number of examples in a micro-batch of the trial."""
        examples, tokens = self._cut.now()  # One that is found may be small for want of memory.
        size, axis = meeting.size_of(examples or meeting.MOST), self._cut.axis
        if tokens is None or axis is None:
            return size
        # Examples are as long here as the longest of the batch.
        there = [leaf for leaf in tree.flatten(batch) if leaf is not None and leaf.ndim > axis]
        longest = max([1, *(int(leaf.shape[axis]) for leaf in there)])
        return max(2, min(size, tokens // longest))

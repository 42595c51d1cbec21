"""`fit()` itself, and what goes with it: workers, sizes that are looked for, what is shown."""

from typing import Any

import tensorflow as tf

from macrobatch._fit.functions import Functions
from macrobatch._keras.installed import fit_of
from macrobatch._shown import fit as shown
from macrobatch._shown.line import Line, Place, can_show
from macrobatch._tensorflow import replicas
from macrobatch._tensorflow.progress import Progress
from macrobatch._workers import callbacks
from macrobatch._workers import checks as worker_checks


class Fitting(Functions):
    """The functions of a model, and the `fit` that calls them.

    Attributes, beside those of the functions:
        line: shows updates that take long.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.line = Line(self._place)

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """As Keras', with what goes with workers, with sizes that are looked for, and on screen."""
        call = shown.call_of(fit_of(self.model), self.model, args, kwargs)
        given = shown.arguments_of(call)
        own = given.get("callbacks")
        if replicas.has_several_workers(self.strategy):
            worker_checks.shuffles_alike(given["x"], given["shuffle"])
        if self._has_workers():
            own = callbacks.callbacks_of(self.strategy, own)
        if self.auto is not None:
            own = self.auto.callbacks(own)
            self.model.predict_function = None  # It may know no size, or another one.
        if own is not None:
            given["callbacks"] = own
        with shown.shown(given, self.model, self.line, self.cut.named):
            return fit_of(self.model)(*call.args, **call.kwargs)

    def _has_workers(self) -> bool:
        return isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def show_progress(self) -> None:
        """Lets train steps that are traced from now on say how far they are, if it can be seen."""
        if self.progress is None and self.strategy is None and can_show():
            self.progress = Progress()

    def _place(self) -> Place:
        """How far an update is."""
        return Place(0, 0) if self.progress is None else Place(*self.progress.read())

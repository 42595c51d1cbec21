"""`fit()` itself, and what goes with it: workers, sizes that are looked for, what is shown."""

import contextlib
from typing import Any

import tensorflow as tf

from macrobatch._fit.functions import Functions
from macrobatch._keras.fit_call import FitCall
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
        call = FitCall(fit_of(self.model), self.model, args, kwargs)
        if replicas.has_several_workers(self.strategy):
            worker_checks.shuffles_alike(call.get("x"), call.get("shuffle"))
        if self._has_workers():
            call.set("callbacks", callbacks.callbacks_of(self.strategy, call.get("callbacks")))
        with contextlib.ExitStack() as stack:
            if self.auto is not None:
                stack.enter_context(call.with_callback(self.auto.logged()))
                self.model.predict_function = None  # It may know no size, or another one.
            stack.enter_context(shown.shown(call, self.line, self.cut.named))
            return call.run()

    def _has_workers(self) -> bool:
        return isinstance(self.strategy, tf.distribute.MultiWorkerMirroredStrategy)

    def show_progress(self) -> None:
        """Lets train steps that are traced from now on say how far they are, if it can be seen."""
        if self.progress is None and self.strategy is None and can_show():
            self.progress = Progress()

    def _place(self) -> Place:
        """How far an update is."""
        return Place(0, 0) if self.progress is None else Place(*self.progress.read())

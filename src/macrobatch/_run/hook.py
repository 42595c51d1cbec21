"""Lets every `fit` of a script be accumulated, from the moment at which the script imports Keras.

Nothing here imports TensorFlow or Keras before the script does: a script may set what they read
when they are imported. Runs wherever Python does.
"""

import contextlib
import functools
import importlib.machinery
import importlib.util
import linecache
import sys
from typing import Any, Dict, Iterator, List, Optional

from macrobatch._run import nothing
from macrobatch._workers import script


class Hook:
    """What watches for Keras, and replaces `keras.Model.fit`.

    Attributes:
        settings: the arguments of `accumulate`, and "verify" (None, "stop" or "warn").
        fits: what is done at a fit, once there is one.
        trains_on_batches: whether `train_on_batch` was called.
    """

    def __init__(self, settings: Dict[str, Any]):
        self.settings = settings
        self.fits: Any = None
        self.trains_on_batches = False
        self._plain: Dict[str, Any] = {}
        self._is_looking = False

    def install(self) -> None:
        """Replaces `fit` now, or when Keras is imported."""
        if self.patch(sys.modules.get("keras")):
            return
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Gives Keras its own `fit` back."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, method in self._plain.items():
            setattr(sys.modules["keras"].Model, name, method)
        self._plain = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Lets others find Keras, and sees it loaded. Python calls it for each import."""
        if name != "keras" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            loader: Any = _Loader(spec.loader, self)
            spec.loader = loader
        return spec

    def patch(self, keras: Any) -> bool:
        """Replaces `keras.Model.fit`, and returns whether there is one."""
        model = getattr(keras, "Model", None)
        if model is None:
            return False
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        plain, on_batch = model.fit, getattr(model, "train_on_batch", None)
        self._plain = {"fit": plain}

        @functools.wraps(plain)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            if self.fits is None:
                # Here Keras and its backend are there.
                from macrobatch._run.fits import Fits

                self.fits = Fits(self.settings)
            return self.fits.fit(plain, model, *args, **kwargs)

        model.fit = fit
        if on_batch is not None:
            self._plain["train_on_batch"] = on_batch

            @functools.wraps(on_batch)
            def train_on_batch(*args: Any, **kwargs: Any) -> Any:
                self.trains_on_batches = True
                return on_batch(*args, **kwargs)

            model.train_on_batch = train_on_batch
        return True

    def summary(self, is_worker: bool) -> Optional[str]:
        """What to say at the end of a script, in one line; None if there is nothing to say."""
        if self.fits is not None:
            return str(self.fits.summary())
        return nothing.line(self.trains_on_batches, is_worker)


class _Loader:
    """A loader that tells a hook when its module is there."""

    def __init__(self, loader: Any, hook: Hook):
        self._loader, self._hook = loader, hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        """As the loader itself."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """As the loader itself, whose place it is again."""
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._hook.patch(module)


@contextlib.contextmanager
def accumulated(settings: Optional[Dict[str, Any]], is_worker: bool = False) -> Iterator[None]:
    """A context in which a script runs with every `fit` accumulated, and what it came to is said.

    Args:
        settings: as those of a `Hook`; None leaves everything as it is.
        is_worker: whether it is one of several workers.
    """
    if settings is None:
        yield
        return
    hook = Hook(settings)
    hook.install()
    failed = True
    try:
        yield
        failed = False
    except SystemExit as end:
        failed = bool(end.code)
        raise
    finally:
        # Threads and atexit hooks of the script may train on: `fit` stays as it is.
        # A script that failed before its first fit has said why there was none.
        line = None if failed and hook.fits is None else hook.summary(is_worker)
        if line is not None:
            with contextlib.suppress(OSError):  # Nobody may read any more.
                print(f"macrobatch: {line}", file=sys.stderr, flush=True)


def without_own_frames(error: BaseException) -> None:
    """Takes what macrobatch adds out of the traceback of an error, and of those behind it."""
    found: Optional[BaseException] = error
    seen = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        found.__traceback__ = _stripped(found.__traceback__)
        found = found.__cause__ or found.__context__


def _stripped(traceback: Any) -> Any:
    """A traceback from the script's own first frame on, without frames of this room."""
    frames: List[Any] = []
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__") or ""
        if traceback.tb_frame.f_globals is vars(script):
            frames.clear()  # All frames so far have started the script.
        elif not name.startswith("macrobatch._run."):
            frames.append(traceback)
        traceback = traceback.tb_next
    while frames and frames[0].tb_frame.f_globals.get("__name__") == "runpy":
        frames.pop(0)
    if not is_raised_here(frames[-1] if frames else None):
        frames = [frame for frame in frames if not _is_of_package(frame)]
    for frame, following in zip(frames, [*frames[1:], None]):
        frame.tb_next = following
    return frames[0] if frames else None


def is_raised_here(traceback: Any) -> bool:
    """Whether macrobatch itself has raised an error, and neither Keras nor the script."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    # Keras takes its own frames out: then the last one is where a model or a layer was called.
    name, code = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
    return _is_of_package(traceback) and linecache.getline(name, code).strip().startswith("raise ")


def _is_of_package(frame: Any) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__")).startswith("macrobatch.")

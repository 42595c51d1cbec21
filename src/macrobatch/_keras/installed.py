"""How methods get onto one Keras model, and off it again, on any backend."""

import contextlib
import contextvars
from typing import Any, Callable, Dict, Iterator

import keras

from macrobatch import _checks, _internals
from macrobatch._keras import model_checks


class Installed:
    """What Keras calls of one model. It is set on the instance, so that its class stays as it is.

    Attributes:
        model: the model.
        cut: how batches are cut: a `Cut`.
        auto: what finds the size of micro-batches, if asked for.
        settings: what `accumulate` was called with: a `Settings`.
        is_logged: whether the log has said what is accumulated.
    """

    model: Any
    cut: Any
    auto: Any
    settings: Any
    is_logged = False
    _replaced: Dict[str, Any]

    def methods(self) -> Dict[str, Callable[..., Any]]:
        """The methods of the model that this one stands in for, by name."""
        raise NotImplementedError

    @property
    def devices(self) -> int:
        """The number of devices that share each batch, over all workers."""
        return 1

    def install(self) -> None:
        """Replaces the methods of the model that make and run its steps."""
        self._replaced = {}
        for name, method in self.methods().items():
            if name in vars(self.model):
                self._replaced[name] = vars(self.model)[name]
            setattr(self.model, name, method)
        _internals.before_training(_check_parts)
        self._make_anew()

    def report_first_batch(self, examples: int) -> None:
        """Logs once how batches are cut; warns in each fit that has nothing to cut."""
        cut, devices = self.cut, self.devices
        if cut.size and 0 < examples <= cut.size * devices:
            _checks.warn(model_checks.no_accumulation(examples, cut.size, devices))
        elif examples and not self.is_logged:
            self.is_logged = True
            if self.auto is None or not self.auto.is_settled:  # which has been logged
                _checks.LOG.warning(model_checks.accumulation(examples, cut, devices))

    def uninstall(self) -> None:
        """Gives the model its own methods back."""
        self._take_off()
        self._make_anew()

    @contextlib.contextmanager
    def taken_off(self) -> Iterator[None]:
        """A context in which the model has its own methods. What was made with others is kept."""
        methods = self._take_off()
        try:
            yield
        finally:
            for name, method in methods.items():
                setattr(self.model, name, method)

    def _take_off(self) -> Dict[str, Callable[..., Any]]:
        found = vars(self.model).items()
        methods = {name: each for name, each in found if getattr(each, "__self__", None) is self}
        for name in methods:
            delattr(self.model, name)
        for name, method in self._replaced.items():
            setattr(self.model, name, method)
        return methods

    def _make_anew(self) -> None:
        """Forgets functions that were made before. In the middle of fit() Keras needs new ones."""
        model = self.model
        trains, tests = model.train_function is not None, model.test_function is not None
        model.train_function = model.test_function = model.predict_function = None
        if trains:
            model.make_train_function()
        if tests:
            model.make_test_function()


# The model whose `fit` was called in another way than by its name, and that `fit`.
_called: "contextvars.ContextVar[Any]" = contextvars.ContextVar("macrobatch_fit", default=None)


def fit_of(model: Any) -> Callable[..., Any]:
    """The `fit` that goes on where one of ours ends: that of the model's class."""
    called = _called.get()
    found: Callable[..., Any] = type(model).fit
    return called[1] if called is not None and called[0] is model else found


@contextlib.contextmanager
def going_on_with(model: Any, fit: Callable[..., Any]) -> Iterator[None]:
    """A context in which that is another one. The class may have a `fit` that has called us."""
    token = _called.set((model, fit))
    try:
        yield
    finally:
        _called.reset(token)


def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Trains a model as Keras does, whatever `fit` its class has; accumulated, if the model is."""
    plain = keras.Model.fit
    own = vars(model).get("fit") if accumulation_of(model) is not None else None
    if own is None:
        return plain(model, *args, **kwargs)
    with going_on_with(model, plain):
        return own(*args, **kwargs)


def accumulation_of(model: Any) -> Any:
    """What was installed in a model, or None."""
    owner = getattr(vars(model).get("train_step"), "__self__", None)
    return owner if isinstance(owner, Installed) else None


def _check_parts(model: Any) -> None:
    """Warns when a model is about to train that has an accumulated one in it."""
    if accumulation_of(model) is None:
        parts = [part for part in _internals.layers_of(model) if accumulation_of(part) is not None]
        if parts:
            _checks.warn(model_checks.only_a_part(model, parts[0]))

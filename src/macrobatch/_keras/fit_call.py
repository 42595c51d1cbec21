"""A call of `fit`, whose arguments are looked at and added to before it runs, on any backend."""

import contextlib
import inspect
from typing import Any, Iterator, Tuple

import keras


class FitCall:
    """A call of a `fit`: that of Keras, or one of a model's own, which may take `*args, **kwargs`.

    Attributes:
        model: the model.
    """

    def __init__(self, fit: Any, model: Any, args: Any, kwargs: Any):
        self.model, self._fit = model, fit
        signature = inspect.signature(fit)
        self._call = signature.bind(model, *args, **kwargs)
        self._call.apply_defaults()
        self._plain = inspect.signature(keras.Model.fit).parameters
        # The names of what stands for other arguments, by position and by name.
        kinds = {each.kind: name for name, each in signature.parameters.items()}
        self._rest = kinds.get(inspect.Parameter.VAR_POSITIONAL)
        self._named = kinds.get(inspect.Parameter.VAR_KEYWORD)
        # Where `*args` come first, they are those of Keras. Otherwise nobody can tell.
        self._are_plain = list(signature.parameters)[1:2] == [self._rest]

    def get(self, name: str) -> Any:
        """An argument that Keras' `fit` takes; its default where the call has none."""
        holder, key = self._place(name)
        try:
            return holder[key]
        except (KeyError, IndexError):
            return self._plain[name].default

    def set(self, name: str, value: Any) -> None:
        """Sets an argument, unless the `fit` of the model takes none of that name."""
        holder, key = self._place(name)
        holder[key] = value

    def _place(self, name: str) -> Any:
        """What holds an argument, and the key or index of it in there."""
        arguments = self._call.arguments
        if name in arguments and name not in (self._rest, self._named):
            return arguments, name
        if self._rest is not None and self._are_plain:
            index = list(self._plain).index(name) - 1  # after the model
            if index < len(arguments[self._rest]):
                arguments[self._rest] = list(arguments[self._rest])
                return arguments[self._rest], index
        return {} if self._named is None else arguments[self._named], name

    @contextlib.contextmanager
    def with_callback(self, own: keras.callbacks.Callback) -> Iterator[None]:
        """A context in which the call has another callback, before all others."""
        given = self.get("callbacks")
        if not isinstance(given, keras.callbacks.CallbackList):
            self.set("callbacks", [own, *keras.tree.flatten([] if given is None else given)])
            yield
            return
        own.set_model(self.model)
        own.set_params(given.params)
        given.callbacks.insert(0, own)
        try:
            yield
        finally:  # The list is the user's, for other fits too.
            given.callbacks.remove(own)

    def arguments(self) -> Tuple[Any, Any]:
        """The arguments after the model: those by position, and those by name."""
        return self._call.args[1:], self._call.kwargs

    def run(self) -> Any:
        """Calls `fit`."""
        return self._fit(*self._call.args, **self._call.kwargs)

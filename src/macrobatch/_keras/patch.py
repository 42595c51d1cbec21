"""Private functions of Keras that do something else inside of a context, and for its thread only.

Those that macrobatch replaces are used by all of Keras and have no public name; each is named in
one room, with the reason, and a test notices if one goes.
"""

import contextlib
import functools
import sys
import threading
from typing import Any, Callable, Iterator


class Patch:
    """A function of a module of Keras, and what is called instead of it inside of a context.

    That gets the function, what the context was entered with, and the arguments.
    """

    def __init__(self, module: str, name: str, instead: Callable[..., Any]):
        self._module, self._name, self._instead = module, name, instead
        self._local = threading.local()

    @contextlib.contextmanager
    def __call__(self, value: Any = True) -> Iterator[None]:
        self._install()
        before = getattr(self._local, "value", None)
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = before

    def _install(self) -> None:
        module: Any = sys.modules[self._module]
        function = getattr(module, self._name)
        if getattr(function, "patch", None) is self:
            return

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = getattr(self._local, "value", None)
            if value is None:
                return function(*args, **kwargs)
            return self._instead(function, value, *args, **kwargs)

        call.patch = self  # type: ignore[attr-defined]
        setattr(module, self._name, call)

"""A function of somebody else's, replaced for a while and for one thread."""

import contextlib
import functools
import threading
from typing import Any, Callable, Iterator, List


class Patch:
    """A function of a module or class, and what is called instead of it inside a context.

    What is called instead gets the function, what the context was entered with, and the arguments.
    Other threads, and code outside of the context, call the function itself.
    """

    def __init__(self, place: Callable[[], Any], name: str, instead: Callable[..., Any]):
        self._place, self._name, self._instead = place, name, instead
        self._local = threading.local()
        self._installing = threading.Lock()
        self._installed: Any = None
        self._made: List[Any] = []

    @contextlib.contextmanager
    def __call__(self, value: Any = True) -> Iterator[None]:
        self._install()
        before = getattr(self._local, "value", None)
        self._local.value = value
        try:
            yield
        finally:
            self._local.value = before

    @property
    def is_entered(self) -> bool:
        """Whether this thread is inside the context."""
        return getattr(self._local, "value", None) is not None

    @contextlib.contextmanager
    def beneath(self, other: Callable[..., Any]) -> Iterator[None]:
        """Lets everybody who calls the function call another one, which gets the function first."""
        self._install()
        self._local.other = other
        try:
            yield
        finally:
            self._local.other = None

    def _install(self) -> None:
        place = self._place()
        with self._installing:
            function = getattr(place, self._name)
            # Whoever put a function of their own over one of these may have taken it off again.
            if any(function is made for made in self._made):
                self._installed = function
                return

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._installed is not call:  # There is another one over somebody else's.
                    return function(*args, **kwargs)
                value = getattr(self._local, "value", None)
                other = getattr(self._local, "other", None)
                plain = function if other is None else functools.partial(other, function)
                if value is None:
                    return plain(*args, **kwargs)
                return self._instead(plain, value, *args, **kwargs)

            self._installed = call
            self._made.append(call)
            setattr(place, self._name, call)

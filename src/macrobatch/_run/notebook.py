"""`%load_ext macrobatch` and `%macrobatch 8` in notebooks. IPython calls, and is not imported."""

import shlex
from typing import Any, Dict, Optional

from macrobatch._run.hook import Hook

USAGE = "%macrobatch [N | auto | off] [--sequence-axis N] [--nonfinite skip|raise|propagate]"


class Magic:
    """The magic `%macrobatch`, of one notebook."""

    def __init__(self) -> None:
        self._hook: Optional[Hook] = None

    def __call__(self, line: str) -> None:
        """Accumulates every `fit` from now on, in micro-batches of N examples. `off` ends it.

        Models that have been accumulated stay so: macrobatch.release gives a plain one back.
        """
        settings = settings_of(line)
        self.off()
        if settings is not None:
            self._hook = Hook(settings)
            self._hook.install()

    def off(self) -> None:
        """Lets `fit` be as Keras has it."""
        if self._hook is not None:
            self._hook.uninstall()
            self._hook = None


def settings_of(line: str) -> Optional[Dict[str, Any]]:
    """The settings that a line asks for; None for "off"."""
    words = shlex.split(line)
    settings: Dict[str, Any] = {"micro_batch_size": "auto"}
    if words and not words[0].startswith("-"):
        size = words.pop(0)
        if size == "off" and not words:
            return None
        if size != "auto" and not (size.isdecimal() and int(size) > 0):
            raise ValueError(f"Expected: {USAGE}. Received: %macrobatch {line}")
        settings["micro_batch_size"] = "auto" if size == "auto" else int(size)
    kinds = {"--sequence-axis": int, "--nonfinite": str}
    if len(words) % 2 or any(name not in kinds for name in words[::2]):
        raise ValueError(f"Expected: {USAGE}. Received: %macrobatch {line}")
    for name, value in zip(words[::2], words[1::2]):
        settings[name[2:].replace("-", "_")] = kinds[name](value)
    return settings


_magic = Magic()


def load(ipython: Any) -> None:
    """Gives a notebook the magic."""
    ipython.register_magic_function(_magic, "line", "macrobatch")


def unload() -> None:
    """Ends what the magic has begun."""
    _magic.off()

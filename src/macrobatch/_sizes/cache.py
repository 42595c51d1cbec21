"""Sizes that were found before, in the folder of Keras: a small file for each, so that processes
never write to the same one at different ends.
"""

import hashlib
import json
import os
import tempfile
import warnings
from typing import Any, Dict, NamedTuple, Optional

from macrobatch._sizes.search import power_above

SWITCH = "MACROBATCH_CACHE"  # the environment variable that switches it off
OFF = ("0", "false", "off", "no")  # in any case


class Found(NamedTuple):
    """What was found.

    Attributes:
        size: of a micro-batch.
        bytes: that an update with it takes, beyond what the process had before; 0 if not known.
    """

    size: int
    bytes: int = 0


def folder() -> str:
    """The folder of the files: where Keras has its own."""
    home = os.environ.get("KERAS_HOME")
    if not home:
        user = os.path.expanduser("~")
        home = os.path.join(user if os.access(user, os.W_OK) else "/tmp", ".keras")
    return os.path.join(home, "macrobatch", "sizes")


def read(key: Dict[str, Any]) -> Optional[Found]:
    """What was found for a key; None if nothing was. A damaged file is ignored, with a warning."""
    if not _is_on():
        return None
    path = _path(key)
    try:
        with open(path, encoding="utf-8") as file:
            entry = json.load(file)
        found = Found(entry["size"], entry["bytes"])
        numbers = all(type(number) is int for number in found)
        if (
            not numbers
            or not 1 <= found.size <= power_above(key["whole"])
            or found.bytes < 0
            or entry["key"] != key
        ):
            raise ValueError("its contents are not those of a size")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        warnings.warn(
            f"The file {path!r}, with a size of micro-batches that was found before, is ignored: "
            f"it cannot be read ({type(error).__name__}: {error}). The size is looked for again, "
            "and the file is written anew.",
            stacklevel=2,
        )
        return None
    return found


def write(key: Dict[str, Any], found: Found) -> None:
    """Keeps what was found. Whoever reads at the same time has the old file or the new one."""
    if not _is_on():
        return
    path = _path(key)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=os.path.dirname(path), suffix=".new")
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump({"size": found.size, "bytes": found.bytes, "key": key}, file, indent=1)
            os.replace(temporary, path)
        except BaseException:
            os.remove(temporary)
            raise
    except OSError:  # a folder that nobody may write to: then the size is looked for each time
        pass


def _is_on() -> bool:
    return os.environ.get(SWITCH, "1").strip().lower() not in OFF


def _path(key: Dict[str, Any]) -> str:
    text = json.dumps(key, sort_keys=True)
    return os.path.join(folder(), hashlib.sha256(text.encode()).hexdigest()[:32] + ".json")

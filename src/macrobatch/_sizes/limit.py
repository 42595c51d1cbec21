"""How much memory this process may take: what the user says, or what is there.

A limit is of the whole process, the memory that it has already included; on a GPU, of the memory
of the device. No TensorFlow here.
"""

import math
import numbers
import os
import re
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Union

UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
LEAST = 1024**2  # bytes; less is a slip, such as 6 for "6GiB"
EXPECTED = (
    'Expected: a size ("6GiB", "500 MB"), a number of bytes, or a fraction of the memory that is '
    'there (0.5, "50%").'
)

NO_LIMIT = 2**62  # bytes

MemoryLimit = Union[int, float, str, None]


class Limit(NamedTuple):
    """How much memory there may be.

    Attributes:
        bytes: of the whole process, or of the device.
        source: where the number comes from, for messages.
    """

    bytes: int
    source: str

    def __str__(self) -> str:
        return f"{shown(self.bytes)} ({self.source})"


class Machine(NamedTuple):
    """Where the system says how much memory there is. Tests have folders of their own.

    Attributes:
        proc: the folder of processes.
        cgroups: the folder of control groups, which containers are.
        platform: as in `sys.platform`.
    """

    proc: str = "/proc"
    cgroups: str = "/sys/fs/cgroup"
    platform: str = sys.platform


THIS = Machine()


def memory_limit(
    given: MemoryLimit, machine: Machine = THIS, of_device: Optional[int] = None
) -> Limit:
    """The limit that a user gave, in bytes. None stands for all memory that others do not use.

    Args:
        given: "6GiB", "500 MB", bytes, a fraction of the memory that is there, or None.
        machine: where to look.
        of_device: bytes of a GPU, which then count in place of the machine's.
    """
    size = parsed(given)
    if isinstance(size, int):
        there = _whole(machine) if of_device is None else of_device
        if there is not None and size > there:
            raise ValueError(
                f"memory_limit must not be more than there is, {shown(there)}. "
                f"Received: memory_limit={given!r}, which is {shown(size)}. Pass less, or leave "
                "it out: all memory that others do not use is taken then."
            )
        return Limit(size, f"memory_limit={given!r}")
    allowed = available(machine) if of_device is None else Limit(of_device, "the device has it")
    if size is None:
        return allowed
    return Limit(int(size * allowed.bytes), f"memory_limit={given!r}, and {allowed.source}")


def parsed(given: MemoryLimit) -> Union[int, float, None]:
    """Bytes as an int, a fraction as a float, or None. Raises for anything else."""
    if given is None:
        return None
    text = given.strip().lower() if isinstance(given, str) else ""
    if isinstance(given, str):
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*|%)", text)
        if found is None or (found[2] not in ("", "%") and found[2] not in UNITS):
            raise _refused(given, "Units are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %.")
        number, unit = found[1], found[2]
        if unit in UNITS:
            return _bytes(given, float(number) * UNITS[unit])
        if unit == "%":
            return _fraction(given, float(number) / 100)
        return _bytes(given, int(number)) if number.isdigit() else _fraction(given, float(number))
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise _refused(given)
    if isinstance(given, numbers.Integral):
        return _bytes(given, int(given))
    return _fraction(given, float(given))


def _bytes(given: Any, size: float) -> int:
    if size < LEAST:
        raise _refused(given, f"A limit must be {shown(LEAST)} or more, and this is {size:g} B.")
    return int(size)


def _fraction(given: Any, size: float) -> float:
    if not 0 < size <= 1:  # nor is NaN
        raise _refused(given, "A fraction must be over 0, and not over 1 (100%).")
    return size


def _refused(given: Any, reason: str = "") -> ValueError:
    return ValueError(f"{EXPECTED} Received: memory_limit={given!r}. {reason}".rstrip())


def shown(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1023.5:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"


def check_room(limit: Limit, there: int, what: str) -> None:
    """Raises if a limit is no more than what is there before any work.

    Args:
        limit: the limit.
        there: bytes that are in use already.
        what: what they are, as a plural.
    """
    if limit.bytes <= there:
        raise ValueError(
            f"memory_limit must be more than what {what} take before any training: "
            f"{shown(there)}. Received: {limit}. Pass a larger memory_limit."
        )


def no_limit_with_size(memory_limit: Any, micro_batch_size: Any) -> None:
    """Raises for a limit where there is nothing to choose."""
    if memory_limit is not None:
        raise ValueError(
            "memory_limit= says how much memory sizes that are looked for may take. Received: "
            f"memory_limit={memory_limit!r}, and a size, {micro_batch_size}. Leave one of them "
            'out, or pass micro_batch_size="auto".'
        )


def running_out_is_an_error(on_gpu: bool) -> bool:
    """Whether too large a size raises an error. Otherwise the kernel may kill the process."""
    return on_gpu or address_space() is not None


# What the system says


def available(machine: Machine = THIS) -> Limit:
    """What this process may take, with what it has: what is there, less what others use.

    Raises a ValueError if the system does not say.
    """
    if machine.platform != "linux":
        whole = _whole(machine)
        if whole is None:
            raise ValueError(
                f"The memory that may be used is not known on {machine.platform}. "
                "Pass memory_limit, for instance memory_limit='6GiB'."
            )
        return Limit(whole // 2, "half of the machine's memory, since others' share is not known")
    own = status(machine.proc)
    # Pages of files can be read again, so that MemAvailable has this process' own too.
    private = own["RssAnon"] + own.get("RssShmem", 0)
    found = [
        Limit(
            _fields(os.path.join(machine.proc, "meminfo"))["MemAvailable"] + private,
            "the machine has it, less what others use",
        )
    ]
    for allowed, used in _cgroups(machine):
        rest = allowed - max(used - private, 0)
        found.append(Limit(rest, "the container (cgroup) allows it, less what others use"))
    space = address_space()
    if space is not None:
        rest = space - own["VmSize"] + own["VmRSS"]
        found.append(Limit(rest, "RLIMIT_AS (ulimit -v) allows it"))
    return min(found)


def in_all(given: MemoryLimit, machine: Machine = THIS, on_gpu: bool = False) -> Optional[int]:
    """How much memory there may be, whatever others use of it: the same number in each run.

    Args:
        given: what the user gave.
        machine: where to look.
        on_gpu: whether it is the memory of a GPU, which its name tells.
    """
    size = parsed(given)
    if isinstance(size, int):
        return size
    there = [None] if on_gpu else [_whole(machine), address_space()]
    whole = min((each for each in there if each is not None), default=None)
    if whole is None:  # of a fraction, the percentage
        return None if size is None else int(100 * size)
    return whole if size is None else int(size * whole)


def _whole(machine: Machine) -> Optional[int]:
    """All memory of the machine, or of the container, whoever uses it."""
    if machine.platform == "linux":
        whole = _fields(os.path.join(machine.proc, "meminfo"))["MemTotal"]
        return min([whole, *(allowed for allowed, _ in _cgroups(machine))])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def address_space() -> Optional[int]:
    """RLIMIT_AS in bytes, if there is one."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def status(proc: str = "/proc") -> Dict[str, int]:
    """The memory of this process in bytes, by Linux' names."""
    return _fields(os.path.join(proc, "self", "status"))


def _fields(path: str) -> Dict[str, int]:
    """The sizes of a file of lines such as `MemTotal: 16 kB`, in bytes."""
    with open(path) as lines:
        found = (re.match(r"(\w+):\s+(\d+) kB", line) for line in lines)
        return {match[1]: int(match[2]) * 1024 for match in found if match}


class _Names(NamedTuple):
    """The files of a control group: limits, use, and the fields of use that can be given back."""

    limits: Tuple[str, ...]
    used: str
    files: Tuple[str, ...]


_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))
_V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _cgroups(machine: Machine) -> Iterator[Tuple[int, int]]:
    """The limit and the use of each control group of this process that has a limit."""
    try:
        with open(os.path.join(machine.proc, "self", "cgroup")) as lines:
            groups = [line.rstrip("\n").split(":", 2) for line in lines]
    except OSError:
        return
    for number, controllers, path in groups:
        if "memory" in controllers.split(","):
            for folder in _folders(os.path.join(machine.cgroups, "memory"), path):
                yield from _of_group(folder, _V1)
        elif number == "0":
            mounted = os.path.join(machine.cgroups, "unified")
            top = mounted if os.path.isdir(mounted) else machine.cgroups
            for folder in _folders(top, path):
                yield from _of_group(folder, _V2)


def _folders(top: str, path: str) -> List[str]:
    """The folders of a group and of those around it. A container may see only the last ones."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [os.path.join(top, *parts[:count]) for count in range(len(parts), -1, -1)]


def _of_group(folder: str, names: _Names) -> Iterator[Tuple[int, int]]:
    limits = [_number(os.path.join(folder, name)) for name in names.limits]
    allowed = min((limit for limit in limits if limit is not None), default=math.inf)
    used = _number(os.path.join(folder, names.used))
    # Without a limit there is "max", or in older kernels a number near 2**63.
    if allowed < 2**60 and used is not None:
        yield int(allowed), max(used - _files(os.path.join(folder, "memory.stat"), names.files), 0)


def _number(path: str) -> Optional[int]:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # a file that is not there, or "max"
        return None


def _files(path: str, names: Tuple[str, ...]) -> int:
    """Bytes of files that a group has in memory, which the kernel can give to others."""
    try:
        with open(path) as lines:
            fields = dict(line.split() for line in lines)
    except (OSError, ValueError):
        return 0
    return sum(int(fields.get(name, 0)) for name in names)

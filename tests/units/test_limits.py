"""How much memory there may be, from folders that look like /proc and /sys/fs/cgroup."""

import math

import numpy as np
import pytest

from macrobatch._sizes import limit
from macrobatch._sizes.limit import Limit, Machine

MIB, GIB = 1024**2, 1024**3
OWN = 1 * GIB  # what this process has to itself


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        (" 500 MB ", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("2TiB", 2048 * GIB),
        ("2048KiB", 2 * MIB),
        ("3000000 B", 3_000_000),
        ("3000000", 3_000_000),
        (3 * GIB, 3 * GIB),
        (np.int64(3 * GIB), 3 * GIB),
        (0.5, 0.5),
        (1.0, 1.0),
        (np.float32(0.5), 0.5),
        ("50%", 0.5),
        ("12.5 %", 0.125),
        ("0.25", 0.25),
    ],
)
def test_limits_as_people_write_them(given, expected):
    found = limit.parsed(given)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "given",
    [
        "6 apples",
        "",
        "GiB",
        "six GiB",
        "-6GiB",
        "6GiB 5",
        "6G",
        "1e3MB",
        "inf",
        "nan",
        "0%",
        "101%",
        0,
        -1,
        6,
        "6",
        "6 kB",
        -0.5,
        0.0,
        1.5,
        6e9,
        math.nan,
        math.inf,
        True,
        False,
        [1],
        b"6GiB",
    ],
)
def test_bad_limits(given):
    with pytest.raises(ValueError, match=r"Expected: a size .*Received: memory_limit=") as error:
        limit.parsed(given)
    assert repr(given) in str(error.value)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 16 GiB, 10 of them available, and a process that has 1 GiB of its own."""
    monkeypatch.setattr(limit, "address_space", lambda: None)
    write_meminfo(tmp_path, 10 * MIB)
    kb = {"VmSize": 5 * MIB, "VmHWM": 3 * MIB, "VmRSS": 2 * MIB, "RssAnon": OWN // 1024}
    lines = [f"{name}:\t {size} kB\n" for name, size in kb.items()]
    write(tmp_path / "proc/self/status", "Name:\tpython\n" + "".join(lines))
    return Machine(str(tmp_path / "proc"), str(tmp_path / "cgroup"), "linux")


def write_meminfo(folder, available):
    write(folder / "proc/meminfo", f"MemTotal: {16 * MIB} kB\nMemAvailable: {available} kB\n")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def group(folder, limits, used, files=0, version=2):
    """A control group. `files` bytes of what it uses are pages of files."""
    most, current, prefix = ("memory.max", "memory.current", "")
    if version == 1:
        most, current, prefix = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    write(folder / most, f"{limits}\n")
    write(folder / current, f"{used}\n")
    write(folder / "memory.stat", f"anon 7\n{prefix}inactive_file {files}\n{prefix}active_file 0\n")


def test_what_this_process_has_is_its_own(machine):
    found = limit.memory_limit(None, machine)
    assert found.bytes == 10 * GIB + OWN
    assert "the machine" in found.source

    half = limit.memory_limit("50%", machine)
    assert half.bytes == found.bytes // 2
    assert "50%" in half.source
    assert "less what others use" in half.source
    # Bytes count as they are.
    assert limit.memory_limit("12GiB", machine) == Limit(12 * GIB, "memory_limit='12GiB'")
    with pytest.raises(ValueError, match=r"not be more than there is, 16 GiB. Received: .*'17GiB'"):
        limit.memory_limit("17GiB", machine)


def test_a_container(machine, tmp_path):
    # Of 8 GiB the group uses 5: 2 are pages of files, 1 is this process, 2 are others.
    write(tmp_path / "proc/self/cgroup", "0::/jobs/one\n")
    group(tmp_path / "cgroup/jobs/one", 8 * GIB, 5 * GIB, 2 * GIB)
    group(tmp_path / "cgroup/jobs", "max", 9 * GIB)
    found = limit.memory_limit(None, machine)
    assert found.bytes == 6 * GIB
    assert "cgroup" in found.source
    with pytest.raises(ValueError, match="more than there is, 8 GiB"):
        limit.memory_limit("9GiB", machine)
    # A group around it allows less; and memory.high slows down before memory.max kills.
    group(tmp_path / "cgroup/jobs", 6 * GIB, 5 * GIB, 2 * GIB)
    assert limit.memory_limit(None, machine).bytes == 4 * GIB
    write(tmp_path / "cgroup/jobs/memory.high", 5 * GIB)
    assert limit.memory_limit(None, machine).bytes == 3 * GIB


def test_a_container_of_the_first_kind(machine, tmp_path):
    write(tmp_path / "proc/self/cgroup", "4:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/\n")
    folder = tmp_path / "cgroup/memory"
    group(folder, 9223372036854771712, 9 * GIB, version=1)
    assert limit.memory_limit(None, machine).bytes == 10 * GIB + OWN
    group(folder, 4 * GIB, 2 * GIB, version=1)  # from inside, its own group is the topmost
    assert limit.memory_limit(None, machine).bytes == 3 * GIB


def test_groups_that_tell_nothing(machine, tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/gone\n")
    write(tmp_path / "cgroup/memory.max", "rubbish")
    write(tmp_path / "cgroup/memory.current", 5)
    assert limit.memory_limit(None, machine).bytes == 10 * GIB + OWN


def test_a_limit_of_addresses(machine, monkeypatch):
    assert not limit.running_out_is_an_error(on_gpu=False)
    assert limit.running_out_is_an_error(on_gpu=True)
    monkeypatch.setattr(limit, "address_space", lambda: 7 * GIB)
    # 5 of 7 GiB of addresses are taken, for 2 GiB that are resident.
    found = limit.memory_limit(None, machine)
    assert found.bytes == 4 * GIB
    assert "RLIMIT_AS" in found.source
    assert limit.running_out_is_an_error(on_gpu=False)


def test_other_systems(tmp_path, monkeypatch):
    elsewhere = Machine(str(tmp_path), str(tmp_path), "darwin")
    pages = {"SC_PHYS_PAGES": 4 * MIB, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(limit.os, "sysconf", pages.__getitem__)
    found = limit.memory_limit(None, elsewhere)
    assert found.bytes == 8 * GIB
    assert "half" in found.source
    monkeypatch.delattr(limit.os, "sysconf")
    with pytest.raises(ValueError, match=r"not known on win32. Pass memory_limit"):
        limit.memory_limit(None, elsewhere._replace(platform="win32"))
    assert limit.memory_limit("6GiB", elsewhere).bytes == 6 * GIB


def test_what_there_is_in_all(machine, tmp_path, monkeypatch):
    whole = limit.in_all(None, machine)
    write_meminfo(tmp_path, 3 * MIB)
    assert limit.in_all(None, machine) == whole == 16 * GIB
    assert limit.in_all(0.5, machine) == whole // 2
    assert limit.in_all("3MiB", machine) == 3 * 2**20
    monkeypatch.setattr(limit, "address_space", lambda: 2**20)
    assert limit.in_all(None, machine) == 2**20
    assert limit.in_all(None, machine, on_gpu=True) is None
    assert limit.in_all(0.5, machine, on_gpu=True) == 50


def test_a_device():
    assert limit.memory_limit(0.25, of_device=8 * GIB).bytes == 2 * GIB
    with pytest.raises(ValueError, match="more than there is, 8 GiB"):
        limit.memory_limit("9GiB", of_device=8 * GIB)

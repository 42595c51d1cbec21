"""Memory that really runs out: a limit of the kernel (RLIMIT_AS), in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from support import thorough

import macrobatch

HERE = os.path.dirname(os.path.abspath(__file__))


def run(script, *arguments):
    source = os.path.dirname(os.path.dirname(macrobatch.__file__))
    # Each thread's own heap would take 64 MiB of address space.
    settings = {"PYTHONPATH": source, "MALLOC_ARENA_MAX": "1", "XLA_FLAGS": ""}
    return subprocess.run(
        [sys.executable, os.path.join(HERE, script), *map(str, arguments)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit needs /proc")
@thorough
def test_training_in_too_little_memory_ends_where_unlimited_training_ends():
    done = run("memory_cases.py", 150)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["plain"] == "ran out"
    for case in ("from_the_start", "longer_in_the_middle"):
        assert found[case]["difference"] < 1e-10
        assert found[case]["sizes"][0] < 64
    assert done.stderr.count("ran out of memory with micro_batch_size=") >= 2

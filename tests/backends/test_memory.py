"""Memory that really runs out: a limit of the kernel (RLIMIT_AS), in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from support import BACKEND, thorough

import macrobatch

HERE = os.path.dirname(os.path.abspath(__file__))
# MiB, and how many times 512 rows. A compiler that has no memory ends the process: JAX needs more.
ROOM = {"torch": (250, 1), "jax": (500, 3)}


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the limit needs /proc")
def test_training_in_too_little_memory_ends_where_unlimited_training_ends():
    source = os.path.dirname(os.path.dirname(macrobatch.__file__))
    # Each thread's own heap would take 64 MiB of address space.
    settings = {"PYTHONPATH": source, "MALLOC_ARENA_MAX": "1", "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, os.path.join(HERE, "memory_cases.py"), *map(str, ROOM[BACKEND])],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"torch": "can't allocate", "jax": "Out of memory"}[BACKEND] in found["plain"]
    for case in ("from_the_start", "longer_in_the_middle"):
        assert found[case]["difference"] < 1e-10
    assert found["from_the_start"]["sizes"][0] < 512
    assert found["longer_in_the_middle"]["sizes"][0] < 64
    assert "ran out of memory with micro_batch_size=" in done.stderr

"""Memory that really runs out: a limit of the kernel (RLIMIT_AS), in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from support import BACKEND, thorough

import macrobatch

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "processes", "memory_cases.py")
# MiB, and how many times as many rows as TensorFlow has. A compiler that has no memory ends the
# process: JAX needs more.
WAYS = {
    "tensorflow": {"graph": (150, 1), "compiled": (280, 1, "compiled")},
    "jax": {"compiled": (500, 3)},
    "torch": {"eager": (250, 1)},
}[BACKEND]


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the limit needs /proc")
@pytest.mark.parametrize("way", WAYS)
def test_training_in_too_little_memory_ends_where_unlimited_training_ends(way):
    source = os.path.dirname(os.path.dirname(macrobatch.__file__))
    # Each thread's own heap would take 64 MiB of address space. oneDNN's allocator would take all
    # that there is: TensorFlow crashes then for want of a few bytes.
    settings = {"PYTHONPATH": source, "MALLOC_ARENA_MAX": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, WAYS[way])],
        env={**os.environ, **settings, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("plain") or "compiled" in WAYS[way], "plain training fitted"
    for case in found.values():
        assert case["difference"] < 1e-10
        assert case["sizes"][0] < case["examples"]
    # Compiled steps are watched: XLA would end the process.
    again = done.stderr.count("ran out of memory with micro_batch_size=")
    assert way == "compiled" or again >= len(found) == 2

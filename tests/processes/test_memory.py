"""Memory that really runs out: a limit of the kernel (RLIMIT_AS), in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from support import thorough
from test_workers import environment

HERE = os.path.dirname(os.path.abspath(__file__))


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, os.path.join(HERE, script), *map(str, arguments)],
        env={**environment(), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )


CASES = {
    (150,): ("from_the_start", "longer_in_the_middle"),
    (280, "compiled"): ("larger_in_the_middle",),
}


@pytest.mark.skipif(sys.platform != "linux", reason="the limit needs /proc")
@pytest.mark.parametrize("arguments", CASES, ids=["graph", "compiled"])
@thorough
def test_training_in_too_little_memory_ends_where_unlimited_training_ends(arguments):
    done = run("memory_cases.py", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("plain", None) == "ran out" or "compiled" in arguments
    assert tuple(found) == CASES[arguments]
    for case in found.values():
        assert case["difference"] < 1e-10
        assert case["sizes"][0] < (512 if "compiled" in arguments else 64)
    # Compiled steps are watched: XLA would end the process.
    again = done.stderr.count("ran out of memory with micro_batch_size=")
    assert again >= len(found) or "compiled" in arguments

"""Breaks the package in many ways, one at a time, and sees whether its tests notice.

    python tests/mutants                all mutants, which takes long
    python tests/mutants rows replica   those with one of these words in their names

A mutant is applied to a copy of src, in which only the tests that it names are run: those that
`make test` runs. Mutants whose text is not found exactly once are refused.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import List

import fit
import loops
import meeting
import noise
import nonfinite
import plan
import replicas
import run
import sequences
import sizes
import steps
import verify
import whole_batch
import windows
from mutant import Mutant

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
ROOMS = (
    *(fit, loops, windows, replicas, sequences, meeting, whole_batch, steps, nonfinite, verify),
    *(sizes, plan, noise, run),
)
ALL = [mutant for room in ROOMS for mutant in room.MUTANTS]
TIMEOUT = 300  # replicas that disagree may wait for each other for ever


def outcome_of(mutant: Mutant) -> str:
    """What becomes of a mutant: "killed" is what it should be."""
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "src")
        shutil.copytree(
            os.path.join(ROOT, "src"), source, ignore=shutil.ignore_patterns("__pycache__")
        )
        path = os.path.join(source, "macrobatch", mutant.file)
        if not os.path.exists(path):
            return f"refused: no file {mutant.file}"
        with open(path) as file:
            text = file.read()
        if text.count(mutant.old) != 1:
            return f"refused: its text is {text.count(mutant.old)} times in {mutant.file}"
        with open(path, "w") as file:
            file.write(text.replace(mutant.old, mutant.new))
        return tested(mutant, source)


def tested(mutant: Mutant, source: str) -> str:
    """Runs the tests with the package that is in a folder."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    tests = [os.path.join("tests", test) for test in mutant.tests]
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        run = subprocess.run(
            [*command, *tests],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "300"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "killed: did not end"
    if run.returncode == 1:
        # Which test, and why: what a mutant breaks may be something else than it is meant to.
        failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return "killed: " + failed[0].split("::", 1)[-1][:150] if failed else "killed"
    if run.returncode == 0:
        return "SURVIVED"
    # Not a failed test: an id that is unknown or deselected, or a package that does not import.
    return "broken: " + " ".join(run.stdout.split()[-20:])


def main(words: List[str]) -> int:
    chosen = [m for m in ALL if not words or any(word in m.name for word in words)]
    print("Nothing broken: ", end="", flush=True)
    tests = tuple(dict.fromkeys(test for m in chosen for test in m.tests))
    outcome = tested(Mutant("", "", "", "", tests), os.path.join(ROOT, "src"))
    print(outcome.replace("SURVIVED", "all pass"))
    if outcome != "SURVIVED":
        print("The tests must pass without a mutant first.")
        return 1
    found = []
    for index, mutant in enumerate(chosen, 1):
        print(f"[{index}/{len(chosen)}] {mutant.name} ... ", end="", flush=True)
        start = time.monotonic()
        found.append(outcome_of(mutant))
        print(f"{found[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
    killed = [each for each in found if each.startswith("killed")]
    print(f"{len(killed)} of {len(found)} killed")
    for mutant, outcome in zip(chosen, found):
        if not outcome.startswith("killed"):
            print(f"  {mutant.name}: {outcome}")
    return int(len(killed) < len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

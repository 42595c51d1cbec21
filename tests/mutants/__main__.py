"""Breaks the package in many ways, one at a time, and sees whether its tests notice.

    python tests/mutants                all mutants, which takes long
    python tests/mutants rows replica   those with one of these words in their names, files or tests

A mutant is applied to a copy of src, in which only the tests that it names are run: those that
`make test` runs. Mutants whose text is not found exactly once are refused.

Each mutant has a process of its own, two at a time. The processes are forked from this one, which
has imported TensorFlow: to import it takes longer than most tests.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from typing import Dict, List, NamedTuple

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
SOURCE = os.path.join(ROOT, "src")
ROOMS = (
    *(fit, loops, windows, replicas, sequences, meeting, whole_batch, steps, nonfinite, verify),
    *(sizes, plan, noise, run),
)
ALL = [mutant for room in ROOMS for mutant in room.MUTANTS]
TIMEOUT = 300  # replicas that disagree may wait for each other for ever
AT_ONCE = 2
MANY = 20  # tests that are worth the start of more processes


class Run(NamedTuple):
    """The tests of a mutant, in a process of their own."""

    mutant: Mutant
    folder: str
    start: float


def copy_with(mutant: Mutant, folder: str) -> str:
    """Makes a copy of src with the mutant in it. Returns why that cannot be, or nothing."""
    source = os.path.join(folder, "src")
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    path = os.path.join(source, "macrobatch", mutant.file)
    if not os.path.exists(path):
        return f"refused: no file {mutant.file}"
    with open(path) as file:
        text = file.read()
    if text.count(mutant.old) != 1:
        return f"refused: its text is {text.count(mutant.old)} times in {mutant.file}"
    with open(path, "w") as file:
        file.write(text.replace(mutant.old, mutant.new))
    return ""


def start_tests(arguments: List[str], source: str, output: str) -> int:
    """Starts a process that runs pytest, with the package in a folder. Returns its id."""
    process = os.fork()
    if process:
        return process
    os.setsid()  # so that the processes of a test can be stopped with it
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(ROOT)
    sys.path.insert(0, source)
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), COLUMNS="300")
    # The mutants' own modules have the names of folders of tests.
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != HERE]
    for name in [room.__name__ for room in ROOMS] + ["mutant"]:
        sys.modules.pop(name, None)
    import pytest

    code = 3
    try:
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def outcome_of(code: int, output: str) -> str:
    """What became of a mutant: "killed" is what it should be."""
    with open(output) as file:
        lines = file.read().splitlines()
    # Which test, and why: what a mutant breaks may be something else than it is meant to. Several
    # processes of pytest are interrupted by a failure, which is code 2.
    failed = [line for line in lines if line.startswith("FAILED")]
    if code == 1 or (code == 2 and failed):
        return "killed: " + failed[0].split("::", 1)[-1][:150] if failed else "killed"
    if code == 0:
        return "SURVIVED"
    # Not a failed test: an id that is unknown or deselected, or a package that does not import.
    return "broken: " + " ".join(" ".join(lines).split()[-20:])


def all_outcomes(mutants: List[Mutant]) -> Dict[str, str]:
    """Tries mutants, and says what becomes of each."""
    waiting, running, found = list(mutants), {}, {}  # type: ignore[var-annotated]

    def end(run: Run, outcome: str) -> None:
        found[run.mutant.name] = outcome
        shutil.rmtree(run.folder)
        taken = time.monotonic() - run.start
        place = f"[{len(found)}/{len(mutants)}]"
        print(f"{place} {run.mutant.name} ... {outcome} ({taken:.0f} s)", flush=True)

    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            run = Run(waiting.pop(0), tempfile.mkdtemp(), time.monotonic())
            refusal = copy_with(run.mutant, run.folder)
            if refusal:
                end(run, refusal)
                continue
            tests = [os.path.join("tests", test) for test in run.mutant.tests]
            source, output = (os.path.join(run.folder, name) for name in ("src", "output"))
            running[start_tests(tests, source, output)] = run
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in running:
            run = running.pop(process)
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            end(run, outcome_of(code, os.path.join(run.folder, "output")))
            continue
        for process, run in list(running.items()):
            if time.monotonic() - run.start > TIMEOUT:
                os.killpg(process, signal.SIGKILL)
                os.waitpid(process, 0)
                end(running.pop(process), "killed: did not end")
        time.sleep(0.05)
    return found


def text_of(mutant: Mutant) -> str:
    """What words are looked for in."""
    return " ".join([mutant.name, mutant.file, *mutant.tests])


def main(words: List[str]) -> int:
    chosen = [m for m in ALL if not words or any(word in text_of(m) for word in words)]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import keras  # noqa: F401 - for the processes that are forked
    import tensorflow  # noqa: F401

    gc.freeze()
    print("Nothing broken: ", end="", flush=True)
    tests = list(dict.fromkeys(os.path.join("tests", test) for m in chosen for test in m.tests))
    options = ["-n", str(AT_ONCE), "--dist", "worksteal"] if len(tests) > MANY else []
    with tempfile.TemporaryDirectory() as folder:
        output = os.path.join(folder, "output")
        process = start_tests([*options, *tests], SOURCE, output)
        _, status = os.waitpid(process, 0)
        outcome = outcome_of(os.WEXITSTATUS(status), output)
    print(outcome.replace("SURVIVED", "all pass"), flush=True)
    if outcome != "SURVIVED":
        print("The tests must pass without a mutant first.")
        return 1
    found = all_outcomes(chosen)
    killed = [name for name, outcome in found.items() if outcome.startswith("killed")]
    print(f"{len(killed)} of {len(found)} killed")
    for name, outcome in found.items():
        if not outcome.startswith("killed"):
            print(f"  {name}: {outcome}")
    return int(len(killed) < len(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

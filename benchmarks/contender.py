"""A contender: a process that builds one model, then takes steps when it is told to.

It is started by bench.py with a description in JSON, and then reads commands and writes answers,
both as lines of JSON. While it waits for a command it does nothing, so that others can be timed.

    {"do": "steps", "count": 3}           -> {"seconds": [0.1, 0.1, 0.1]}
    {"do": "memory"}                      -> {"start": 400.0, "peak": 700.0}, in MiB
    {"do": "save", "path": "weights.npy"} -> {}
    {"do": "first"}                       -> what the first fit or evaluate took, see first_step

This file runs in the environments of all peers, so it imports nothing but the standard library.
"""

import contextlib
import importlib
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path


def memory(field):
    """Memory of this process in MiB: "VmRSS" is held now, "VmHWM" is the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 2**10


def restarted_peak():
    """What this process holds now. Its peak starts anew here, so that imports do not count."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def seconds_of(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def answer(training, start, command):
    if command["do"] == "steps":
        return {"seconds": [seconds_of(training.step) for _ in range(command["count"])]}
    if command["do"] == "memory":
        return {"start": start, "peak": memory("VmHWM")}
    if command["do"] == "first":
        return training.first()
    if command["do"] == "save":
        training.save_weights(command["path"])
        return {}
    raise ValueError(f"Unknown command: {command}")


def serve(description, write):
    library = importlib.import_module(description["library"])
    start = restarted_peak()
    training = library.training(description)
    write({"versions": {"Python": platform.python_version(), **library.versions()}})
    for line in sys.stdin:
        write(answer(training, start, json.loads(line)))


def main():
    # Libraries may print; answers have the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(values):
        print(json.dumps(values), file=answers, flush=True)

    try:
        serve(json.loads(sys.argv[1]), write)
    except Exception as problem:
        traceback.print_exc()
        first_line = (str(problem).strip().splitlines() or [""])[0]
        write({"failed": f"{type(problem).__name__}: {first_line}"})
    os._exit(0)  # Taking TensorFlow down in order takes seconds.


if __name__ == "__main__":
    main()

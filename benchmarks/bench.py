"""What accumulation costs, in time and memory, against its floor, its targets and its peers.

Every contender is a process of its own. In each round each of them takes its turn, in random
order, while all others sleep; a ratio is of two times of the same round. Tables have the medians
of these ratios and their quartiles. Memory is the high-water mark of a contender's process, and
starts anew once it has imported its libraries. Linux only.

The sections first-step and first-fit start a process for each measurement, and take its processor
time.

    python benchmarks/bench.py [--only SECTION ...] [--rounds N] [--peers] [--output FOLDER]
    python benchmarks/bench.py --list

Writes SECTION.json and SECTION.png as soon as a section has ended, and, with the default folder,
the tables of docs/performance.md: so a run may be ended, and the rest run later. report.py makes
tables and pictures again from the JSON files.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import measures
import numpy as np
import report
import sections
from processes import Failed, Process

MEMORY_REPEATS, LARGE_BATCH = 3, 256
MEMORY_STEPS = 15
# malloc() keeps memory that tensors have left, in pieces: how much differs by tens of MiB from
# process to process. TensorFlow can allocate by itself, and then holds what tensors need.
OWN_ALLOCATOR = {"TF_CPU_ALLOCATOR_USE_BFC": "1", "TF_CPU_BFC_MEM_LIMIT_IN_MB": "8192"}
PAUSE = 0.05  # seconds for the threads of the contender before to fall asleep


def timed(section, contenders, rounds, results):
    """Starts all contenders, and times them in turns; more than once where processes differ."""
    for start in range(section.starts):
        if section.starts > 1:
            say(section, f"processes {start + 1} of {section.starts}")
        able = {n: each for n, each in contenders.items() if "failed" not in results[n]}
        timed_once(section, able, rounds, results)
    add_compared_memory(section, contenders, results)


def timed_once(section, contenders, rounds, results):
    alive = {}
    with contextlib.ExitStack() as stack:
        for name, contender in contenders.items():
            say(section, f"starting {contender.label}")
            with recorded(results[name]):
                started = time.perf_counter()
                process = Process(contender, section.variables)
                stack.callback(process.close)
                results[name]["versions"] = process.versions
                results[name].setdefault("seconds", [])
                warm_up(section, process, results[name])
                results[name]["warm-up seconds"] = time.perf_counter() - started
                alive[name] = process
        if section.check_update:
            add_update_differences(results)
        start = time.monotonic()
        for round_ in range(rounds):
            take_turns(section, alive, results)
            spent = time.monotonic() - start
            left = spent / (round_ + 1) * (rounds - round_ - 1)
            say(section, f"round {round_ + 1} of {rounds}, {left:.0f} s left")
        for name, process in alive.items():
            with recorded(results[name]):
                add_memory(process, results[name])


def add_compared_memory(section, contenders, results):
    """Measures the memory of those that a target compares apart: one process says little."""
    compared = {n: contenders[n] for n in section.peaks if "failed" not in results.get(n, "failed")}
    for name in compared:
        results[name].update(start=[], peak=[])
    for repeat in range(MEMORY_REPEATS):
        for name, contender in compared.items():
            say(section, f"memory of {contender.label}, {repeat + 1} of {MEMORY_REPEATS}")
            with recorded(results[name]):
                add_memory_of(contender, MEMORY_STEPS, results[name])
    for name, contender in compared.items():
        with recorded(results[name]):
            alone = {}
            add_memory_of(contender, MEMORY_STEPS, alone, OWN_ALLOCATOR)
            results[name]["peak without fragments"] = alone["peak"]


def warm_up(section, process, result):
    """The first steps; with the weights before and after them, where these are compared."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "weights.npy")
        before = weights(process, path) if section.check_update else None
        process.steps(section.warm_up)
        if section.check_update:
            result["weights"] = before, weights(process, path)


def weights(process, path):
    process.ask("save", path=path)
    return np.load(path)


def add_update_differences(results):
    """How far each contender is from the plain update; the weights themselves are let go."""
    found = {name: result.pop("weights") for name, result in results.items() if "weights" in result}
    if "plain" not in found:
        return
    before, expected = found["plain"]
    for name, (start, after) in found.items():
        if not np.array_equal(before, start):
            results[name]["failed"] = "starts from other weights than the plain contender"
        results[name]["update difference"] = measures.difference(after, expected, before)


def take_turns(section, alive, results):
    for name in random.sample(list(alive), len(alive)):
        time.sleep(PAUSE)
        with recorded(results[name]):
            # The first step finds the caches full of another contender's data.
            steps = section.contenders[name].steps or section.steps
            _, *seconds = alive[name].steps(1 + steps)
            results[name]["seconds"].append(statistics.median(seconds))
        if "failed" in results[name]:
            alive.pop(name).close()


def fresh(section, contenders, results):
    """Runs each contender by itself, for its memory: several times, unless that takes long."""
    for repeat in range(MEMORY_REPEATS):
        for name, contender in contenders.items():
            if repeat and contender.options["batch"] > LARGE_BATCH:
                continue
            say(section, f"{contender.label}, {repeat + 1} of {MEMORY_REPEATS}")
            with recorded(results[name]):
                # About as many micro-batches for all: more of them leave more fragments.
                steps = max(2, 64 // contender.options["batch"])
                add_memory_of(contender, steps, results[name])


def first_calls(section, contenders, rounds, results):
    """Starts every contender anew in every round: a process has one first step."""
    for round_ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            if "failed" in results[name]:
                continue
            say(section, f"{contenders[name].label}, {round_ + 1} of {rounds}")
            with recorded(results[name]):
                add_first_call(contenders[name], results[name])


def add_first_call(contender, result):
    with contextlib.closing(Process(contender)) as process:
        result["versions"] = process.versions
        for figure, value in process.ask("first").items():
            result.setdefault(figure, []).append(value)


def add_memory_of(contender, steps, result, variables=None):
    """Adds the memory of a process of its own."""
    process = Process(contender, variables)
    try:
        result["versions"] = process.versions
        process.steps(steps)
        add_memory(process, result)
    finally:
        process.close()


def add_memory(process, result):
    memory = process.ask("memory")
    result.setdefault("start", []).append(memory["start"])
    result.setdefault("peak", []).append(memory["peak"])


@contextlib.contextmanager
def recorded(result):
    """Notes a failure with the contender's results, so that the others' are not lost."""
    try:
        yield
    except Failed as reason:
        print(f"  failed: {reason}", flush=True)
        result["failed"] = str(reason)


def say(section, text):
    print(f"  {section.name}: {text}", flush=True)


def measured(section, rounds, peers):
    """The results of a section, ready for its JSON file."""
    contenders = {
        name: contender
        for name, contender in section.contenders.items()
        if peers or contender.environment.startswith("own")
    }
    results = {name: {"label": contender.label} for name, contender in contenders.items()}
    if section.kind == "memory":
        fresh(section, contenders, results)
    elif section.kind in ("first", "least", "figures"):
        first_calls(section, contenders, rounds, results)
    else:
        timed(section, contenders, rounds, results)
    return {
        "section": section.name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "rounds": MEMORY_REPEATS if section.kind == "memory" else rounds * section.starts,
        "contenders": results,
    }


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory in GiB": round(pages / 2**30),
        "system": f"{platform.system()} {platform.release()}",
    }


def main():
    every = sections.all_sections()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    only = {"action": "extend", "nargs": "+", "choices": every, "metavar": "SECTION"}
    parser.add_argument("--only", **only, help="of those that --list prints; may be repeated")
    parser.add_argument("--rounds", type=int, help="turns of each contender, else 15 or 5")
    parser.add_argument("--peers", action="store_true", help="with peers in their environments")
    parser.add_argument("--list", action="store_true", help="print the sections, and end")
    parser.add_argument("--output", type=Path, default=report.RESULTS, metavar="FOLDER")
    options = parser.parse_args()
    if options.list:
        for section in every.values():
            print(f"{section.name:<22} {section.title}")
        return
    report.check_pictures()
    options.output.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(options.only or every))
    for index, name in enumerate(names):
        print(f"Section {index + 1} of {len(names)}: {every[name].title}", flush=True)
        rounds = options.rounds or every[name].rounds
        results = measured(every[name], rounds, options.peers)
        path = options.output / f"{name}.json"
        path.write_text(json.dumps(results, indent=2) + "\n")
        report.show(every[name], results, options.output)
        if options.output.resolve() == report.RESULTS:
            report.write_pages()


if __name__ == "__main__":
    main()

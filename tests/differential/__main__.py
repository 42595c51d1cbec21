"""Compares the package with that of another commit, on random cases.

    python tests/differential [--backend tensorflow|jax|torch] [--cases N] [--seed S]

Cases are drawn from seeds: a model, settings, a way in. Each runs with both packages, in processes
of their own. Both must come to the same weights, logs, warnings, refusals and numbers of updates,
and the new one may not trace or call layers more often. `--seed S --cases 1` runs a case again.
`make test-differential` runs this on all backends.

The old package is built from its commit, once, into build/differential. On TensorFlow, the code
blocks of README and docs of that commit run with the new package too.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
from packages import COMMIT, FOLDERS, ROOT, Package, built, git

# How often the new package may trace and call layers, make graphs and compile: a factor and a
# number beyond what the old one did.
MOST = {"traces": (1, 0), "calls": (1, 0), "graphs": (1.5, 2), "compilations": (1.5, 2)}
# Logs that come from measured times.
TIMED = ("micro_batch_size", "micro_batch_tokens")
# The first words of warnings that were reworded: new -> old.
REWORDED = {}


# What is compared


def differences(old, new):
    """What differs, in words; and what is only worth knowing."""
    found, notes = [], []
    for name in ("refusal", "paths", "updates"):
        if old.get(name) != new.get(name):
            found.append(f"{name}: {old.get(name)} -> {new.get(name)}")
    if old.get("message") != new.get("message"):
        notes.append(f"message: {old.get('message')!r} -> {new.get('message')!r}")
    if found or "weights" not in old:
        return found, notes
    tolerance = 1e-10 if old["by_time"] else 1e-12
    for path, left, right in zip(old["paths"], old["weights"], new["weights"]):
        found += _distance(f"weights: {path}", left, right, tolerance)
    left, right = (dict(_leaves("", each["logs"], old["by_time"])) for each in (old, new))
    if left.keys() != right.keys():
        found.append(f"logs: {sorted(left.keys() ^ right.keys())} are in one only")
    for key in sorted(left.keys() & right.keys()):
        found += _distance(f"logs: {key}", left[key], right[key], tolerance)
    said = [sorted(map(_as_before, each["warnings"])) for each in (old, new)]
    if said[0] != said[1]:
        found.append(f"warnings: {said[0]} -> {said[1]}")
    for name, (factor, more) in ({} if old["by_time"] else MOST).items():
        before, now = (each["counts"].get(name, 0) for each in (old, new))
        if now != before:
            of = found if now > factor * before + more else notes
            of.append(f"{name}: {before} -> {now}")
    return found, notes


def _leaves(name, value, by_time):
    """The values in logs by name, without those that come from measured times."""
    if isinstance(value, dict):
        for key in set(value) - set(TIMED if by_time else ()):
            yield from _leaves(f"{name}.{key}", value[key], by_time)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _leaves(f"{name}[{index}]", each, by_time)
    else:
        yield name, np.asarray(value)


def _distance(name, left, right, tolerance):
    """Why two arrays are not the same, if they are not."""
    if left.shape != right.shape or left.dtype.kind != right.dtype.kind:
        return [f"{name}: {left.dtype} {left.shape} -> {right.dtype} {right.shape}"]
    if left.dtype.kind not in "fc":
        return [] if (left == right).all() else [f"{name}: {left} -> {right}"]
    finite = np.isfinite(left)
    if not np.array_equal(finite, np.isfinite(right)):
        return [f"{name}: other values are finite"]
    scale = np.abs(left[finite]).max(initial=1.0)
    distance = np.abs(left - right)[finite].max(initial=0.0) / scale
    return [f"{name}: differs by {distance:.1e}"] if distance > tolerance else []


def _as_before(warning):
    kind, _, text = warning.partition(": ")
    return next(
        (f"{kind}: {old}" for new, old in REWORDED.items() if text.startswith(new)), warning
    )


def compare(backend, seeds, old, new, show):
    """Runs cases. Returns the number of those that differ."""
    packages = Package("old", old, backend), Package("new", new, backend)
    start, seen, bad = time.time(), collections.Counter(), []
    for index, seed in enumerate(seeds):
        futures = [each.start(seed) for each in packages]
        results = [each.result(future) for each, future in zip(packages, futures)]
        found, notes = differences(*results)
        seen.update([*results[0]["kinds"], f"refused {results[0]['refusal']}"])
        bad += [seed] if found else []
        if found or show:
            print(f"\n{backend}, seed {seed} {'DIFFERS' if found else 'is the same'}:")
            print("", *[each["case"] for each in results[:1]], *found, *notes, sep="\n    ")
            shown = {k: results[0].get(k) for k in ("refusal", "message", "warnings", "counts")}
            print(f"    {shown}")
        if (index + 1) % 10 == 0 or index + 1 == len(seeds):
            seconds = time.time() - start
            print(f"{backend}: {index + 1} cases, {len(bad)} differ, {seconds:.0f} s", flush=True)
    for each in packages:
        each.stop()
    print(f"{backend}:", ", ".join(f"{name} {count}" for name, count in sorted(seen.items())))
    print(f"{backend}: seeds that differ: {bad or 'none'}")
    return len(bad)


# Documentation


def run_pages(new):
    """Runs the code blocks of the old README and docs with the new package. Counts what fails."""
    sys.path += FOLDERS
    from pages import blocks_of

    names = git("ls-tree", "-r", "--name-only", COMMIT, "README.md", "docs").decode().split()
    blocks = [
        (f"{name}:{block.line}", block.code)
        for name in names
        if name.endswith(".md")
        for block in blocks_of(git("show", f"{COMMIT}:{name}").decode())
        if block.runs
    ]
    failed = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda block: _run_block(block[1], new), blocks)
        for index, ((name, _), result) in enumerate(zip(blocks, results)):
            if result.returncode:
                failed.append(name)
                print(f"\n{name} of {COMMIT} failed:\n{result.stderr[-1000:]}")
            if (index + 1) % 10 == 0 or index + 1 == len(blocks):
                print(f"code blocks: {index + 1}, {len(failed)} failed", flush=True)
    return len(failed)


def _run_block(code, new):
    environment = {**os.environ, "PYTHONPATH": str(new), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "pasted.py"
        script.write_text(code)
        return subprocess.run(
            [sys.executable, script], cwd=folder, env=environment, capture_output=True, text=True
        )


def main():
    parser = argparse.ArgumentParser(prog="python tests/differential")
    parser.add_argument("--backend", default="tensorflow", choices=("tensorflow", "jax", "torch"))
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--new", type=pathlib.Path, default=ROOT / "src", help="the new package")
    parser.add_argument("--show", action="store_true", help="say what came of each case")
    parser.add_argument("--skip-pages", action="store_true", help="run no code of README and docs")
    options = parser.parse_args()
    seeds, new = range(options.seed, options.seed + options.cases), options.new.resolve()
    bad = compare(options.backend, seeds, built(), new, options.show)
    if options.backend == "tensorflow" and not options.skip_pages:
        bad += run_pages(new)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

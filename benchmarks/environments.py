"""Environments of the peers, beside that of this project: made once, and used by all benchmarks.

A peer is never a dependency of the package. Where its environment cannot be made it is left out.

    python benchmarks/environments.py    # makes all of them
"""

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Environment(NamedTuple):
    folder: str
    peer: str
    pythons: list  # versions, best first
    packages: list  # arguments of one pip install after the other


PEERS = Environment(
    ".venv-peers",
    "gradient-accumulator",
    ["3.10", "3.9", "3.8"],
    # gradient-accumulator asks for the tensorflow package by name; the CPU build of it is enough.
    [["tensorflow-cpu==2.12.*", "numpy==1.23.2"], ["--no-deps", "gradient-accumulator==0.5.2"]],
)
TORCH = Environment(
    ".venv-peers-torch",
    "PyTorch",
    ["3.11", "3.12", "3.13", "3.10"],
    [["torch==2.13.0", "accelerate", "numpy", "keras"]],
)
OPTAX = Environment(
    ".venv-peers-jax",
    "optax",
    ["3.11", "3.12", "3.13", "3.10"],
    [["jax==0.10.2", "optax", "numpy", "keras"]],
)


def find_python(versions):
    """The first interpreter of these versions that runs, on the PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        for python in [f"python{version}", *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
            try:
                subprocess.run([python, "-c", "import ensurepip"], check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError):
                continue
            return python
    return None


def python_of(environment):
    """The Python of an environment, which is made if need be, or None."""
    folder = ROOT / environment.folder
    ready, python = folder / "ready", folder / "bin" / "python"
    if ready.exists():
        return python
    base = find_python(environment.pythons)
    if base is None:
        versions = " or ".join(environment.pythons)
        print(f"No Python {versions} found: {environment.peer} is left out.")
        return None
    print(f"Making {environment.folder} for {environment.peer}: a large download", flush=True)
    try:
        subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
        for packages in environment.packages:
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    except subprocess.CalledProcessError as problem:
        print(f"That failed ({problem}): {environment.peer} is left out.")
        return None
    ready.touch()
    return python


if __name__ == "__main__":
    for environment in (PEERS, TORCH, OPTAX):
        python_of(environment)

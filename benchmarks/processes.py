"""Contenders seen from the main process: started, asked, and ended."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import environments

CONTENDER = Path(__file__).with_name("contender.py")
OWN = "own, "
BACKENDS = {f"{OWN}{backend}" for backend in ("jax", "torch")}  # Keras without TensorFlow
PATIENCE = 900  # seconds for an answer: XLA may take minutes to compile


class Failed(Exception):
    """A contender cannot go on; the message is the reason."""


class Process:
    """A contender in a process of its own, which may have environment variables of its own.

    Raises:
        Failed: where its model cannot be built, and later where a step fails.
    """

    def __init__(self, contender, variables=None):
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [python_for(contender.environment), CONTENDER, json.dumps(contender.description())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**quiet_environment(contender.environment), **(variables or {})},
        )
        self.versions = self._answer()["versions"]

    def ask(self, do, **arguments):
        try:
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._end()) from None
        return self._answer()

    def steps(self, count):
        return self.ask("steps", count=count)["seconds"]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.log.close()

    def _answer(self):
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        answer = json.loads(line) if line else {"failed": self._end()}
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _end(self):
        """How a process ended that says nothing any more."""
        code = self.process.wait()
        self.log.seek(0)
        last_words = self.log.read().strip().splitlines()[-1:]
        return " ".join([f"ended with code {code}", *last_words])


def python_for(environment):
    made = {
        "peers": environments.PEERS,
        "torch": environments.TORCH,
        "peers of jax": environments.OPTAX,
        "peers of torch": environments.TORCH,
    }
    if environment == "own":
        return sys.executable
    if environment in BACKENDS:
        python = environments.ROOT / f".venv-{environment[len(OWN) :]}" / "bin" / "python"
        if not python.exists():
            raise Failed(f"{python.parents[1].name} is missing: make test-backends makes it")
        return python
    python = environments.python_of(made[environment])
    if python is None:
        raise Failed(f"{made[environment].folder} could not be made")
    return python


def quiet_environment(environment):
    """The same for all, except that a peer does not see the packages of this project."""
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    # PyTorch keeps OpenMP's own way to wait. Threads that sleep at once are steadier on a busy
    # machine, but its fastest steps took half as long again; and between turns they sleep anyway.
    if not environment.startswith("own"):
        variables.pop("PYTHONPATH", None)
    if environment in BACKENDS or environment.startswith("peers of"):
        variables["KERAS_BACKEND"] = environment.split()[-1]
    return variables

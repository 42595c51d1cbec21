"""The command `macrobatch`: its arguments. What `macrobatch run` does is in _workers.launch.

Nothing here uses TensorFlow, which takes seconds to import.
"""

import argparse
import os
import sys
from typing import List, Optional, Sequence

from macrobatch import __version__
from macrobatch._workers import launch


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs a command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="macrobatch", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"macrobatch {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command")
    commands.required = True
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        usage="macrobatch run --workers N [--devices-per-worker N] (script.py | -m module) ...",
        help="run a script in several worker processes on this machine",
        description="Runs a script in several worker processes on this machine, with TF_CONFIG "
        "set for tf.distribute.MultiWorkerMirroredStrategy. If a worker fails, all are stopped.",
    )
    run.add_argument("--workers", type=int, required=True, metavar="N", help="number of processes")
    run.add_argument(
        "--devices-per-worker",
        type=int,
        default=1,
        metavar="N",
        help="GPUs of each worker, its own; on a machine without, logical CPU devices. 1 if not "
        "given. CUDA_VISIBLE_DEVICES=-1 leaves GPUs alone.",
    )
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.add_argument("script", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    options = parser.parse_args(arguments)
    command = options.script if options.module is None else ["-m", *options.module]
    devices = options.devices_per_worker
    try:
        _check(options.workers, devices, command)
        launch.check_descriptors(options.workers)
        gpus = launch.gpus_of_workers(options.workers, devices)
    except ValueError as error:
        run.error(str(error))
    return launch.Launch().run(options.workers, 1 if gpus else devices, gpus, command)


def _check(workers: int, devices: int, command: List[str]) -> None:
    """Raises for a command line that cannot be run."""
    if os.name != "posix":
        raise ValueError(
            "macrobatch run works on Linux and macOS. "
            f"Received: {sys.platform}. On Windows, use WSL (Windows Subsystem for Linux)."
        )
    for name, value in (("--workers", workers), ("--devices-per-worker", devices)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more. Received: {name} {value}.")
    if command in ([], ["-m"]):
        raise ValueError(
            "a script.py, or -m and a module, must follow the options. Received: none."
        )
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise ValueError(
            "the script must be a Python file, and options of macrobatch run come before it. "
            f"Received: {command[0]}, which is not a file in {os.getcwd()}."
        )
    if "TF_CONFIG" in os.environ:
        raise ValueError(
            "TF_CONFIG must not be set, because macrobatch run sets it for each worker. "
            f"Received: TF_CONFIG={os.environ['TF_CONFIG']}. If a scheduler has set it, that "
            "scheduler starts the workers: let it run `python script.py`. Otherwise unset it."
        )

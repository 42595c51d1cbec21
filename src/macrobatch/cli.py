"""The command `macrobatch`: its arguments. What `macrobatch run` does is in _workers.launch, what
`macrobatch verify` does in _verify.command.

Nothing here uses TensorFlow, which takes seconds to import.
"""

import argparse
import os
import sys
from typing import Any, List, Optional, Sequence

from macrobatch import __version__
from macrobatch._verify import command as verification
from macrobatch._workers import launch


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs a command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="macrobatch", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"macrobatch {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command")
    commands.required = True
    run, verify = _add_run(commands), _add_verify(commands)
    options = parser.parse_args(arguments)
    return _verify(verify, options) if options.command == "verify" else _run(run, options)


def _add_run(commands: Any) -> argparse.ArgumentParser:
    run: argparse.ArgumentParser = commands.add_parser(
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
    return run


def _add_verify(commands: Any) -> argparse.ArgumentParser:
    verify: argparse.ArgumentParser = commands.add_parser(
        "verify",
        allow_abbrev=False,
        usage="macrobatch verify [--micro-batch-size N] [--json] (script.py ... | module:function)",
        help="is the accumulated update that of the whole batch, for your model and data?",
        description="Compares the accumulated update with that of the whole batch, and explains a "
        "difference. A script runs until its first fit(), whose model and first batch are taken. "
        "A function returns them: (model, x, y). Exit code 0: exact; 1: not exact; 2: could not "
        "tell.",
        epilog="Example: macrobatch verify --micro-batch-size 8 train.py --epochs 3",
    )
    sizes = {
        "--micro-batch-size": "examples in a micro-batch. If nothing is given, the model's own "
        "settings, which it has from macrobatch.accumulate",
        "--micro-batch-tokens": "instead, the most that examples times the longest of them may be",
        "--sequence-axis": "the axis along which sequences are padded",
    }
    for name, text in sizes.items():
        verify.add_argument(name, type=int, metavar="N", help=text)
    verify.add_argument(
        "--whole-batch-loss", action="store_true", help="as accumulate(..., whole_batch_loss=True)"
    )
    verify.add_argument("--json", action="store_true", help="print the report as JSON")
    verify.add_argument("target", nargs=argparse.REMAINDER, help="what to verify")
    return verify


def _verify(parser: argparse.ArgumentParser, options: Any) -> int:
    if not options.target:
        parser.error("a script.py, or module:function, must follow the options. Received: none.")
    names = ("micro_batch_size", "micro_batch_tokens", "sequence_axis", "whole_batch_loss")
    settings = {name: getattr(options, name) for name in names}
    given = {name: v for name, v in settings.items() if v is not None and v is not False}
    return verification.run(options.target, given, options.json)


def _run(run: argparse.ArgumentParser, options: Any) -> int:
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

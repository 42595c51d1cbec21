"""The command `macrobatch`: its arguments. What `macrobatch run` does is in _workers.launch, what
`macrobatch verify` and `macrobatch plan` do in _verify.command and _plan.command.

Nothing here uses TensorFlow, which takes seconds to import.
"""

import argparse
import os
import sys
from typing import Any, Dict, List, Optional, Sequence

from macrobatch import __version__
from macrobatch._plan import command as planning
from macrobatch._verify import command as verification
from macrobatch._workers import launch


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs a command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="macrobatch", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"macrobatch {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command")
    commands.required = True
    adders = {"run": (_add_run, _run), "verify": (_add_verify, _verify), "plan": (_add_plan, _plan)}
    parsers = {name: add(commands) for name, (add, _) in adders.items()}
    options = parser.parse_args(arguments)
    _, start = adders[options.command]
    return start(parsers[options.command], options)


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


def _add_plan(commands: Any) -> argparse.ArgumentParser:
    plan: argparse.ArgumentParser = commands.add_parser(
        "plan",
        allow_abbrev=False,
        usage="macrobatch plan [--memory-limit 6GiB] [--plot plan.png] [--json] "
        "(script.py ... | module:function)",
        help="which micro_batch_size fits into memory, and which is fastest?",
        description="Tries sizes of micro-batches on one batch, and shows the memory and the speed "
        "of each. A script runs until its first fit(), whose model and first batch are taken. A "
        "function returns them: (model, x, y). Exit code 0: found; 1: nothing fits; 2: could not "
        "tell.",
        epilog="Example: macrobatch plan --memory-limit 6GiB --plot plan.png train.py --epochs 3",
    )
    plan.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help="what the process may take in all (6GiB, 500MB), or a fraction (0.5, 50%%). If not "
        "given, what the machine and the container allow, less what others use",
    )
    plan.add_argument(
        "--objective",
        choices=("fastest", "largest"),
        default="fastest",
        help="which of the sizes that fit to take; fastest if not given",
    )
    plan.add_argument(
        "--sequence-axis", type=int, metavar="N", help="the axis along which sequences are padded"
    )
    plan.add_argument(
        "--whole-batch-loss", action="store_true", help="as accumulate(..., whole_batch_loss=True)"
    )
    plan.add_argument("--plot", metavar="FILE", help="draw memory and speed against the size")
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("target", nargs=argparse.REMAINDER, help="what to plan for")
    return plan


def _plan(parser: argparse.ArgumentParser, options: Any) -> int:
    _check_target(parser, options)
    settings = _given(options, ("sequence_axis", "whole_batch_loss"))
    return planning.run(
        options.target,
        planning.Options(
            options.memory_limit, options.objective, settings, options.plot, options.json
        ),
    )


def _check_target(parser: argparse.ArgumentParser, options: Any) -> None:
    if not options.target:
        parser.error("a script.py, or module:function, must follow the options. Received: none.")


def _given(options: Any, names: Sequence[str]) -> Dict[str, Any]:
    """Those of the settings of `accumulate` that were given."""
    settings = {name: getattr(options, name) for name in names}
    return {name: v for name, v in settings.items() if v is not None and v is not False}


def _verify(parser: argparse.ArgumentParser, options: Any) -> int:
    _check_target(parser, options)
    names = ("micro_batch_size", "micro_batch_tokens", "sequence_axis", "whole_batch_loss")
    return verification.run(options.target, _given(options, names), options.json)


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

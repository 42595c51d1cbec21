"""The command `macrobatch`: its arguments. What `macrobatch run` does is in _run.command, and with
workers in _workers.launch; what `macrobatch verify` and `macrobatch plan` do in their own rooms.

Nothing here uses TensorFlow, which takes seconds to import.
"""

import argparse
import difflib
import os
import re
import sys
from typing import Any, Dict, List, Optional, Sequence

from macrobatch import __version__
from macrobatch._plan import command as planning
from macrobatch._run import command as running
from macrobatch._verify import command as verification


class CannotRun(Exception):
    """A command line that cannot be run, and why."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs a command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="macrobatch", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"macrobatch {__version__}")
    commands = parser.add_subparsers(metavar="command", dest="command")
    commands.required = True
    adders = {"run": (_add_run, _run), "verify": (_add_verify, _verify), "plan": (_add_plan, _plan)}
    parsers = {name: add(commands) for name, (add, _) in adders.items()}
    for each in (parsers["verify"], parsers["plan"]):
        each.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(parsers[options.command], unknown[0])
    _, start = adders[options.command]
    return start(parsers[options.command], options)


def _refuse(parser: argparse.ArgumentParser, unknown: str) -> None:
    """Ends with what to say of an option that there is not."""
    known = re.findall(r"--[a-z-]+", parser.format_help())
    alike = difflib.get_close_matches(unknown.split("=")[0], known, 1)
    hint = f" Did you mean {alike[0]}?" if alike else ""
    parser.error(f"there is no option {unknown}.{hint} Options of a script come after the script.")


def _add_run(commands: Any) -> argparse.ArgumentParser:
    run: argparse.ArgumentParser = commands.add_parser(
        "run",
        allow_abbrev=False,
        usage="macrobatch run [options] (script.py | -m module) ...",
        help="run a Keras script with every fit() accumulated, in one process or in several",
        description="Runs a Keras script as it is, with every fit() accumulated: the updates of "
        "its batches, in the memory of micro-batches. What the script sets itself with macrobatch "
        "wins. A model that cannot be accumulated trains as before, with a warning.",
        epilog="Example: macrobatch run --micro-batch-size 8 train.py --epochs 3",
    )
    run.add_argument(
        "--micro-batch-size",
        type=_size,
        default="auto",
        metavar="N|auto|off",
        help="examples in memory at one time; auto, the default, finds how many; off changes no "
        "fit(), and is for --workers",
    )
    run.add_argument(
        "--sequence-axis", type=int, metavar="N", help="the axis along which sequences are padded"
    )
    run.add_argument(
        "--nonfinite",
        choices=("propagate", "skip", "raise"),
        help="what to do with examples whose loss or gradient is not finite",
    )
    run.add_argument(
        "--verify",
        action="store_const",
        const="stop",
        help="compare the update of the first batch of each model with that of the whole batch. If "
        "they differ, end with exit code 1; with --verify=warn, go on",
    )
    # An option of its own: --verify must not take the script for its value.
    run.add_argument(
        "--verify=warn", dest="verify", action="store_const", const="warn", help=argparse.SUPPRESS
    )
    several = run.add_argument_group(
        "several processes",
        "TF_CONFIG is set for tf.distribute.MultiWorkerMirroredStrategy. If a worker fails, all "
        "are stopped. Linux and macOS.",
    )
    several.add_argument("--workers", type=int, metavar="N", help="number of processes")
    several.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="N",
        help="GPUs of each worker, its own; on a machine without, logical CPU devices. 1 if not "
        "given. CUDA_VISIBLE_DEVICES=-1 leaves GPUs alone.",
    )
    several.add_argument(
        "--log-dir", metavar="DIR", help="write the output of each worker to DIR/worker-N.log too"
    )
    several.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start all workers again if one fails, N times at most; 0 if not given",
    )
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.add_argument("script", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    return run


def _size(text: str) -> Any:
    if text in ("auto", "off"):
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be a positive integer, auto or off. Received: {text}."
        )
    return int(text)


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
        "--micro-batch-tokens",
        choices=("auto",),
        help="with --sequence-axis: sizes in tokens, the examples times the longest of them",
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
    settings = _given(options, ("sequence_axis", "whole_batch_loss", "micro_batch_tokens"))
    return planning.run(
        options.target,
        planning.Options(
            options.memory_limit,
            options.objective,
            settings,
            options.plot,
            options.json,
            options.debug,
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
    return verification.run(options.target, _given(options, names), options.json, options.debug)


def _run(run: argparse.ArgumentParser, options: Any) -> int:
    command = options.script if options.module is None else ["-m", *options.module]
    settings: Optional[Dict[str, Any]] = _given(
        options, ("micro_batch_size", "sequence_axis", "nonfinite", "verify")
    )
    if options.micro_batch_size == "off":
        settings = None
    try:
        _check_command(command)
        _check_off(options)
        if options.workers is None:
            _check_one_process(options)
            return running.run(command, settings)
        devices = 1 if options.devices_per_worker is None else options.devices_per_worker
        restarts = options.max_restarts or 0
        _check_workers(options.workers, devices, restarts)
        # It needs what Windows has not.
        from macrobatch._workers import launch

        try:
            launch.check_backend()
            launch.check_descriptors(options.workers)
            gpus = launch.gpus_of_workers(options.workers, devices)
        except ValueError as error:
            raise CannotRun(str(error)) from error
    except CannotRun as error:
        run.error(str(error))
    cpus = 1 if gpus else devices
    return launch.run(options.workers, cpus, gpus, command, settings, options.log_dir, restarts)


def _check_command(command: List[str]) -> None:
    if command in ([], ["-m"]):
        raise CannotRun("a script.py, or -m and a module, must follow the options. Received: none.")
    if command[0] != "-m" and not os.path.isfile(command[0]):
        raise CannotRun(
            "the script must be a Python file, and options of macrobatch run come before it. "
            f"Received: {command[0]}, which is not a file in {os.getcwd()}."
        )


def _check_off(options: Any) -> None:
    """Raises for settings of `accumulate` where nothing is accumulated."""
    names = ("sequence_axis", "nonfinite", "verify")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if options.micro_batch_size == "off" and given:
        raise CannotRun(
            f"{given[0]} is for fits that are accumulated. Received: {given[0]} and "
            "--micro-batch-size off. Leave one of them out."
        )


def _check_one_process(options: Any) -> None:
    names = ("devices_per_worker", "log_dir", "max_restarts")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None]
    if given:
        raise CannotRun(f"{given[0]} is for several processes. Received: no --workers N.")


def _check_workers(workers: int, devices: int, restarts: int) -> None:
    """Raises where workers cannot be started."""
    if os.name != "posix":
        raise CannotRun(
            "macrobatch run --workers works on Linux and macOS. "
            f"Received: {sys.platform}. On Windows, use WSL (Windows Subsystem for Linux)."
        )
    least = (("--workers", workers, 1), ("--devices-per-worker", devices, 1))
    for name, value, smallest in (*least, ("--max-restarts", restarts, 0)):
        if value < smallest:
            raise CannotRun(f"{name} must be {smallest} or more. Received: {name} {value}.")
    if "TF_CONFIG" in os.environ:
        raise CannotRun(
            "TF_CONFIG must not be set, because macrobatch run sets it for each worker. "
            f"Received: TF_CONFIG={os.environ['TF_CONFIG']}. If a scheduler has set it, that "
            "scheduler starts the workers: let it run `python script.py`. Otherwise unset it."
        )

"""A worker of `macrobatch run`: runs the user's script as plain Python would, reports what it
raises, and does not outlive the launcher.

The launcher starts this file by its path, and it imports nothing of the package before it runs: the
script must find Python as it always does, and may set environment variables before anything else is
imported. Workers run on Linux and macOS; `run` runs anywhere.
"""

import builtins
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import sys
import time
import types
from typing import Any, List, Tuple


def guard(lifeline: int) -> None:
    """Forks a process that kills the worker's process group when the launcher is gone.

    The launcher alone has the other end of the pipe, which the kernel closes even after kill -9.
    A process of its own works while the worker is stuck in C++, and reaches the worker's children,
    as `prctl(PR_SET_PDEATHSIG)` would not. Forked twice, it is none of the script's own children.
    """
    if os.fork() == 0:
        try:
            if os.fork() == 0:
                # These are sent to the whole group; the guard stays until the worker is gone.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.close(1)
                os.close(2)
                os.read(lifeline, 1)
                os.killpg(os.getpgrp(), signal.SIGKILL)
        finally:
            os._exit(0)
    os.wait()
    os.close(lifeline)


def use_cpus(count: int) -> None:
    """Makes `count` logical CPUs of this worker, each of them a replica of any strategy."""
    import tensorflow as tf
    from tensorflow.python.distribute import collective_all_reduce_strategy

    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * count
    )

    def all_cpus(self: Any, resolver: Any, worker_device: str) -> Tuple[Tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(count)), "CPU"

    # MultiWorkerMirroredStrategy takes all GPUs of a worker but only the first CPU, and has no
    # argument for it. This method is where it decides that.
    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    if not hasattr(extended, "_initialize_local_devices"):
        raise RuntimeError(
            "--devices-per-worker on CPUs must be 1 with this TensorFlow, whose "
            "MultiWorkerMirroredStrategy chooses its devices in a way unknown to macrobatch. "
            f"Received: --devices-per-worker {count}, TensorFlow {tf.__version__}."
        )
    extended._initialize_local_devices = all_cpus


def run(command: List[str]) -> None:
    """Runs `script.py args...` or `-m module args...` as the main module."""
    is_module = command[0] == "-m"
    sys.argv = command[1:] if is_module else command
    if not getattr(sys.flags, "safe_path", False):  # else Python puts no folder there
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(command[0]))
    if is_module:
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    # Not runpy.run_path: it takes the main module away before threads and atexit hooks are done.
    main: Any = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(command[0])
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    with open(main.__file__, "rb") as script:
        code = compile(script.read(), main.__file__, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def accumulated(settings: str) -> Any:
    """A context in which every `fit` is accumulated with these settings, or none: "null"."""
    if settings == "null":
        return contextlib.nullcontext()
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path.insert(0, root)  # The launcher may have the package from anywhere.
    try:
        # By its name: nothing else here, and nobody above, knows of that room.
        hook = importlib.import_module("macrobatch._run.hook")
    finally:
        sys.path.remove(root)
    return hook.accumulated(json.loads(settings), is_worker=True)


def text_of(error: BaseException) -> str:
    """What Python would print about an error of the script, without the frames of this file."""
    traceback = error.__traceback__
    while traceback and (
        traceback.tb_frame.f_globals is globals()
        or traceback.tb_frame.f_globals.get("__name__") == "runpy"
    ):
        traceback = traceback.tb_next
    hook: Any = sys.modules.get("macrobatch._run.hook")
    if hook is not None:
        hook.without_own_frames(error.with_traceback(traceback))
        traceback = error.__traceback__
    with contextlib.redirect_stderr(io.StringIO()) as text:
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    return text.getvalue()


def main() -> None:
    """Runs what follows the numbers of the lifeline, of the report's file and of logical CPUs, and
    the settings of `accumulate`, as JSON.
    """
    lifeline, report, cpus = map(int, sys.argv[1:4])
    settings = sys.argv[4]
    guard(lifeline)
    os.set_inheritable(report, False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as in a terminal
    status, text = 1, ""
    try:
        if cpus > 1:
            use_cpus(cpus)
        with accumulated(settings):
            run(sys.argv[5:])
        return
    except SystemExit as error:
        when = time.monotonic()
        if error.code is None or error.code == 0:
            raise
        if isinstance(error.code, int):
            status = error.code & 0xFF
        else:
            text = f"{error.code}\n"
    except BaseException as error:
        when = time.monotonic()
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        text = text_of(error)
    with open(report, "w") as file:
        json.dump([when, text], file)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: TensorFlow may wait for the other workers then, and they for this one.
    os._exit(status)


if __name__ == "__main__":
    main()

"""Scripts in processes of their own, which find TensorFlow imported already.

To import TensorFlow takes longer than most scripts run. A server has done so, and forks.
"""

import multiprocessing
import os
import pathlib
import runpy
import sys
from typing import NamedTuple

PRELOADED = ["keras", "macrobatch", "tensorflow"]
# Scripts run beside other tests: more threads would only wait for each other.
ENVIRONMENT = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(script, *arguments, folder, through=None):
    """Runs a script as `python script arguments...` would. Its output goes to files in a folder.

    With `through`, a list of options, as `macrobatch run options... script arguments...`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    files = [str(pathlib.Path(folder) / name) for name in ("stdout", "stderr")]
    process = context.Process(
        target=_main, args=([str(script), *map(str, arguments)], files, through)
    )
    process.start()
    process.join()
    return Result(process.exitcode, *(pathlib.Path(file).read_text() for file in files))


def _main(arguments, files, through):
    for descriptor, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(ENVIRONMENT)
    if through is not None:
        from macrobatch import cli

        try:
            sys.exit(cli.main(["run", *through, *arguments]))
        except Exception:
            sys.excepthook(*sys.exc_info())  # as Python itself would show it
            sys.exit(1)
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")

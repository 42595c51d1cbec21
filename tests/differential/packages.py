"""The old and the new package, each with a process that runs cases with it."""

import concurrent.futures
import faulthandler
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "differential"
# Where the cases are, and what reads pages.
FOLDERS = [str(HERE.parent / name) for name in ("", "equivalence", "fit", "loops", "processes")]
COMMIT = "a0924f9"
PATIENCE = 600  # seconds for a case
RENEWED = 40  # cases after which a process is replaced: functions that were made stay in memory


def built():
    """The folder with the old package, as its wheel has it."""
    target = BUILD / COMMIT
    if not target.is_dir():
        print(f"Building the wheel of {COMMIT}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder) / "source"
            source.mkdir()
            subprocess.run(["tar", "-x", "-C", source], input=git("archive", COMMIT), check=True)
            pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
            subprocess.run([*pip, "-w", folder, source], check=True)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(target)
    return target


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=-1, check=True).stdout


class Package:
    """One of the packages, and the process that runs cases with it."""

    def __init__(self, name, folder, backend):
        self.folder, self.pool, self.ran = str(folder), None, 0
        self.settings = {
            "KERAS_BACKEND": backend,
            "JAX_COMPILATION_CACHE_DIR": str(BUILD / f"jax-{name}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.log = str(BUILD / f"{backend}-{name}.log")

    def start(self, seed):
        """The future of what comes of a case."""
        if self.ran % RENEWED == 0:
            self.stop()
            self.pool = concurrent.futures.ProcessPoolExecutor(
                1,
                multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self.folder, self.settings, self.log),
            )
        self.ran += 1
        return self.pool.submit(_run, seed)

    def result(self, future):
        """What came of a case; if its process ended or hung, that."""
        try:
            found = future.result()
        except concurrent.futures.process.BrokenProcessPool:
            self.ran = 0
            return {"refusal": f"the process ended or hung: {self.log}", "case": "", "kinds": []}
        assert found["package"].startswith(self.folder), found["package"]
        return found

    def stop(self):
        if self.pool is not None:
            self.pool.shutdown()


def _begin(package, settings, log):
    """Prepares a process, before Keras is imported."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(settings)
    sys.path[:0] = [package, str(HERE), *FOLDERS]


def _run(seed):
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    import worker

    found = worker.run(seed)
    faulthandler.cancel_dump_traceback_later()
    return found

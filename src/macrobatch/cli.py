"""`macrobatch run`: local worker processes for `tf.distribute.MultiWorkerMirroredStrategy`.

Nothing here uses TensorFlow. What a worker does around its script is in _worker.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any, List, Optional, Sequence

# How long workers may take to end when they are asked to, before they are killed.
GRACE_SECONDS = 5.0
_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_workers", "script.py")
# Each state of a progress bar, which ends in \r, is passed on like a line. A \r that comes last may
# yet turn out to be half of \r\n.
_LINE = re.compile(rb"([^\r\n]*)(\r?\n|\r(?=[^\n]))")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs a command line and returns its exit code."""
    parser = argparse.ArgumentParser(prog="macrobatch", allow_abbrev=False)
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
    try:
        _check(options.workers, options.devices_per_worker, command)
        gpus = _gpus(options.workers, options.devices_per_worker)
    except ValueError as error:
        run.error(str(error))
    return _Launch().run(options.workers, 1 if gpus else options.devices_per_worker, gpus, command)


def _check(workers: int, devices: int, command: List[str]) -> None:
    """Raises for what cannot be run."""
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


def _gpus(workers: int, devices: int) -> List[str]:
    """The CUDA_VISIBLE_DEVICES of each worker, or [] without GPUs. CUDA is not initialised."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # As CUDA does: what follows a name that is none is not looked at.
        gpus = list(itertools.takewhile(lambda name: name and name[0] != "-", names))
    else:
        try:
            command = ["nvidia-smi", "-L"]
            found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            gpus = re.findall(r"^GPU (\d+):", found.stdout.decode(), re.MULTILINE)
        except OSError:
            gpus = []
    if gpus and len(gpus) < workers * devices:
        raise ValueError(
            f"--workers {workers} --devices-per-worker {devices} needs {workers * devices} GPUs. "
            f"Received: {len(gpus)} ({', '.join(gpus)}). Ask for fewer, or set "
            "CUDA_VISIBLE_DEVICES=-1 to train on CPU devices."
        )
    return [",".join(gpus[i * devices : (i + 1) * devices]) for i in range(workers) if gpus]


def _addresses(sockets: List[socket.socket]) -> List[str]:
    """An address at a free port for each of the sockets, which keep the ports from others."""
    for each in sockets:
        # With this option Linux lets a worker, which sets it too, listen there all the same.
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind(("", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    if sys.platform != "linux":
        for each in sockets:
            each.close()
    return addresses


def _write(target: int, data: bytes) -> None:
    """Writes at once, past the buffer of sys.stdout and sys.stderr."""
    while data:
        data = data[os.write(target, data) :]


def _say(message: str) -> None:
    _write(2, f"macrobatch: {message}\n".encode())


class _Output:
    """One output of a worker, passed on in whole lines: those of several workers never mix."""

    def __init__(self, source: Any, target: int, prefix: str) -> None:
        self.ended = False
        self._source, self._target, self._prefix = source, target, prefix.encode()
        self._pending = b""
        # A line may take the place of another worker's progress bar, which may be longer.
        self._clear = b"\x1b[K" if os.isatty(target) else b""
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        """The pipe, for select."""
        return int(self._source.fileno())

    def read(self) -> bool:
        """Passes on what there is, and returns whether there was anything."""
        data = self._source.read(1 << 16)
        self.ended = data == b""  # None stands for nothing yet
        if data:
            self.write(data)
        return bool(data)

    def write(self, data: bytes) -> None:
        """Passes on the lines that are whole with this."""
        self._pending += data
        lines, end = [], 0
        for line in _LINE.finditer(self._pending):
            end = line.end()
            if line.group() != b"\r":  # with which a bar goes back to where it started
                lines += [self._prefix, line.group(1), self._clear, line.group(2)]
        self._pending = self._pending[end:]
        _write(self._target, b"".join(lines))

    def finish(self) -> None:
        """Passes on all that is left, the end of it as a line."""
        while self.read():
            pass
        if self._pending.strip(b"\r"):
            self.write(b"\n")


class _Worker:
    """A worker process and how it ended."""

    def __init__(self, index: int, lifeline: int, cpus: int, command: List[str], env: Any) -> None:
        self.name = f"worker {index}"
        self.report = ""
        self.failed_at = time.monotonic()
        self._report_file = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has ended
        report = self._report_file.fileno()
        self.process = subprocess.Popen(
            [sys.executable, _WORKER, str(lifeline), str(report), str(cpus), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            pass_fds=(lifeline, report),
            start_new_session=True,  # the worker and its children are a process group
        )
        self._stderr = _Output(self.process.stderr, 2, f"[{self.name}] ")
        self.outputs = [_Output(self.process.stdout, 1, f"[{self.name}] "), self._stderr]

    def send(self, number: int) -> None:
        """Sends a signal to the worker and its children."""
        # macOS does not permit it if only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether the worker has ended. Its children are killed then, and its report is read."""
        now = time.monotonic()
        if self.process.poll() is None:
            # If it dies without a report, it did so after this, and that counts as the time: what
            # the others report from then on may well come of it.
            self.failed_at = now
            return False
        self.send(signal.SIGKILL)
        for output in self.outputs:
            output.finish()
        self._report_file.seek(0)
        report = self._report_file.read()
        if report:
            self.failed_at, self.report = json.loads(report.decode())
        return True

    def explain(self) -> int:
        """Says how the worker failed, and returns its exit code as a shell would."""
        code = self.process.returncode
        if self.report:
            self._stderr.write(self.report.encode(errors="replace"))
        elif code < 0:
            _say(f"{self.name} was killed by {signal.Signals(-code).name}")
        else:
            _say(f"{self.name} ended with exit code {code}")
        return code if code >= 0 else 128 - code


class _Launch:
    """All workers of a run, from start to end."""

    def __init__(self) -> None:
        self._running: List[_Worker] = []
        self._failed: List[_Worker] = []
        self._signals: List[int] = []  # received by the launcher, and not yet dealt with
        self._interrupted_by = 0
        self._kill_at = 0.0  # set when the workers are asked to end

    def run(self, workers: int, cpus: int, gpus: List[str], command: List[str]) -> int:
        """Starts the workers, waits until all have ended, and returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.append(number))
        # Workers die when the other end of their lifeline is closed: by the kernel, if need be.
        lifeline, _other_end = os.pipe()
        sockets = [socket.socket() for _ in range(workers)]
        addresses = _addresses(sockets)
        try:
            for index in range(workers):
                task = {"type": "worker", "index": index}
                config = json.dumps({"cluster": {"worker": addresses}, "task": task})
                env = dict(os.environ, TF_CONFIG=config)
                if gpus:
                    env["CUDA_VISIBLE_DEVICES"] = gpus[index]
                self._running.append(_Worker(index, lifeline, cpus, command, env))
            while self._running:
                self._look()
            # The others may have failed because the first one did, so it comes last.
            self._failed.sort(key=lambda worker: worker.failed_at, reverse=True)
            codes = [worker.explain() for worker in self._failed]
        except BrokenPipeError:  # as in `macrobatch run ... | head`
            return 128 + signal.SIGPIPE
        finally:
            self._send(signal.SIGKILL)
        if self._interrupted_by:
            return 128 + self._interrupted_by
        return codes[-1] if codes else 0

    def _look(self) -> None:
        """Passes on output, and sees to workers that have ended and to signals."""
        outputs = [output for worker in self._running for output in worker.outputs]
        waiting = [output for output in outputs if not output.ended]
        for output in select.select(waiting, [], [], 0.05)[0]:
            output.read()
        for worker in list(self._running):
            if worker.has_ended():
                self._running.remove(worker)
                # Those that were asked to end are not to blame for it, unless they report an error.
                if worker.process.returncode and (worker.report or not self._kill_at):
                    self._failed.append(worker)
        if self._signals:
            number = self._signals.pop(0)
            if self._kill_at:  # asked for a second time
                self._kill_at = time.monotonic()
            else:
                self._interrupted_by = number
                self._stop(number, f"stopping the workers on {signal.Signals(number).name}")
        elif self._failed and self._running and not self._kill_at:
            first = min(self._failed, key=lambda worker: worker.failed_at)
            self._stop(signal.SIGTERM, f"{first.name} failed, stopping the others")
        if self._kill_at and time.monotonic() >= self._kill_at:
            self._send(signal.SIGKILL)

    def _stop(self, number: int, message: str) -> None:
        """Asks all workers to end."""
        _say(message)
        self._kill_at = time.monotonic() + GRACE_SECONDS
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)


if __name__ == "__main__":
    sys.exit(main())

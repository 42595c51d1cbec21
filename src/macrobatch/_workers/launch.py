"""The inside of `macrobatch run`: starts local workers, and sees to them until all have ended.

Nothing here uses TensorFlow. What a worker does around its script is in script.
"""

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
from typing import Any, Dict, List, Optional, Sequence

from macrobatch import _backends
from macrobatch._workers.output import Output, Writer, writers

# How long workers may take to end when they are asked to, before they are killed.
GRACE_SECONDS = 5.0
# How long a reader may take for the last output, after a signal.
_LAST_SECONDS = 0.5
_TICK = 0.05
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "script.py")


def check_backend() -> None:
    """Raises where Keras would run on another backend than that of the workers' strategy."""
    name = os.environ.get("KERAS_BACKEND") or _backends.TENSORFLOW
    if name != _backends.TENSORFLOW:
        raise ValueError(
            "--workers is for MultiWorkerMirroredStrategy, which TensorFlow has. Each worker would "
            f"train a model of its own. Received: KERAS_BACKEND={name}. Leave out --workers."
        )


def check_descriptors(workers: int) -> None:
    """Raises where the system does not allow as many open files as the workers need."""
    import resource  # not on Windows

    # Two outputs, a report and a port for each worker, and a few for all.
    needed = 4 * workers + 32
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise ValueError(
            f"--workers {workers} needs {needed} file descriptors. Received: a limit of {limit}. "
            f"Raise it with `ulimit -n {needed}`, or ask for fewer workers."
        )


def gpus_of_workers(workers: int, devices: int) -> List[str]:
    """The CUDA_VISIBLE_DEVICES of each worker, or [] without GPUs. CUDA is not initialised."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # As CUDA does: names after one that names nothing do not count.
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


def _say(writer: Writer, message: str) -> None:
    writer.write(2, f"macrobatch: {message}\n".encode())


class Worker:
    """A worker process and how it ended."""

    def __init__(
        self,
        index: int,
        command: List[str],
        env: Dict[str, str],
        writers: Dict[int, Writer],
        *,
        lifeline: int,
        cpus: int,
        settings: str = "null",
        log: int = -1,
    ) -> None:
        self.name = f"worker {index}"
        self.report = ""
        self.failed_at = time.monotonic()
        self._report_file = tempfile.TemporaryFile()  # noqa: SIM115 - read when the worker has ended
        report = self._report_file.fileno()
        self.process = subprocess.Popen(
            [sys.executable, _SCRIPT, str(lifeline), str(report), str(cpus), settings, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=env,
            pass_fds=(lifeline, report),
            start_new_session=True,  # the worker and its children are a process group
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._writer, prefix = writers[2], f"[{self.name}] "
        self._stderr = Output(self.process.stderr, 2, writers[2], prefix, log)
        self.outputs = [Output(self.process.stdout, 1, writers[1], prefix, log), self._stderr]

    def send(self, number: int) -> None:
        """Sends a signal to the worker and its children."""
        # macOS does not permit it if only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def has_ended(self) -> bool:
        """Whether the worker has ended. Its children are killed then, and its report is read."""
        now = time.monotonic()
        if self.process.poll() is None:
            # A worker that dies without a report does so after this moment, which counts as the
            # time: what the others report from then on may well come of it.
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
            _say(self._writer, f"{self.name} was killed by {signal.Signals(-code).name}")
        else:
            _say(self._writer, f"{self.name} ended with exit code {code}")
        return code if code >= 0 else 128 - code


def run(
    workers: int,
    cpus: int,
    gpus: List[str],
    command: List[str],
    settings: Optional[Dict[str, Any]] = None,
    log_dir: Optional[str] = None,
    max_restarts: int = 0,
) -> int:
    """Starts workers, all of them again if one fails, and returns the exit code.

    Args:
        workers: how many.
        cpus: logical CPUs of each.
        gpus: the CUDA_VISIBLE_DEVICES of each, or [].
        command: the script, and its arguments.
        settings: those of `accumulate`; None leaves every `fit` as it is.
        log_dir: a folder for a file with the output of each worker.
        max_restarts: how often to start again at most.
    """
    logs = [-1] * workers
    if log_dir is not None:
        os.makedirs(log_dir, exist_ok=True)
        paths = [os.path.join(log_dir, f"worker-{index}.log") for index in range(workers)]
        logs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for path in paths]
    for restarts in range(max_restarts + 1):
        started = Launch(json.dumps(settings), logs)
        code = started.run(workers, cpus, gpus, command)
        if code == 0 or started.is_stopped or restarts == max_restarts:
            break
        message = f"starting all workers again ({restarts + 1} of {max_restarts})"
        print(f"macrobatch: {message}", file=sys.stderr, flush=True)
    return code


class Launch:
    """All workers of a run, from start to end."""

    def __init__(self, settings: str = "null", logs: Sequence[int] = ()) -> None:
        self._settings, self._logs = settings, logs
        self._running: List[Worker] = []
        self._failed: List[Worker] = []
        self._writers = writers()
        self._signals: List[int] = []  # received by the launcher, and not yet dealt with
        self._is_unread = False
        self._is_urged = False  # by a signal, sooner or later
        self._interrupted_by = 0
        self._kill_at = 0.0  # set when the workers are asked to end

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped the run, or reads no more of it."""
        return bool(self._interrupted_by) or self._is_unread

    def run(self, workers: int, cpus: int, gpus: List[str], command: List[str]) -> int:
        """Starts the workers, waits until all have ended, and returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: self._signals.append(number))
        # Workers die when the other end of their lifeline is closed: by the kernel, if need be.
        lifeline, other_end = os.pipe()
        sockets = [socket.socket() for _ in range(workers)]
        try:
            addresses = _addresses(sockets)
            for index in range(workers):
                task = {"type": "worker", "index": index}
                config = json.dumps({"cluster": {"worker": addresses}, "task": task})
                env = dict(os.environ, TF_CONFIG=config)
                if gpus:
                    env["CUDA_VISIBLE_DEVICES"] = gpus[index]
                self._running.append(
                    Worker(
                        index,
                        command,
                        env,
                        self._writers,
                        lifeline=lifeline,
                        cpus=cpus,
                        settings=self._settings,
                        log=self._logs[index] if self._logs else -1,
                    )
                )
            while self._running:
                self._look()
            # The others may have failed because the first one did, so it comes last.
            self._failed.sort(key=lambda worker: worker.failed_at, reverse=True)
            codes = [worker.explain() for worker in self._failed]
            self._finish_writing()
        except BrokenPipeError:  # as in `macrobatch run ... | head`
            self._is_unread = True
            return 128 + signal.SIGPIPE
        finally:
            self._send(signal.SIGKILL)
            # Workers may be started again, many times.
            for each in sockets:
                each.close()
            os.close(lifeline)
            os.close(other_end)
        if self._interrupted_by:
            return 128 + self._interrupted_by
        return codes[-1] if codes else 0

    def _look(self) -> None:
        """Passes on output, and sees to workers that have ended and to signals."""
        self._pass_on()
        for worker in list(self._running):
            if worker.has_ended():
                self._running.remove(worker)
                # Those that were asked to end are not to blame for it, unless they report an error.
                if worker.process.returncode and (worker.report or not self._kill_at):
                    self._failed.append(worker)
        if self._signals:
            number = self._signals.pop(0)
            self._is_urged = True
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

    def _pass_on(self) -> None:
        """Reads each output that has something, or waits for a moment."""
        outputs = [output for worker in self._running for output in worker.outputs]
        wanted = {output.fileno(): output for output in outputs if output.is_wanted()}
        poll = select.poll()  # select.select takes no descriptor above 1023
        for descriptor in wanted:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * _TICK):
            wanted[descriptor].read()

    def _finish_writing(self) -> None:
        """Waits until all output is written. After a signal, nobody has to read any more."""
        leave_at = max(self._kill_at, time.monotonic() + _LAST_SECONDS)
        busy = list(self._writers.values())
        while busy:
            busy = [writer for writer in busy if not writer.is_done(_TICK)]
            if self._signals:
                number = self._signals.pop(0)
                if not self._is_urged and not self._kill_at:
                    self._interrupted_by = number
                self._is_urged = True
                leave_at = time.monotonic() + _LAST_SECONDS
            if self._is_urged and time.monotonic() >= leave_at:
                return

    def _stop(self, number: int, message: str) -> None:
        """Asks all workers to end."""
        _say(self._writers[2], message)
        self._kill_at = time.monotonic() + GRACE_SECONDS
        self._send(number)

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)

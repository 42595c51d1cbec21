"""The output of workers, passed on in whole lines, without ever waiting for its reader."""

import collections
import contextlib
import os
import re
import select
import threading
from typing import IO, Deque, Dict, List, Optional, Tuple

# Longer lines are passed on in pieces: memory is finite, and a line may never end.
LONGEST_LINE = 1 << 24
# So many bytes may wait for the reader. Then workers wait too, each with a full pipe.
BUFFER = 1 << 20
# What a pipe can hold at most, on Linux without privileges.
_PIPE = 1 << 20
_READ = 1 << 16
_END = re.compile(rb"\r?\n|\r")


class Lines:
    r"""Cuts a stream into lines. Looks at each byte once, however long a line is.

    Each state of a progress bar, which ends in \r, counts as a line.
    """

    def __init__(self) -> None:
        self._pending = bytearray()
        self._held = b""

    def add(self, data: bytes) -> List[Tuple[bytes, bytes]]:
        """The lines that are whole with this, each with its end."""
        data = self._held + data
        # A \r that comes last may yet turn out to be half of \r\n.
        self._held = b"\r" if data.endswith(b"\r") else b""
        data = data[: len(data) - len(self._held)]
        lines, start = [], 0
        for end in _END.finditer(data):
            self._pending += data[start : end.start()]
            if self._pending or end.group() != b"\r":  # a bar goes back to where it started
                lines.append((self._take(), end.group()))
            start = end.end()
        self._pending += data[start:]
        if len(self._pending) >= LONGEST_LINE:
            lines.append((self._take(), b"\n"))
        return lines

    def finish(self) -> List[Tuple[bytes, bytes]]:
        """The line that the stream ended in, if any."""
        return self.add(b"\n") if self._pending else []

    def _take(self) -> bytes:
        line = bytes(self._pending)
        self._pending.clear()
        return line


class Writer:
    """Writes in a thread: whoever reads the output may stop, and the launcher must go on.

    The alternative, non-blocking writes, is a setting of the terminal or pipe, and so would change
    it for all other processes that write there.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Deque[Tuple[int, bytes]] = collections.deque()
        self._size = 0
        self._error: Optional[OSError] = None
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, target: int, data: bytes) -> None:
        """Writes when its turn has come. Does not wait."""
        if data:
            with self._changed:
                self._waiting.append((target, data))
                self._size += len(data)
                self._changed.notify_all()

    def has_room(self) -> bool:
        """Whether more output should be read. Raises if writing has failed."""
        if self._error is not None:
            raise self._error
        return self._size < BUFFER

    def is_done(self, timeout: float) -> bool:
        """Whether all is written, perhaps after a while. Raises if writing has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._size == 0 or self._error is not None, timeout)
            return self.has_room() and self._size == 0

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    target, data = self._waiting.popleft()
                _write(target, data)
                with self._changed:
                    self._size -= len(data)
                    self._changed.notify_all()
        except OSError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _write(target: int, data: bytes) -> None:
    """Writes at once, past the buffer of sys.stdout and sys.stderr."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:  # as another process may have set the pipe
            poll = select.poll()
            poll.register(target, select.POLLOUT)
            poll.poll()


def writers() -> Dict[int, Writer]:
    """The writers of stdout and stderr. One for both if they are the same, or lines would mix."""
    stdout = Writer()
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(1), os.fstat(2)):
            return {1: stdout, 2: stdout}
    return {1: stdout, 2: Writer()}


class Output:
    """One output of a worker, passed on in whole lines: those of several workers never mix."""

    def __init__(
        self, source: IO[bytes], target: int, writer: Writer, prefix: str, log: int = -1
    ) -> None:
        self._source, self._target, self._writer = source, target, writer
        self._log = log  # a file that gets the lines too, or -1
        self._prefix = prefix.encode()
        self._lines = Lines()
        self._has_ended = False
        # A line may take the place of another worker's progress bar, which may be longer.
        self._clear = b"\x1b[K" if os.isatty(target) else b""
        os.set_blocking(source.fileno(), False)

    def fileno(self) -> int:
        """The pipe, for poll."""
        return self._source.fileno()

    def is_wanted(self) -> bool:
        """Whether to read now."""
        return not self._has_ended and self._writer.has_room()

    def read(self) -> bool:
        """Passes on what there is, and returns whether there was anything."""
        data = self._source.read(_READ)
        self._has_ended = data == b""  # None stands for nothing yet
        if data:
            self._pass_on(self._lines.add(data))
        return bool(data)

    def write(self, data: bytes) -> None:
        """Passes on lines as if they came from the worker."""
        self._pass_on([*self._lines.add(data), *self._lines.finish()])

    def finish(self) -> None:
        """Passes on all that is left of a worker that has ended, the end of it as a line."""
        # No more than a pipe can hold: a process that got away may write for ever.
        for _ in range(_PIPE // _READ):
            if not self.read():
                break
        self._pass_on(self._lines.finish())

    def _pass_on(self, lines: List[Tuple[bytes, bytes]]) -> None:
        parts = [part for text, end in lines for part in (self._prefix, text, self._clear, end)]
        self._writer.write(self._target, b"".join(parts))
        if self._log >= 0:
            _write(self._log, b"".join(text + end for text, end in lines))

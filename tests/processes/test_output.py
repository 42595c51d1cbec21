"""Output of workers: cut into lines, and written by a thread."""

import os
import re
import subprocess
import sys

import pytest

from macrobatch._workers import output

TEXT = b"\r1/2\r2/2\rdone\nleft\rright\r\n\n\r\n\r\r\rend\r\r\n\rno end"
# The rule for a whole text: \r\n, \n and \r end a line. An empty text before \r is no line.
LINES = [
    (text, end)
    for text, end in re.findall(rb"([^\r\n]*)(\r\n|\n|\r)", TEXT)
    if (text, end) != (b"", b"\r")
]


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_lines_do_not_depend_on_the_pieces_they_come_in(size):
    lines, found = output.Lines(), []
    for start in range(0, len(TEXT), size):
        found += lines.add(TEXT[start : start + size])
    assert found == LINES
    assert lines.finish() == [(b"no end", b"\n")]
    assert lines.finish() == []


def test_a_line_without_end_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(output, "LONGEST_LINE", 1000)
    lines, found = output.Lines(), []
    for _ in range(100):
        found += lines.add(b"x" * 99)
    found += lines.finish()
    assert b"".join(text for text, _ in found) == b"x" * 9900
    assert {end for _, end in found} == {b"\n"}
    assert max(len(text) for text, _ in found) < 1100


def test_a_writer_does_not_wait_for_the_reader():
    reading, writing = os.pipe()
    writer = output.Writer()
    sent = [bytes([i]) * 100_000 for i in range(20)]
    for data in sent:
        writer.write(writing, data)  # more than a pipe holds
    assert not writer.has_room()
    assert not writer.is_done(0.01)
    with open(reading, "rb") as reader:
        assert reader.read(2_000_000) == b"".join(sent)
        assert writer.is_done(60)
        assert writer.has_room()
    writer.write(writing, b"nobody reads this")
    with pytest.raises(BrokenPipeError):
        writer.is_done(60)
    with pytest.raises(BrokenPipeError):
        writer.has_room()
    os.close(writing)


@pytest.mark.parametrize("stderr", [subprocess.STDOUT, subprocess.PIPE])
def test_one_pipe_for_both_outputs_has_one_writer(stderr):
    """Two would write at the same time, and a pipe takes a long line in pieces."""
    program = "from macrobatch._workers import output; w = output.writers(); print(w[1] is w[2])"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True)
    assert result.stdout == f"{stderr == subprocess.STDOUT}\n"

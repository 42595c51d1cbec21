"""`macrobatch plan`: a script until its first fit, or a function; exit codes; JSON; the picture."""

import io
import json
import os
import subprocess
import sys

import pytest
from support import thorough

from macrobatch import cli
from macrobatch._plan import command, live, search
from macrobatch._plan.report import Row

FIT = "model_with().fit(x, y, batch_size=2)"


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(search, "ROUNDS", 1)


def test_a_script_runs_until_its_first_fit(script, capsys):
    script(f"print('hello', sys.argv)\n{FIT}\nprint('never')")
    assert cli.main(["plan", "script.py", "--epochs", "3"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0] == "small, a batch of 2 examples, on a CPU."
    assert lines[-1].startswith("Batch 2 fits in ")
    assert "x the time of the plain batch" in lines[-1]
    # What is going on is no output, nor is what the script prints. No terminal: plain lines.
    assert "hello ['script.py', '--epochs', '3']" in output.err
    assert "never" not in output.err
    assert "macrobatch plan: [1/" in output.err
    assert "macrobatch plan: micro_batch_size=2: " in output.err


def test_nothing_fits(script, capsys, monkeypatch):
    script(FIT)
    monkeypatch.setattr(search, "MARGIN", 1.0)
    assert cli.main(["plan", "script.py"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "macrobatch plan: Not even a micro-batch of one example fits" in output.err


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (["--memory-limit", "6 apples"], FIT, "Received: memory_limit='6 apples'"),
        (["--memory-limit", "50MB"], FIT, "must be more than what TensorFlow, the weights"),
        ([], "1 / 0", "script.py failed before any fit(). ZeroDivisionError"),
    ],
)
def test_what_cannot_be_told(script, capsys, options, text, message):
    script(text)
    assert cli.main(["plan", *options, "script.py"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err.splitlines()[-1]


def test_without_matplotlib(script, capsys, monkeypatch):
    script("print('ran')\n" + FIT)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["plan", "--plot", "plan.png", "script.py"]) == 2
    error = capsys.readouterr().err
    assert 'pip install "macrobatch[plot]"' in error
    assert "ran" not in error


@pytest.mark.parametrize("path", ["not_there/plan.png", "plan.abc", "."])
def test_a_picture_that_cannot_be_written(script, capsys, path):
    script("print('ran')\n" + FIT)
    assert cli.main(["plan", "--plot", path, "script.py"]) == 2
    error = capsys.readouterr().err
    assert f"Received: {path}. " in error
    assert "ran" not in error


def test_what_is_missing(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["plan"])
    assert end.value.code == 2
    assert "must follow the options" in capsys.readouterr().err


def test_an_option_that_there_is_not(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["plan", "--plott", "plan.png", "train.py"])
    said = capsys.readouterr().err
    assert "usage: macrobatch plan" in said
    assert "there is no option --plott. Did you mean --plot?" in said


def test_the_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert "Example: macrobatch plan --memory-limit 6GiB --plot plan.png train.py" in output
    assert "Exit code 0: found; 1: nothing fits; 2: could not tell." in output


@thorough
def test_json_and_a_picture_in_a_process_of_its_own(script, tmp_path):
    """Keras is not there before the function's module imports it."""
    script("def made():\n    return model_with(), x[:2], y[:2]", "functions_to_plan.py")
    command = [sys.executable, "-m", "macrobatch", "plan", "--json", "--plot", "plan.png"]
    command += ["--memory-limit", "90%", "--objective", "largest", "functions_to_plan:made"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert (found["micro_batch_size"], found["objective"]) == (2, "largest")
    assert [row["size"] for row in found["rows"]] == [1, 2]
    assert all(row["peak"] > 10**8 for row in found["rows"])
    assert found["limit_source"].startswith("memory_limit='90%'")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert os.path.getsize(tmp_path / "plan.png") > 10_000


def test_a_terminal(monkeypatch):
    """A table that grows, and a bar under it."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    rows = [Row(1, 2**30, 12.0, True), Row(2, note="not tried")]
    with live.shown_live() as tell:
        tell(rows, "micro_batch_size=4", 2, 9)
    text = screen.getvalue()
    for part in ("peak memory", "1 GiB", "examples/s", "12", "2/9", "micro_batch_size=4", "━"):
        assert part in text

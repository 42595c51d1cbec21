"""The examples, as a reader would run them. test_documentation.py has the code of the pages."""

import os
import pathlib
import re
import subprocess
import sys

import fresh
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def run(script, *arguments, folder):
    result = fresh.run(ROOT / "examples" / script, *arguments, folder=folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


# How far weights may differ, in what an example prints, and its options if it draws a picture.
@pytest.mark.parametrize(
    ("name", "limits", "options"),
    [
        ("custom_loop", [1e-5, 1e-3], []),  # weights move by 0.2
        ("stream", 4 * [1e-5], []),  # by 0.01 in an update
        ("contrastive", [1e-4], ["--epochs", 1]),  # by 0.01
        ("retrieval", [1e-4], ["--steps", 5]),  # by 0.015
        ("multi_device", [1e-5], []),  # by 0.1
    ],
)
def test_an_example(name, limits, options, tmp_path):
    picture = tmp_path / "picture.png"
    options = options and [*options, "--output", picture]
    result = run(f"{name}.py", *options, folder=tmp_path)
    found = [float(number) for number in re.findall(r"by at most (\S+?),?\s", result.stdout)]
    assert len(found) == len(limits)
    assert all(map(float.__lt__, found, limits))
    assert "AutoGraph could not" not in result.stderr
    assert not options or picture.stat().st_size > 10_000


@pytest.mark.thorough  # test_workers.py has the same, faster
def test_multi_worker(tmp_path):
    """As it is, and started by the launcher, both with the updates of the same batches."""
    out = tmp_path / "out"
    out.mkdir()
    command = ["multi_worker.py", "--folder", str(out), "--epochs", "2"]
    launcher = [sys.executable, "-m", "macrobatch", "run", "--workers", "2"]
    together = subprocess.run(
        [*launcher, *command],
        cwd=ROOT / "examples",
        env={**os.environ, **fresh.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert together.returncode == 0, together.stderr[-3000:]
    assert re.search(r"\[worker 1\] macrobatch: \d+ batches, ", together.stderr)
    for result in (run(*command, folder=tmp_path), together):
        losses = re.findall(r"loss: \[(\S+), (\S+)\]", result.stdout)
        assert losses
        assert all(losses[0] == each for each in losses), "workers report different losses"
        assert float(losses[0][1]) < float(losses[0][0])
    assert [path.name for path in out.iterdir()] == ["model.keras"]

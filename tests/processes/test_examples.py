"""The examples, as a reader would run them. test_documentation.py has the code of the pages."""

import os
import pathlib
import re
import subprocess
import sys

import fresh
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def run(tmp_path_factory):
    def run(script, *arguments):
        result = fresh.run(script, *arguments, folder=tmp_path_factory.mktemp("output"))
        assert result.returncode == 0, result.stderr[-3000:]
        return result

    return run


def differences(output):
    return [float(number) for number in re.findall(r"by at most (\S+?),?\s", output)]


def test_custom_loop(run):
    single, mixed = differences(run(ROOT / "examples/custom_loop.py").stdout)
    assert single < 1e-5  # weights move by 0.2
    assert mixed < 1e-3


def test_stream(run):
    result = run(ROOT / "examples/stream.py")
    found = differences(result.stdout)
    assert len(found) == 4
    assert max(found) < 1e-5  # an update moves weights by 0.01
    assert "AutoGraph could not" not in result.stderr


def test_contrastive(run, tmp_path):
    picture = tmp_path / "picture.png"
    result = run(ROOT / "examples/contrastive.py", "--epochs", 1, "--output", picture)
    (difference,) = differences(result.stdout)
    assert difference < 1e-4  # weights move by 0.01
    assert picture.stat().st_size > 10_000


def test_retrieval(run, tmp_path):
    picture = tmp_path / "picture.png"
    result = run(ROOT / "examples/retrieval.py", "--steps", 5, "--output", picture)
    (difference,) = differences(result.stdout)
    assert difference < 1e-4  # weights move by 0.015
    assert picture.stat().st_size > 10_000


def test_multi_device(run):
    (difference,) = differences(run(ROOT / "examples/multi_device.py").stdout)
    assert difference < 1e-5  # weights move by 0.1


@pytest.mark.thorough  # test_workers.py has the same, faster
def test_multi_worker(run, tmp_path):
    """As it is, and started by the launcher, both with the updates of the same batches."""
    script = ROOT / "examples/multi_worker.py"
    folder = ["--folder", str(tmp_path), "--epochs", "2"]
    launcher = [sys.executable, "-m", "macrobatch", "run", "--workers", "2"]
    together = subprocess.run(
        [*launcher, script, *folder],
        env={**os.environ, **fresh.ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    assert together.returncode == 0, together.stderr[-3000:]
    assert re.search(r"\[worker 1\] macrobatch: \d+ batches, ", together.stderr)
    for result in (run(script, *folder), together):
        losses = re.findall(r"loss: \[(\S+), (\S+)\]", result.stdout)
        assert losses
        assert all(losses[0] == each for each in losses), "workers report different losses"
        assert float(losses[0][1]) < float(losses[0][0])
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]

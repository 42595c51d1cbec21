"""The examples, and the code in the documentation, as a reader would run them."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def run(path):
    environment = {**os.environ, "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def differences(output):
    return [float(number) for number in re.findall(r"by at most (\S+?),?\s", output)]


def test_custom_loop():
    single, mixed = differences(run(ROOT / "examples/custom_loop.py").stdout)
    assert single < 1e-5  # weights move by 0.2
    assert mixed < 1e-3


def test_stream():
    result = run(ROOT / "examples/stream.py")
    found = differences(result.stdout)
    assert len(found) == 4
    assert max(found) < 1e-5  # an update moves weights by 0.01
    assert "AutoGraph could not" not in result.stderr


@pytest.mark.parametrize("page", ["custom-loops.md"])
def test_code_on_a_page(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    run(script)

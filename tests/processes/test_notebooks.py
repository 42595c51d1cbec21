"""The notebooks, from top to bottom, in processes of their own."""

import json
import pathlib

import fresh
import pytest
from support import needs_hub, thorough

FOLDER = pathlib.Path(__file__).parent.parent.parent / "notebooks"


@pytest.mark.parametrize(
    "name",
    ["quickstart", pytest.param("lora", marks=[thorough, needs_hub])],
)
def test_a_notebook_runs(name, tmp_path):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = tmp_path / "notebook.py"
    script.write_text("\n\n".join(code))
    result = fresh.run(script, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


def test_notebooks_are_saved_without_output():
    for path in FOLDER.glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            assert not cell.get("outputs"), path.name

"""Each block of code in README and docs, pasted into an empty file, in a process of its own."""

import pathlib
import re

import fresh
import pytest
from pages import blocks_of

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks():
    for page in PAGES:
        for block in blocks_of(page.read_text()):
            yield f"{page.relative_to(ROOT)}:{block.line}", block


def runnable():
    for name, block in blocks():
        if block.runs:
            marks = [pytest.mark.thorough] if block.mark == "thorough" else []
            yield pytest.param(block.code, id=name, marks=marks)


@pytest.mark.parametrize("code", list(runnable()))
def test_a_block_runs_by_itself(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "pasted.py"
    script.write_text(code)
    result = fresh.run(script, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


def test_code_has_a_language_that_decides_whether_it_runs():
    """Code under another name, such as `py`, would pass by the test above."""
    assert {each.language for _, each in blocks()} <= {"python", "sh", "text", "toml", "yaml"}


def test_few_blocks_are_not_run():
    left_out = [name for name, block in blocks() if block.mark.startswith("not run")]
    assert all(re.match(r"docs/(scaling|coming-from)\.md", name) for name in left_out), left_out


def test_links_of_the_readme_work_on_pypi():
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert targets
    metadata = (ROOT / "pyproject.toml").read_text()
    repository = re.search(r'^Repository = "(.+)"$', metadata, re.M).group(1)
    raw = repository.replace("//github.com/", "//raw.githubusercontent.com/")
    for target in targets:
        found = re.fullmatch(rf"(?:{repository}/blob/main|{raw}/main)/([^#]+)(#.+)?", target)
        assert found, target
        assert (ROOT / found.group(1)).is_file(), target

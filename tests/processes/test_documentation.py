"""Each block of code in README and docs, pasted into an empty file, in a process of its own.

A line before a block may say more: <!-- thorough --> or <!-- not run: why -->.
"""

import pathlib
import re

import fresh
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"(?:^<!-- (thorough|not run: .+?) -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks():
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            mark, language, code = found.groups()
            line = text.count("\n", 0, found.start(3)) + 1
            yield f"{page.relative_to(ROOT)}:{line}", mark or "", language, code


def runnable():
    for name, mark, language, code in blocks():
        if language == "python" and not mark.startswith("not run"):
            marks = [pytest.mark.thorough] if mark == "thorough" else []
            yield pytest.param(code, id=name, marks=marks)


@pytest.mark.parametrize("code", list(runnable()))
def test_a_block_runs_by_itself(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "pasted.py"
    script.write_text(code)
    result = fresh.run(script, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]


def test_code_has_a_language_that_decides_whether_it_runs():
    """Code under another name, such as `py`, would pass by the test above."""
    assert {language for _, _, language, _ in blocks()} <= {"python", "sh", "text", "toml", "yaml"}


def test_few_blocks_are_not_run():
    left_out = [name for name, mark, *_ in blocks() if mark.startswith("not run")]
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

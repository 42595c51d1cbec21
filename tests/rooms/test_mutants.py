"""Each mutant can still be applied: its text stands once in its file, and its tests are there."""

import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
SOURCE = HERE.parent / "src" / "macrobatch"


def all_mutants():
    folder = HERE / "mutants"
    sys.path.insert(0, str(folder))
    try:
        files = [path.stem for path in sorted(folder.glob("*.py"))]
        modules = [__import__(name) for name in files if name != "__main__"]
    finally:
        sys.path.remove(str(folder))
    return [mutant for module in modules for mutant in getattr(module, "MUTANTS", [])]


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant):
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1
    for test in mutant.tests:
        assert (HERE / test.partition("::")[0]).exists()

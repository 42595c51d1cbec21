"""Each mutant can still be applied: its text stands once in its file, and its tests are there."""

import importlib.util
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parents[1]
SOURCE = HERE.parent / "src" / "macrobatch"
NO_MUTANTS = ("__main__", "mutant")


def all_mutants():
    folder = HERE / "mutants"
    sys.path.insert(0, str(folder))  # for the record that each file imports
    try:
        files = [path for path in sorted(folder.glob("*.py")) if path.stem not in NO_MUTANTS]
        return [mutant for path in files for mutant in loaded(path).MUTANTS]
    finally:
        sys.path.remove(str(folder))


def loaded(path):
    """The module in a file. By its name, the folder tests/fit would be found for another one."""
    spec = importlib.util.spec_from_file_location(f"mutants_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant):
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1
    for test in mutant.tests:
        assert (HERE / test.partition("::")[0]).exists()


def test_the_default_selection_has_the_tests_of_all_mutants(request):
    config = request.config
    if config.args != config.getini("testpaths") or config.option.keyword:
        pytest.skip("only a part of the tests was chosen")
    ids = {item.nodeid for item in request.session.items}
    chosen = {full.partition(mark)[0] for full in ids for mark in ("[", "::", "\0")}
    named = {f"tests/{test}" for mutant in all_mutants() for test in mutant.tests}
    assert not named - chosen

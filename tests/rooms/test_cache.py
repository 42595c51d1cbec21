"""Sizes that were found before, in files."""

import json
import multiprocessing
import os

import pytest

from macrobatch._sizes import cache
from macrobatch._sizes.cache import Found

KEY = {"model": [["Dense", "float32"]], "whole": 64, "memory": None}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    return tmp_path


def files():
    return sorted(os.listdir(cache.folder()))


def test_what_is_written_is_read():
    assert cache.read(KEY) is None
    cache.write(KEY, Found(8, 1000))
    assert cache.read(KEY) == Found(8, 1000)
    cache.write(KEY, Found(4))
    assert cache.read(KEY) == Found(4)
    assert cache.read({**KEY, "whole": 65}) is None
    cache.write({**KEY, "whole": 60}, Found(64))
    assert cache.read({**KEY, "whole": 60}) == Found(64)
    assert len(files()) == 2


def test_is_in_the_folder_of_keras(home, monkeypatch):
    assert cache.folder() == str(home / "macrobatch" / "sizes")
    monkeypatch.delenv("KERAS_HOME")
    monkeypatch.setenv("HOME", str(home))
    assert cache.folder() == str(home / ".keras" / "macrobatch" / "sizes")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"size": 8}',
        json.dumps({"size": "8", "bytes": 0, "key": KEY}),
        json.dumps({"size": 0, "bytes": 0, "key": KEY}),
        json.dumps({"size": 65, "bytes": 0, "key": KEY}),
        json.dumps({"size": True, "bytes": 0, "key": KEY}),
        json.dumps({"size": 8, "bytes": 0, "key": {}}),
        "\x00\xff",
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_ignored_with_a_warning(text):
    cache.write(KEY, Found(8))
    (name,) = files()
    path = os.path.join(cache.folder(), name)
    with open(path, "w", encoding="latin-1") as file:
        file.write(text)
    with pytest.warns(UserWarning, match="is ignored"):
        assert cache.read(KEY) is None
    cache.write(KEY, Found(8))
    assert cache.read(KEY) == Found(8)


@pytest.mark.parametrize("off", ["0", "false", "False", "off", "no", " NO "])
def test_can_be_switched_off(off, monkeypatch):
    cache.write(KEY, Found(8))
    monkeypatch.setenv("MACROBATCH_CACHE", off)
    assert cache.read(KEY) is None
    cache.write(KEY, Found(4))
    monkeypatch.setenv("MACROBATCH_CACHE", "1")
    assert cache.read(KEY) == Found(8)


def test_a_folder_that_cannot_be_written_to_does_no_harm(home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("KERAS_HOME", str(home / "file"))
    cache.write(KEY, Found(8))
    with pytest.warns(UserWarning, match="is ignored"):
        assert cache.read(KEY) is None


def _write_and_read(size):
    for _ in range(50):
        cache.write(KEY, Found(size))
        found = cache.read(KEY)
        assert found is not None
        assert found.size in (1, 2, 3)
    return True


def test_several_processes_never_see_half_a_file():
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert all(pool.map(_write_and_read, [1, 2, 3]))
    assert len(files()) == 1

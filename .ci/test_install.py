"""Builds wheel and sdist, and installs each into clean environments: `make test-install`.

First without TensorFlow: the package must import, know its version, show its help, and say what to
install. Then with it: the examples in the docstrings of all public names must run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
CHECK = """
import macrobatch

print(macrobatch.__version__, macrobatch.__file__)
try:
    macrobatch.accumulate
except ImportError as error:
    assert "pip install" in str(error), error
else:
    raise AssertionError("accumulate can be had without any backend")
"""
DOCTESTS = """
import doctest, importlib, macrobatch

rooms = {getattr(macrobatch, name).__module__ for name in macrobatch.__all__}
results = [doctest.testmod(importlib.import_module(room)) for room in sorted(rooms)]
failed, tried = (sum(each) for each in zip(*results))
assert tried and not failed, (failed, tried)
print(f"{tried} lines of docstrings ran")
"""


def pythons():
    """A Python of each supported version that runs here."""
    for minor in range(10, 14):
        found = [shutil.which(f"python3.{minor}")]
        found += [str(path) for path in PYENV.glob(f"3.{minor}.*/bin/python")]
        check = f"import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, {minor}))"
        works = [
            path
            for path in found
            if path and subprocess.run([path, "-c", check], capture_output=True).returncode == 0
        ]
        if works:
            yield minor, works[0]
        else:
            print(f"NOT TESTED: no Python 3.{minor} found here", file=sys.stderr)


def run(*command):
    subprocess.run([str(each) for each in command], check=True, cwd=tempfile.gettempdir())


def main():
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
        products = [*Path(folder).glob("*.whl"), *Path(folder).glob("*.tar.gz")]
        assert len(products) == 2, products
        for minor, python in pythons():
            for product in products:
                environment = Path(folder) / f"{minor}-{product.suffix}"
                run(python, "-m", "venv", environment)
                installed = environment / "bin" / "python"
                run(installed, "-m", "pip", "install", "--quiet", product)
                run(installed, "-c", CHECK)
                run(environment / "bin" / "macrobatch", "--version")
                run(environment / "bin" / "macrobatch", "--help")
                run(installed, "-m", "pip", "install", "--quiet", f"{product}[cpu]")
                run(installed, "-c", DOCTESTS)


if __name__ == "__main__":
    main()

"""Builds wheel and sdist, and installs each into a clean environment: `make test-install`.

No TensorFlow is installed: the package must import, know its version and show its help without one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
CHECK = "import macrobatch; print(macrobatch.__version__, macrobatch.__file__)"


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


if __name__ == "__main__":
    main()

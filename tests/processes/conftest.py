"""Scripts for the commands that look at the first fit of a script."""

import textwrap

import pytest

HEADER = """
import sys
import keras, numpy as np

random = np.random.default_rng(0)
x, y = random.normal(size=[48, 3]), random.normal(size=[48, 1])

def model_with(*layers, **options):
    model = keras.Sequential([keras.Input([3]), *layers, keras.layers.Dense(1)], name="small")
    model.compile(**{"optimizer": "sgd", "loss": "mse", "run_eagerly": True, **options})
    return model
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a script into the current folder, with a few names for all."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="script.py"):
        (tmp_path / name).write_text(HEADER + textwrap.dedent(text))

    return write

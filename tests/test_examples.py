"""The examples, and the code in the documentation, as a reader would run them."""

import os
import pathlib
import re
import subprocess
import sys

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


def blocks_of(page):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    return blocks


def test_code_in_the_documentation(tmp_path):
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks_of("docs/custom-loops.md")))
    run(script)


# What the README's code takes for granted.
GIVEN = """
import keras, macrobatch, numpy as np, tensorflow as tf
x = x_val = np.random.default_rng(0).normal(size=[48, 784]).astype("float32")
y = y_val = np.arange(48) % 10
model = keras.Sequential([keras.Input([784]), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
GIVEN_TO_LOOPS = """
model = keras.Sequential([keras.Input([784]), keras.layers.Dense(1)])
y = y[:, None].astype("float32")
optimizer = keras.optimizers.Adam()
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
"""


def test_code_in_the_readme(tmp_path):
    first, use, step, stream = blocks_of("README.md")
    script = tmp_path / "readme.py"
    # Its batches are larger than the data here, so that nothing is accumulated: it says so.
    script.write_text("\n".join([GIVEN, first, use, GIVEN_TO_LOOPS, step, stream]))
    run(script)

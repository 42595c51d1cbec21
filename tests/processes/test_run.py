"""`macrobatch run` on scripts as people write them, in one process; `%macrobatch` in notebooks."""

import os
import pathlib
import re
import subprocess
import sys
import types

import fresh
import h5py
import keras
import numpy as np
import pytest
from support import needs_hub, thorough
from test_accumulator_everywhere import mirrored

import macrobatch

SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def weights_in(path):
    """All arrays of a file of weights, by name."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: found.update({name: item[()]}) if hasattr(item, "shape") else None
        )
    assert found
    return found


def said_of_same_weights(script, folder, size, *options, tolerance=1e-10):
    """What is said of a script that is run, once it has ended with the weights of a plain one."""
    plain, ours = (folder / f"{name}.weights.h5" for name in ("plain", "run"))
    for path, through in ((plain, None), (ours, ["--micro-batch-size", size, *options])):
        result = fresh.run(script, path, folder=folder, through=through)
        assert result.returncode == 0, result.stderr
    expected, found = weights_in(plain), weights_in(ours)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)
    return result.stderr


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("image_classifier", "6 batches, 18 micro-batches"),
        ("text_classifier", "6 batches, 20 micro-batches"),
        pytest.param("several_outputs", "9 batches, 33 micro-batches", marks=thorough),
        pytest.param("autoencoder", "6 batches, 14 micro-batches", marks=thorough),
        pytest.param("tabular", "6 batches, 18 micro-batches", marks=thorough),
        pytest.param("transfer_learning", "4 batches, 8 micro-batches", marks=thorough),
        pytest.param("hub_lora", "4 batches, 12 micro-batches", marks=[thorough, needs_hub]),
    ],
)
def test_an_unmodified_script_ends_with_the_same_weights(tmp_path, name, line):
    # Keras has LoRA's matrices in float32, whatever the policy. There they move by 0.04.
    tolerance = 1e-8 if name == "hub_lora" else 1e-10
    said = said_of_same_weights(SCRIPTS / f"{name}.py", tmp_path, "5", tolerance=tolerance)
    assert f"macrobatch: {line}, peak memory " in said


SMALL = """
import sys
import keras, numpy as np
keras.config.set_floatx("float64")
keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x, y = random.normal(size=[50, 3]), random.normal(size=[50, 1])
model = keras.Sequential([keras.Input([3]), *{layers}, keras.layers.Dense(1)])
model.compile("adam", "mse", run_eagerly=True)
{before}
model.fit(x, y, batch_size=20, verbose=0)
model.save_weights(sys.argv[1])
"""


def small(tmp_path, before="", layers="()"):
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(layers=layers, before=before))
    return script


def run_small(tmp_path, *options, **changes):
    script, out = small(tmp_path, **changes), tmp_path / "w.weights.h5"
    return fresh.run(script, out, folder=tmp_path, through=["--micro-batch-size", *options]), out


def test_what_the_script_sets_wins(tmp_path):
    before = "import macrobatch; macrobatch.accumulate(model, micro_batch_size=4)"
    result, _ = run_small(tmp_path, "10", before=before)
    assert "macrobatch: 3 batches, 13 micro-batches" in result.stderr


NORMALIZED = "[keras.layers.Dense(2), keras.layers.BatchNormalization()]"


@pytest.mark.parametrize(("option", "code"), [("--verify", 1), ("--verify=warn", 0)])
def test_an_update_that_is_not_exact(tmp_path, option, code):
    result, out = run_small(tmp_path, "10", option, layers=NORMALIZED)
    assert result.returncode == code
    assert "NOT EXACT" in result.stderr
    assert out.exists() == (code == 0)


OWN_FIT = """
class Own(keras.Model):
    def fit(self, x, y, **options):
        return super().fit(x / 10, y, **options)

model = Own(model.inputs, model.outputs)
model.compile("adam", "mse", run_eagerly=True)
"""


@pytest.mark.parametrize("options", [["10", "--verify"], pytest.param(["auto"], marks=thorough)])
def test_a_model_with_a_fit_of_its_own(tmp_path, options):
    """Its own fit, which calls Keras', is called once."""
    said_of_same_weights(small(tmp_path, OWN_FIT), tmp_path, *options)


OWN_STEP = """
class Own(keras.Model):
    def train_step(self, data):
        import tensorflow as tf
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        for weight, gradient in zip(
            self.trainable_weights, tape.gradient(loss, self.trainable_weights)
        ):
            weight.assign_sub(0.1 * gradient * tf.norm(x))
        return {"loss": loss}

model = Own(model.inputs, model.outputs)
model.compile()
"""
# It has no weights before it runs, and nobody can copy it.
OF_PARTS = """
class OfParts(keras.Model):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def call(self, x):
        return self.part(x)

model = OfParts(keras.layers.Dense(1, kernel_initializer="ones"))
model.compile("adam", "mse", run_eagerly=True)
"""
PLAIN = "no batch was accumulated"


@pytest.mark.parametrize(
    ("options", "before", "why", "line"),
    [
        (["auto"], OWN_STEP, "depends on the examples", PLAIN),
        pytest.param(["5"], OWN_STEP, "depends on the examples", PLAIN, marks=thorough),
        (["5"], "model.layers[-1].stateful = True", "is stateful", PLAIN),
        (["5", "--verify"], OF_PARTS, "cannot be verified, and is trained", "3 batches, 10 micro"),
    ],
)
def test_a_model_that_cannot_be_accumulated_trains_as_before(tmp_path, options, before, why, line):
    """Or accumulated, if it only cannot be verified."""
    said = said_of_same_weights(small(tmp_path, before), tmp_path, *options)
    (warning,) = (line for line in said.splitlines() if "Warning: " in line)
    assert "small.py:" in warning
    assert why in warning
    assert f"macrobatch: {line}" in said
    assert ("Cannot be accumulated, as a warning says: '" in said) == (line == PLAIN)


SPAWNS = """
import multiprocessing, time
if __name__ == "__main__":
    import keras
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=[0])
    process.start(), process.join()
"""
FITS_BY_ITSELF = """
class Own(keras.Sequential):
    def fit(self, x, y):
        return self.train_step((x, y))

Own(model.layers).fit
sys.exit()
"""


@pytest.mark.parametrize(
    ("script", "code", "why"),
    [
        ("model.train_on_batch(x, y); sys.exit()", 0, "the script called train_on_batch(), and"),
        ("model(x); sys.exit(0)", 0, "the script called no fit(). For tf_keras models and loops"),
        (FITS_BY_ITSELF, 0, "the fit() of Own did not call that of keras.Model. For tf_keras"),
        (SPAWNS, 0, "started processes that macrobatch run does not reach"),
        ("import macrobatch; macrobatch.accumulate(model, 5); sys.exit()", 0, None),
        ("import threading, time; threading.Timer(0.5, print).start(); sys.exit()", 0, None),
        ("sys.exit(3)", 3, None),
    ],
    ids=["on-batch", "own-loop", "own-fit", "spawned", "by-itself", "still-running", "failed"],
)
def test_nothing_was_accumulated(tmp_path, script, code, why):
    if script == SPAWNS:
        (tmp_path / "small.py").write_text(SPAWNS)
    else:
        small(tmp_path, script)
    result = fresh.run(tmp_path / "small.py", folder=tmp_path, through=[])
    assert result.returncode == code
    said = [line for line in result.stderr.splitlines() if "nothing was accumulated" in line]
    assert len(said) == (why is not None), result.stderr
    for line in said:
        assert line.startswith("macrobatch: nothing was accumulated in this process: ")
        assert why in line


def test_batches_that_are_not_cut(tmp_path):
    result, _ = run_small(tmp_path, "20")
    assert "macrobatch: 3 batches, 3 micro-batches, peak memory " in result.stderr
    assert ". Nothing was accumulated: each batch was one micro-batch" in result.stderr


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("keras.Sequential(model.layers).fit(x, y)", "You must call `compile()`"),
        ("model.fit(x[:, :2], y, verbose=0)", "expected axis -1 of input shape"),
        (
            "model.fit(x, y, callbacks=[keras.callbacks.LambdaCallback("
            "on_train_batch_end=lambda batch, logs: int('no number'))], verbose=0)",
            "ValueError: invalid literal for int()",
        ),
    ],
)
def test_errors_of_the_script_are_its_own(tmp_path, before, message):
    """There is no warning, and no frame of macrobatch in the traceback."""
    result, _ = run_small(tmp_path, "2", before=before)
    assert result.returncode == 1
    assert message in result.stderr
    assert "Warning: " not in result.stderr
    assert os.path.dirname(macrobatch.__file__) not in result.stderr


# As plain Python

# Workers do not say so: many do something else.
WITHOUT_KERAS = "macrobatch: nothing was accumulated: the script did not import Keras 3\n"


def python(*arguments, cwd=None, **options):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, cwd=cwd, check=False, **options)


SEEN = """
import os, pickle, sys, __main__
from folder_of_script import here
def f(): pass
print(sys.argv, __name__, __file__, sys.path, __main__.f is f, __package__, __doc__)
print(pickle.loads(pickle.dumps(f)) is f, sys.stdin.read(), os.getcwd(), here)
"""


@pytest.mark.parametrize("command", [["folder/script.py"], ["-m", "folder.script"]])
@pytest.mark.parametrize(("options", "typed"), [([], b"typed"), (["--workers", "1"], b"")])
def test_a_script_sees_what_it_sees_in_plain_python(tmp_path, command, options, typed):
    """Only that workers have no standard input."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "script.py").write_text(SEEN)
    for place in (folder, tmp_path):
        (place / "folder_of_script.py").write_text("here = __file__")
    command = [*command, "--workers", "7", "-m", "x", "--help"]
    plain = python(*command, cwd=tmp_path, input=typed)
    run = python("-m", "macrobatch", "run", *options, *command, cwd=tmp_path, input=b"typed")
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert (run.returncode, run.stderr) == (0, b"" if options else WITHOUT_KERAS.encode())
    assert re.sub(rb"(?m)^\[worker 0\] ", b"", run.stdout) == plain.stdout


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys.exit(3)",
        "import sys\nsys.exit('a reason')",
        "def f():\n    1 / 0\nf()",
        "try:\n    1 / 0\nexcept Exception as e:\n    raise ValueError('two') from e",
        "raise KeyboardInterrupt",
        "this is no Python",
        "import sys\nsys.excepthook = lambda *e: print('own', e[0])\n[][0]",
        "import atexit\natexit.register(print, 'last', flush=True)\n1 / 0",
        "import does_not_exist",
    ],
)
def test_a_script_ends_as_in_plain_python(tmp_path, text):
    (tmp_path / "script.py").write_text(text)
    plain = python("script.py", cwd=tmp_path)
    run = python("-m", "macrobatch", "run", "script.py", cwd=tmp_path)
    assert plain.returncode != 0
    assert (run.returncode, run.stdout) == (plain.returncode, plain.stdout)
    # Python shows the script by its full name here.
    shown = run.stderr.replace(str(tmp_path).encode() + b"/", b"")
    assert shown == plain.stderr.replace(str(tmp_path).encode() + b"/", b"")


IMPORTS_KERAS = """
print("started")
import keras
print(keras.Model.fit is keras.plain, keras.__file__, type(keras.__spec__.loader).__name__)
"""


@pytest.mark.parametrize(("size", "is_plain"), [("2", False), ("off", True)])
def test_fit_is_replaced_when_keras_is_imported(tmp_path, size, is_plain):
    fake = tmp_path / "keras.py"
    fake.write_text("print('imported')\nclass Model:\n    def fit(self): pass\nplain = Model.fit")
    (tmp_path / "script.py").write_text(IMPORTS_KERAS)
    options = ["--micro-batch-size", size]
    run = python("-m", "macrobatch", "run", *options, "script.py", cwd=tmp_path, text=True)
    expected = ["started", "imported", f"{is_plain} {fake} SourceFileLoader"]
    # This is no Keras 3.
    assert (run.stdout.splitlines(), run.stderr) == (expected, "" if is_plain else WITHOUT_KERAS)


def test_without_workers_nothing_is_imported_that_windows_lacks(tmp_path):
    (tmp_path / "script.py").write_text("print('here')")
    program = (
        "import sys\n"
        "for name in ('resource', 'fcntl', 'termios', 'pwd', 'grp'): sys.modules[name] = None\n"
        "from macrobatch import cli\n"
        "cli.main(['run', 'script.py'])"
    )
    result = python("-c", program, cwd=tmp_path)
    assert (result.stdout, result.stderr) == (b"here\n", WITHOUT_KERAS.encode())


# Notebooks


@pytest.fixture
def magic():
    """`%macrobatch`, as IPython calls it. Each line takes the place of the one before."""
    magics, plain = {}, keras.Model.fit
    shell = types.SimpleNamespace(
        register_magic_function=lambda function, *names: magics.update({names: function})
    )
    macrobatch.load_ipython_extension(shell)
    magics["line", "macrobatch"]("2")
    yield magics["line", "macrobatch"]
    macrobatch.unload_ipython_extension(shell)
    assert keras.Model.fit is plain


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"micro_batch_size": "auto"}),
        ("auto", {"micro_batch_size": "auto"}),
        ("8", {"micro_batch_size": 8}),
        ("8 --sequence-axis 1", {"micro_batch_size": 8, "sequence_axis": 1}),
        ("--nonfinite raise", {"micro_batch_size": "auto", "nonfinite": "raise"}),
        ("off", None),
    ],
)
def test_lines_of_a_notebook(magic, line, expected):
    magic(line)
    layers = [keras.Input([None], dtype="int32"), keras.layers.Embedding(2, 3)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    options = {"batch_size": 16, "verbose": 0}
    history = model.fit(np.ones([16, 5], "int32"), np.ones([16, 5, 1]), **options).history
    settings = macrobatch.settings_of(model)
    assert (settings and settings.arguments()) == expected
    assert list(history) == ["loss"]  # Scripts may take it apart. What was found is logged.


@pytest.mark.parametrize("line", ["0", "eight", "off 8", "8 --other 1", "8 --nonfinite"])
def test_lines_that_mean_nothing(magic, line):
    with pytest.raises(ValueError, match=r"Expected: %macrobatch \[N"):
        magic(line)


def test_a_model_on_replicas(magic):
    """The number of updates of an optimizer on replicas is no number of Python."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=8, verbose=0)
    assert macrobatch.settings_of(model).size_in_use == 2

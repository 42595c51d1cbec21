"""`macrobatch run` on scripts as people write them, in one process."""

import importlib.util
import pathlib
import subprocess
import sys

import fresh
import h5py
import keras
import numpy as np
import pytest
from support import thorough
from test_accumulator_everywhere import mirrored

import macrobatch
from macrobatch import cli
from macrobatch._no_trace.capture import CannotCapture
from macrobatch._run import hook, notebook

NEEDS_HUB = pytest.mark.skipif(
    importlib.util.find_spec("keras_hub") is None, reason="needs keras-hub: make test-hub"
)
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


def assert_same_weights(path, other, tolerance=1e-10):
    expected, found = weights_in(path), weights_in(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("image_classifier", "6 batches, 18 micro-batches"),
        ("text_classifier", "6 batches, 20 micro-batches"),
        pytest.param("several_outputs", "9 batches, 33 micro-batches", marks=thorough),
        pytest.param("autoencoder", "6 batches, 14 micro-batches", marks=thorough),
        pytest.param("tabular", "6 batches, 18 micro-batches", marks=thorough),
        pytest.param("transfer_learning", "4 batches, 8 micro-batches", marks=thorough),
    ],
)
def test_an_unmodified_script_ends_with_the_same_weights(tmp_path, name, line):
    script = SCRIPTS / f"{name}.py"
    plain, run = tmp_path / "plain.weights.h5", tmp_path / "run.weights.h5"
    result = fresh.run(script, plain, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    result = fresh.run(script, run, folder=tmp_path, through=["--micro-batch-size", "5"])
    assert result.returncode == 0, result.stderr
    assert f"macrobatch: {line}, peak memory " in result.stderr
    assert_same_weights(plain, run)


@thorough
@NEEDS_HUB
def test_a_script_with_kerashub_and_lora(tmp_path):
    script = SCRIPTS / "hub_lora.py"
    plain, run = tmp_path / "plain.weights.h5", tmp_path / "run.weights.h5"
    result = fresh.run(script, plain, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    result = fresh.run(script, run, folder=tmp_path, through=["--micro-batch-size", "5"])
    assert result.returncode == 0, result.stderr
    assert "macrobatch: 4 batches, 12 micro-batches, peak memory " in result.stderr
    # Keras has LoRA's matrices in float32, whatever the policy. Here they move by 0.04.
    assert_same_weights(plain, run, tolerance=1e-8)


SMALL = """
import sys
import keras, numpy as np
{imports}
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


def small(tmp_path, imports="", layers="()", before=""):
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(imports=imports, layers=layers, before=before))
    return script


def test_what_the_script_sets_wins(tmp_path):
    before = "macrobatch.accumulate(model, micro_batch_size=4)"
    script = small(tmp_path, "import macrobatch", before=before)
    out = tmp_path / "w.weights.h5"
    result = fresh.run(script, out, folder=tmp_path, through=["--micro-batch-size", "10"])
    assert "macrobatch: 3 batches, 13 micro-batches" in result.stderr


NORMALIZED = "[keras.layers.Dense(2), keras.layers.BatchNormalization()]"


@pytest.mark.parametrize(("option", "code"), [("--verify", 1), ("--verify=warn", 0)])
def test_an_update_that_is_not_exact(tmp_path, option, code):
    script = small(tmp_path, layers=NORMALIZED)
    out = tmp_path / "w.weights.h5"
    options = ["--micro-batch-size", "10", option]
    result = fresh.run(script, out, folder=tmp_path, through=options)
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
    script = small(tmp_path, before=OWN_FIT)
    plain, run = tmp_path / "plain.weights.h5", tmp_path / "run.weights.h5"
    assert fresh.run(script, plain, folder=tmp_path).returncode == 0
    result = fresh.run(script, run, folder=tmp_path, through=["--micro-batch-size", *options])
    assert result.returncode == 0, result.stderr
    assert_same_weights(plain, run)


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


@pytest.mark.parametrize(
    ("size", "before", "why"),
    [
        ("auto", OWN_STEP, "depends on the examples"),
        pytest.param("5", OWN_STEP, "depends on the examples", marks=thorough),
        ("5", "model.layers[-1].stateful = True", "is stateful"),
    ],
)
def test_a_model_that_cannot_be_accumulated_trains_as_before(tmp_path, size, before, why):
    script = small(tmp_path, before=before)
    plain, run = tmp_path / "plain.weights.h5", tmp_path / "run.weights.h5"
    fresh.run(script, plain, folder=tmp_path)
    result = fresh.run(script, run, folder=tmp_path, through=["--micro-batch-size", size])
    assert result.returncode == 0
    warnings = [line for line in result.stderr.splitlines() if "Warning: " in line]
    assert len(warnings) == 1, result.stderr
    assert "small.py:" in warnings[0]
    assert why in warnings[0]
    assert "macrobatch: no batch was accumulated" in result.stderr
    assert_same_weights(plain, run)


# As plain Python


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
def test_a_script_sees_what_it_sees_in_plain_python(tmp_path, command):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "script.py").write_text(SEEN)
    for place in (folder, tmp_path):
        (place / "folder_of_script.py").write_text("here = __file__")
    command = [*command, "--workers", "7", "-m", "x", "--help"]
    plain = python(*command, cwd=tmp_path, input=b"typed")
    run = python("-m", "macrobatch", "run", *command, cwd=tmp_path, input=b"typed")
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert (run.returncode, run.stdout, run.stderr) == (0, plain.stdout, b"")


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


def test_a_model_that_is_not_compiled():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    watching = hook.Hook({"micro_batch_size": 2})
    watching.install()
    try:
        with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
            model.fit(np.ones([4, 3]), np.ones([4, 1]), verbose=0)
    finally:
        watching.uninstall()


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise ValueError("from a callback")


@pytest.mark.parametrize(
    ("width", "callbacks", "message"),
    [(3, [Failing()], "from a callback"), (4, [], "expected axis -1 of input shape")],
)
def test_errors_of_the_script_are_its_own(width, callbacks, message):
    """There is no warning, and no frame of macrobatch in the traceback."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watching = hook.Hook({"micro_batch_size": 2})
    watching.install()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            model.fit(np.ones([4, width]), np.ones([4, 1]), verbose=0, callbacks=callbacks)
    finally:
        watching.uninstall()
    hook.without_own_frames(caught.value)
    modules = [entry.frame.f_globals["__name__"] for entry in caught.traceback]
    assert __name__ in modules
    assert not [name for name in modules if name.startswith("macrobatch.")]


class OfParts(keras.Model):
    """Has no weights before it runs, and nobody can copy it."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def call(self, x):
        return self.part(x)


def test_a_model_that_cannot_be_verified_is_trained():
    model = OfParts(keras.layers.Dense(1))
    model.compile("sgd", "mse", run_eagerly=True)
    watching = hook.Hook({"micro_batch_size": 2, "verify": "stop"})
    watching.install()
    try:
        with pytest.warns(UserWarning, match=r"cannot be verified, and is trained.*no weights"):
            model.fit(np.ones([4, 3]), np.ones([4, 1]), batch_size=4, verbose=0)
    finally:
        watching.uninstall()
    assert int(model.optimizer.iterations) == 1


def test_history_is_that_of_keras():
    """Scripts may take it apart. What was found is logged."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    watching = hook.Hook({"micro_batch_size": "auto"})
    watching.install()
    try:
        history = model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=4, verbose=0).history
    finally:
        watching.uninstall()
    assert list(history) == ["loss"]


def test_a_model_on_replicas():
    """The number of updates of an optimizer on replicas is no number of Python."""
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    watching = hook.Hook({"micro_batch_size": 2})
    watching.install()
    try:
        model.fit(np.ones([8, 3]), np.ones([8, 1]), batch_size=8, verbose=0)
    finally:
        watching.uninstall()
    assert watching.fits.summary().startswith("1 batch, ")


FAKE_KERAS = """
print("keras is imported")
class Model:
    name = "fake"
    def fit(self, *args): print("plain", args)
"""


def test_fit_is_replaced_when_keras_is_imported(tmp_path, monkeypatch, capsys):
    (tmp_path / "keras.py").write_text(FAKE_KERAS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras")
    watching = hook.Hook({})
    watching.fits = Recorded()
    watching.install()
    assert capsys.readouterr().out == ""
    import keras as fake

    assert fake.__file__ == str(tmp_path / "keras.py")
    assert type(fake.__spec__.loader).__name__ == "SourceFileLoader"
    fake.Model().fit(1)
    watching.uninstall()
    fake.Model().fit(2)
    assert capsys.readouterr().out == "keras is imported\naccumulated (1,)\nplain (2,)\n"
    assert watching not in sys.meta_path


class Recorded:
    def fit(self, plain, model, *args):
        print("accumulated", args)


def test_without_workers_nothing_is_imported_that_windows_lacks():
    program = (
        "import sys\n"
        "for name in ('resource', 'fcntl', 'termios', 'pwd', 'grp'): sys.modules[name] = None\n"
        "from macrobatch import cli\n"
        "assert 'macrobatch._workers.launch' not in sys.modules\n"
        "assert 'tensorflow' not in sys.modules\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit as end: sys.exit(end.code)\n"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
    assert b"Example: macrobatch run" in result.stdout


@pytest.mark.parametrize("command", ["run", "verify", "plan"])
def test_each_command_shows_an_example(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert f"Example: macrobatch {command} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_errors_are_one_line_unless_asked_for_more(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("1 / 0")
    assert cli.main([command, "script.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ZeroDivisionError" in line
    with pytest.raises(CannotCapture):
        cli.main([command, "--debug", "script.py"])


# Notebooks


class Notebook:
    """What IPython offers to an extension."""

    def __init__(self):
        self.magics = {}

    def register_magic_function(self, function, kind, name):
        self.magics[kind, name] = function


def test_a_notebook():
    shell = Notebook()
    macrobatch.load_ipython_extension(shell)
    magic = shell.magics["line", "macrobatch"]
    plain = keras.Model.fit
    x, y = np.ones([8, 3]), np.ones([8, 1])

    def trained():
        model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x, y, batch_size=8, verbose=0)
        return "train_step" in vars(model)

    try:
        magic("2 --nonfinite skip")
        assert trained()
        magic("4")
        assert trained()
        magic("off")
        assert not trained()
        magic("2")
    finally:
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
def test_lines_of_a_notebook(line, expected):
    assert notebook.settings_of(line) == expected


@pytest.mark.parametrize("line", ["0", "eight", "off 8", "8 --other 1", "8 --nonfinite"])
def test_lines_that_mean_nothing(line):
    with pytest.raises(ValueError, match=r"Expected: %macrobatch \[N"):
        notebook.settings_of(line)

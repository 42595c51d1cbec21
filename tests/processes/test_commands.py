"""`macrobatch verify` and `plan`: a script until its first fit, or a function; exit codes; JSON.

And what each command refuses.
"""

import importlib
import io
import json
import subprocess
import sys

import keras
import pytest
from support import code_of, thorough

FIT = "model_with().fit(x, y, batch_size=2)"


@pytest.mark.parametrize(
    ("command", "codes"),
    [
        ("run", ""),
        ("verify", "Exit code 0: exact; 1: not exact; 2: could not tell."),
        ("plan", "Exit code 0: found; 1: nothing fits; 2: could not tell."),
    ],
)
def test_the_help_has_an_example(command, codes, capsys):
    assert code_of(f"{command} --help") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"Example: macrobatch {command} " in output
    assert codes in output


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        ("run --workers 2", "", "Received: none."),
        ("run --workers 2 -m", "", "Received: none."),
        ("run --workers 2 none.py", "", "Received: none.py, which is not a file in "),
        ("run --workers 0 script.py", "", "Received: --workers 0."),
        ("run --log-dir logs script.py", "", "Received: no --workers N."),
        ("run --max-restarts 1 script.py", "", "Received: no --workers N."),
        ("run --workers 1 --max-restarts -1 script.py", "", "Received: --max-restarts -1."),
        ("run --micro-batch-size 0 script.py", "", "Received: 0."),
        ("run --micro-batch-size off --verify script.py", "", "Leave one of them out."),
        ("run --workers 1 --worker 2 script.py", "", "there is no option --worker."),
        ("run --workers 1 --devices-per-worker -1 script.py", "", "Received: --devices-"),
        ("TF_CONFIG={} run --workers 1 script.py", "", "Received: TF_CONFIG={}."),
        ("KERAS_BACKEND=jax run --workers 1 script.py", "", "Received: KERAS_BACKEND=jax."),
        ("CUDA_VISIBLE_DEVICES=0 run --workers 2 script.py", "", "Received: 1 (0)."),
        ("verify", "", "must follow the options"),
        ("verify missing.py", "", "Received: missing.py, which is not a file in"),
        ("verify script.py", "model_with().fit(x, y)", "Pass --micro-batch-size N."),
        ("verify script.py", "1 / 0", "failed before any fit(). ZeroDivisionError: division"),
        ("verify script.py", "sys.exit(3)", "ended before any fit(), with exit code 3"),
        ("verify script.py", "", "ended without a call of fit"),
        ("plan", "", "must follow the options"),
        ("plan --plott a.png script.py", "", "there is no option --plott. Did you mean --plot?"),
        ("plan script.py", "1 / 0", "script.py failed before any fit(). ZeroDivisionError"),
        ("plan --memory-limit '6 apples' script.py", FIT, "Received: memory_limit='6 apples'"),
        ("plan --memory-limit 50MB script.py", FIT, "must be more than what TensorFlow, the w"),
        ("plan --plot not_there/plan.png script.py", "1 / 0", "Received: not_there/plan.png. "),
        ("plan --plot plan.abc script.py", "1 / 0", "Received: plan.abc. "),
        ("plan --plot . script.py", "1 / 0", "Received: .. "),
    ],
)
def test_what_cannot_be_told(script, monkeypatch, capsys, line, text, message):
    """Errors are one line, and a script runs only if the rest is right."""
    script(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    *variables, line = line.split(" ", 1) if line[0].isupper() else [line]
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    assert code_of(line) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err.splitlines()[-1]
    assert "Traceback" not in output.err


@pytest.mark.parametrize("command", ["verify", "plan"])
def test_an_error_is_raised_if_asked_for(command, script):
    script("1 / 0")
    with pytest.raises(Exception, match="failed before any fit") as caught:
        code_of(f"{command} --debug script.py")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_without_matplotlib(script, capsys, monkeypatch):
    script("1 / 0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert code_of("plan --plot plan.png script.py") == 2
    assert 'pip install "macrobatch[plot]"' in capsys.readouterr().err


# verify


def test_verify_runs_a_script_until_its_first_fit(script, capsys):
    script("""
        import macrobatch

        print("arguments", sys.argv)
        model = macrobatch.accumulate(model_with(), micro_batch_size=5)
        try:
            model.fit(x, y, batch_size=16, epochs=2)
        except Exception:
            pass
        print("never")
    """)
    plain, arguments, path = keras.Model.fit, sys.argv, list(sys.path)
    assert code_of("verify script.py --epochs 3") == 0
    output = capsys.readouterr()
    assert output.out.startswith("EXACT\nsmall, a batch of 16 examples, micro_batch_size=5.")
    assert "arguments ['script.py', '--epochs', '3']" in output.err
    assert "never" not in output.err
    assert (keras.Model.fit, sys.argv, sys.path) == (plain, arguments, path)


def test_a_script_that_is_not_exact_as_json(script, capsys):
    script("""
        rate = keras.optimizers.schedules.CosineDecay(0.1, 3 * 2 * 6)
        optimizer = keras.optimizers.SGD(rate)
        model = model_with(keras.layers.BatchNormalization(name="norm"), optimizer=optimizer)
        model.fit(x, y, batch_size=24, epochs=3, class_weight=None)
    """)
    assert code_of("verify --micro-batch-size 4 --json script.py") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["exact"] is False
    assert [cause["kind"] for cause in found["causes"]] == ["batch_normalization", "schedule"]
    assert found["settings"] == {"micro_batch_size": 4}


def test_a_function(script, capsys):
    script(
        """
        def three():
            return model_with(), x, y

        def two():
            return model_with(), (x, y, np.ones([48]))

        def one():
            return model_with()
        """,
        "functions_to_verify.py",
    )
    line = "verify --micro-batch-size 20 functions_to_verify"
    for name in ("three", "two"):
        assert code_of(f"{line}:{name}") == 0
        assert "a batch of 48 examples" in capsys.readouterr().out
    assert code_of(f"{line}:one") == 2
    assert "must return (model, x, y)" in capsys.readouterr().err


@thorough
def test_verify_in_a_process_of_its_own(script):
    """Keras is not there before the script imports it, and sees what the script has set."""
    script("""
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_float16")
        model_with(keras.layers.Dropout(0.5)).fit(x, y, batch_size=12)
    """)
    run = in_a_process("verify", "--micro-batch-size", "5", "script.py")
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("EXACT\nsmall, a batch of 12 examples")


def in_a_process(*arguments):
    command = [sys.executable, "-m", "macrobatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# plan


def test_plan_runs_a_script_until_its_first_fit(script, capsys):
    script(f"print('hello', sys.argv)\n{FIT}\nprint('never')")
    assert code_of("plan script.py --epochs 3") == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0] == "small, a batch of 2 examples, on a CPU."
    assert lines[-1].startswith("Batch 2 fits in ")
    assert "x the time of the plain batch" in lines[-1]
    # What is going on is no output, nor is what the script prints. No terminal: plain lines.
    assert "hello ['script.py', '--epochs', '3']" in output.err
    assert "never" not in output.err
    assert "macrobatch plan: [1/" in output.err
    assert "macrobatch plan: micro_batch_size=2: " in output.err


def test_a_terminal_shows_a_table_that_grows_and_a_bar(script, monkeypatch):
    script(FIT)
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert code_of("plan script.py") == 0
    for part in ("peak memory", "examples/s", "micro_batch_size=2", "━"):
        assert part in screen.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_fits(script, capsys):
    """An example takes some hundred megabytes, of which there are few left."""
    script("""
        layers = keras.layers.Reshape([3, 1]), keras.layers.UpSampling1D(2_000_000)
        model_with(*layers, keras.layers.GlobalAveragePooling1D()).fit(x, y, batch_size=2)
    """)
    with open("/proc/self/status") as lines:
        (taken,) = (int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    assert code_of(f"plan --memory-limit {int(1.02 * taken)}KiB script.py") == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "macrobatch plan: Not even a micro-batch of one example fits" in output.err


@thorough
def test_json_and_a_picture_in_a_process_of_its_own(script, tmp_path):
    """Keras is not there before the function's module imports it."""
    script("def made():\n    return model_with(), x[:2], y[:2]", "functions_to_plan.py")
    options = ["--json", "--plot", "plan.png", "--memory-limit", "90%", "--objective", "largest"]
    run = in_a_process("plan", *options, "functions_to_plan:made")
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert (found["micro_batch_size"], found["objective"]) == (2, "largest")
    assert [row["size"] for row in found["rows"]] == [1, 2]
    assert all(row["peak"] > 10**8 for row in found["rows"])
    assert found["limit_source"].startswith("memory_limit='90%'")
    picture = (tmp_path / "plan.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000

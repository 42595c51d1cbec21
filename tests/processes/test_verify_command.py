"""`macrobatch verify`: a script until its first fit, or a function; exit codes; JSON."""

import json
import re
import subprocess
import sys

import keras
import pytest
from support import thorough

from macrobatch import cli


def test_a_script_runs_until_its_first_fit(script, capsys):
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
    assert cli.main(["verify", "script.py", "--epochs", "3"]) == 0
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
    assert cli.main(["verify", "--micro-batch-size", "4", "--json", "script.py"]) == 1
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
    options = ["verify", "--micro-batch-size", "20"]
    for name in ("three", "two"):
        assert cli.main([*options, f"functions_to_verify:{name}"]) == 0
        assert "a batch of 48 examples" in capsys.readouterr().out
    assert cli.main([*options, "functions_to_verify:one"]) == 2
    assert "must return (model, x, y)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_with().fit(x, y)", "is not accumulated.*--micro-batch-size N"),
        ("1 / 0", "script.py failed before any fit().*ZeroDivisionError: division by zero"),
        ("sys.exit(3)", "ended before any fit.*exit code 3"),
        ("", "ended without a call of fit"),
    ],
)
def test_what_cannot_be_told(script, capsys, text, message):
    script(text)
    assert cli.main(["verify", "script.py"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("macrobatch verify: ")
    assert re.search(message, lines[0])


def test_what_is_not_there(script, capsys):
    assert cli.main(["verify", "missing.py"]) == 2
    assert "Received: missing.py, which is not a file in" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["verify"])
    assert end.value.code == 2
    assert "must follow the options" in capsys.readouterr().err


def test_the_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["verify", "--help"])
    assert end.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Example: macrobatch verify --micro-batch-size 8 train.py --epochs 3" in output
    assert "Exit code 0: exact; 1: not exact; 2: could not tell." in output


@thorough
def test_the_command_in_a_process_of_its_own(script):
    """Keras is not there before the script imports it, and sees what the script has set."""
    script("""
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("mixed_float16")
        model_with(keras.layers.Dropout(0.5)).fit(x, y, batch_size=12)
    """)
    command = [sys.executable, "-m", "macrobatch", "verify", "--micro-batch-size", "5", "script.py"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.startswith("EXACT\nsmall, a batch of 12 examples")
    code = "import sys; from macrobatch import cli; assert 'tensorflow' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

"""`macrobatch run` with real processes. Most scripts do without TensorFlow, so they are quick."""

import contextlib
import inspect
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import textwrap
import time
from subprocess import PIPE

import pytest
from support import thorough

import macrobatch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="macrobatch run is for Linux and macOS")

DEADLINE = 120  # seconds


def launcher_with(grace=5.0):
    """The command `macrobatch run`. Workers that ignore signals need not be given much time.

    A test suite in the background of a shell ignores Ctrl-C, which processes inherit.
    """
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "from macrobatch import cli; from macrobatch._workers import launch; "
        f"launch.GRACE_SECONDS = {grace}; sys.exit(cli.main())"
    )
    return [sys.executable, "-c", program, "run"]


HEADER = """
import json, os, signal, subprocess, sys, time
me = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]

def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)

def touch(path):
    open(path, "w").close()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes script.py into the current folder, with a few names for all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")

    def write(text):
        (tmp_path / "script.py").write_text(HEADER + textwrap.dedent(text))

    return write


def run(*arguments, **options):
    options = {"stdout": PIPE, "stderr": PIPE, "timeout": DEADLINE, **options}
    return subprocess.run([*launcher_with(), *arguments], **options)


@contextlib.contextmanager
def launched(*arguments, **options):
    """A launcher, for tests that do something to it. It does not outlive a test that fails."""
    command = [*launcher_with(**options), *arguments]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
            # Or workers that are blocked would wait for somebody to read.
            launcher.stdout.close()
            launcher.stderr.close()


def last_line(result):
    return result.stderr.decode().splitlines()[-1]


def size(group):
    """The number of processes in a process group, without those that are only waited for."""
    listing = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, check=True)
    processes = [line.split() for line in listing.stdout.decode().splitlines()]
    return sum(int(pgid) == group and state[0] != "Z" for pgid, state in processes)


def wait_until(condition):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("command", [["folder/script.py"], ["-m", "folder.script"]])
def test_a_script_sees_what_it_sees_in_plain_python(script, tmp_path, command):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "script.py").write_text(
        "import os, pickle, sys, __main__\n"
        "def f(): pass\n"
        "print(sys.argv, __name__, __file__, sys.path, __main__.f is f, __package__, __doc__)\n"
        "print(pickle.loads(pickle.dumps(f)) is f, sys.stdin.read(), os.getcwd())\n"
    )
    command = [*command, "--workers", "7", "-m", "x", "--help"]
    plain = subprocess.run(
        [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=PIPE, check=True
    )
    result = run("--workers", "1", *command)
    assert result.returncode == 0
    assert re.sub(rb"(?m)^\[worker 0\] ", b"", result.stdout) == plain.stdout


def test_each_worker_has_its_place_in_one_cluster(script):
    script("print(os.environ['TF_CONFIG'])")
    result = run("--workers", "3", "script.py")
    assert result.returncode == 0
    lines = sorted(result.stdout.decode().splitlines())
    configs = [eval(line[len("[worker 0] ") :]) for line in lines]
    assert [line[: len("[worker 0] ")] for line in lines] == [f"[worker {i}] " for i in range(3)]
    assert [c["task"] for c in configs] == [{"type": "worker", "index": i} for i in range(3)]
    addresses = configs[0]["cluster"]["worker"]
    assert all(config["cluster"] == {"worker": addresses} for config in configs)
    assert len(set(addresses)) == 3
    assert all(re.match(r"localhost:\d+$", address) for address in addresses)


def test_outputs_are_passed_on_whole_lines_at_a_time(script):
    script(
        """
        for i in range(50):
            for half in ("<", str(i) * 20, ">\\n"):
                sys.stdout.write(half), sys.stdout.flush()
                sys.stderr.write(half), sys.stderr.flush()
        """
    )
    result = run("--workers", "2", "script.py")
    for output in (result.stdout, result.stderr):
        lines = output.decode().splitlines()
        for worker in (0, 1):
            mine = [line for line in lines if line.startswith(f"[worker {worker}]")]
            assert mine == [f"[worker {worker}] <{str(i) * 20}>" for i in range(50)]
        assert len(lines) == 100


def test_progress_bars_and_other_ends_of_lines(script):
    script(
        """
        print("\\r1/2\\r2/2\\rdone")
        print("left\\rright\\r", end="")
        print("end\\r", end="\\n")
        print("", flush=True)
        print("no end", end="")
        print("\\r1/2", end="", file=sys.stderr)
        """
    )
    result = run("--workers", "1", "script.py")
    at = b"[worker 0] "
    bar = at + b"1/2\r" + at + b"2/2\r" + at + b"done\n"
    rest = at + b"left\r" + at + b"right\r" + at + b"end\r\n" + at + b"\n" + at + b"no end\n"
    assert result.stdout == bar + rest
    assert result.stderr == at + b"1/2\n"


def test_output_comes_while_the_script_runs(script, tmp_path):
    script("print('started'); wait_for('seen')")
    with launched("--workers", "1", "script.py") as launcher:
        assert select.select([launcher.stdout], [], [], DEADLINE)[0]
        assert launcher.stdout.readline() == b"[worker 0] started\n"
        (tmp_path / "seen").touch()
        assert launcher.wait(DEADLINE) == 0


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("sys.exit(0)", 0, None),
        ("sys.exit()", 0, None),
        ("sys.exit(3)", 3, "macrobatch: worker 1 ended with exit code 3"),
        ("sys.exit('a message')", 1, "[worker 1] a message"),
        ("os._exit(7)", 7, "macrobatch: worker 1 ended with exit code 7"),
        ("1 / 0", 1, "[worker 1] ZeroDivisionError: division by zero"),
        ("os.kill(os.getpid(), 9)", 137, "macrobatch: worker 1 was killed by SIGKILL"),
        ("compile('(', 'f', 'exec')", 1, "[worker 1] SyntaxError: "),
    ],
)
def test_how_a_worker_ends_is_how_the_run_ends(script, ending, code, last):
    # Without a failure, the other worker is waited for; after one, it is stopped.
    script(
        f"if me == 1: touch('passed'); {ending}\nwait_for('passed'); time.sleep({code and 1000})"
    )
    result = run("--workers", "2", "script.py")
    assert result.returncode == code
    if last is None:
        assert result.stderr == b""
    else:
        assert last_line(result).startswith(last)
        assert b"worker 0" not in result.stderr  # it is not to blame


def test_the_first_failing_worker_has_the_last_word(script):
    script(
        """
        def fail(*_):
            raise RuntimeError("the peer is gone")

        if me != 1:
            signal.signal(signal.SIGTERM, fail)
            touch(f"ready {me}")
            time.sleep(1000)
        wait_for("ready 0"), wait_for("ready 2")
        raise ValueError("the cause")
        """
    )
    result = run("--workers", "3", "script.py")
    assert result.returncode == 1
    lines = result.stderr.decode().splitlines()
    assert lines[0] == "macrobatch: worker 1 failed, stopping the others"
    assert "[worker 0] RuntimeError: the peer is gone" in lines
    assert "[worker 2] RuntimeError: the peer is gone" in lines
    assert [line for line in lines if os.path.join("_workers", "script.py") in line] == []
    assert lines[-4:] == [
        "[worker 1] Traceback (most recent call last):",
        f'[worker 1]   File "{os.path.realpath("script.py")}", line 20, in <module>',
        '[worker 1]     raise ValueError("the cause")',
        "[worker 1] ValueError: the cause",
    ]


STUBBORN = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    touch(f"{os.getpid()} {me}.started")
    if me == 1:
        wait_for("fail")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("ending", "code"),
    [("failure", 137), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
)
def test_no_process_is_left_behind(script, tmp_path, ending, code):
    script(STUBBORN)
    with launched("--workers", "2", "script.py", grace=0.2) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        groups = [int(file.name.split()[0]) for file in tmp_path.glob("*.started")]
        assert all(size(group) >= 2 for group in groups)
        if ending == "failure":
            (tmp_path / "fail").touch()
        else:
            launcher.send_signal(ending)
        assert launcher.wait(DEADLINE) == code
    wait_until(lambda: not any(size(group) for group in groups))


def test_children_of_a_worker_that_succeeds_are_not_left_behind(script, tmp_path):
    script("print(os.getpid()); subprocess.Popen(['sleep', '1000'])")
    result = run("--workers", "1", "script.py")
    assert result.returncode == 0
    group = int(result.stdout.split()[-1])
    wait_until(lambda: size(group) == 0)


def test_ctrl_c_reaches_workers_and_their_children(script, tmp_path):
    script(
        """
        child = me == 0 and os.fork() == 0
        try:
            touch(f"{me} {child}.ready")
            time.sleep(1000)
        except KeyboardInterrupt:
            print("child" if child else "worker", "saved")
            if me == 0 and not child:
                os.wait()
            if me == 1:
                raise
        """
    )
    with launched("--workers", "2", "script.py") as launcher:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 3)
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=DEADLINE)
    assert launcher.returncode == 130
    assert sorted(output.decode().splitlines()) == [
        "[worker 0] child saved",
        "[worker 0] worker saved",
        "[worker 1] worker saved",
    ]
    said, *traceback = errors.decode().splitlines()
    assert said == "macrobatch: stopping the workers on SIGINT"
    assert all(line.startswith("[worker 1] ") for line in traceback)
    assert traceback[-1] == "[worker 1] KeyboardInterrupt"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--workers", "2"], {}, "Received: none."),
        (["--workers", "2", "-m"], {}, "Received: none."),
        (["--workers", "2", "none.py"], {}, "Received: none.py, which is not a file in "),
        (["--workers", "0", "script.py"], {}, "Received: --workers 0."),
        (["--log-dir", "logs", "script.py"], {}, "Received: no --workers N."),
        (["--max-restarts", "1", "script.py"], {}, "Received: no --workers N."),
        (["--workers", "1", "--max-restarts", "-1", "script.py"], {}, "--max-restarts -1."),
        (["--micro-batch-size", "0", "script.py"], {}, "Received: 0."),
        (["--micro-batch-size", "off", "--verify", "script.py"], {}, "Leave one of them out."),
        (["--workers", "1", "--worker", "2", "script.py"], {}, "--worker"),
        (["--workers", "1", "--devices-per-worker", "-1", "script.py"], {}, "Received: --devices-"),
        (["--workers", "1", "script.py"], {"TF_CONFIG": "{}"}, "Received: TF_CONFIG={}."),
        (["--workers", "1", "script.py"], {"KERAS_BACKEND": "jax"}, "Received: KERAS_BACKEND=jax."),
        (["--workers", "2", "script.py"], {"CUDA_VISIBLE_DEVICES": "0"}, "Received: 1 (0)."),
    ],
)
def test_what_cannot_be_run(script, monkeypatch, capsys, arguments, environment, message):
    script("")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["macrobatch", "run", *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("macrobatch", run_name="__main__")
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("visible", "devices", "expected"),
    [
        ("3,4,5,6", "2", ["3,4", "5,6"]),
        ("GPU-a, GPU-b,GPU-c", "1", ["GPU-a", "GPU-b"]),
        ("0,1,-1,2", "1", ["0", "1"]),
        (None, "1", ["0", "1"]),
        ("", "1", ["", ""]),
    ],
)
def test_each_worker_has_gpus_of_its_own(script, monkeypatch, tmp_path, visible, devices, expected):
    if visible is None:
        nvidia_smi = tmp_path / "nvidia-smi"
        nvidia_smi.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: a)'\necho 'GPU 1: B (UUID: b)'\n")
        nvidia_smi.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script("print('<' + os.environ['CUDA_VISIBLE_DEVICES'] + '>')")
    result = run("--workers", "2", "--devices-per-worker", devices, "script.py")
    lines = sorted(result.stdout.decode().splitlines())
    assert lines == [f"[worker {i}] <{gpus}>" for i, gpus in enumerate(expected)]


def test_a_long_line_is_passed_on_whole(script):
    script("print('x' * 3_000_000); print('after')")
    result = run("--workers", "1", "script.py")
    assert result.stdout == b"[worker 0] " + b"x" * 3_000_000 + b"\n[worker 0] after\n"


def test_long_lines_of_both_outputs_do_not_mix_in_one_pipe(script):
    script(
        """
        for i in range(20):
            print("<" + "o" * 200_000 + ">")
            print("<" + "e" * 200_000 + ">", file=sys.stderr)
        """
    )
    result = run("--workers", "2", "script.py", stderr=subprocess.STDOUT)
    lines = sorted(result.stdout.decode().splitlines())
    expected = [f"[worker {i}] <{kind * 200_000}>" for i in (0, 1) for kind in "eo"]
    assert lines == [line for line in expected for _ in range(20)]


FLOOD = """
    if me == 1:
        wait_for("fail")
        os.kill(os.getpid(), signal.SIGKILL)
    touch(f"{os.getpid()}.pid")
    for i in range(64_000):
        print(f"{i:05} " + 1_000 * "x")
        if i % 10 == 0:
            with open("count", "w") as file:
                file.write(str(i))
"""


def wait_for_standstill(path):
    """Waits until nothing has been written there for a while."""
    wait_until(lambda: path.exists() and path.read_text())
    before = None
    while before != path.read_text():
        before = path.read_text()
        time.sleep(0.5)
    return int(before)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_whose_output_nobody_reads(script, tmp_path, ending):
    script(FLOOD)
    with launched("--workers", "2", "script.py", grace=1) as launcher:
        # The worker has to wait, too: what is not read is not kept.
        assert wait_for_standstill(tmp_path / "count") < 10_000
        group = int(next(tmp_path.glob("*.pid")).stem)
        launcher.send_signal(ending)
        assert launcher.wait(DEADLINE) == 128 + ending
        assert launcher.stderr.read().startswith(b"macrobatch: stopping the workers on SIG")
    wait_until(lambda: not size(group))


def test_a_failure_ends_a_run_whose_output_nobody_reads_yet(script, tmp_path):
    script(FLOOD)
    with launched("--workers", "2", "script.py", grace=1) as launcher:
        wait_for_standstill(tmp_path / "count")
        group = int(next(tmp_path.glob("*.pid")).stem)
        (tmp_path / "fail").touch()
        wait_until(lambda: not size(group))
        assert launcher.poll() is None, "output is lost"
        output, errors = launcher.communicate(timeout=DEADLINE)
    *lines, last = output.decode().splitlines()
    assert lines == [f"[worker 0] {i:05} {1_000 * 'x'}" for i in range(len(lines))]
    assert f"[worker 0] {len(lines):05} {1_000 * 'x'}".startswith(last)  # it was killed there
    assert len(lines) > 1_000
    assert errors.splitlines()[-1] == b"macrobatch: worker 1 was killed by SIGKILL"
    assert launcher.returncode == 137


def test_a_pipe_that_others_have_made_non_blocking(script):
    script("for i in range(10_000): print(100 * 'x')")
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [*launcher_with(), "--workers", "1", "script.py"]
    with subprocess.Popen(command, stdout=writing) as launcher, open(reading, "rb") as output:
        os.close(writing)
        assert output.read() == (b"[worker 0] " + 100 * b"x" + b"\n") * 10_000
    assert launcher.returncode == 0


def test_output_that_nobody_wants_any_more(script):
    script("while True: print('x')")
    with launched("--workers", "1", "script.py") as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(DEADLINE) == 128 + signal.SIGPIPE


def with_descriptors(soft, opened=0):
    """A program that runs its arguments with a limit, and with so many files open before."""
    return [
        sys.executable,
        "-c",
        "import os, resource, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, hard)); "
        f"[os.dup(0) for _ in range({opened})]; "
        f"[os.set_inheritable(i, True) for i in range(3, 3 + {opened})]; "
        "os.execv(sys.argv[1], sys.argv[1:])",
        *launcher_with(),
    ]


def test_descriptors_that_select_would_not_take(script):
    """As of some 250 workers."""
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this system does not allow so many open files")
    script("print('here')")
    result = subprocess.run(
        [*with_descriptors(1200, opened=1050), "--workers", "2", "script.py"],
        capture_output=True,
        timeout=DEADLINE,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    assert sorted(result.stdout.splitlines()) == [b"[worker 0] here", b"[worker 1] here"]


def test_more_workers_than_files_may_be_open(script):
    script("")
    command = [*with_descriptors(200), "--workers", "300", "script.py"]
    result = subprocess.run(command, capture_output=True, timeout=DEADLINE)
    assert result.returncode == 2
    assert b"Received: a limit of 200. Raise it with `ulimit -n 1232`" in result.stderr


@pytest.mark.parametrize(
    "command", [["-m", "macrobatch"], ["-c", "import macrobatch.cli as c; c.main()"]]
)
def test_the_version_without_tensorflow(tmp_path, monkeypatch, command):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('it takes seconds')")
    monkeypatch.chdir(tmp_path)
    result = subprocess.run([sys.executable, *command, "--version"], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == (f"macrobatch {macrobatch.__version__}\n", "")
    assert result.returncode == 0


def test_the_launcher_does_not_load_tensorflow():
    program = (
        "import sys, macrobatch.cli, macrobatch._workers.launch; "
        "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert result.stdout == b"[]\n"


@thorough
def test_workers_and_their_devices_are_replicas_of_one_strategy(script):
    script(
        """
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            weight = tf.Variable(1.0)

        @tf.function
        def step():
            def replica():
                context = tf.distribute.get_replica_context()
                rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
                weight.assign_sub(context.all_reduce("SUM", 2.0 ** rank * weight))
            strategy.run(replica)

        step()
        print(strategy.num_replicas_in_sync, weight.numpy())
        """
    )
    result = run("--workers", "2", "--devices-per-worker", "2", "script.py")
    assert result.returncode == 0, result.stderr.decode()
    # The sum of 2 ** rank over all ranks is 2 ** replicas - 1.
    lines = [f"[worker {i}] 4 {2.0 - 2.0**4}" for i in (0, 1)]
    assert sorted(result.stdout.decode().splitlines()) == lines


def test_tensorflow_still_chooses_local_devices_where_the_worker_replaces_it():
    from tensorflow.python.distribute import collective_all_reduce_strategy

    replaced = collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices
    parameters = list(inspect.signature(replaced).parameters)
    assert parameters == ["self", "cluster_resolver", "worker_device"]


FAILS_ONCE = """
if me == 1 and not os.path.exists("failed"):
    touch("failed")
    print("on the way")
    sys.exit(5)
print("done", sys.argv[1])
"""


@pytest.mark.parametrize(("restarts", "code"), [("1", 0), ("0", 5)])
def test_workers_start_again_and_write_files(script, tmp_path, restarts, code):
    script(FAILS_ONCE)
    options = ["--workers", "2", "--max-restarts", restarts, "--log-dir", "logs/of/run"]
    result = run(*options, "script.py", "well")
    assert result.returncode == code
    again = b"macrobatch: starting all workers again (1 of 1)"
    assert (again in result.stderr) == (code == 0)
    log = (tmp_path / "logs/of/run/worker-1.log").read_text()
    assert log.splitlines() == ["on the way", *(["done well"] if code == 0 else [])]
    if code == 0:
        assert result.stdout.count(b"[worker 1] done well") == 1
        assert "done well" in (tmp_path / "logs/of/run/worker-0.log").read_text()

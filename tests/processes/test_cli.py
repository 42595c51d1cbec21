"""`macrobatch run --workers` with real processes. Scripts do without TensorFlow, and are quick."""

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from subprocess import PIPE, STDOUT

import pytest
from support import thorough

import macrobatch

pytestmark = pytest.mark.skipif(os.name != "posix", reason="macrobatch run is for Linux and macOS")

DEADLINE = 120  # seconds
LAUNCHER = [sys.executable, "-m", "macrobatch", "run", "--workers"]

HEADER = """
import json, os, signal, subprocess, sys, time
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

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


def run(workers, *options, launcher=LAUNCHER, **more):
    """Runs script.py, and returns what became of it."""
    command = [*launcher, str(workers), *options, "script.py"]
    return subprocess.run(command, **{"stdout": PIPE, "stderr": PIPE, "timeout": DEADLINE, **more})


@contextlib.contextmanager
def launched(workers):
    """A launcher, for tests that do something to it. It does not outlive a test that fails."""
    with subprocess.Popen(
        [*LAUNCHER, str(workers), "script.py"], stdout=PIPE, stderr=PIPE
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
            # Or workers that are blocked would wait for somebody to read.
            launcher.stdout.close()
            launcher.stderr.close()


def stop(launcher, number):
    """Sends a signal, and once more: then workers have no more time to end."""
    launcher.send_signal(number)
    said = f"macrobatch: stopping the workers on {signal.Signals(number).name}\n"
    assert launcher.stderr.readline() == said.encode()
    launcher.send_signal(number)
    return launcher.wait(DEADLINE)


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


def test_each_worker_has_its_place_in_one_cluster(script):
    script("print(os.environ['TF_CONFIG'])")
    lines = sorted(run(3).stdout.decode().splitlines())
    configs = [json.loads(line.partition("] ")[2]) for line in lines]
    addresses = configs[0]["cluster"]["worker"]
    for index, (line, config) in enumerate(zip(lines, configs)):
        assert line.startswith(f"[worker {index}] ")
        task = {"type": "worker", "index": index}
        assert config == {"cluster": {"worker": addresses}, "task": task}
    assert len(set(addresses)) == len(lines) == 3
    assert all(re.match(r"localhost:\d+$", address) for address in addresses)


# Output


@pytest.mark.parametrize("length", [40, 200_000])
@pytest.mark.parametrize("stderr", [PIPE, STDOUT])
def test_outputs_are_passed_on_whole_lines_at_a_time(script, stderr, length):
    """Also where both go to one pipe, which takes a long line in pieces."""
    script(
        f"""
        for i in range(20):
            for part in (f"<{{i}} ", {length} * "x", ">\\n"):
                for stream in (sys.stdout, sys.stderr):
                    stream.write(part), stream.flush()
        """
    )
    result = run(2, stderr=stderr)
    lines = [f"[worker {w}] <{i} {length * 'x'}>" for i in range(20) for w in (0, 1)]
    outputs = [result.stdout + result.stderr] if stderr == PIPE else [result.stdout]
    for output in outputs:
        assert sorted(output.decode().splitlines()) == sorted(2 * lines)


TEXT = b"\r1/2\r2/2\rdone\nleft\rright\r\n\n\r\n\r\r\rend\r\r\n\rno end"
# The rule for a whole text: \r\n, \n and \r end a line. An empty text before \r is no line.
LINES = [
    b"[worker 0] " + text + end
    for text, end in re.findall(rb"([^\r\n]*)(\r\n|\n|\r)", TEXT + b"\n")
    if (text, end) != (b"", b"\r")
]


def test_progress_bars_and_other_ends_of_lines(script):
    """The same for a text at once and in pieces, as which it comes where a bar is drawn."""
    script(
        f"""
        os.write(2, {TEXT})
        for byte in {TEXT}:
            os.write(1, bytes([byte])), time.sleep(0.005)
        """
    )
    result = run(1)
    assert result.stdout == result.stderr == b"".join(LINES)


def test_a_line_without_end_comes_in_pieces(script):
    """Memory is finite. Any line of a few megabytes is whole."""
    script("print(3_000_000 * 'x'); print(20_000_000 * 'y', end='')")
    first, *pieces = run(1).stdout.split(b"\n")
    assert first == b"[worker 0] " + 3_000_000 * b"x"
    texts = [piece.removeprefix(b"[worker 0] ") for piece in pieces]
    assert b"".join(texts) == 20_000_000 * b"y"
    assert max(map(len, texts)) < 20_000_000


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


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, "failure"])
def test_the_end_of_a_run_whose_output_nobody_reads(script, tmp_path, ending):
    script(FLOOD)
    with launched(2) as launcher:
        # The worker has to wait, too: what is not read is not kept.
        assert wait_for_standstill(tmp_path / "count") < 10_000
        group = int(next(tmp_path.glob("*.pid")).stem)
        if ending != "failure":
            assert stop(launcher, ending) == 128 + ending
            wait_until(lambda: not size(group))
            return
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
    command = [*LAUNCHER, "1", "script.py"]
    with subprocess.Popen(command, stdout=writing) as launcher, open(reading, "rb") as output:
        os.close(writing)
        assert output.read() == (b"[worker 0] " + 100 * b"x" + b"\n") * 10_000
    assert launcher.returncode == 0


def test_output_that_nobody_wants_any_more(script):
    script("while True: print('x')")
    with launched(1) as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(DEADLINE) == 128 + signal.SIGPIPE


# How a run ends


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("sys.exit()", 0, None),
        ("sys.exit(3)", 3, "macrobatch: worker 1 ended with exit code 3"),
        ("sys.exit('a message')", 1, "[worker 1] a message"),
        ("compile('(', 'f', 'exec')", 1, "[worker 1] SyntaxError: "),
    ],
)
def test_how_a_worker_ends_is_how_the_run_ends(script, ending, code, last):
    # Without a failure, the other worker is waited for; after one, it is stopped.
    script(
        f"if me == 1: touch('passed'); {ending}\nwait_for('passed'); time.sleep({code and 1000})"
    )
    result = run(2)
    assert result.returncode == code
    if last is None:
        assert result.stderr == b""
    else:
        assert result.stderr.decode().splitlines()[-1].startswith(last)
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
    result = run(3)
    assert result.returncode == 1
    lines = result.stderr.decode().splitlines()
    assert lines[0] == "macrobatch: worker 1 failed, stopping the others"
    assert "[worker 0] RuntimeError: the peer is gone" in lines
    assert "[worker 2] RuntimeError: the peer is gone" in lines
    assert os.path.dirname(macrobatch.__file__) not in result.stderr.decode()
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
    with launched(2) as launcher:
        wait_until(lambda: len(list(tmp_path.glob("*.started"))) == 2)
        groups = [int(file.name.split()[0]) for file in tmp_path.glob("*.started")]
        assert all(size(group) >= 2 for group in groups)
        if ending == signal.SIGTERM:
            assert stop(launcher, ending) == code
        elif ending == signal.SIGKILL:
            launcher.kill()
        else:
            (tmp_path / "fail").touch()
        assert launcher.wait(DEADLINE) == code
    wait_until(lambda: not any(size(group) for group in groups))


def test_children_of_a_worker_that_succeeds_are_not_left_behind(script):
    script("print(os.getpid()); subprocess.Popen(['sleep', '1000'])")
    result = run(1)
    assert result.returncode == 0
    group = int(result.stdout.split()[-1])
    wait_until(lambda: size(group) == 0)


def test_ctrl_c_reaches_workers_and_their_children(script):
    script(
        """
        child = me == 0 and os.fork() == 0
        try:
            print("ready")
            time.sleep(1000)
        except KeyboardInterrupt:
            print("child" if child else "worker", "saved")
            if me == 0 and not child:
                os.wait()
            if me == 1:
                raise
        """
    )
    with launched(2) as launcher:
        # Output comes while the script runs.
        assert all(b"ready" in launcher.stdout.readline() for _ in range(3))
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


# What workers get from the system


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
    lines = sorted(run(2, "--devices-per-worker", devices).stdout.decode().splitlines())
    assert lines == [f"[worker {i}] <{gpus}>" for i, gpus in enumerate(expected)]


def with_descriptors(soft, opened=0):
    """A launcher with a limit of open files, and with so many open before."""
    program = (
        "import os, resource, sys; hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, hard)); "
        f"[os.dup(0) for _ in range({opened})]; "
        f"[os.set_inheritable(i, True) for i in range(3, 3 + {opened})]; "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", program, *LAUNCHER]


def test_descriptors_that_select_would_not_take(script):
    """As of some 250 workers."""
    resource = pytest.importorskip("resource")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this system does not allow so many open files")
    script("print('here')")
    result = run(2, launcher=with_descriptors(1200, opened=1050))
    assert (result.returncode, result.stderr) == (0, b"")
    assert sorted(result.stdout.splitlines()) == [b"[worker 0] here", b"[worker 1] here"]


@pytest.mark.parametrize(("failures", "restarts", "code"), [(20, 20, 0), (2, 1, 5)])
def test_workers_start_again_and_write_files(script, tmp_path, failures, restarts, code):
    """As often as is allowed, with no more files open than the first time."""
    script(
        f"""
        if me == 1:
            with open("starts", "a") as file:
                file.write(".")
                start = file.tell()
            print("start", start)
            sys.exit(5 * (start <= {failures}))
        """
    )
    options = ["--max-restarts", str(restarts), "--log-dir", "logs/of/run"]
    result = run(2, *options, launcher=with_descriptors(44))
    assert result.returncode == code
    again = f"macrobatch: starting all workers again ({restarts} of {restarts})"
    assert again in result.stderr.decode().splitlines()
    lines = [f"start {start}" for start in range(1, restarts + 2)]
    assert result.stdout.decode().splitlines() == [f"[worker 1] {line}" for line in lines]
    logs = [path.read_text().splitlines() for path in sorted(tmp_path.glob("logs/of/run/*.log"))]
    assert logs == [[], lines]


def test_more_workers_than_files_may_be_open(script):
    script("")
    result = run(300, launcher=with_descriptors(200))
    assert result.returncode == 2
    assert b"Received: a limit of 200. Raise it with `ulimit -n 1232`" in result.stderr


def test_a_launcher_and_its_workers_do_without_tensorflow(script, tmp_path):
    """To import it takes seconds."""
    for name in ("tensorflow", "keras", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('it takes seconds')")
    script("print('here')")
    result = run(1)
    assert (result.stdout, result.stderr) == (b"[worker 0] here\n", b"")
    version = subprocess.run([*LAUNCHER[:3], "--version"], capture_output=True, text=True)
    assert (version.stdout, version.stderr) == (f"macrobatch {macrobatch.__version__}\n", "")


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
    result = run(2, "--devices-per-worker", "2")
    assert result.returncode == 0, result.stderr.decode()
    # The sum of 2 ** rank over all ranks is 2 ** replicas - 1.
    lines = [f"[worker {i}] 4 {2.0 - 2.0**4}" for i in (0, 1)]
    assert sorted(result.stdout.decode().splitlines()) == lines


def test_tensorflow_still_chooses_local_devices_where_the_worker_replaces_it():
    from tensorflow.python.distribute import collective_all_reduce_strategy

    replaced = collective_all_reduce_strategy.CollectiveAllReduceExtended._initialize_local_devices
    parameters = list(inspect.signature(replaced).parameters)
    assert parameters == ["self", "cluster_resolver", "worker_device"]

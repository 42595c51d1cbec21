"""wait_for_workers: late workers, missing ones, and strangers who connect or answer."""

import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest
import tensorflow as tf

import macrobatch

DEADLINE = 60  # seconds


def resolver_of(addresses, index):
    spec = tf.train.ClusterSpec({"worker": addresses})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="worker", task_id=index
    )


def free_ports(host="localhost", family=socket.AF_INET):
    with socket.socket(family) as one, socket.socket(family) as other:
        for each in (one, other):
            each.bind((host, 0))
        return one.getsockname()[1], other.getsockname()[1]


def cluster():
    """The ports of two workers, and a resolver for each."""
    ports = free_ports()
    return ports, [resolver_of([f"localhost:{p}" for p in ports], index) for index in range(2)]


THREADS = concurrent.futures.ThreadPoolExecutor()


def waiting(resolver, timeout=DEADLINE):
    """A worker that waits in a thread."""
    return THREADS.submit(macrobatch.wait_for_workers, timeout, cluster_resolver=resolver)


def assert_met(*workers):
    assert [worker.result(DEADLINE) for worker in workers] == [None] * len(workers)


def connected(port):
    """A connection to a worker, as soon as it listens."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=DEADLINE)
        except ConnectionRefusedError:
            assert time.monotonic() < end, "nobody listens"
            time.sleep(0.01)


@pytest.mark.parametrize("index", [0, 1])
def test_a_worker_that_never_comes(index):
    ports, resolvers = cluster()
    missing = f"worker {1 - index} .localhost:{ports[1 - index]}"
    with pytest.raises(TimeoutError, match=f"within 0.3 seconds.*{missing}"):
        macrobatch.wait_for_workers(0.3, cluster_resolver=resolvers[index])


def test_somebody_else_at_the_address():
    """A server that is about to end, for instance, which takes connections but no greeting."""
    (_, port), resolvers = cluster()
    with socket.create_server(("localhost", port)), pytest.raises(TimeoutError, match="worker 1"):
        macrobatch.wait_for_workers(0.1, cluster_resolver=resolvers[0])


def test_a_worker_that_comes_after_somebody_else_at_its_address():
    (_, port), resolvers = cluster()
    with socket.create_server(("localhost", port)) as stale:
        first = waiting(resolvers[0])
        stale.accept()[0].close()
    assert_met(waiting(resolvers[1]), first)


def test_an_address_that_is_taken():
    (port, _), resolvers = cluster()
    taken = pytest.raises(OSError, match="must be able to listen")
    with socket.create_server(("", port)), taken:
        macrobatch.wait_for_workers(1, cluster_resolver=resolvers[0])


def test_workers_that_come_late():
    _, resolvers = cluster()
    first = waiting(resolvers[0])
    time.sleep(0.3)
    assert not first.done()
    assert_met(waiting(resolvers[1]), first)


def test_one_worker_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    macrobatch.wait_for_workers(0)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1, "60", None, True])
def test_a_timeout_is_a_number_of_seconds(timeout):
    with pytest.raises(ValueError, match=r"timeout must be a finite number.*Received: timeout="):
        macrobatch.wait_for_workers(timeout, cluster_resolver=cluster()[1][0])


# Strangers


@contextlib.contextmanager
def dripping(connections):
    """Sends a byte now and then to each connection, as long as a test lasts."""
    stopped = threading.Event()

    def drip():
        while not stopped.wait(0.02):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(b"w")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        for connection in connections:
            connection.close()


def test_a_slow_stranger_keeps_no_worker_from_being_heard():
    (port, _), resolvers = cluster()
    first = waiting(resolvers[0])
    with dripping([connected(port) for _ in range(3)]):
        assert_met(waiting(resolvers[1]), first)


def test_a_stranger_whose_answer_does_not_end_outlives_no_timeout():
    (_, port), resolvers = cluster()
    connections = []
    with socket.create_server(("localhost", port)) as server:

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        with dripping(connections):
            first = waiting(resolvers[0], timeout=0.5)
            assert isinstance(first.exception(DEADLINE), TimeoutError)
        server.shutdown(socket.SHUT_RDWR)


def flood(connection):
    """Whether somebody takes a line of 64 MiB."""
    try:
        for _ in range(64):
            connection.sendall(b"w" * (1 << 20))
    except (ConnectionError, socket.timeout):
        return False
    return True


def test_a_line_without_end_is_not_listened_to():
    (port, _), resolvers = cluster()
    first = waiting(resolvers[0])
    with connected(port) as stranger:
        assert not flood(stranger)
    assert_met(waiting(resolvers[1]), first)


def test_an_answer_without_end_is_not_listened_to():
    (_, port), resolvers = cluster()
    with socket.create_server(("localhost", port)) as server:
        server.settimeout(DEADLINE)
        waiting(resolvers[0], timeout=1)
        with server.accept()[0] as connection:
            assert not flood(connection)


def test_names_of_no_worker_are_not_answered():
    (port, _), resolvers = cluster()
    first = waiting(resolvers[0])
    for name in (b"worker 2\n", b"worker 0\n", b"\xff\n", b"\n"):
        with connected(port) as stranger:
            stranger.sendall(name)
            assert stranger.recv(100) == b""
    assert_met(waiting(resolvers[1]), first)


# Where a worker listens


def test_a_worker_listens_at_its_address_only():
    (port, _), resolvers = cluster()
    first = waiting(resolvers[0])
    connected(port).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=DEADLINE)
    assert_met(waiting(resolvers[1]), first)


def test_addresses_of_ipv6():
    try:
        ports = free_ports("::1", socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    resolvers = [resolver_of([f"[::1]:{port}" for port in ports], index) for index in range(2)]
    assert_met(*map(waiting, resolvers))


ADDRESSES = {"elsewhere": "192.0.2.1", "self": "127.0.1.1"}


@pytest.fixture
def names(monkeypatch):
    """Names as systems may know them. No other one is known, apart from localhost."""
    known = socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known(ADDRESSES.get(host, host), port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("host", ["elsewhere", "192.0.2.1", "unknown", "self"])
def test_a_host_that_others_know_by_another_address(names, host):
    ports = free_ports()
    views = [[f"{name}:{ports[0]}", f"localhost:{ports[1]}"] for name in (host, "127.0.0.1")]
    resolvers = [resolver_of(view, index) for index, view in enumerate(views)]
    assert_met(*map(waiting, resolvers))


def test_a_name_that_takes_long_to_resolve_outlives_no_timeout(monkeypatch):
    _, resolvers = cluster()
    over, answers = threading.Event(), []

    def getaddrinfo(*_, **__):
        answers.append(over.wait(DEADLINE))
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    try:
        with pytest.raises(TimeoutError):
            macrobatch.wait_for_workers(0.2, cluster_resolver=resolvers[0])
        assert answers == []
    finally:
        over.set()

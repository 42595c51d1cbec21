"""wait_for_workers: all workers meet before any of them makes the strategy."""

import contextlib
import errno
import ipaddress
import selectors
import socket
import threading
import time
from typing import Any, Dict, List, Optional, Set, Tuple

import tensorflow as tf

from macrobatch._workers import checks

# Anybody may connect, a port scanner for instance: whoever takes longer or says more than a worker
# would is left alone.
_PATIENCE = 10.0
_LONGEST = 64  # bytes of "worker 123\n"
_STRANGERS = 128  # who may be connected at a time, beside all workers
_TICK = 0.05


def wait_for_workers(timeout: float = 300, *, cluster_resolver: Optional[Any] = None) -> None:
    """Waits until all workers have come.

    `tf.distribute.MultiWorkerMirroredStrategy` itself waits for an hour. Call this function once on
    every worker, before the strategy is made. With a single worker it returns at once.

    Each worker listens at its own address in the cluster. (If the machine does not have that
    address, because others reach it by another one, the worker listens at all its addresses.)

    Args:
        timeout: the number of seconds to wait: finite, 0 or more.
        cluster_resolver: names the workers. Pass the resolver that the strategy gets; the default
            is the environment variable `TF_CONFIG`.

    Raises:
        TimeoutError: if a worker has not come in time. The message names the missing workers.
        OSError: if another process has the port of this worker.
        ValueError: for a timeout that is not a finite number, 0 or more.

    Examples:
        >>> import macrobatch, tensorflow as tf
        >>> macrobatch.wait_for_workers(timeout=60)
        >>> strategy = tf.distribute.MultiWorkerMirroredStrategy()
    """
    timeout = checks.timeout(timeout)
    resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = {
        f"{job} {index}": address
        for job, addresses in resolver.cluster_spec().as_dict().items()
        if job in ("chief", "worker")
        for index, address in enumerate(addresses)
    }
    own = f"{resolver.task_type} {resolver.task_id}"
    if own not in tasks or len(tasks) == 1:
        return
    with _Meeting(own, tasks, timeout) as meeting:
        meeting.wait()


class _Meeting:
    """Greets all other workers, and answers their greetings, until both is done.

    A greeting is a line with the name of the worker who greets, and the answer is a line too.
    Threads do the talking: not even a name that takes long to resolve outlasts the timeout.
    """

    def __init__(self, own: str, tasks: Dict[str, str], timeout: float):
        self._own, self._address = own, tasks[own]
        self._places = {name: _host_and_port(address) for name, address in tasks.items()}
        self._others = {name: address for name, address in tasks.items() if name != own}
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._greeted: Set[str] = set()
        self._heard: Set[str] = set()
        self._problem: Optional[OSError] = None  # with listening
        self._answering = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> "_Meeting":
        self._answering.start()
        for name in self._others:
            threading.Thread(target=self._greet, args=[name], daemon=True).start()
        return self

    def __exit__(self, error_type: Any, *_: Any) -> None:
        self._over.set()
        # The strategy's server will listen at the same address, which must be free by then. After
        # an error, the thread may be stuck where it resolves a name.
        self._answering.join(None if error_type is None else 4 * _TICK)

    def wait(self) -> None:
        """Waits for all. Nobody goes on before everybody has greeted and has been greeted."""
        with self._changed:
            while not self._greeted & self._heard >= set(self._others):
                left = self._deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, 1.0))
                elif self._problem is not None:
                    raise OSError(checks.port_in_use(self._own, self._address, self._problem))
                else:
                    met = self._greeted & self._heard
                    missing = {n: at for n, at in self._others.items() if n not in met}
                    raise TimeoutError(checks.workers_missing(self._own, missing, self._timeout))

    def _add(self, name: str, names: Set[str]) -> None:
        with self._changed:
            names.add(name)
            self._changed.notify_all()

    def _greet(self, name: str) -> None:
        """Greets a worker again and again, until it answers."""
        pause = _TICK
        while not self._over.is_set() and time.monotonic() < self._deadline:
            until = min(time.monotonic() + _PATIENCE, self._deadline)
            if _greets_back(name, self._places[name], self._own, until):
                return self._add(name, self._greeted)
            self._over.wait(pause)
            pause = min(1.5 * pause, 0.5)  # Hundreds of workers may greet one that is late.
        return None

    def _answer(self) -> None:
        """Listens where the strategy's server will listen later, and answers."""
        while not self._over.is_set():
            try:
                sockets = _listening_at(*self._places[self._own])
            except OSError as error:  # A worker of an earlier run may be about to end.
                self._problem = error
                self._over.wait(2 * _TICK)
                continue
            self._problem = None
            with contextlib.ExitStack() as opened:
                for each in sockets:
                    opened.enter_context(each)
                self._answer_at(sockets)

    def _answer_at(self, sockets: List[socket.socket]) -> None:
        """Several are listened to at a time, so that a slow one keeps nobody waiting."""
        callers: Dict[socket.socket, _Caller] = {}  # in the order in which they came
        with selectors.DefaultSelector() as selector:
            for each in sockets:
                selector.register(each, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select(_TICK):
                    here: Any = key.fileobj
                    if here in callers:
                        self._hear(callers[here])
                    else:
                        caller = _accepted(here)
                        if caller is not None:
                            callers[caller.connection] = caller
                            selector.register(caller.connection, selectors.EVENT_READ)
                too_many = len(callers) - len(self._others) - _STRANGERS
                now = time.monotonic()
                for index, caller in enumerate(list(callers.values())):
                    if caller.is_done or now > caller.until or index < too_many:
                        selector.unregister(caller.connection)
                        caller.connection.close()
                        del callers[caller.connection]
            for caller in callers.values():
                caller.connection.close()

    def _hear(self, caller: "_Caller") -> None:
        name = caller.name()
        if name in self._others:
            with contextlib.suppress(OSError):
                caller.connection.sendall(self._own.encode() + b"\n")
                self._add(name, self._heard)


class _Caller:
    """Somebody who has connected, and what they have said so far."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.until = time.monotonic() + _PATIENCE
        self.is_done = False
        self._said = b""

    def name(self) -> str:
        """The name, if it is complete with what there is to read now; otherwise nothing."""
        try:
            data = self.connection.recv(_LONGEST - len(self._said))
        except OSError:
            data = b""
        self._said += data
        is_complete = self._said.endswith(b"\n")
        self.is_done = is_complete or not data or len(self._said) == _LONGEST
        return self._said[:-1].decode(errors="replace") if is_complete else ""


def _accepted(listening: socket.socket) -> Optional[_Caller]:
    try:
        connection, _ = listening.accept()
    except OSError:  # They have gone again, or too many files are open.
        time.sleep(_TICK)
        return None
    connection.setblocking(False)
    return _Caller(connection)


def _greets_back(name: str, place: Tuple[str, int], own: str, until: float) -> bool:
    """Whether a worker is there: not just somebody who listens, such as one that is ending."""
    expected, said = name.encode() + b"\n", b""
    try:
        with socket.create_connection(place, timeout=1) as connection:
            connection.sendall(own.encode() + b"\n")
            # By what is left of the time, not by the time between two bytes.
            while said != expected and expected.startswith(said):
                connection.settimeout(max(until - time.monotonic(), 0.001))
                data = connection.recv(len(expected) - len(said))
                if not data:
                    break
                said += data
    except (OSError, UnicodeError):  # the latter from names that cannot be any
        return False
    return said == expected


def _host_and_port(address: str) -> Tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listening_at(host: str, port: int) -> List[socket.socket]:
    """Sockets that listen at the address that the cluster names, as it is known here."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        found = []
    places = list({(each[0], each[4]) for each in found})
    # Some systems give their own name an address of the loopback interface (127.0.1.1), where
    # others, who know it by another address, cannot come.
    is_misnamed = host != "localhost" and all(_is_loopback(str(place[0])) for _, place in places)
    sockets = [] if is_misnamed and not _is_literal(host) else _bound(places)
    if not sockets:
        # The name may also be known to others only, or stand for a machine that forwards (NAT, a
        # container's host, a service of Kubernetes). They come to one of this machine's addresses.
        sockets = _bound([(socket.AF_INET, ("", port)), (socket.AF_INET6, ("::", port))])
    if not sockets:
        raise OSError(errno.EADDRNOTAVAIL, "no address to listen at")
    return sockets


def _bound(places: List[Any]) -> List[socket.socket]:
    """Sockets that listen at each of the places that this machine has."""
    with contextlib.ExitStack() as opened:
        sockets = []
        for family, place in places:
            try:
                sockets.append(opened.enter_context(_bound_at(family, place)))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
        opened.pop_all()
    return sockets


def _bound_at(family: int, place: Any) -> socket.socket:
    with contextlib.ExitStack() as opened:
        each = opened.enter_context(socket.socket(family))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # IPv4 has a socket of its own
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.bind(place)
        each.listen(128)
        each.setblocking(False)
        opened.pop_all()
    return each


def _is_literal(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback

"""Connecting to a daemon: one that is slow to take connections, one that answers wrongly, one whose processes end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvsidecar.client import AttachRefused, BreakerState, Client, ClientError, DaemonUnreachable, HostBuffer
from kvsidecar.client.connection import DaemonProcess, LostDaemon, connect
from kvsidecar.client.local_operator import Operator
from kvsidecar.client.messages import TransportError
from kvsidecar.client.quiescing import quiesce
from kvsidecar.errors import RequestDenied
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.harness import NAMESPACE, SECONDS, eventually, hashes, layout
from tests.marks import processes
from tests.open_files import open_files


def welcome(connection: socket.socket, message: pb.Welcome, *, pidfds: int = 1, payload: bytes | None = None) -> None:
    """Send a Welcome, or other bytes, with pidfds of this process."""
    fds = [os.pidfd_open(os.getpid()) for _ in range(pidfds)]
    socket.send_fds(connection, [payload or frame(message.SerializeToString())], fds)
    for fd in fds:
        os.close(fd)


@pytest.fixture
def full(short_dir: Path) -> Iterator[SimpleNamespace]:
    """A daemon whose queue of connections is full."""
    path = str(short_dir / "full.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(0)
    waiting = []
    while True:
        one = socket.socket(socket.AF_UNIX)
        one.setblocking(False)
        waiting.append(one)
        try:
            one.connect(path)
        except BlockingIOError:
            break
    yield SimpleNamespace(path=path, listener=listener)
    for each in (*waiting, listener):
        each.close()


def test_a_full_queue_of_connections_is_waited_for(full: SimpleNamespace) -> None:
    def serve() -> None:
        while True:
            connection, _ = full.listener.accept()
            if connection.recv(4096):
                welcome(connection, pb.Welcome(token=b"t", epoch=3, num_pidfds=1))
                return

    def close_those_before() -> None:
        for connection in [full.listener.accept()[0]]:
            connection.close()
        serve()

    threading.Timer(0.05, close_those_before).start()
    connection = connect(full.path, fds=(), client="", timeout=SECONDS)
    assert connection.epoch == 3
    connection.close()


def test_a_queue_that_stays_full_is_an_unreachable_daemon(full: SimpleNamespace) -> None:
    with pytest.raises(DaemonUnreachable, match="queue"):
        connect(full.path, fds=(), client="", timeout=0.05)


def test_waiting_for_a_full_queue_can_be_given_up(full: SimpleNamespace) -> None:
    cancel = os.eventfd(1)
    with pytest.raises(DaemonUnreachable, match="being closed"):
        connect(full.path, fds=(), client="", timeout=SECONDS, cancel=cancel)
    os.close(cancel)


def test_a_scheduler_at_a_daemon_that_hangs_in_the_greeting_pays_three_budgets(full: SimpleNamespace) -> None:
    os.symlink(full.path, full.path + ".attach")
    client = Client(full.path, step_budget=0.02, timeout=SECONDS)
    for _ in range(3):
        assert client.lookup(NAMESPACE, {0: hashes("a")}).reason == "daemon_lost"
    assert client.breaker_state is not BreakerState.CLOSED
    assert client.lookup(NAMESPACE, {0: hashes("a")}, timeout=SECONDS).reason == "daemon_lost"
    client.close()


# -- the processes behind it -------------------------------------------------------------------------------------------

DAEMON = """
import os, socket, sys
from kvsidecar.protocol.framing import frame
from kvsidecar.v1 import sidecar_pb2 as pb
connection, _ = socket.socket(fileno=int(sys.argv[1])).accept()
connection.recv(4096)
pidfds = [os.pidfd_open(int(pid)) for pid in (os.getpid(), *sys.argv[2:])]
welcome = pb.Welcome(token=b"t", epoch=3, num_pidfds=len(pidfds))
socket.send_fds(connection, [frame(welcome.SerializeToString())], pidfds)
connection.close()
sys.stdin.read()
"""
"""Answers one client with its own pidfd and those of its copiers, closes the connection, and lives on."""


def pidfds() -> int:
    """How many pidfds this process has open."""
    return sum("pidfd" in file for file in open_files(os.getpid()).values())


@contextmanager
def connected(directory: Path, num_copiers: int) -> Iterator[tuple[DaemonProcess, list[subprocess.Popen[bytes]]]]:
    """What a client knows of the processes, and those: the daemon, and its copiers. Each ends with its stdin."""
    path = str(directory / "daemon.sock")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen()

        def start(*command: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds)
            stack.callback(process.communicate)
            return process

        copiers = [start("cat") for _ in range(num_copiers)]
        number = listener.fileno()
        pids = [str(copier.pid) for copier in copiers]
        daemon = start(sys.executable, "-c", DAEMON, str(number), *pids, pass_fds=[number])
        connection = connect(path, fds=(), client="", timeout=SECONDS)
        stack.callback(connection.close)
        assert connection.sock.recv(1) == b""
        yield connection.process, [daemon, *copiers]


@processes
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_memory_is_in_use_until_the_daemon_and_all_of_its_copiers_have_ended(
    short_dir: Path, order: tuple[int, ...]
) -> None:
    with connected(short_dir, 2) as (process, processes), Client(str(short_dir / "nobody.sock")) as client:
        client._supervisor.lost_daemon = LostDaemon(process.duplicate())
        for number in order:
            assert not process.gone(), "the connection is closed, and not all processes have ended"
            assert not client.unmapped()
            processes[number].communicate()
        assert process.gone()
        assert client.unmapped()
        assert client.unmapped()


@processes
def test_close_waits_for_the_end_of_a_daemon_whose_session_had_ended_before(short_dir: Path) -> None:
    with connected(short_dir, 1) as (process, processes), Client(str(short_dir / "nobody.sock")) as client:
        client._supervisor.lost_daemon = LostDaemon(process.duplicate())
        assert not client.close(0.01)
        unmapped: list[bool] = []
        closing = threading.Thread(target=lambda: unmapped.append(client.close(SECONDS)))
        closing.start()
        for each in processes:
            assert closing.is_alive(), "not all processes have ended"
            each.communicate()
        closing.join(SECONDS)
        assert unmapped == [True]


@processes
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_end_of_the_daemon_is_no_proof_while_a_copier_of_it_lives(short_dir: Path, order: tuple[int, ...]) -> None:
    """Nobody answers any more: what is waited for is the end of all processes."""
    with connected(short_dir, 1) as (process, processes):
        left = [processes[number] for number in order]

        def query(_request: Any, _seconds: float, then: Callable[[Any], None]) -> Callable[[], None]:
            then(TransportError(grpc.StatusCode.UNAVAILABLE, "nobody answers"))
            return lambda: None

        def wait_until(is_done: Callable[[], bool], _seconds: float) -> bool:
            if is_done():
                return True
            left.pop(0).communicate()
            return is_done()

        transport: Any = SimpleNamespace(
            connection=SimpleNamespace(process=process, fence=None), going_down=lambda: True, query=query
        )  # fmt: skip
        session: Any = SimpleNamespace(id=11, epoch=3)
        end: Any = SimpleNamespace(
            wait_until=wait_until, wake=lambda: None, is_too_late=lambda: False, going_down=lambda: None,
            fenced=lambda: False,
        )  # fmt: skip
        assert quiesce(transport, session, end, given_up=False)
        assert not left, "a process still lives"


@processes
def test_every_descriptor_is_duplicated_and_closed_and_no_child_inherits_one(short_dir: Path) -> None:
    before = pidfds()
    with connected(short_dir, 2) as (process, processes):
        other = process.duplicate()
        assert (len(process.fds), len(other.fds), len({*process.fds, *other.fds})) == (3, 3, 6)
        assert not any(map(os.get_inheritable, (*process.fds, *other.fds)))
        assert pidfds() == before + 6
        process.close()
        process.close()
        assert pidfds() == before + 3
        for each in processes:
            each.communicate()
        assert other.gone()
        assert not process.gone(), "closed: that cannot be known any more"
        lost = LostDaemon(other)
        assert lost.gone()
        assert pidfds() == before
        assert lost.gone()
    given_up = LostDaemon(DaemonProcess([os.pidfd_open(os.getpid())]))
    assert not given_up.gone()
    del given_up
    assert pidfds() == before


GOOD = pb.Welcome(token=b"t", epoch=3, num_pidfds=2)
WRONG: dict[str, tuple[type[ClientError], str, dict[str, Any]]] = {
    "fewer than announced": (DaemonUnreachable, "announced 2 pidfds and sent 1", {"pidfds": 1}),
    "more than announced": (DaemonUnreachable, "announced 2 pidfds and sent 3", {"pidfds": 3}),
    "a fence that does not come": (
        DaemonUnreachable,
        "announced 2 pidfds and a fence and sent 2",
        {"message": pb.Welcome(token=b"t", num_pidfds=2, fence=True)},
    ),
    "none": (DaemonUnreachable, "announced 0 pidfds and sent 0", {"message": pb.Welcome(token=b"t"), "pidfds": 0}),
    "a refusal": (AttachRefused, "not you", {"message": pb.Welcome(error="not you")}),
    "a frame that is too long": (DaemonUnreachable, "not kvsidecar's", {"payload": b"\xff" * 4}),
    "no Welcome": (DaemonUnreachable, "Welcome", {"payload": frame(b"\xff" * 4)}),
    "an end in the middle": (DaemonUnreachable, "closed the connection", {"payload": b"\x09"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_answer_leaves_no_descriptor_behind(short_dir: Path, what: str) -> None:
    kind, text, answer = WRONG[what]
    before = pidfds()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "wrong.sock"))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                welcome(connection, **{"message": GOOD, "pidfds": 2, **answer})

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(kind, match=text):
            connect(listener.getsockname(), fds=(), client="", timeout=SECONDS)
        server.join(SECONDS)
    assert pidfds() == before


@pytest.mark.parametrize("cancelled", [False, True])
def test_giving_up_in_the_middle_of_an_answer_leaves_no_descriptor_behind(short_dir: Path, cancelled: bool) -> None:
    before = pidfds()
    cancel = os.eventfd(0)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_dir / "slow.sock"))
        listener.listen()

        def serve() -> None:
            with listener.accept()[0] as connection:
                connection.recv(4096)
                welcome(connection, GOOD, pidfds=2, payload=b"\x09")
                if cancelled:
                    eventually(lambda: pidfds() == before + 2)  # the client has them
                    os.eventfd_write(cancel, 1)
                assert connection.recv(1) == b"", "the client has not given up"

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(DaemonUnreachable, match="being closed" if cancelled else "does not answer"):
            connect(
                listener.getsockname(), fds=(), client="", timeout=SECONDS if cancelled else 0.2,
                cancel=cancel if cancelled else None,
            )  # fmt: skip
        server.join(SECONDS)
    os.close(cancel)
    assert pidfds() == before


class ClosesItsClient:
    """An event ring; what another thread may do while `Client.attach` begins, it does when it is asked for handles."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def handles(self) -> tuple[bytes, ...]:
        self._client.close(0.0)
        return ()

    def record(self, index: int) -> None:
        """Never called."""

    mark = None


def test_an_attach_ends_when_its_client_is_closed(short_dir: Path) -> None:
    """And not when its own time is over: it would use a core until then."""
    buffer = HostBuffer(1 << 20)
    client = Client(str(short_dir / "kvs.sock"))
    ring = ClosesItsClient(client)
    with pytest.raises(ClientError, match="was closed while it attached"):
        client.attach(
            instance="i",
            namespace=NAMESPACE,
            buffers=buffer.kv_buffers(),
            groups=[layout()],
            events=ring,  # type: ignore[arg-type]
            timeout=100 * SECONDS,
        )
    buffer.close()


def test_a_daemon_that_does_not_know_the_request_is_of_another_release(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: object, **__: object) -> None:
        raise AttachRefused("nobody needs one here")

    monkeypatch.setattr(f"{Operator.__module__}.{connect.__name__}", no_link)
    socket = str(short_dir / "kvs.sock")
    server = grpc.server(ThreadPoolExecutor(1))  # knows no request at all
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    operator = Operator(socket, timeout=30.0)
    try:
        with pytest.raises(ClientError, match=f"the daemon at {socket} runs a different release") as raised:
            operator.call("CancelDrain", pb.CancelDrainRequest())
        assert not isinstance(raised.value, DaemonUnreachable | RequestDenied)
    finally:
        operator.close()
        server.stop(None)

"""Clients that begin and do not go on: what they began costs little, and not for long; who is only slow is unharmed."""

from __future__ import annotations

import re
import socket
import time
from contextlib import ExitStack, suppress

import pytest

from kvsidecar.client import HostBuffer
from kvsidecar.protocol.framing import MAX_MESSAGE_BYTES, frame
from kvsidecar.protocol.wire import namespace_to_wire
from kvsidecar.server import http_connection
from kvsidecar.server.partial_messages import MAX_PARTIAL_BYTES
from kvsidecar.types import PROTOCOL
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.leftovers import open_fds, rss_mib
from tests.e2e.unfinished import before_any_is_ended, ended, http, until_closed
from tests.e2e.wire import RawClient, framed, hello, raw_client, welcome
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, done, eventually
from tests.marks import lent_daemon, promise

pytestmark = lent_daemon

MIB = 1 << 20
ONE_READ = 256 * 1024
"""The most that the event loop reads from a socket at a time."""


OWN_FDS = 4
"""Of a rank's own connections, which it may still be opening when they are counted: far fewer than a test opens."""


def send_what_goes(daemon: DaemonProcess, clients: list[RawClient], data: bytes) -> None:
    """To each of them, until the daemon takes no more of any, though its loop went round and round."""
    rest = {raw: memoryview(data) for raw in clients}
    quiet = 0
    while quiet < 5:
        before = sum(map(len, rest.values()))
        for raw in clients:
            raw.connection.setblocking(False)
            with suppress(OSError):  # the socket's buffer is full, or the connection has ended
                while rest[raw]:
                    rest[raw] = rest[raw][raw.connection.send(rest[raw]) :]
            raw.connection.settimeout(SECONDS)
        turn_of_the_loop(daemon)
        quiet = quiet + 1 if sum(map(len, rest.values())) == before else 0


def turn_of_the_loop(daemon: DaemonProcess) -> None:
    """What was sent before has been read."""
    for _ in range(2):
        assert daemon.get("/health")[0] == 200


def big_lookup(nbytes: int = MAX_MESSAGE_BYTES - 1024) -> bytes:
    request = pb.LookupRequest(namespace=namespace_to_wire(NAMESPACE), mode=pb.LookupRequest.MODE_PREFIX)
    request.groups.add(group=0, hashes=bytes(nbytes // 32 * 32))
    return frame(pb.LocalRequest(call=7, lookup=request).SerializeToString())


def test_messages_without_their_end_have_a_budget_and_a_time(daemon: DaemonProcess) -> None:
    whole = big_lookup()
    fit = MAX_PARTIAL_BYTES // len(whole)
    many = 6 * fit
    rank = Rank(daemon)
    assert rank.hits("a") == 0
    fds = open_fds(daemon)

    def send(stack: ExitStack) -> tuple[list[RawClient], list[float], int]:
        """Returns the clients, the MiB of the daemon before, with those that fit and with all, and how many were ended
        before."""
        ended_before, mib = ended(daemon), [rss_mib(daemon)]
        clients = [stack.enter_context(raw_client(daemon)) for _ in range(many)]
        send_what_goes(daemon, clients[:fit], whole[:-1])
        done(rank.store("a"))
        mib.append(rss_mib(daemon))
        send_what_goes(daemon, clients[fit:], whole[:-1])
        assert rank.hits("a") == 1, "another connection of the same user is held up"
        mib.append(rss_mib(daemon))
        return clients, mib, ended_before

    stack, (clients, (start, *mib), ended_before) = before_any_is_ended(daemon, send)
    with stack:
        with_fit, with_many = (each - start for each in mib)
        assert with_fit > 0.9 * fit * len(whole) / MIB, "the messages are not where they are looked for"
        print(f"{fit} unfinished messages take {with_fit:.0f} MiB, {many} take {with_many:.0f} MiB")
        assert with_many < with_fit + (many - fit) * ONE_READ / MIB + 0.2 * with_fit
        for raw in clients:
            text = raw.error(0)[1]
            assert re.search(r"was not complete 10 s after|there was no room", text), text
            with suppress(ConnectionResetError):  # what it had sent, and the daemon had not read
                assert raw.closed()
        assert daemon.refused("unfinished") >= fit
        assert ended(daemon) == ended_before + many
        assert rss_mib(daemon) - start < 0.5 * with_fit, "what was read is kept"
    eventually(lambda: open_fds(daemon) <= fds + OWN_FDS)
    done(rank.store("b"))
    rank.close()


def test_a_slow_client_is_served_beside_those_that_do_not_go_on(daemon: DaemonProcess) -> None:
    """Its message finds no room at first, and comes in many pieces."""
    whole = big_lookup()
    fit = MAX_PARTIAL_BYTES // len(whole)

    def send(stack: ExitStack) -> tuple[list[RawClient], list[pb.LocalReply], tuple[int, int]]:
        """Returns those that do not go on, the answers to the others, which are slow, and what was refused before."""
        before, answers = (daemon.refused("unfinished"), daemon.refused("limit")), list[pb.LocalReply]()
        bad = [stack.enter_context(raw_client(daemon)) for _ in range(fit)]
        with suppress(OSError):  # its connection was ended
            for raw in bad:
                raw.connection.sendall(whole[:-1])
            slow = stack.enter_context(raw_client(daemon))
            slow.connection.sendall(whole[: MIB // 16])
            turn_of_the_loop(daemon)
            for raw in bad[: fit // 2]:
                raw.connection.sendall(whole[-1:])
                answers.append(raw.receive())
            step = len(whole) // 50
            for start in range(MIB // 16, len(whole), step):
                slow.connection.sendall(whole[start : start + step])
            answers.append(slow.receive())
        return bad[fit // 2 :], answers, before

    stack, (bad, answers, (unfinished, limit)) = before_any_is_ended(daemon, send)
    with stack:
        assert [(each.call, each.lookup.ready) for each in answers] == [(7, True)] * (fit // 2 + 1)
        for raw in bad:
            assert "was not complete" in raw.error(0)[1]
    assert daemon.refused("unfinished") == unfinished + fit - fit // 2
    assert daemon.refused("limit") == limit + fit // 2 + 1, "each lookup is answered, for the most hashes of one"


def test_a_hello_without_its_end_is_told_so(daemon: DaemonProcess) -> None:
    with hello(daemon, framed(pb.Hello(protocol=PROTOCOL))[:-1], []) as connection:
        assert "no Hello was complete within 5 s" in welcome(connection).error
        assert connection.recv(1) == b""
    assert daemon.refused("unfinished") == 1


@pytest.mark.parametrize(("announced", "sent"), [(0, 2), (2, 0), (1, 2), (3, 1)])
def test_a_hello_with_other_descriptors_than_it_says_is_told_so(
    daemon: DaemonProcess, announced: int, sent: int
) -> None:
    buffer = HostBuffer(4096)
    before = open_fds(daemon)
    with hello(daemon, framed(pb.Hello(protocol=PROTOCOL, num_fds=announced)), [buffer.fd] * sent) as connection:
        reply = welcome(connection)
        assert f"announces {announced} descriptors, but {sent} arrived" in reply.error
        assert not reply.token
        assert connection.recv(1) == b""
    eventually(lambda: open_fds(daemon) <= before)
    assert daemon.refused("invalid_request") == 1
    buffer.close()


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_half_a_request_is_ended_and_a_slow_one_is_answered(daemon: DaemonProcess) -> None:
    halves = (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n")

    def send(stack: ExitStack) -> tuple[list[socket.socket], bytes, int]:
        """Returns those that hang, the answer to the slow one, and how many were ended before."""
        before = daemon.refused("unfinished")
        hanging = [stack.enter_context(http(daemon, half)) for half in halves]
        # One whole request, and then half of one.
        kept = stack.enter_context(http(daemon, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"))
        assert b"200 OK" in kept.recv(65536)
        kept.sendall(halves[1])
        slow = stack.enter_context(http(daemon))
        for piece in (b"GET /hea", b"lth HTTP/1.1\r\n", b"Host: x\r\nConnection: close\r\n", b"\r\n"):
            with suppress(OSError):  # its connection was ended
                slow.sendall(piece)
            assert daemon.get("/health")[0] == 200  # in between the daemon has read it
        return [*hanging, kept], until_closed(slow), before

    stack, (hanging, answer, before) = before_any_is_ended(daemon, send)
    with stack:
        assert b"200 OK" in answer
        began = time.monotonic()
        for connection in hanging:
            assert b"408" in until_closed(connection)
        assert time.monotonic() - began < SECONDS
    assert daemon.refused("unfinished") == before + 4


@promise("so probes are still answered")
def test_connections_that_are_held_keep_no_probe_out(daemon: DaemonProcess) -> None:
    before = open_fds(daemon)

    def hold(stack: ExitStack) -> int:
        """Returns how many were ended for the limit."""
        ended_before = daemon.refused("limit")
        for _ in range(3 * http_connection.MAX_CONNECTIONS):
            stack.enter_context(http(daemon, b"GET /ready HTTP/1.1\r\n"))
        assert daemon.get("/health")[0] == 200
        assert daemon.get("/ready")[0] == 200
        eventually(lambda: open_fds(daemon) <= before + http_connection.MAX_CONNECTIONS + 1)
        return daemon.refused("limit") - ended_before

    stack, ended_of_them = before_any_is_ended(daemon, hold)
    with stack:
        assert ended_of_them >= 2 * http_connection.MAX_CONNECTIONS
    eventually(lambda: open_fds(daemon) <= before + 1)


def test_a_connection_that_is_used_outlives_those_that_only_hold(daemon: DaemonProcess) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as stack:
        used = stack.enter_context(http(daemon, request))
        assert b"200 OK" in used.recv(65536)
        for _ in range(3):
            for _ in range(http_connection.MAX_CONNECTIONS - 3):
                stack.enter_context(http(daemon, b"G"))
            assert daemon.get("/health")[0] == 200  # which was accepted behind them
            used.sendall(request)
            assert b"200 OK" in used.recv(65536)


def test_an_answer_that_nobody_reads_is_ended(daemon: DaemonProcess) -> None:
    """What does not fit into the socket's buffer waits in the daemon."""
    with http(daemon) as connection:
        connection.setblocking(False)
        requests = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20

        def refused_after_more() -> bool:
            with suppress(OSError):  # the socket's buffer is full, or the connection has ended
                connection.send(requests)
            return daemon.refused("unfinished") >= 1

        eventually(refused_after_more, pause=0.05)
        connection.setblocking(True)
        until_closed(connection)

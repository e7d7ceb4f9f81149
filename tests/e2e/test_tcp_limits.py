"""Hostile clients of the TCP port, with a certificate and without: what they cost is bounded, counted and over in time,
and honest clients are served meanwhile."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import pytest

from benchmarks.attacks import headers_bomb
from benchmarks.attacks.http2_client import DATA, END_HEADERS, END_STREAM, HEADERS, Connection, frame, message, request
from kvsidecar.client import DaemonUnreachable, RemoteClient, Tls
from kvsidecar.server import handshakes, http2_gate, tls_front
from kvsidecar.server.header_block import literal_fields
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.e2e.grpc_calls import LOOKUP, half_send_a_call_and_go_on, send_a_message_over_the_limit
from tests.e2e.leftovers import open_fds, rss_mib
from tests.e2e.remote import Pki, Remote, pki, remote, stub
from tests.e2e.unfinished import before_any_is_ended, ended
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, eventually, hashes

trustme = pytest.importorskip("trustme")

__all__ = ("pki", "remote")
HOSTILE, HONEST = "n1.sched.example", "n2.sched.example"
LARGE = (HOSTILE, *(f"{number}.{'x' * 60}.example" for number in range(380)))
"""Names of a certificate that is nearly as large as may be."""


def context_of(pki: Pki, tls: Tls | None, alpn: str = "h2") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki.ca_file))
    if tls is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    context.set_alpn_protocols([alpn])
    return context


def raw(remote: Remote, source: str = "") -> socket.socket:
    """A TCP connection that has said nothing."""
    return socket.create_connection(("127.0.0.1", remote.port), SECONDS, (source, 0) if source else None)


def shake(remote: Remote, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(raw(remote), server_hostname="localhost")


def is_closed(connection: socket.socket) -> bool:
    """Whether the daemon has ended it. What it has said is thrown away."""
    connection.setblocking(False)
    try:
        while select.select([connection], [], [], 0)[0]:
            if not connection.recv(65536):
                return True
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def logged(daemon: DaemonProcess) -> int:
    """How many lines say that something was refused."""
    return len([line for line in daemon.read_so_far() if line["event"] == "gRPC refused"])


def hits(client: RemoteClient) -> int:
    return client.lookup(NAMESPACE, {0: hashes("a")}).groups[0].hits


@contextmanager
def honest(remote: Remote, pki: Pki) -> Iterator[RemoteClient]:
    with RemoteClient(remote.address, pki.client(HONEST), timeout=SECONDS) as client:
        assert hits(client) == 0
        yield client


def begin_handshake(connection: socket.socket, context: ssl.SSLContext) -> None:
    """Send all of a handshake but its last bytes."""
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, to_send, server_hostname="localhost")
    while True:
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            connection.sendall(to_send.read())
            received.write(connection.recv(65536))
        else:
            connection.sendall(to_send.read()[:-1])
            return


# -- with a certificate ------------------------------------------------------------------------------------------


def test_headers_that_become_a_hundred_times_as_large_cost_nothing(remote: Remote, pki: Pki) -> None:
    """One connection alone took 44 MiB, and 40 of them 1.3 GiB."""
    daemon, context, began = remote.daemon, context_of(pki, pki.client(HOSTILE)), time.monotonic()
    bomb = request() + b"\x90" * headers_bomb.FIELDS
    with ExitStack() as stack, honest(remote, pki) as client:
        start = most = rss_mib(daemon)
        for _ in range(headers_bomb.CONNECTIONS):
            connection = Connection(shake(remote, context))
            stack.callback(connection.close)
            for stream in range(1, 2 * headers_bomb.STREAMS, 2):
                if not connection.send(frame(HEADERS, stream, bomb, END_HEADERS)):
                    break
            assert hits(client) == 0
            most = max(most, rss_mib(daemon))
            if most - start > 200:
                pytest.fail(f"the daemon has grown by {most - start:.0f} MiB")
        eventually(lambda: daemon.refused("limit") >= headers_bomb.CONNECTIONS)
        most = max(most, rss_mib(daemon))
    assert most - start < 64
    line = daemon.wait_log("gRPC refused")
    assert line["certificate"] == HOSTILE
    assert "header block" in line["reason"]
    assert logged(daemon) <= time.monotonic() - began + 1, "one line for each"


def test_half_sent_calls_are_ended_in_words_and_their_connection_goes_on(remote: Remote, pki: Pki) -> None:
    connection = Connection(shake(remote, context_of(pki, pki.client(HOSTILE)))).socket
    half_send_a_call_and_go_on(connection, LOOKUP, lambda: honest(remote, pki))
    assert remote.daemon.refused("unfinished") == 1
    connection.close()


def test_a_message_over_the_limit_is_refused_and_counted(remote: Remote, pki: Pki) -> None:
    with stub(remote, pki.client(HONEST)) as sidecar:
        send_a_message_over_the_limit(sidecar, LOOKUP)
    assert remote.daemon.refused("limit") == 1


def test_what_one_certificate_holds_stays_below_the_stated_bound_and_is_given_back(remote: Remote, pki: Pki) -> None:
    """As many connections and calls as are taken, each as large as it may be, also the certificate."""
    daemon, limits = remote.daemon, tls_front.LIMITS.user
    context = context_of(pki, pki.client(*LARGE))
    block = request() + literal_fields([(b"x-large", bytes(3900)), *((b"x", bytes(60)) for _ in range(50))])
    assert len(block) < http2_gate.MAX_BLOCK_BYTES
    calls = -(-(limits.calls + 20) // limits.connections)
    with honest(remote, pki) as client:
        start = rss_mib(daemon)

        def hold(stack: ExitStack) -> tuple[float, Connection]:
            """Begin the calls; returns the MiB that they hold, and one of their connections."""
            before = ended(daemon)
            shaken = (shake(remote, context) for _ in range(limits.connections))
            connections = [stack.enter_context(closing(Connection(each))) for each in shaken]
            for each in connections:
                for stream in range(1, 2 * calls, 2):
                    each.send(frame(HEADERS, stream, block, END_HEADERS))
                    each.send(frame(DATA, stream, message(bytes(100), declared=200)))
                each.send(frame(DATA, 1, bytes(16384))[:-1])
            eventually(lambda: not [each for each in connections if each.send(b"") and each.full])
            eventually(lambda: ended(daemon) >= before + 20)
            return rss_mib(daemon) - start, connections[-1]

        connections, (held, one) = before_any_is_ended(daemon, hold)
        bound = tls_front.USER_BYTES / 2**20
        print(f"one certificate holds {held:.0f} MiB of {bound:.0f}")
        assert 8 < held < bound
        with stub(remote, pki.client(*LARGE)) as sidecar, pytest.raises(grpc.RpcError) as caught:
            sidecar.Lookup(LOOKUP, timeout=SECONDS)  # one more connection
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        one.close()
        with stub(remote, pki.client(*LARGE)) as sidecar:
            served = eventually(lambda: _answer(sidecar))
        assert served in ("ready", f"one user may have {limits.calls} open gRPC calls at once")
        assert hits(client) == 0, "another certificate is locked out"
        connections.close()
        eventually(lambda: rss_mib(daemon) - start < 0.4 * held, lambda: f"{rss_mib(daemon) - start:.0f} MiB are kept")
    with stub(remote, pki.client(*LARGE)) as sidecar:
        assert eventually(lambda: _answer(sidecar)) == "ready"


def _answer(sidecar: object) -> str | None:
    """What a lookup of the stub is told; None while there is no connection."""
    try:
        return "ready" if sidecar.Lookup(LOOKUP, timeout=SECONDS).ready else None  # type: ignore[attr-defined]
    except grpc.RpcError as error:
        return None if error.code() is grpc.StatusCode.UNAVAILABLE else error.details()


# -- without one -------------------------------------------------------------------------------------------------


def test_handshakes_that_never_end_are_bounded_and_ended_and_keep_nobody_out(remote: Remote, pki: Pki) -> None:
    daemon, context = remote.daemon, context_of(pki, pki.client(*LARGE))
    sources = [f"127.0.0.{number}" for number in range(2, 8)]
    each = handshakes.MAX_HANDSHAKES + 8
    with ExitStack() as stack, honest(remote, pki) as client:
        fds, start = open_fds(daemon), rss_mib(daemon)

        def hold(stack: ExitStack) -> tuple[list[socket.socket], float]:
            """Begin them, from all sources, until those beyond the limit are ended. Returns how many were, too."""
            refused, held = daemon.refused("limit"), list[socket.socket]()
            for source in sources:
                for number in range(each):
                    held.append(stack.enter_context(raw(remote, source)))
                    if number % 4:  # else it says nothing
                        begin_handshake(held[-1], context)
            beyond = len(held) - handshakes.MAX_ALL_HANDSHAKES
            eventually(lambda: sum(map(is_closed, held)) >= beyond)
            assert open_fds(daemon) - fds <= handshakes.MAX_ALL_HANDSHAKES + 4
            print(f"{handshakes.MAX_ALL_HANDSHAKES} handshakes hold {rss_mib(daemon) - start:.0f} MiB")
            assert (rss_mib(daemon) - start) * 2**20 < handshakes.MAX_ALL_HANDSHAKES * tls_front.HANDSHAKE_BYTES
            return held, daemon.refused("limit") - refused

        connections, (held, refused) = before_any_is_ended(daemon, hold)
        stack.enter_context(connections)
        assert refused == len(held) - handshakes.MAX_ALL_HANDSHAKES
        with honest(remote, pki):
            assert hits(client) == 0
        eventually(lambda: all(map(is_closed, held)))
        assert daemon.refused("unfinished") >= handshakes.MAX_ALL_HANDSHAKES - 4
        assert open_fds(daemon) - fds <= 4
        line = next(each for each in daemon.read_so_far() if "not complete within 10 s" in each.get("reason", ""))
        assert line["address"] in sources
        for _ in range(4):
            begin_handshake(stack.enter_context(raw(remote)), context)
    assert daemon.terminate() == 0, "handshakes keep it from its end"


def test_a_handshake_of_endless_bytes_is_ended(remote: Remote, pki: Pki) -> None:
    """A hello that announces 16 MiB."""
    record = b"\x16\x03\x01\x40\x00"
    with raw(remote) as connection:
        connection.sendall(record + b"\x01\xff\xff\xff" + bytes(0x3FFC))
        with suppress(OSError):
            for _ in range(1000):
                connection.sendall(record + bytes(0x4000))
            pytest.fail("all is taken")
    eventually(lambda: remote.daemon.refused("limit") + remote.daemon.refused("invalid_request") == 1)


def test_certificates_over_the_limit_of_a_handshake_are_refused(remote: Remote, pki: Pki) -> None:
    """They would be kept as long as the connection."""
    names = (HOSTILE, *(f"{number}.{'x' * 60}.example" for number in range(900)))
    with suppress(OSError), shake(remote, context_of(pki, pki.client(*names))) as connection:
        eventually(lambda: is_closed(connection))
    eventually(lambda: remote.daemon.refused("limit") == 1)
    assert remote.daemon.wait_log("gRPC refused")["reason"] == "a TLS handshake of more than 32768 bytes"


@pytest.mark.parametrize(
    ("shown", "reason", "said"),
    [
        ("none", "unidentified", "the client shows no certificate"),
        ("of another CA", "unidentified", "the client's certificate is not accepted"),
        ("plain text", "invalid_request", "a TLS handshake failed"),
        ("TLS 1.2", "invalid_request", "a TLS handshake failed (unsupported protocol)"),
        ("HTTP/1.1", "invalid_request", "does not name HTTP/2"),
    ],
)
def test_who_is_refused_is_counted_and_the_log_says_why_once(
    remote: Remote, pki: Pki, shown: str, reason: str, said: str
) -> None:
    wrong = {"none": None, "of another CA": pki.client(HOSTILE, ca=trustme.CA())}
    tls = wrong[shown] if shown in wrong else pki.client(HOSTILE)
    context = context_of(pki, tls, "http/1.1" if shown == "HTTP/1.1" else "h2")
    if shown == "TLS 1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    began = time.monotonic()
    for _ in range(8):
        with raw(remote) as connection:
            if shown == "plain text":
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            else:
                try:
                    connection = context.wrap_socket(connection, server_hostname="localhost")
                except OSError:
                    continue
            eventually(lambda: is_closed(connection))  # noqa: B023 - called at once
            connection.close()
    eventually(lambda: remote.daemon.refused(reason) == 8)
    line = remote.daemon.wait_log("gRPC refused")
    assert line["address"] == "127.0.0.1"
    assert said in line["reason"]
    assert logged(remote.daemon) <= time.monotonic() - began + 1, "one line for each"


def test_a_probe_of_the_port_is_no_refusal(remote: Remote, pki: Pki) -> None:
    for _ in range(5):
        raw(remote).close()
    with honest(remote, pki):
        assert not logged(remote.daemon)
    assert sum(remote.daemon.refused(reason) for reason in ("client_gone", "unfinished", "invalid_request")) == 0


# -- identity ----------------------------------------------------------------------------------------------------


def test_a_bundle_may_hold_an_intermediate_ca_alone(remote: Remote, pki: Pki) -> None:
    intermediate = pki.ca.create_child_ca()
    intermediate.cert_pem.write_to_path(str(pki.ca_file))  # read at the next handshake
    certificate, key = pki.issue("leaf", HONEST, ca=intermediate)
    root = pki.directory / "root.pem"
    pki.ca.cert_pem.write_to_path(str(root))
    with RemoteClient(remote.address, Tls(str(root), str(certificate), str(key)), timeout=SECONDS) as client:
        assert hits(client) == 0
    root_signed = Tls(str(root), *map(str, pki.issue("other", HONEST)))
    with RemoteClient(remote.address, root_signed, timeout=3) as client, pytest.raises(DaemonUnreachable):
        client.status()


def test_two_certificates_at_once_keep_their_rights(remote: Remote, pki: Pki) -> None:
    """gRPC sees all connections come from the daemon itself."""
    with ExitStack() as stack:
        admins = [stack.enter_context(stub(remote, pki.client("ops.example"))) for _ in range(4)]
        users = [stack.enter_context(stub(remote, pki.client(HONEST))) for _ in range(4)]
        for _ in range(3):
            for admin, user in zip(admins, users, strict=True):
                assert not admin.Status(pb.StatusRequest(), timeout=SECONDS).partial
                assert user.Status(pb.StatusRequest(), timeout=SECONDS).partial
                with pytest.raises(grpc.RpcError, match=f"the certificate of {HONEST}"):
                    user.Drain(pb.DrainRequest(), timeout=SECONDS)


def test_a_handshake_in_single_bytes_succeeds(remote: Remote, pki: Pki) -> None:
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context_of(pki, pki.client(HONEST)).wrap_bio(received, to_send, server_hostname="localhost")
    with raw(remote) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                for byte in to_send.read():
                    connection.sendall(bytes([byte]))
                received.write(connection.recv(65536))
        call = frame(HEADERS, 1, request(), END_HEADERS)
        call += frame(DATA, 1, message(LOOKUP.SerializeToString()), END_STREAM)
        tls.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4) + call)
        connection.sendall(to_send.read())  # the end of the handshake and a call, at once
        answer = b""
        while b"grpc-status\x010" not in answer:
            data = connection.recv(65536)
            assert data, "the daemon has closed the connection"
            received.write(data)
            with suppress(ssl.SSLWantReadError):
                while True:  # each read takes one record
                    answer += tls.read(65536)

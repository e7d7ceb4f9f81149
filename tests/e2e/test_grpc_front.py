"""Hostile clients of the gRPC socket: what they cost is bounded, is over with them, and locks nobody else out."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import grpc
import pytest

from benchmarks.attacks.http2_client import DATA, END_HEADERS, HEADERS, Connection, frame, message, request
from kvsidecar.server import grpc_front, http2_gate
from kvsidecar.server.header_block import literal_fields
from kvsidecar.support.child_process import environment
from tests.e2e.grpc_calls import LOOKUP, half_send_a_call_and_go_on, send_a_message_over_the_limit
from tests.e2e.leftovers import rss_mib
from tests.e2e.policies import daemon_for_others, needs_root
from tests.e2e.unfinished import before_any_is_ended, ended
from tests.e2e.wire import stub
from tests.harness import SECONDS, DaemonProcess, Rank, eventually
from tests.marks import daemon_may_open, lent_daemon

pytestmark = lent_daemon

OTHER_UID = 12345


def attack(name: str, daemon: DaemonProcess, seconds: float, *uid: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.attacks.{name}", str(Path(daemon.socket).parent), str(seconds)]
    return subprocess.Popen([*command, *map(str, uid)], stdout=subprocess.PIPE, text=True, env=environment())


def sent(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    found: dict[str, int] = json.loads(out)
    return found


def test_headers_that_become_a_hundred_times_as_large_cost_nothing(daemon: DaemonProcess) -> None:
    """One connection alone took 145 MiB, and 322 requests the whole of 1 GiB."""
    rank = Rank(daemon)
    start = most = rss_mib(daemon)
    with attack("headers_bomb", daemon, 3.0) as process:
        while process.poll() is None:
            most = max(most, rss_mib(daemon))
            if most - start > 200:
                process.kill()
                pytest.fail(f"the daemon has grown by {most - start:.0f} MiB")
            with stub(daemon) as sidecar:
                assert sidecar.Lookup(LOOKUP, timeout=SECONDS).ready
            assert rank.hits("a") == 0
        assert sent(process)["calls"] > 100
    assert most - start < 64
    assert daemon.refused("limit") > 0, "nothing is counted"
    daemon.wait_log("gRPC refused")
    said = [line for line in daemon.read_so_far() if line["event"] == "gRPC refused"]
    assert len(said) <= 10, "one line for each"
    rank.close()


@needs_root
def test_half_sent_calls_of_one_user_lock_nobody_else_out(short_dir: Path) -> None:
    with daemon_for_others(short_dir) as daemon:
        start = rss_mib(daemon)
        with attack("half_sent_calls", daemon, 8.0, OTHER_UID) as process:
            eventually(lambda: process.poll() is not None or daemon.refused("limit") > grpc_front.MAX_CALLS)
            for _ in range(20):
                with stub(daemon) as sidecar:
                    assert sidecar.Lookup(LOOKUP, timeout=SECONDS).ready
            assert sent(process)["calls"] > 2 * grpc_front.MAX_CALLS
        assert rss_mib(daemon) - start < 200


def test_half_sent_calls_are_ended_in_words_and_their_connection_goes_on(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar:
        assert sidecar.Lookup(LOOKUP, timeout=SECONDS).ready
    connection = Connection(Path(daemon.socket))
    half_send_a_call_and_go_on(connection.socket, LOOKUP)
    assert daemon.refused("unfinished") == 1
    connection.close()


def test_a_message_over_the_limit_is_refused_and_counted(daemon: DaemonProcess) -> None:
    with stub(daemon) as sidecar:
        send_a_message_over_the_limit(sidecar, LOOKUP)
    assert daemon.refused("limit") == 1


@daemon_may_open(2000)  # two for each connection
def test_a_client_beyond_the_limit_of_connections_is_told_and_does_not_hammer(daemon: DaemonProcess) -> None:
    """Its call waited for its own time limit while it connected dozens of times a second."""
    connections = [Connection(Path(daemon.socket)) for _ in range(grpc_front.MAX_CONNECTIONS)]
    turned_away = Connection(Path(daemon.socket))
    eventually(lambda: not turned_away.send(b""))
    assert daemon.refused("limit") == 1
    for _ in range(10):  # whether it has begun when it is turned away is a race
        with stub(daemon) as sidecar, pytest.raises(grpc.RpcError) as caught:
            sidecar.Lookup(LOOKUP, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    for each in (turned_away, *connections):
        each.close()


@daemon_may_open(2000)
def test_what_one_user_holds_stays_below_the_stated_bound_and_is_given_back(daemon: DaemonProcess) -> None:
    """As many connections and calls as are taken, each as large as it may be."""
    block = request() + literal_fields([(b"x-large", bytes(3900)), *((b"x", bytes(60)) for _ in range(50))])
    assert len(block) < http2_gate.MAX_BLOCK_BYTES
    half = frame(DATA, 1, message(bytes(100), declared=200))
    most_of_a_frame = frame(DATA, 1, bytes(16384))[:-1]
    with stub(daemon) as sidecar:
        assert sidecar.Lookup(LOOKUP, timeout=SECONDS).ready
    start = rss_mib(daemon)

    def hold(stack: ExitStack) -> float:
        """Begin the calls; returns the MiB that they hold."""
        before = ended(daemon)
        paths = [Path(daemon.socket)] * (grpc_front.MAX_CONNECTIONS + 20)
        connections = [stack.enter_context(closing(Connection(path))) for path in paths]

        def all_sent() -> bool:
            return not [each for each in connections if each.send(b"") and each.full]

        for number in range(grpc_front.MAX_CALLS + 20):
            connections[number].send(frame(HEADERS, 1, block, END_HEADERS) + half + most_of_a_frame)
            all_sent()
        eventually(all_sent)
        eventually(lambda: ended(daemon) >= before + 20)
        eventually(lambda: all(each.taken for each in connections if each.send(b"")))  # which takes its turns
        return rss_mib(daemon) - start

    connections, held = before_any_is_ended(daemon, hold)
    bound = grpc_front.USER_BYTES / 2**20
    print(f"one user holds {held:.0f} MiB of {bound:.0f}")
    assert 16 < held < bound
    assert bound <= 304, "docs/security.md says so"
    assert grpc_front.ALL_BYTES / 2**20 <= 768, "docs/security.md says so"
    connections.close()
    eventually(lambda: rss_mib(daemon) - start < 0.4 * held, lambda: f"{rss_mib(daemon) - start:.0f} MiB are kept")
    with stub(daemon) as sidecar:
        assert sidecar.Lookup(LOOKUP, timeout=SECONDS).ready


def test_who_was_refused_is_served_over_the_same_connection_when_there_is_room(daemon: DaemonProcess) -> None:
    """gRPC has not seen the calls in between, but their headers, on which those of later calls build."""
    full = Connection(Path(daemon.socket))
    streams = itertools.count(1, 2)
    with stub(daemon) as sidecar:

        def refused(number: int) -> bool:
            """Whether a call finds no room. The calls that leave none end after some seconds: they are sent again."""
            for stream in itertools.islice(streams, grpc_front.MAX_CALLS):
                full.send(frame(HEADERS, stream, request(), END_HEADERS))
            eventually(lambda: full.send(b"") and not full.full)
            try:
                sidecar.Lookup(LOOKUP, timeout=SECONDS, metadata=[(f"x-new-{number}", "value")])
            except grpc.RpcError as error:
                code, said = error.code(), error.details()
            else:
                return False
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"one user may have {grpc_front.MAX_CALLS} open gRPC" in (said or "")
            return True

        for number in range(5):
            eventually(functools.partial(refused, number), "the daemon takes more calls than one user may have")
        full.close()

        def served() -> bool:
            try:
                answers = [
                    sidecar.Lookup(LOOKUP, timeout=SECONDS, metadata=[(f"x-new-{number}", "value")]).ready
                    for number in range(5)
                ]
            except grpc.RpcError:
                return False
            return all(answers)

        eventually(served)
    assert daemon.terminate() == 0
    assert not [line for line in daemon.read_log() if line["event"] == "stderr"], "gRPC complains"

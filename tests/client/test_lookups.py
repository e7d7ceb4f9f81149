"""Lookups within a budget."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.client import (
    DAEMON_LOST,
    NO_ANSWER,
    BreakerState,
    Client,
    ClientError,
    LookupMode,
    PendingLookup,
)
from kvsidecar.client.local_calls import WHOLE_BYTES
from kvsidecar.client.lookup_parts import PART_HASHES
from kvsidecar.support.breaker import CircuitBreaker
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.e2e.endings import pause
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Gate, Rank, eventually, hashes
from tests.marks import lent_daemon

pytestmark = lent_daemon


def test_hits_of_a_bitmap_are_flags_per_hash(short_dir: Path) -> None:
    with FakeDaemon(short_dir) as daemon:
        bitmap = bytes((0b10110001, 0b1))
        daemon.on_lookup = lambda _: pb.LookupReply(ready=True, groups=[pb.GroupHits(group=0, hits=5, bitmap=bitmap)])
        client = Client(daemon.socket, step_budget=SECONDS)
        expected = tuple(bool(bitmap[i // 8] >> i % 8 & 1) for i in range(10))
        for asked in (hashes(*range(10)), b"".join(hashes(*range(10)))):
            result = client.lookup(NAMESPACE, {0: asked}, mode=LookupMode.BITMAP)
            assert result.groups[0].found == expected
        client.close()


@pytest.fixture(params=[True, False], ids=["local", "grpc"])
def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.socket, local_protocol=request.param, step_budget=SECONDS) as client:
        assert client.lookup(NAMESPACE, {0: hashes("nothing")}).ready
        yield client


@pytest.fixture
def stored(daemon: DaemonProcess) -> Iterator[list[bytes]]:
    rank = Rank(daemon)
    rank.store("a", "b", "c")
    yield hashes("a", "b", "none", "c")
    rank.close()


def begin(client: Client, asked: list[bytes], **options: Any) -> PendingLookup:
    pending = client.begin_lookup(NAMESPACE, {0: asked}, **options)
    assert pending is not None
    return pending


def test_lookups_that_were_begun_are_answered_as_others_in_any_order(client: Client, stored: list[bytes]) -> None:
    asked = [stored[:count] for count in range(1, 5)]
    pending = [begin(client, each, mode=LookupMode.BITMAP) for each in asked]
    expected = [client.lookup(NAMESPACE, {0: each}, mode=LookupMode.BITMAP) for each in asked]
    assert [each.result(SECONDS) for each in reversed(pending)] == expected[::-1]
    assert expected[-1].groups[0].found == (True, True, False, True)


def test_a_lease_that_nobody_wants_any_more_is_dropped(
    client: Client, stored: list[bytes], daemon: DaemonProcess
) -> None:
    kept, early, late = (begin(client, stored, lease_seconds=600.0) for _ in range(3))
    early.cancel()
    lease = kept.result(SECONDS).lease
    late.cancel()

    def dropped() -> bool:
        client.lookup(NAMESPACE, {0: stored})  # reads what has come
        return daemon.metric("kvsidecar_leases") == 1

    eventually(dropped)
    assert client.release(lease)


def test_a_lookup_that_is_refused_says_why_when_it_is_taken(client: Client) -> None:
    pending = client.begin_lookup(replace(NAMESPACE, block_size=0), {0: hashes("a")})
    assert pending is not None
    with pytest.raises(ClientError, match="block"):
        pending.result(SECONDS)


def test_a_daemon_that_hangs_or_dies_is_noticed_as_by_other_lookups(client: Client, daemon: DaemonProcess) -> None:
    pending, lost = begin(client, hashes("a")), begin(client, hashes("a"))
    assert pending.result(SECONDS).ready
    assert lost.result(SECONDS).ready
    pause(daemon)
    pending, lost = begin(client, hashes("a")), begin(client, hashes("a"))
    late = pending.result(0.01)
    assert (late.ready, late.reason, late.groups[0].hits) == (False, NO_ANSWER, 0)
    while client.breaker_state is BreakerState.CLOSED:
        begin(client, hashes("a")).result(0.001)
    assert client.begin_lookup(NAMESPACE, {0: hashes("a")}) is None
    daemon.process.kill()
    daemon.process.wait()
    assert lost.result(SECONDS).reason == DAEMON_LOST


def test_nothing_is_begun_without_a_connection(short_dir: Path) -> None:
    with FakeDaemon(short_dir) as daemon, Client(daemon.socket, step_budget=SECONDS) as client:
        assert client.begin_lookup(NAMESPACE, {0: hashes("a")}) is None
        client.lookup(NAMESPACE, {0: hashes("a")})
        assert begin(client, [bytes(WHOLE_BYTES // 2)]).result(SECONDS)


# -- of any size -------------------------------------------------------------------------------------------------------

UNKNOWN = [bytes(32)] * (2 * PART_HASHES)
"""So many that what stands around them is in different parts."""


@pytest.mark.parametrize("begun", [False, True])
def test_any_number_of_hashes_is_looked_up_under_one_lease(
    client: Client, stored: list[bytes], daemon: DaemonProcess, begun: bool
) -> None:
    asked = {0: stored[:2] + UNKNOWN + stored[2:], 1: UNKNOWN, 2: [], 3: stored}
    options: dict[str, Any] = {"mode": LookupMode.BITMAP, "lease_seconds": 600.0}
    if begun:
        pending = client.begin_lookup(NAMESPACE, asked, **options)
        assert pending is not None
        result = pending.result(SECONDS)
    else:
        result = client.lookup(NAMESPACE, asked, **options)
    assert result.groups[0].found == (True, True, *[False] * len(UNKNOWN), False, True)
    assert {group: each.hits for group, each in result.groups.items()} == {0: 3, 1: 0, 2: 0, 3: 0}
    assert daemon.metric("kvsidecar_leases") == 1
    prefix = client.lookup(NAMESPACE, asked)
    assert [prefix.groups[group].hits for group in (0, 1)] == [2, 0]
    assert client.release(result.lease)
    assert daemon.metric("kvsidecar_leases") == 0


def test_a_lookup_can_go_on_with_the_lease_of_another(
    client: Client, stored: list[bytes], daemon: DaemonProcess
) -> None:
    first = client.lookup(NAMESPACE, {0: stored[:1]}, lease_seconds=600.0)
    more = client.lookup(NAMESPACE, {0: stored[1:2]}, lease_seconds=600.0, lease=first.lease)
    assert more.lease == first.lease
    none = client.lookup(NAMESPACE, {0: [bytes(32)]}, lease_seconds=600.0, lease=first.lease)
    assert none.lease == first.lease
    assert daemon.metric("kvsidecar_leases") == 1
    assert client.release(first.lease)
    again = client.lookup(NAMESPACE, {0: stored[1:2]}, lease_seconds=600.0, lease=first.lease)
    assert again.lease not in (None, first.lease)
    with Client(daemon.socket, step_budget=SECONDS) as other:
        own = other.lookup(NAMESPACE, {0: stored[:1]}, lease_seconds=600.0, lease=again.lease)
        assert own.lease not in (None, again.lease), "it is somebody else's"
    assert client.release(again.lease)


@pytest.fixture(params=[True, False], ids=["local", "grpc"])
def local(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("size", ["short", "long"])
@pytest.mark.parametrize("way", ["lookup", "result", "cancel", "add"])
def test_an_answer_that_nobody_waits_for_leaves_no_lease(
    daemon: DaemonProcess, stored: list[bytes], local: bool, way: str, size: str
) -> None:
    """Though its client asks for nothing any more, and long before the lease would end."""
    asked = {0: stored if size == "short" else stored + UNKNOWN + stored}
    breaker = CircuitBreaker(silence=SECONDS)
    with Client(daemon.socket, local_protocol=local, step_budget=SECONDS, breaker=breaker) as client:
        earlier = client.lookup(NAMESPACE, {0: stored[:1]}, lease_seconds=600.0 if way == "add" else 0.0)
        options: dict[str, Any] = {"mode": LookupMode.BITMAP, "lease_seconds": 600.0}
        before = daemon.metric('kvsidecar_lookup_blocks_total{result="hit"}')
        pause(daemon)
        if way == "lookup":
            assert client.lookup(NAMESPACE, asked, timeout=0.05, **options).reason == NO_ANSWER
        else:
            pending = client.begin_lookup(NAMESPACE, asked, lease=earlier.lease, **options)
            assert pending is not None
            if way == "cancel":
                pending.cancel()
            else:
                assert not pending.wait(0.0)
                assert pending.result(0.01).reason == NO_ANSWER
        daemon.process.send_signal(signal.SIGCONT)
        # It was answered, unless the socket had no room for all of it, and nothing is left of it.
        if (local, way, size) != (True, "lookup", "long"):
            eventually(lambda: daemon.metric('kvsidecar_lookup_blocks_total{result="hit"}') > before)
        eventually(lambda: daemon.metric("kvsidecar_leases") == 0)
        eventually(lambda: not client._supervisor.late_answers)


@pytest.mark.parametrize("begun", [False, True])
def test_one_that_is_given_up_between_two_parts_leaves_no_lease(short_dir: Path, local: bool, begun: bool) -> None:
    gate = Gate(short_dir)
    with (
        DaemonProcess(short_dir, KVSIDECAR_FAILPOINTS=f"lookup.before_answer@2={gate}", local=local) as daemon,
        daemon.client(breaker=CircuitBreaker(silence=SECONDS)) as client,
    ):
        daemon.wait_ready()
        rank = Rank(daemon)
        rank.store("a", "b", "c")
        client.lookup(NAMESPACE, {})
        asked = {0: hashes("a") + UNKNOWN + hashes("b", "c")}
        options: dict[str, Any] = {"mode": LookupMode.BITMAP, "lease_seconds": 600.0}
        if begun:
            pending = client.begin_lookup(NAMESPACE, asked, **options)
            assert pending is not None
            eventually(lambda: gate.holds(daemon.process.pid))
            pending.cancel()
        else:
            assert client.lookup(NAMESPACE, asked, timeout=1.0, **options).reason == NO_ANSWER
            eventually(lambda: gate.holds(daemon.process.pid))
        gate.let_pass()
        eventually(lambda: daemon.metric("kvsidecar_leases") == 0 and not client._supervisor.late_answers)
        assert daemon.refused("lease_expired") == 0
        rank.close()
    gate.close()


def test_size_opens_no_breaker_and_silence_does(short_dir: Path, local: bool) -> None:
    """Every wait is in vain until the last part is answered; each part is a sign of life."""
    now = [100.0]
    breaker = CircuitBreaker(failures=1, silence=1.0, clock=lambda: now[0])
    with FakeDaemon(short_dir, local_protocol=local) as daemon:
        answer, answered = threading.Semaphore(0), threading.Semaphore(0)

        def on_lookup(request: pb.LookupRequest) -> pb.LookupReply:
            assert answer.acquire(timeout=SECONDS)
            hits = [pb.GroupHits(group=each.group, hits=len(each.hashes) // 32) for each in request.groups]
            answered.release()
            return pb.LookupReply(ready=True, groups=hits)

        with Client(daemon.socket, step_budget=SECONDS, breaker=breaker, local_protocol=local) as client:
            client.lookup(NAMESPACE, {})
            daemon.on_lookup = on_lookup
            pending = begin(client, [bytes(32)] * (6 * PART_HASHES))
            for part in range(6):
                now[0] += 0.6
                assert not pending.wait(0.001)
                assert breaker.state is BreakerState.CLOSED, part
                answer.release()
                assert answered.acquire(timeout=SECONDS)
                if part < 5:
                    eventually(lambda part=part: len(pending._parts._results[0]) == part + 1)
            assert pending.result(SECONDS).groups[0].hits == 6 * PART_HASHES
            silent = begin(client, [bytes(32)] * (6 * PART_HASHES))
            now[0] += 1.1
            assert not silent.wait(0.0)
            assert breaker.state is BreakerState.CLOSED, "nobody has waited for the answer"
            assert not silent.wait(0.001)
            assert breaker.state is not BreakerState.CLOSED
            answer.release(6)

"""Lookups within a budget."""

from __future__ import annotations

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
from kvsidecar.client.local_calls import MAX_POST_BYTES
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.e2e.test_daemon_death import pause
from tests.harness import NAMESPACE, SECONDS, DaemonProcess, Rank, eventually, hashes


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


def test_what_is_too_long_to_be_sent_at_once_is_not_begun(short_dir: Path) -> None:
    with FakeDaemon(short_dir) as daemon, Client(daemon.socket, step_budget=SECONDS) as client:
        assert client.begin_lookup(NAMESPACE, {0: hashes("a")}) is None, "nothing is connected yet"
        client.lookup(NAMESPACE, {0: hashes("a")})
        assert client.begin_lookup(NAMESPACE, {0: bytes(MAX_POST_BYTES)}) is None
        assert begin(client, [bytes(MAX_POST_BYTES // 2)]).result(SECONDS)

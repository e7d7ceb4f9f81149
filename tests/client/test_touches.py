"""Touches: in parts as lookups are, head last, and kept until the first connection."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsidecar.client import Client, lookups, supervisor
from kvsidecar.client.lookup_parts import PART_HASHES, LookupParts, touch_parts
from kvsidecar.client.messages import LookupQuery
from kvsidecar.client.types import GroupHits, LookupResult
from kvsidecar.types import LookupMode
from kvsidecar.v1 import sidecar_pb2 as pb
from tests.client.fake_daemon import FakeDaemon
from tests.harness import NAMESPACE, SECONDS, eventually, hashes

WIDTH = NAMESPACE.hash_bytes
LONG = PART_HASHES * 2 + 3
"""Hashes of a prompt in three parts."""

Touched = tuple[FakeDaemon, "queue.SimpleQueue[pb.LookupRequest]"]


def prompt(first: int, count: int) -> bytes:
    """The joined hashes of blocks with these numbers."""
    return b"".join((first + number).to_bytes(WIDTH, "big") for number in range(count))


@pytest.fixture
def touched(short_dir: Path) -> Iterator[Touched]:
    """A daemon, and what it is told."""
    told: queue.SimpleQueue[pb.LookupRequest] = queue.SimpleQueue()

    def on_lookup(request: pb.LookupRequest) -> pb.LookupReply:
        told.put(request)
        return pb.LookupReply(ready=True)

    with FakeDaemon(short_dir) as daemon:
        daemon.on_lookup = on_lookup
        yield daemon, told


@pytest.mark.parametrize("counts", [{0: LONG}, {0: 5}, {0: 0}, {0: PART_HASHES, 1: 1}, {0: 1, 1: LONG, 2: 0}])
def test_a_touch_is_cut_as_a_lookup_and_begins_with_the_tail(counts: dict[int, int]) -> None:
    query = LookupQuery(NAMESPACE, {group: prompt(0, count) for group, count in counts.items()}, LookupMode.BITMAP)
    parts, cuts = LookupParts(query), []
    while (part := parts.next()) is not None:
        cuts.append({group: bytes(each) for group, each in part.groups.items() if each})
        answers = {group: GroupHits(0, (False,) * part.count(group)) for group in part.groups}
        parts.take(LookupResult(True, answers))
    found = [{group: bytes(each) for group, each in part.groups.items() if each} for part in touch_parts(query)]
    assert found == cuts[::-1]


@pytest.mark.parametrize("joined", [True, False])
def test_all_of_a_long_prompt_is_touched_head_last(touched: Touched, joined: bool) -> None:
    daemon, told = touched
    with Client(daemon.socket, step_budget=SECONDS) as client:
        client.lookup(NAMESPACE, {0: hashes("connected")})
        told.get(timeout=SECONDS)
        whole = prompt(0, LONG)
        apart = [whole[i : i + WIDTH] for i in range(0, len(whole), WIDTH)]
        assert client.touch_nowait(NAMESPACE, {0: whole if joined else apart}, pause=60)
        messages = [told.get(timeout=SECONDS) for _ in range(3)]
        assert b"".join(message.groups[0].hashes for message in messages[::-1]) == whole
        assert [(message.touch, message.pause_seconds) for message in messages] == [(True, 60)] * 3


def test_the_first_touches_of_a_client_wait_for_its_connection(
    touched: Touched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else connects it. Of many, the latest are kept."""
    daemon, told = touched
    monkeypatch.setattr(lookups, "EARLY_TOUCH_BYTES", 30 * WIDTH)
    connect = held(monkeypatch)
    with Client(daemon.socket, step_budget=SECONDS) as client:
        for number in range(3):
            assert client.touch_nowait(NAMESPACE, {0: prompt(number, 10)})
        connect()
        assert [told.get(timeout=SECONDS).groups[0].hashes for _ in range(2)] == [prompt(1, 10), prompt(2, 10)]
        assert client.touch_nowait(NAMESPACE, {0: prompt(9, 1)})
        assert told.get(timeout=SECONDS).groups[0].hashes == prompt(9, 1)
    assert told.empty()
    assert not client.touch_nowait(NAMESPACE, {0: prompt(9, 1)}), "it is closed"


def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Clients connect when the function that this returns has been called."""
    may, original = threading.Event(), supervisor.open_transport

    def open_transport(*arguments: object, **options: object) -> object:
        assert may.wait(SECONDS)
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(supervisor, "open_transport", open_transport)
    return may.set


def test_without_a_daemon_a_touch_is_not_sent_then_or_later(short_dir: Path) -> None:
    with Client(str(short_dir / "kvs.sock"), step_budget=SECONDS) as client:
        client.touch_nowait(NAMESPACE, {0: prompt(0, 1)})
        assert client._supervisor.wait_attempt(0, SECONDS)
        assert not client.touch_nowait(NAMESPACE, {0: prompt(0, 1)})
        with FakeDaemon(short_dir) as daemon:
            told: list[pb.LookupRequest] = []

            def on_lookup(request: pb.LookupRequest) -> pb.LookupReply:
                told.append(request)
                return pb.LookupReply(ready=True)

            daemon.on_lookup = on_lookup
            eventually(lambda: client.lookup(NAMESPACE, {0: hashes("connected")}).ready, "the daemon is found")
            assert not any(request.touch for request in told), "it was for the daemon of then"

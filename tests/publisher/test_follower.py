"""Which of what the daemon tells becomes events. With engines' own notes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import pytest

from kvsidecar.client import Residency, ResidencyChange
from kvsidecar.integrations.residency import known_blocks
from kvsidecar.integrations.residency.known_blocks import BlockInfo, KnownBlocks
from kvsidecar.integrations.residency.note_format import NoteFormat
from kvsidecar.integrations.residency.residents import STEP_BLOCKS
from kvsidecar.integrations.vllm.groups import GroupKind
from kvsidecar.integrations.weights_version import WeightsVersion
from kvsidecar.publisher.engine_dialects import VLLM
from kvsidecar.publisher.events import Topic
from kvsidecar.publisher.follower import Follower, keep_below
from tests.integrations.engine import chain, full, group
from tests.router import View

WIDTH = 32
TOKENS = list(range(4 * 5))
CHAIN = chain(TOKENS)


def notes_on(hashes: Sequence[bytes], *, width: int = WIDTH, index: int = 0, kind: GroupKind = GroupKind.FULL) -> bytes:
    """What an engine notes on blocks of `TOKENS`."""
    known = KnownBlocks([full(0), group(1, kind, 4)], width)
    for i, each in enumerate(CHAIN):
        packed = array("i", TOKENS[4 * i : 4 * i + 4]).tobytes()
        known.add(index, each[:width], BlockInfo(packed, CHAIN[i - 1][:width] if i else None))
    return known.notes(index, [each[:width] for each in hashes])


class Daemon:
    def __init__(self) -> None:
        self.news: list[ResidencyChange] = []
        self.topic, self.view = Topic("t"), View()
        self.follower = Follower(WIDTH, self, self.topic)

    @property
    def has_residency(self) -> bool:
        return bool(self.news)

    def take_residency(self, most_bytes: int) -> list[ResidencyChange]:
        taken, self.news = self.news[:2], self.news[2:]
        return taken

    def tell(self, kind: Residency, hashes: Iterable[bytes] = (), notes: bytes = b"", index: int = 0) -> None:
        self.news.append(ResidencyChange(kind, index, b"".join(hashes), notes))

    def store(self, hashes: Sequence[bytes], notes: bytes = b"", index: int = 0) -> None:
        if notes:
            self.tell(Residency.NOTES, hashes, notes, index)
        self.tell(Residency.STORED, hashes, index=index)

    def snapshot(self) -> None:
        self.tell(Residency.RESET)
        self.tell(Residency.COMPLETE)

    def settle(self) -> None:
        for _ in range(1000):
            self.follower.step()
            events = self.topic.take()
            for event in events:
                self.view.take(event)
            if not events and not self.follower.pending:
                assert self.view.ignored == []
                return
        raise AssertionError("it never comes to rest")

    def known(self, medium: str = "CPU") -> set[int]:
        self.settle()
        return set(self.view.of(medium))


def numbers(hashes: Iterable[bytes]) -> set[int]:
    return {VLLM.number(each) for each in hashes}


@pytest.fixture
def daemon() -> Daemon:
    daemon = Daemon()
    daemon.snapshot()
    return daemon


def test_noted_blocks_are_published_with_tokens_and_removed_blocks_taken_back(daemon: Daemon) -> None:
    daemon.store(CHAIN, notes_on(CHAIN))
    assert daemon.known() == numbers(CHAIN)
    assert [*daemon.view.of("CPU").values()][-1] == tuple(TOKENS[-4:])
    daemon.tell(Residency.REMOVED, CHAIN[3:])
    assert daemon.known() == numbers(CHAIN[:3])
    daemon.tell(Residency.CLEARED)
    assert daemon.known() == set()


def test_a_child_waits_for_its_parent(daemon: Daemon) -> None:
    daemon.store(CHAIN[1:], notes_on(CHAIN[1:]))
    assert daemon.known() == set()
    daemon.store(CHAIN[:1], notes_on(CHAIN[:1]))
    assert daemon.known() == numbers(CHAIN)


def test_a_lost_daemon_has_nothing_and_one_that_comes_back_what_its_snapshot_says(daemon: Daemon) -> None:
    daemon.store(CHAIN, notes_on(CHAIN))
    daemon.settle()
    daemon.tell(Residency.LOST)
    assert daemon.known() == set()
    daemon.tell(Residency.RESET)
    daemon.store(CHAIN[:2], notes_on(CHAIN[:2]))
    daemon.tell(Residency.COMPLETE)
    assert daemon.known() == numbers(CHAIN[:2])
    daemon.follower.end()
    assert daemon.known() == set()


def test_blocks_on_the_disk_are_published_beside_those_in_the_pool(daemon: Daemon) -> None:
    daemon.store(CHAIN[:2], notes_on(CHAIN[:2]))
    daemon.tell(Residency.TIER_STORED, CHAIN[:2])
    assert daemon.known("STORAGE") == numbers(CHAIN[:2])
    daemon.tell(Residency.REMOVED, CHAIN[:2])
    assert daemon.known() == set()
    daemon.tell(Residency.TIER_REMOVED, CHAIN[1:2])
    assert daemon.known("STORAGE") == numbers(CHAIN[:1])


def test_sglangs_pages_have_its_names_and_medium(daemon: Daemon) -> None:
    daemon.store(CHAIN, notes_on(CHAIN, width=8))
    daemon.tell(Residency.TIER_STORED, CHAIN)  # its lookups fetch nothing from there
    assert daemon.known("CPU_PINNED") == {int.from_bytes(each[:8], "big", signed=True) for each in CHAIN}
    assert daemon.known("DISK") == set()
    daemon.tell(Residency.REMOVED, CHAIN[1:])
    assert len(daemon.known("CPU_PINNED")) == 1


def test_blocks_of_weights_with_a_name_are_not_published(daemon: Daemon) -> None:
    keys = [WeightsVersion(WIDTH, "v2").keys(each) for each in CHAIN]
    daemon.store(keys, notes_on(CHAIN))
    assert daemon.known() == set()


def test_groups_that_need_no_whole_prefix_are_not_published(daemon: Daemon) -> None:
    daemon.store(CHAIN, notes_on(CHAIN, index=1, kind=GroupKind.SLIDING_WINDOW), index=1)
    assert daemon.known() == set()
    daemon.store(CHAIN, notes_on(CHAIN))
    assert daemon.known() == numbers(CHAIN)
    assert not daemon.follower.needs_snapshot


@pytest.mark.parametrize("notes", [b"", bytes(57 * len(CHAIN)), b"\xff" * 57 * len(CHAIN), b"what it is"])
def test_blocks_without_notes_or_with_somebody_elses_are_not_published(daemon: Daemon, notes: bytes) -> None:
    daemon.store(CHAIN, notes)
    assert daemon.known() == set()


def test_a_snapshot_is_needed_when_the_first_notes_come_late(daemon: Daemon) -> None:
    daemon.store(CHAIN)
    assert daemon.known() == set()
    assert not daemon.follower.needs_snapshot
    daemon.tell(Residency.NOTES, CHAIN, notes_on(CHAIN))
    daemon.settle()
    assert daemon.follower.needs_snapshot
    daemon.follower.watch_again(daemon)
    assert not daemon.follower.needs_snapshot
    daemon.tell(Residency.RESET)
    daemon.tell(Residency.NOTES, CHAIN, notes_on(CHAIN))
    daemon.tell(Residency.STORED, CHAIN)
    daemon.tell(Residency.COMPLETE)
    assert daemon.known() == numbers(CHAIN)


def test_the_order_of_a_snapshot_needs_no_other_one(daemon: Daemon) -> None:
    daemon.tell(Residency.RESET)
    daemon.store(CHAIN, notes_on(CHAIN))
    daemon.tell(Residency.COMPLETE)
    assert daemon.known() == numbers(CHAIN)
    assert not daemon.follower.needs_snapshot


def long_notes(first: int, count: int, tokens: int = 4085) -> tuple[list[bytes], bytes]:
    """Blocks without parents, with notes of 16 KiB."""
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(first, first + count)]
    form = NoteFormat(WIDTH, tokens, chained=True)
    return hashes, b"".join(form.pack(each, None, bytes(4 * tokens)) for each in hashes)


def test_long_notes_are_remembered_within_a_limit_of_bytes_and_what_is_forgotten_is_taken_back(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 50 * 16 * 1024
    monkeypatch.setattr(known_blocks, "MAX_KNOWN_BYTES", most)
    for first in range(0, 200, 4):
        daemon.store(*long_notes(first + 1, 4))
        daemon.settle()
        assert daemon.follower.known_bytes <= most
    last = numbers(long_notes(197, 4)[0])
    assert last < daemon.known()
    assert 40 <= len(daemon.known()) == len(daemon.topic) <= 50
    daemon.tell(Residency.LOST)
    assert daemon.known() == set()


def test_the_namespace_that_has_most_forgets_first(daemon: Daemon) -> None:
    honest, most = Daemon(), 60 * 16 * 1024
    honest.snapshot()
    honest.store(CHAIN, notes_on(CHAIN))
    honest.settle()
    for first in range(0, 200, 4):
        daemon.store(*long_notes(first + 1, 4))
        daemon.settle()
        keep_below([daemon.follower, honest.follower], most)
        assert daemon.follower.known_bytes + honest.follower.known_bytes <= most
    assert honest.known() == numbers(CHAIN)
    assert 40 <= len(daemon.known()) <= 60


def test_blocks_that_wait_for_parents_again_and_again_are_forgotten(daemon: Daemon) -> None:
    for _ in range(100):
        daemon.store(CHAIN[3:], notes_on(CHAIN[3:]))
        daemon.tell(Residency.REMOVED, CHAIN[3:])
        daemon.settle()
        (part,) = daemon.follower._parts.values()
        assert part._residents._orphans == {}


def test_no_step_is_as_long_as_clients_make_it(daemon: Daemon) -> None:
    """Many blocks have one parent, which comes last; more is told meanwhile."""
    children = [hashlib.sha256(str(i).encode()).digest() for i in range(20 * STEP_BLOCKS)]
    form = NoteFormat(WIDTH, 4, chained=True)
    notes = b"".join(form.pack(each, CHAIN[0], bytes(16)) for each in children)
    daemon.store(children, notes)
    daemon.settle()
    daemon.store(CHAIN[:1], notes_on(CHAIN[:1]))
    for number in range(1, 5):
        daemon.store(CHAIN[number : number + 1], notes_on(CHAIN[number : number + 1]))
    taken = []
    while daemon.follower.pending or daemon.topic.pending:
        daemon.follower.step()
        waiting = daemon.topic.backlog
        events = daemon.topic.take(STEP_BLOCKS)
        taken.append(waiting)
        for event in events:
            daemon.view.take(event)
        assert sum(len(each.get("block_hashes", ())) for each in events) <= STEP_BLOCKS
    assert max(taken) <= 2 * STEP_BLOCKS, "a step announces all of them"
    assert set(daemon.view.of("CPU")) == numbers([*children, *CHAIN])
    assert daemon.view.ignored == []


def test_blocks_that_wait_in_a_topic_are_said_some_at_a_time() -> None:
    topic = Topic("t")
    holder = topic.hold(VLLM, 0)
    topic.take()
    children = [hashlib.sha256(str(i).encode()).digest() for i in range(5000)]
    for each in children:
        topic.stored(holder, "CPU", each, BlockInfo(bytes(16), CHAIN[0]))
    while topic.pending:
        assert not topic.take(), "their parent is not said"
    topic.stored(holder, "CPU", CHAIN[0], BlockInfo(bytes(16), None))
    topic.take(1)
    assert topic.pending
    assert topic.backlog <= 1, "all that wait were taken in hand at once"
    said = 0
    while topic.pending:
        events = topic.take(100)
        said += (now := sum(len(each["block_hashes"]) for each in events))
        assert now <= 100
    assert said == len(children)

"""Notes for watchers to come: they go with their blocks, their memory a step at a time."""

from __future__ import annotations

import pytest

from kvsidecar.core import notes, residency
from kvsidecar.core.notes import LOOKS, STEP_NOTES
from tests.cache.support import key, keys, namespace, open_space, store
from tests.core.test_residency import Daemon, Reader


def looks(daemon: Daemon, rounds: float) -> None:
    for _ in range(int(rounds * LOOKS)):
        daemon.watches.look()


def test_notes_go_soon_after_their_blocks() -> None:
    daemon = Daemon()
    space, other = open_space(daemon.cache), open_space(daemon.cache, group=1)
    for name in "abc":
        daemon.watches.note(namespace(), 0, key(name), name.encode() * 10, user=0)
    daemon.watches.note(namespace(), 1, key("d"), b"d" * 10, user=0)
    daemon.watches.note(namespace(), 1, b"".join(keys("x", "y")), b"xxxyyy", user=0)
    store(daemon.cache, space, "a", "b")
    store(daemon.cache, other, "d", "y")
    looks(daemon, 1.2)
    daemon.watches.note(namespace(), 0, key("young"), b"its block is on its way", user=0)
    looks(daemon, 1)
    reader = Reader()
    daemon.watch(reader)
    daemon.settle()
    assert set(reader.notes) == set(keys("a", "b", "d", "x", "y", "young"))
    daemon.cache.clear_blocks(space, keys("a"))
    looks(daemon, 3)
    reader = Reader()
    daemon.watch(reader)
    daemon.settle()
    assert set(reader.notes) == set(keys("b", "d", "x", "y"))


def test_all_of_a_namespace_that_keeps_one_block_goes_but_its_own() -> None:
    daemon = Daemon()
    space = open_space(daemon.cache)
    for name in range(3 * STEP_NOTES):
        daemon.watches.note(namespace(), 0, key(name), b"note", user=0)
    store(daemon.cache, space, STEP_NOTES)
    before = daemon.watches.notes_bytes
    looks(daemon, 4)
    assert daemon.watches.notes_bytes == before // (3 * STEP_NOTES)


def test_the_memory_of_a_cleared_namespace_is_freed_in_steps() -> None:
    daemon = Daemon()
    open_space(daemon.cache)
    for name in range(5 * STEP_NOTES):
        daemon.watches.note(namespace(), 0, key(name), b"note", user=0)
    before = daemon.watches.held_bytes
    daemon.watches.forget(namespace())
    assert daemon.watches.notes_bytes == 0
    held = [before, daemon.watches.held_bytes]
    assert held[1] == before, "all is freed at once"
    while held[-1]:
        daemon.watches.look()
        held.append(daemon.watches.held_bytes)
        assert held[-2] - held[-1] <= STEP_NOTES * before / (5 * STEP_NOTES)
    assert len(held) > 5


def test_a_message_is_made_in_each_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much has changed, whoever asks in between waits for one of them."""
    monkeypatch.setattr(residency, "MAX_UPDATE_BYTES", 1000)
    monkeypatch.setattr(residency, "TAKEN_BYTES", 4000)
    daemon, readers = Daemon(), [Reader(), Reader()]
    for reader in readers:
        daemon.watch(reader)
    daemon.settle()
    for name in range(20):
        daemon.watches.note(namespace(), 0, key(name), b"n" * 500, user=0)
    (interval,) = daemon.due
    daemon.due.clear()
    sent = sum(len(reader.updates) for reader in readers)
    interval()
    for _ in range(200):
        now = sum(len(reader.updates) for reader in readers)
        assert now <= sent + 1, "several messages in one turn"
        sent = now
        if not daemon.soon:
            break
        daemon.soon.pop()()
    assert all(set(reader.notes) == set(keys(*range(20))) for reader in readers)
    assert not daemon.soon
    assert not daemon.due


def test_watchers_that_come_and_go_between_two_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "MAX_UPDATE_BYTES", 1000)
    daemon, stays, goes, comes = Daemon(64), Reader(), Reader(), Reader()
    space = open_space(daemon.cache)
    daemon.watch(stays)
    going = daemon.watch(goes)
    daemon.settle()
    store(daemon.cache, space, *range(10))
    for name in range(20):
        daemon.watches.note(namespace(), 0, key(name), b"n" * 500, user=0)
    (interval,) = daemon.due
    daemon.due.clear()
    interval()
    daemon.watches.end(going)
    before = len(goes.updates)
    daemon.watch(comes)
    store(daemon.cache, space, *range(10, 20))
    while daemon.soon:
        daemon.soon.pop()()
    daemon.settle()
    assert len(goes.updates) == before
    for reader in (stays, comes):
        assert reader.readable == {0: set(keys(*range(20)))}
        assert set(reader.notes) == set(keys(*range(20)))


def test_a_note_is_kept_while_the_tier_may_have_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "LOOKS", 1)
    daemon = Daemon()
    open_space(daemon.cache)
    daemon.watches._slower = Nothing()  # type: ignore[assignment]
    daemon.watches.note(namespace(), 0, key("a"), b"note", user=0)
    before = daemon.watches.notes_bytes
    looks(daemon, 3)
    assert daemon.watches.notes_bytes == before > 0


class Nothing:
    """A tier that has nothing."""

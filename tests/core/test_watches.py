"""What watchers are told, over any order of changes, and however slowly they read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvsidecar.cache import change_log
from kvsidecar.cache.space_blocks import Space
from kvsidecar.core import block_notes, watches
from kvsidecar.core.changes import Change
from kvsidecar.core.tier_fetches import shard_space
from kvsidecar.core.watches import Watch, joined, split
from kvsidecar.errors import InvalidRequest
from kvsidecar.tiers.backend import ShardSpace
from kvsidecar.types import LookupMode, Residency
from tests.cache.support import keys, namespace, open_space, store, table_of
from tests.core.watched import WIDTH, Daemon, Reader


def test_a_new_watcher_gets_what_there_is_and_then_what_changes_in_few_messages() -> None:
    daemon, reader = Daemon(), Reader()
    space = open_space(daemon.cache)
    store(daemon.cache, space, "a", "b")
    daemon.watch(reader)
    daemon.settle()
    assert reader.complete
    assert reader.readable == {0: set(keys("a", "b"))}
    before = len(reader.updates)
    for name in "cdef":
        store(daemon.cache, space, name)
    assert len(reader.updates) == before, "it is told at once"
    daemon.settle()
    assert len(reader.updates) == before + 1
    assert reader.updates[-1].changes == (Change(Residency.STORED, 0, b"".join(keys(*"cdef"))),)
    assert daemon.due == [], "a timer runs though nothing changes"


def test_nothing_is_told_before_all_that_is_there_can_be_looked_up() -> None:
    daemon, reader = Daemon(), Reader()
    daemon.ready = False
    space = open_space(daemon.cache)
    daemon.watch(reader)
    store(daemon.cache, space, "a")
    for _ in range(3):
        daemon.turn()
    assert reader.updates == []
    daemon.ready = True
    daemon.settle()
    assert reader.complete
    assert reader.readable == {0: set(keys("a"))}


def test_one_who_does_not_read_costs_nothing_and_gets_all_of_it_later() -> None:
    daemon, slow, other = Daemon(), Reader(), Reader()
    space = open_space(daemon.cache)
    daemon.watch(slow)
    daemon.watch(other)
    daemon.settle()
    slow.room = False
    for name in range(20):
        store(daemon.cache, space, name)
        daemon.turn()
    assert other.readable == {0: {each for each in keys(*range(20)) if found(daemon, space, each)}}
    assert daemon.resets("unread") == 0, "it was sent something"
    slow.room = True
    daemon.settle()
    assert slow.readable == other.readable
    assert (daemon.resets("new"), daemon.resets("unread")) == (2, 1)
    assert sum(update.reset for update in other.updates) == 1


def found(daemon: Daemon, space: Space, block_hash: bytes) -> bool:
    return daemon.cache.lookup(space, [block_hash], LookupMode.PREFIX) == [True]


def test_a_flood_is_given_up_and_becomes_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "MAX_LOG_BYTES", 1000)
    daemon, reader = Daemon(64), Reader()
    space = open_space(daemon.cache)
    daemon.watch(reader)
    daemon.settle()
    for name in range(40):
        store(daemon.cache, space, name)
    (feed,) = daemon.watches._feeds.values()
    assert feed.log.flooded
    assert not feed.log
    daemon.settle()
    assert reader.readable == {0: set(keys(*range(40)))}
    assert daemon.resets("flood") == 1
    store(daemon.cache, space, "after")
    daemon.settle()
    assert set(keys("after")) < reader.readable[0]
    assert daemon.resets("flood") == 1


def test_of_too_many_changes_in_all_namespaces_the_one_with_the_most_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user may watch 256 namespaces, of 4 MiB each."""
    monkeypatch.setattr(watches, "MAX_LOGS_BYTES", 7000)
    daemon, readers = Daemon(64), [Reader(), Reader(), Reader()]
    spaces = [open_space(daemon.cache, f"{number}") for number in range(3)]
    begun = [daemon.watches.begin(space.namespace, reader) for space, reader in zip(spaces, readers, strict=True)]
    daemon.settle()
    for number, count in enumerate((2, 8, 12)):
        for name in range(count):
            store(daemon.cache, spaces[number], name)
    for name in range(8, 12):
        store(daemon.cache, spaces[1], name)
    feeds = list(daemon.watches._feeds.values())
    assert [feed.log.flooded for feed in feeds] == [False, False, True]
    assert daemon.watches._log_bytes == sum(feed.log.nbytes for feed in feeds) <= 7000
    daemon.settle()
    assert [len(reader.readable[0]) for reader in readers] == [2, 12, 12]
    assert (daemon.resets("flood"), daemon.watches._log_bytes) == (1, 0)
    store(daemon.cache, spaces[0], "more")
    for watch in begun:
        daemon.watches.end(watch)
    daemon.settle()
    assert daemon.watches._log_bytes == 0


def test_a_snapshot_is_sent_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "SNAPSHOT_ROWS", 2)
    monkeypatch.setattr(watches, "MAX_UPDATE_BYTES", 2 * WIDTH)
    monkeypatch.setattr(watches, "PIECES", 3)
    daemon, reader = Daemon(64), Reader()
    space = open_space(daemon.cache)
    store(daemon.cache, space, *range(40))
    daemon.watch(reader)
    daemon.turn()
    assert len(reader.readable[0]) == 6
    daemon.settle()
    assert reader.readable == {0: set(keys(*range(40)))}


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_last_word_on_each_block_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "SNAPSHOT_ROWS", 2)
    monkeypatch.setattr(watches, "MAX_UPDATE_BYTES", 2 * WIDTH)
    monkeypatch.setattr(watches, "PIECES", 1)
    monkeypatch.setattr(change_log, "MAX_LOG_BYTES", 600)
    choose = random.Random(seed)
    daemon = Daemon(6)
    spaces = [open_space(daemon.cache, group=group) for group in range(2)]
    readers: list[tuple[Reader, Watch]] = []
    for _ in range(300):
        match choose.randrange(8):
            case 0 if len(readers) < 3:
                reader = Reader()
                readers.append((reader, daemon.watch(reader)))
            case 1 if readers:
                daemon.watches.end(readers.pop(choose.randrange(len(readers)))[1])
            case 2 if readers:
                reader = choose.choice(readers)[0]
                reader.room = not reader.room
            case 3:
                daemon.cache.clear(namespace() if choose.random() < 0.5 else None)
            case 4:
                daemon.cache.sweep()
            case 5 | 6:
                store(daemon.cache, choose.choice(spaces), *choose.sample(range(9), choose.randint(1, 3)))
            case _:
                daemon.turn()
    for reader, _ in readers:
        reader.room = True
    daemon.settle()
    for reader, _ in readers:
        assert reader.complete
        for space in spaces:
            there = {each for each in keys(*range(9)) if found(daemon, space, each)}
            assert reader.readable.get(space.group, set()) == there
    for _, watch in readers:
        daemon.watches.end(watch)
    assert not table_of(daemon.cache).outlets, "somebody is told though nobody listens"


def test_a_snapshot_survives_that_the_table_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are renumbered: what was at the end may come before the place that the snapshot has reached."""
    monkeypatch.setattr(watches, "SNAPSHOT_ROWS", 64)
    monkeypatch.setattr(watches, "MAX_UPDATE_BYTES", 64 * WIDTH)
    monkeypatch.setattr(watches, "PIECES", 1)
    daemon, reader = Daemon(512), Reader()
    space, other = open_space(daemon.cache), open_space(daemon.cache, "other")
    store(daemon.cache, space, *range(500))
    store(daemon.cache, space, "last")
    daemon.watch(reader)
    for _ in range(3):
        daemon.turn()
    store(daemon.cache, other, *[f"other {name}" for name in range(505)])
    assert found(daemon, space, *keys("last"))
    before = space.blocks.index
    assert table_of(daemon.cache).rebuild_sparse()
    assert space.blocks.index is not before
    daemon.settle()
    assert reader.readable[0] == {each for each in keys("last", *range(500)) if found(daemon, space, each)}
    assert set(keys("last")) <= reader.readable[0]


def test_notes_come_before_the_blocks_also_for_those_who_come_later() -> None:
    daemon, first, later = Daemon(), Reader(), Reader()
    space = open_space(daemon.cache)
    daemon.watch(first)
    daemon.settle()
    daemon.watches.note(namespace(), 0, b"".join(keys("a", "b")), b"AAABBB", user=0)
    store(daemon.cache, space, "a", "b")
    daemon.settle()
    kinds = [change.kind for update in first.updates for change in update.changes]
    assert kinds == [Residency.NOTES, Residency.STORED]
    daemon.watch(later)
    daemon.settle()
    assert later.notes == first.notes == dict(zip(keys("a", "b"), [b"AAA", b"BBB"], strict=True))
    assert later.readable == first.readable
    daemon.watches.notes.forget(namespace())
    assert daemon.watches.notes.total_bytes == 0


def test_many_small_notes_fill_few_messages() -> None:
    """Else a snapshot of the notes on many small stores would take minutes."""
    daemon, reader = Daemon(), Reader()
    for name in range(4000):
        daemon.watches.note(namespace(), 0, keys(name)[0], b"n" * 100, user=0)
    daemon.watch(reader)
    daemon.settle()
    assert len(reader.notes) == 4000
    assert len(reader.updates) < 2 + 2 * 4000 * 132 / watches.MAX_UPDATE_BYTES


def test_what_many_jobs_changed_is_three_changes() -> None:
    names = [random.Random(i).randbytes(WIDTH) for i in range(40)]
    log = []
    for i in range(0, 40, 4):
        stored, removed = b"".join(names[i : i + 2]), b"".join(names[i + 2 : i + 4])
        log += [
            Change(Residency.NOTES, 0, stored, f"note {i:03} note {i:03} ".encode()),
            Change(Residency.REMOVED, 0, removed),
            Change(Residency.STORED, 0, stored),
        ]
    notes, removed_all, stored_all = joined(log, WIDTH)
    assert [each.kind for each in (notes, removed_all, stored_all)] == [
        Residency.NOTES,
        Residency.REMOVED,
        Residency.STORED,
    ]
    assert stored_all.hashes == notes.hashes == b"".join(each.hashes for each in log if each.kind is Residency.STORED)
    assert notes.notes == b"".join(each.notes for each in log)


def test_what_the_disk_has_written_and_what_is_cleared_twice_is_one_change_each() -> None:
    names = keys("a", "b", "c")
    log = [Change(Residency.TIER_STORED, 0, each) for each in names]
    log += [Change(Residency.CLEARED, 0), Change(Residency.CLEARED, 0), Change(Residency.TIER_REMOVED, 0, names[1])]
    assert joined(log, WIDTH) == [
        Change(Residency.TIER_STORED, 0, b"".join(names)),
        Change(Residency.CLEARED, 0),
        Change(Residency.TIER_REMOVED, 0, names[1]),
    ]


def test_notes_of_another_length_and_other_groups_are_changes_of_their_own() -> None:
    first, second, third = keys("a", "b", "c")
    log = [
        Change(Residency.NOTES, 0, first, b"12"),
        Change(Residency.STORED, 0, first),
        Change(Residency.NOTES, 1, second, b"34"),
        Change(Residency.STORED, 1, second),
        Change(Residency.NOTES, 0, third, b"567"),
        Change(Residency.STORED, 0, third),
    ]
    assert joined(log, WIDTH) == [
        Change(Residency.NOTES, 0, first, b"12"),
        Change(Residency.NOTES, 0, third, b"567"),
        Change(Residency.NOTES, 1, second, b"34"),
        Change(Residency.STORED, 0, first + third),
        Change(Residency.STORED, 1, second),
    ]


@pytest.mark.parametrize("width", [4, 16, 32])
@pytest.mark.parametrize("seed", range(20))
def test_joined_changes_leave_the_same_behind(seed: int, width: int) -> None:
    """Blocks come, go and come back in one interval, more or less of them, with whole groups cleared in between."""
    draw = random.Random(seed)
    names = [draw.randbytes(width) for _ in range(draw.choice([4, 40, 400]))]
    kinds = [Residency.STORED, Residency.REMOVED, Residency.NOTES]
    kinds += [Residency.CLEARED, Residency.TIER_STORED, Residency.TIER_REMOVED] if seed % 2 else []
    log = []
    for _ in range(draw.randrange(30)):
        kind, some = draw.choice(kinds), draw.sample(names, 3)
        hashes = b"" if kind is Residency.CLEARED else b"".join(some)
        log.append(Change(kind, draw.randrange(2), hashes, b"note" * 3 if kind is Residency.NOTES else b""))

    def state(changes: list[Change]) -> tuple[dict[tuple[int, bytes], bool], dict[tuple[int, bytes], bool]]:
        pool: dict[tuple[int, bytes], bool] = {}
        disk: dict[tuple[int, bytes], bool] = {}
        for change in changes:
            if change.kind is Residency.CLEARED:
                pool = {key: False for key in pool if key[0] == change.group} | {
                    key: there for key, there in pool.items() if key[0] != change.group
                }
            for i in range(0, len(change.hashes), width):
                key = change.group, change.hashes[i : i + width]
                match change.kind:
                    case Residency.STORED | Residency.REMOVED:
                        pool[key] = change.kind is Residency.STORED
                    case Residency.TIER_STORED | Residency.TIER_REMOVED:
                        disk[key] = change.kind is Residency.TIER_STORED
        return {key: there for key, there in pool.items() if there}, {
            key: there for key, there in disk.items() if there
        }

    assert state(joined(log, width)) == state(log)


def test_notes_have_a_limit_and_the_one_with_most_gives_up_its_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_notes, "MAX_NOTES_BYTES", 4000)
    daemon, reader = Daemon(), Reader()
    daemon.watches.note(namespace("small"), 0, keys("s")[0], b"small", user=0)
    for name in range(100):
        daemon.watches.note(namespace(), 0, keys(name)[0], b"n", user=0)
        assert daemon.watches.notes.total_bytes <= 4000
    daemon.watch(reader)
    daemon.settle()
    assert 10 < len(reader.notes) < 20
    assert set(keys(99)) <= set(reader.notes)
    other = Reader()
    daemon.watches.begin(namespace("small"), other)
    daemon.settle()
    assert set(other.notes) == set(keys("s"))


def test_no_user_takes_the_notes_of_another_in_any_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_notes, "MAX_NOTES_BYTES", 4000)
    daemon, reader = Daemon(), Reader()
    for name in ("a", "b", "c"):
        daemon.watches.note(namespace(), 0, keys(name)[0], b"honest", user=1)
    for number in range(100):  # in the same namespace, and in many small ones
        daemon.watches.note(namespace(), 0, keys(number)[0], b"n" * 10, user=2)
        daemon.watches.note(namespace(f"m{number}"), 0, keys(number)[0], b"n" * 10, user=2)
        assert daemon.watches.notes.total_bytes <= 4000
    daemon.watch(reader)
    daemon.settle()
    assert set(keys("a", "b", "c")) <= set(reader.notes)
    dropped = daemon.metrics.value("kvsidecar_residency_dropped_notes_total")
    assert dropped > 180, "what is given up is not counted"
    daemon.watches.note(namespace(), 0, keys("d")[0], b"h" * 3000, user=1)
    assert daemon.watches.notes.total_bytes <= 4000, "who has most gives up"
    for each in daemon.watches.notes.namespaces:
        daemon.watches.notes.forget(each)
    assert daemon.watches.notes.total_bytes == 0


def test_notes_go_with_their_namespace() -> None:
    daemon = Daemon()
    spaces = [open_space(daemon.cache, name) for name in ("stays", "goes")]
    for name, _ in zip(("stays", "goes"), spaces, strict=True):
        daemon.watches.note(namespace(name), 0, keys("a")[0], b"n" * 1000, user=0)
    daemon.watches.look()
    both = daemon.watches.notes.total_bytes
    daemon.cache.close_space(spaces[1])
    daemon.watches.look()
    assert daemon.watches.notes.total_bytes == both // 2


@pytest.mark.parametrize("notes", [b"x", b"x" * (2 * watches.MAX_NOTE_BYTES + 2)])
def test_notes_that_fit_no_block_are_refused(notes: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Daemon().watches.note(namespace(), 0, b"".join(keys("a", "b")), notes, user=0)


def test_no_update_is_longer_than_one_may_be() -> None:
    hashes = b"".join(keys(*range(5000)))
    pieces = split(Change(Residency.NOTES, 1, hashes, bytes(5000 * 100)), WIDTH)
    assert b"".join(each.hashes for each in pieces) == hashes
    assert all(len(each.hashes) + len(each.notes) <= watches.MAX_UPDATE_BYTES for each in pieces)
    assert all(len(each.notes) * WIDTH == len(each.hashes) * 100 for each in pieces)


class Disk:
    """The node's own tier, which tells when the test says so."""

    def __init__(self) -> None:
        self.tells: dict[ShardSpace, Callable[[Residency, bytes], object]] = {}
        self.begun = 0

    def watch(self, space: Space, tell: Callable[[Residency, bytes], object]) -> ShardSpace | None:
        if space.shard_bytes[0] is None:
            return None
        self.begun += 1
        self.tells[shard_space(space, 0)] = tell
        return shard_space(space, 0)

    def unwatch(self, watched: ShardSpace) -> None:
        del self.tells[watched]

    def tell(self, what: Residency, *names: int) -> None:
        (tell,) = self.tells.values()
        tell(what, b"".join(keys(*names)))


def with_disk() -> tuple[Daemon, Disk]:
    daemon, disk = Daemon(), Disk()
    daemon.watches._slower = disk
    return daemon, disk


def test_a_snapshot_waits_for_the_disk_to_be_told() -> None:
    daemon, disk = with_disk()
    store(daemon.cache, open_space(daemon.cache), 1)
    reader = Reader()
    watch = daemon.watch(reader)
    for _ in range(5):
        daemon.turn()
    assert reader.readable == {0: set(keys(1))}
    assert not reader.complete
    disk.tell(Residency.STORED, 2, 3)
    daemon.turn()
    assert (reader.on_disk, reader.complete) == (set(keys(2, 3)), False)
    disk.tell(Residency.COMPLETE)
    daemon.turn()
    assert reader.complete
    daemon.watches.end(watch)
    assert not disk.tells


def test_what_the_disk_tells_between_two_messages_comes_before_the_end_of_a_snapshot() -> None:
    daemon, disk = with_disk()
    store(daemon.cache, open_space(daemon.cache), 1)
    reader = Reader()
    daemon.watch(reader)
    daemon.due.pop()()
    daemon.soon.pop()()
    assert daemon.soon, "the snapshot goes on in the next iteration of the loop"
    disk.tell(Residency.STORED, 2, 3)
    disk.tell(Residency.COMPLETE)
    while not reader.complete:
        daemon.turn()
    told = [{change.kind for change in update.changes} for update in reader.updates]
    assert Residency.TIER_STORED in set().union(*told), "the snapshot ended without what the disk has"
    assert reader.on_disk == set(keys(2, 3))
    daemon.settle()
    assert sum(update.complete for update in reader.updates) == 1


def test_a_disk_that_is_not_used_delays_no_snapshot() -> None:
    daemon, disk = with_disk()
    store(daemon.cache, open_space(daemon.cache), 1)
    reader = Reader()
    daemon.watch(reader)
    daemon.turn()
    disk.tell(Residency.CLEARED)
    daemon.turn()
    assert reader.complete


def test_a_disk_that_never_answers_ends_no_snapshot_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "LISTING_TURNS", 600)
    daemon, _ = with_disk()
    store(daemon.cache, open_space(daemon.cache), 1)
    reader = Reader()
    daemon.watch(reader)
    turns = 0
    while not reader.complete:
        daemon.turn()
        turns += 1
        assert turns < 20


def test_every_watcher_is_told_all_of_the_disk_and_groups_that_come_later() -> None:
    daemon, disk = with_disk()
    first, second = Reader(), Reader()
    daemon.watch(first)
    daemon.turn()
    assert first.complete, "there is no group yet"
    store(daemon.cache, open_space(daemon.cache), 1)
    daemon.watches.look()
    daemon.watches.look()
    assert disk.begun == 1, "it is watched once"
    disk.tell(Residency.STORED, 2)
    disk.tell(Residency.COMPLETE)
    daemon.turn()
    assert first.on_disk == set(keys(2))
    daemon.watch(second)
    daemon.turn()
    assert disk.begun == 2, "from the beginning"
    disk.tell(Residency.STORED, 2)
    disk.tell(Residency.COMPLETE)
    daemon.turn()
    assert first.on_disk == second.on_disk == set(keys(2))
    assert second.complete
    disk.tell(Residency.CLEARED)
    daemon.turn()
    assert first.on_disk == second.on_disk == set()


def test_nobody_watches_the_disk_while_nobody_watches() -> None:
    daemon, disk = with_disk()
    store(daemon.cache, open_space(daemon.cache), 1)
    daemon.watches.look()
    assert not disk.begun


@pytest.mark.parametrize("when", ["changes are joined", "a snapshot is read"])
async def test_watchers_that_could_not_be_told_begin_anew_and_all_others_are_told(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["message"]))
    daemon, reader, beside, other = Daemon(), Reader(), Reader(), Reader()
    space, apart = open_space(daemon.cache), open_space(daemon.cache, "another model")
    store(daemon.cache, space, "a")
    for each in reader, beside:
        daemon.watch(each)
    daemon.watches.begin(apart.namespace, other)
    if when == "changes are joined":
        daemon.settle()
    owner, name = (watches, "joined") if when == "changes are joined" else (daemon.cache, "readable_hashes")
    works, failures = getattr(owner, name), 2

    def failing(*given: Any) -> Any:
        nonlocal failures
        if failures and (name == "joined" or given[0] == space.namespace):
            failures -= 1
            raise ZeroDivisionError
        return works(*given)

    monkeypatch.setattr(owner, name, failing)
    if name == "joined":
        store(daemon.cache, space, "b")  # else there is nothing to join
    daemon.settle()
    assert len(errors) == 2
    assert all("were not told what has changed" in error for error in errors)
    for changed in space, apart:
        store(daemon.cache, changed, "c")
    daemon.settle()
    assert other.readable == {0: set(keys("c"))}
    assert reader.readable == beside.readable == {0: set(keys("a", "c") if name != "joined" else keys("a", "b", "c"))}
    assert daemon.resets("failed") > 0

"""What the backend of the shared tier does when nodes meet, files go wrong, and there is too much."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsidecar.errors import TierFailed
from kvsidecar.support.file_lock import try_lock
from kvsidecar.tiers.backend import ReadEnd, WriteEnd
from kvsidecar.tiers.shard_bytes import TRAILER_BYTES
from kvsidecar.tiers.shared_directory import backend as module
from kvsidecar.tiers.shared_directory import sweep as sweeping
from kvsidecar.tiers.shared_directory.backend import ROOT, SharedBackend
from kvsidecar.tiers.shared_directory.sweep import EMPTY_SECONDS, LOCK, UNFINISHED_SECONDS, sweep
from tests.harness import eventually
from tests.tiers.support import PAGE, content, key, memory, read, space, there, write

FILE = PAGE + TRAILER_BYTES
CAPACITY = 100 * FILE
DAY = 86400.0


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[SharedBackend]]:
    opened: list[SharedBackend] = []
    for _ in range(2):
        opened.append(SharedBackend(tmp_path / "tier", CAPACITY))
        # Its thread sweeps at once, and nobody's turn comes again meanwhile, also if much is written.
        eventually(lambda node=opened[-1]: node._swept_at, "the first sweep")  # type: ignore[misc]
    yield opened
    for each in opened:
        each.close()


@pytest.fixture
def node(nodes: list[SharedBackend]) -> SharedBackend:
    return nodes[0]


def files(directory: Path) -> list[Path]:
    """Those of shards, whole or not."""
    return sorted(each for each in directory.rglob("*") if each.is_file() and each.name != LOCK)


def file_of(directory: Path, number: int) -> Path:
    (found,) = [each for each in files(directory) if each.name == key(number).hex()]
    return found


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_what_one_node_writes_the_other_reads_and_does_not_write_again(nodes: list[SharedBackend]) -> None:
    one, two = nodes
    of = space()
    assert write(one, of, range(40)) == [WriteEnd.DONE] * 40
    assert there(two, of, range(50)) == list(range(40))
    assert set(read(two, of, range(40)).values()) == {ReadEnd.DONE}
    assert write(two, of, range(40), version=1) == [WriteEnd.PRESENT] * 40


def test_a_namespace_that_one_node_forgets_is_gone_for_all_and_can_be_written_again(nodes: list[SharedBackend]) -> None:
    one, two = nodes
    write(one, space(), range(5))
    assert two.forget(space().namespace) == 5
    assert there(one, space(), range(5)) == []
    assert write(one, space(), range(5)) == [WriteEnd.DONE] * 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:10] + bytes([raw[10] ^ 1]) + raw[11:],
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: raw[:-1],
        lambda raw: raw + b"x",
        lambda _: b"",
        lambda raw: bytes(len(raw)),
    ],
    ids=["a bit", "the checksum", "cut short", "too long", "empty", "zeros"],
)
def test_a_file_that_is_not_what_was_written_is_corrupt_and_removed(
    node: SharedBackend, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    write(node, space(), [1, 2])
    path = file_of(tmp_path, 1)
    path.write_bytes(damage(path.read_bytes()))
    assert read(node, space(), [1, 2]) == {1: ReadEnd.CORRUPT, 2: ReadEnd.DONE}
    assert read(node, space(), [1]) == {1: ReadEnd.MISS}
    assert not path.exists()
    assert write(node, space(), [1]) == [WriteEnd.DONE]


def test_a_file_under_the_name_of_another_shard_is_corrupt(node: SharedBackend, tmp_path: Path) -> None:
    write(node, space(), [1, 2])
    file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 2).read_bytes())
    assert read(node, space(), [1]) == {1: ReadEnd.CORRUPT}


def test_nobody_sees_a_file_that_is_being_written(node: SharedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    of = space()
    rename, seen = os.rename, []

    def renamed(*paths: Any) -> None:
        seen.append(there(node, of, [1]))
        rename(*paths)

    monkeypatch.setattr(os, "rename", renamed)
    write(node, of, [1])
    assert seen == [[]]
    assert there(node, of, [1]) == [1]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "rename"])
def test_a_file_system_without_room_refuses_writes_and_serves_reads(
    node: SharedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    write(node, space(), [1])

    def no_room(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, no_room)
        assert write(node, space(), [1, 2]) == [WriteEnd.PRESENT, WriteEnd.FULL]
        assert read(node, space(), [1]) == {1: ReadEnd.DONE}
    assert len(files(tmp_path)) == 1, "nothing unfinished is left"
    assert write(node, space(), [2]) == [WriteEnd.DONE]


def test_a_file_system_that_fails_fails_the_call_with_the_file_and_the_reason(
    node: SharedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(node, space(), [1])

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    for call, act in (
        ("preadv", lambda: read(node, space(), [1])),
        ("pwritev", lambda: write(node, space(), [2])),
        ("stat", lambda: node.find(space(), [key(1)])),
        ("pwritev", node.probe),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, broken)
            with pytest.raises(TierFailed, match="Input/output error"):
                act()
    assert read(node, space(), [1]) == {1: ReadEnd.DONE}


def test_writes_go_on_piece_by_piece(node: SharedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:1000]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [memoryview(parts[0])[:900]], at))
    assert write(node, space(), [1]) == [WriteEnd.DONE]
    assert read(node, space(), [1]) == {1: ReadEnd.DONE}


def test_a_file_whose_directory_is_forgotten_while_it_is_written_is_written_again(
    nodes: list[SharedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = nodes
    rename, cleared = os.rename, []

    def renamed(source: Any, target: Any) -> None:
        if not cleared:
            cleared.append(1)
            two.forget(space().namespace)
        rename(source, target)

    monkeypatch.setattr(os, "rename", renamed)
    assert write(one, space(), [1]) == [WriteEnd.DONE]
    assert read(two, space(), [1]) == {1: ReadEnd.DONE}


# -- sweeps ----------------------------------------------------------------------------------------------------------


def test_the_files_that_were_not_used_for_longest_go_when_there_is_too_much(
    node: SharedBackend, tmp_path: Path
) -> None:
    of = space()
    write(node, of, range(50))
    for number in range(50):
        age(file_of(tmp_path, number), (1 + number) * DAY)
    read(node, of, [49])
    usage = sweep(tmp_path / "tier" / ROOT, 20 * FILE, 0.0)
    assert there(node, of, range(50)) == [*range(17), 49], "nine tenths of twenty; a read makes a file new"
    assert (usage.nbytes, usage.files, usage.removed) == (18 * FILE, 18, 32)


def test_of_files_of_one_age_no_more_go_than_are_too_much(node: SharedBackend, tmp_path: Path) -> None:
    write(node, space(), range(50))
    assert sweep(tmp_path / "tier" / ROOT, 40 * FILE, 0.0).files == 36
    assert len(there(node, space(), range(50))) == 36


def test_a_node_whose_turn_it_is_not_leaves_the_lock_to_one_whose_it_is(
    node: SharedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(sweeping, "try_lock", taken.append)
    sweep(tmp_path / "tier" / ROOT, CAPACITY, DAY)
    assert taken == []
    sweep(tmp_path / "tier" / ROOT, CAPACITY, 0.0)
    assert len(taken) == 1


def test_what_was_never_finished_is_removed_after_a_while(node: SharedBackend, tmp_path: Path) -> None:
    write(node, space(), [1])
    old, young = (file_of(tmp_path, 1).parent / f".{name}" for name in ("old", "young"))
    for each in (old, young):
        each.write_text("")
    age(old, UNFINISHED_SECONDS + 60)
    sweep(tmp_path / "tier" / ROOT, CAPACITY, 0.0)
    assert (old.exists(), young.exists()) == (False, True)
    assert there(node, space(), [1]) == [1]


def directories(root: Path) -> list[Path]:
    return sorted(each for each in root.rglob("*") if each.is_dir())


def age_directories(root: Path) -> None:
    for each in directories(root):
        age(each, EMPTY_SECONDS + 1)


def test_directories_that_are_empty_for_a_while_go_from_the_last_to_the_first(
    node: SharedBackend, tmp_path: Path
) -> None:
    root, of, other = tmp_path / "tier" / ROOT, space(), space(shard=1)
    write(node, of, range(40))
    write(node, other, [1])
    for each in files(root):
        if other.digest.hex() not in each.parts:
            each.unlink()
    before = len(directories(root))
    sweep(root, CAPACITY, 0.0)
    assert len(directories(root)) == before, "somebody may be about to write there"
    for _ in range(3):
        age_directories(root)
        sweep(root, CAPACITY, 0.0)
    assert {each.relative_to(root).as_posix() for each in directories(root)} == {
        each.as_posix() for each in file_of(root, 1).relative_to(root).parents if each.parts
    }
    assert write(node, of, range(40)) == [WriteEnd.DONE] * 40
    assert there(node, of, range(40)) == list(range(40))


def test_a_directory_in_which_a_file_appears_while_it_is_removed_stays(
    nodes: list[SharedBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rmdir = tmp_path / "tier" / ROOT, os.rmdir
    write(nodes[0], space(), [1])
    file_of(root, 1).unlink()
    age_directories(root)

    def just_before(directory: str) -> None:
        assert write(nodes[1], space(), [1]) == [WriteEnd.DONE]
        rmdir(directory)

    monkeypatch.setattr(os, "rmdir", just_before)
    sweep(root, CAPACITY, 0.0)
    assert there(nodes[0], space(), [1]) == [1]


def test_directories_that_go_while_a_file_is_written_are_made_again(
    nodes: list[SharedBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node sweeps between any two steps of a write, each time as if a minute had passed for what is empty."""
    root, steps = tmp_path / "tier" / ROOT, {name: getattr(os, name) for name in ("open", "mkdir", "rename")}
    sweeps: list[str] = []

    def sweeps_first(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if str(arguments[0]).startswith(f"{root}/") and len(sweeps) < 4 and not sweeps.count(name):
                sweeps.append(name)
                sweep(root, CAPACITY, 0.0)
            return steps[name](*arguments, **options)

        return call

    for number in range(5):
        write(nodes[0], space(), [number])
        file_of(root, number).unlink()
        for _ in range(number):
            age_directories(root)
            sweep(root, CAPACITY, 0.0)
        age_directories(root)
        sweeps.clear()
        with monkeypatch.context() as patch:
            for name in steps:
                patch.setattr(os, name, sweeps_first(name))
            assert write(nodes[0], space(), [number]) == [WriteEnd.DONE]
        assert sweeps
        assert read(nodes[1], space(), [number]) == {number: ReadEnd.DONE}


def test_a_read_renews_a_file_that_lies_in_the_future(node: SharedBackend, tmp_path: Path) -> None:
    write(node, space(), [1])
    age(file_of(tmp_path, 1), -7200.0)  # written before the clock was set back
    read(node, space(), [1])
    assert file_of(tmp_path, 1).stat().st_mtime < time.time() + 60


def test_nodes_take_turns_and_learn_from_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, done = tmp_path, []  # of no backend, whose own thread would take its turn
    monkeypatch.setattr(sweeping, "_sweep", lambda *_: done.append(1) or sweeping.Usage(7, 3, 5.0))
    assert sweep(root, CAPACITY, 0.0).files == 3
    assert sweep(root, CAPACITY, 60.0) == sweeping.Usage(7, 3, 5.0), "another one has just swept"
    assert len(done) == 1
    with open(root / LOCK, "rb+") as other:
        assert try_lock(other.fileno())
        assert sweep(root, CAPACITY, 0.0).files == 3, "another one is at it"
        assert len(done) == 1
    age(root / LOCK, 120)
    sweep(root, CAPACITY, 60.0)
    assert len(done) == 2


def test_a_full_directory_refuses_writes_until_its_own_thread_has_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "EARLY_SECONDS", 0.0)
    node = SharedBackend(tmp_path / "tier", 10 * FILE)
    numbers, ends = iter(range(1 << 20)), set()

    def is_full_and_swept() -> bool:
        ends.update(write(node, space(), [next(numbers)]))
        assert len(files(tmp_path)) <= 10
        return WriteEnd.FULL in ends and node.stats().evicted_blocks > 0

    eventually(is_full_and_swept)
    eventually(lambda: write(node, space(), [next(numbers)]) == [WriteEnd.DONE])
    node.close()


def test_what_is_written_while_a_sweep_looks_is_counted(node: SharedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweeps(*args: Any) -> Any:
        seen = sweep(*args)
        write(node, space(), [7])
        return seen

    write(node, space(), range(2))
    monkeypatch.setattr(module, "sweep", sweeps)
    node._sweep(0.0)
    assert node.stats().used_bytes == 3 * FILE


def test_what_this_node_has_written_counts_though_the_last_sweep_did_not_see_it(tmp_path: Path) -> None:
    node = SharedBackend(tmp_path / "tier", 10 * FILE)
    lock = tmp_path / "tier" / ROOT / LOCK
    eventually(lambda: lock.exists() and lock.stat().st_size)
    ends = write(node, space(), range(20))
    assert ends.count(WriteEnd.DONE) == 10
    node._sweep(60.0)
    assert write(node, space(), [30]) == [WriteEnd.FULL], "what it was told is of before"
    node.close()


def test_a_sweep_that_fails_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, swept = threading.Event(), threading.Event()

    def sweeps(*args: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        swept.set()
        return sweep(*args)

    monkeypatch.setattr(module, "sweep", sweeps)
    node = SharedBackend(tmp_path / "tier", CAPACITY, sweep_seconds=0.01)
    assert swept.wait(60)
    node.close()


def test_what_a_call_that_forgets_has_no_time_to_remove_is_gone_and_removed_by_a_sweep(
    node: SharedBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FORGET_SECONDS", 0.0)
    write(node, space(), range(5))
    assert node.forget(None) == 0
    assert there(node, space(), range(5)) == []
    root = tmp_path / "tier" / ROOT
    assert sweep(root, CAPACITY, 0.0).files == 0
    assert len(files(tmp_path)) == 5, "whoever has forgotten them may still be removing them"
    monkeypatch.setattr(sweeping, "TRASH_SECONDS", -60.0)
    sweep(root, CAPACITY, 0.0)
    assert files(tmp_path) == []


# -- the directory ---------------------------------------------------------------------------------------------------


def test_a_directory_that_others_could_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    with pytest.raises(TierFailed, match="has mode 0770: others could write to it"):
        SharedBackend(tmp_path / "open", CAPACITY)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(TierFailed, match=r"cannot be opened: (Not a directory|Too many levels)"):
        SharedBackend(tmp_path / "link", CAPACITY)
    with pytest.raises(TierFailed, match="No such file or directory"):
        SharedBackend(tmp_path / "no" / "where", CAPACITY)


def test_files_and_directories_are_for_their_owner_only(node: SharedBackend, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(node, space(), [1])
    finally:
        os.umask(before)
    for each in (tmp_path / "tier").rglob("*"):
        assert each.stat().st_mode & 0o077 == 0, each


def test_shards_of_one_call_may_be_of_any_size(node: SharedBackend) -> None:
    of = space(nbytes=3 * PAGE + 7)
    slots = memory(of, 1)
    slots[0][:] = content(of, 1)
    assert node.write(of, [key(1)], slots, [None]) == [WriteEnd.DONE]
    assert read(node, of, [1]) == {1: ReadEnd.DONE}

"""What goes wrong with a disk: never wrong bytes, one sentence that says what and where, and a tier that goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from kvsidecar.cache.expiry import SWEEP
from kvsidecar.cache.records import CHECKED, RECORD_WORDS
from kvsidecar.errors import TierFailed
from kvsidecar.tiers.backend import ReadEnd, WriteEnd
from kvsidecar.tiers.disk import backend, directory
from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.disk.directory import EXTENTS, INDEX, MAX_STARTS
from kvsidecar.tiers.disk.extents import Unreadable
from kvsidecar.tiers.disk.names import NAMES
from tests.failpoints import active
from tests.marks import processes
from tests.tiers.support import PAGE, key, memory, read, space, there, write

CAPACITY, SLAB = 64 * PAGE, 16 * PAGE


def open_tier(path: Path, capacity: int = CAPACITY) -> DiskBackend:
    return DiskBackend(path / "tier", capacity, slab_bytes=SLAB, lock_seconds=0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskBackend]:
    opened = open_tier(tmp_path)
    yield opened
    opened.close()


def patch(path: Path, name: str, at: int, nbytes: bytes) -> None:
    with (path / "tier" / name).open("r+b") as file:
        file.seek(at)
        file.write(nbytes)


def flip(path: Path, name: str, at: int) -> None:
    with (path / "tier" / name).open("r+b") as file:
        file.seek(at)
        (was,) = file.read(1)
        file.seek(at)
        file.write(bytes([was ^ 1]))


# -- reads and writes -----------------------------------------------------------------------------------------------


def test_a_failed_write_raises_and_leaves_room_and_nothing_to_read(tier: DiskBackend, tmp_path: Path) -> None:
    of = space()
    with active("tier.write=raise(Input/output error)"), pytest.raises(TierFailed) as raised:
        write(tier, of, range(3))
    assert str(raised.value) == (f"cannot write 12 KiB at byte 0 of {tmp_path}/tier/{EXTENTS}: Input/output error")
    assert (tier.stats().blocks, tier.stats().used_bytes) == (0, 0)
    assert set(read(tier, of, range(3)).values()) == {ReadEnd.MISS}
    assert write(tier, of, range(3)) == [WriteEnd.DONE] * 3


def test_a_failed_read_raises_and_what_could_not_be_read_is_a_miss(tier: DiskBackend, tmp_path: Path) -> None:
    of = space()
    write(tier, of, range(6))
    with active("tier.read=raise(Input/output error)"), pytest.raises(Unreadable) as raised:
        read(tier, of, [1, 2, 4])
    assert str(raised.value).endswith(f"of {tmp_path}/tier/{EXTENTS}: Input/output error")
    assert there(tier, of, range(6)) == [0, 3, 4, 5]
    assert set(read(tier, of, [0, 3, 4, 5]).values()) == {ReadEnd.DONE}
    assert write(tier, of, [1, 2]) == [WriteEnd.DONE] * 2
    assert set(read(tier, of, range(6)).values()) == {ReadEnd.DONE}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ESTALE, errno.ENOSPC])
def test_another_error_raises_and_forgets_nothing(
    tier: DiskBackend, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = space()
    write(tier, of, range(6))

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    for action in (lambda: read(tier, of, range(6)), lambda: write(tier, of, [9]), tier.probe):
        with pytest.raises(TierFailed, match=os.strerror(number)):
            action()
    monkeypatch.undo()
    assert set(read(tier, of, range(6)).values()) == {ReadEnd.DONE}
    assert there(tier, of, [9]) == []


@pytest.mark.parametrize("nbytes", [PAGE, PAGE + 5, 3 * PAGE])
def test_short_reads_and_writes_go_on(tier: DiskBackend, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call moves one page at most, as a signal or a full queue may have it."""
    calls = 0

    def one_page(buffers: list[memoryview]) -> list[memoryview]:
        nonlocal calls
        calls += 1
        return [buffers[0][:PAGE]]

    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, one_page(buffers), at))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, one_page(buffers), at))
    of = space(nbytes=nbytes)
    assert write(tier, of, range(5)) == [WriteEnd.DONE] * 5
    assert set(read(tier, of, range(5)).values()) == {ReadEnd.DONE}
    assert calls == 2 * 5 * -(-nbytes // PAGE)


def test_a_write_that_does_not_go_on_is_an_error(tier: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(TierFailed, match="only 0 bytes were written"):
        write(tier, space(), [1])


def test_a_probe_compares(tier: DiskBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier.probe()
    monkeypatch.setattr(os, "pwritev", lambda _, buffers, __: sum(each.nbytes for each in buffers))
    with pytest.raises(TierFailed) as raised:
        tier.probe()
    assert str(raised.value) == f"{tmp_path}/tier/{EXTENTS} does not return what was written to it"


def test_a_removal_of_many_gives_back_all_of_their_room(tmp_path: Path) -> None:
    tier, of = open_tier(tmp_path, 2 * SWEEP * PAGE), space()
    for first in range(0, 2 * SWEEP, 1024):
        write(tier, of, range(first, first + 1024))
    assert tier.forget(of.namespace) == 2 * SWEEP
    assert tier.stats().used_bytes == 0
    tier.close()


def test_neighbours_are_moved_in_one_call(tier: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    preadv, pwritev = os.preadv, os.pwritev

    def counted_read(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(len(buffers))
        return preadv(fd, buffers, at)

    def counted_write(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(len(buffers))
        return pwritev(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", counted_read)
    monkeypatch.setattr(os, "pwritev", counted_write)
    of = space()
    write(tier, of, range(10))
    read(tier, of, range(10))
    read(tier, of, [7, 2, 8, 3])
    assert calls == [10, 10, 2, 2]


# -- what lies on the disk ------------------------------------------------------------------------------------------


def test_a_truncated_file_is_corrupt_and_grows_again(tier: DiskBackend, tmp_path: Path) -> None:
    of = space()
    write(tier, of, range(6))
    os.truncate(tmp_path / "tier" / EXTENTS, 3 * PAGE + 100)
    ends = read(tier, of, range(6))
    assert ends == dict.fromkeys(range(3), ReadEnd.DONE) | dict.fromkeys(range(3, 6), ReadEnd.CORRUPT)
    assert write(tier, of, range(6)) == [WriteEnd.PRESENT] * 3 + [WriteEnd.DONE] * 3
    assert set(read(tier, of, range(6)).values()) == {ReadEnd.DONE}
    tier.probe()


def test_holes_are_filled_at_the_start_and_what_was_there_is_corrupt(tmp_path: Path) -> None:
    tier, of = open_tier(tmp_path), space()
    write(tier, of, range(6))
    tier.close()
    extents = tmp_path / "tier" / EXTENTS
    for size in (3 * PAGE, CAPACITY + PAGE):
        os.truncate(extents, size)
    assert extents.stat().st_blocks * 512 < CAPACITY
    tier = open_tier(tmp_path)
    assert extents.stat().st_blocks * 512 >= CAPACITY + PAGE
    ends = read(tier, of, range(6))
    assert ends == dict.fromkeys(range(3), ReadEnd.DONE) | dict.fromkeys(range(3, 6), ReadEnd.CORRUPT)
    tier.close()


def test_a_sealed_shard_without_a_checksum_is_a_miss(tmp_path: Path) -> None:
    """As after a kill between the two."""
    tier, of = open_tier(tmp_path), space()
    write(tier, of, range(3))
    records = tier._files.table.records._records
    records[1, CHECKED] = 0
    assert records.shape[1] == RECORD_WORDS
    tier.close()
    tier = open_tier(tmp_path)
    assert read(tier, of, range(3)) == {0: ReadEnd.DONE, 1: ReadEnd.MISS, 2: ReadEnd.DONE}
    assert there(tier, of, range(3)) == [0, 2]
    tier.close()


def test_a_record_that_came_to_be_of_another_space_is_corrupt(tmp_path: Path) -> None:
    """Two power failures can do that: the number of a space that was not written to the disk is given again, and so was
    not that the records of the one before are void."""
    tier, one, two = open_tier(tmp_path), space(), space("two")
    write(tier, one, range(3))
    records = tier._files.table.records
    ((number, _),) = records._entries.items()
    (known,) = tier._cache.spaces
    other = DiskBackend(tmp_path / "other", CAPACITY, slab_bytes=SLAB)
    write(other, two, [50])
    (theirs,) = other._cache.spaces
    records.open_space(number, theirs.namespace, known.group, known.shard_bytes)
    other.close()
    tier.close()
    tier = open_tier(tmp_path)
    assert there(tier, two, range(3)) == [0, 1, 2]
    slots = memory(two, 3)
    assert tier.read(two, [key(number) for number in range(3)], slots) == [ReadEnd.CORRUPT] * 3
    tier.close()


def damage_header(path: Path) -> None:
    flip(path, INDEX, 3)


def shorten_index(path: Path) -> None:
    os.truncate(path / "tier" / INDEX, 100)


def shorten_extents(path: Path) -> None:
    os.truncate(path / "tier" / EXTENTS, PAGE)


def lose_index(path: Path) -> None:
    (path / "tier" / INDEX).unlink()


def lose_extents(path: Path) -> None:
    (path / "tier" / EXTENTS).unlink()


def link_extents(path: Path) -> None:
    (path / "tier" / EXTENTS).rename(path / "elsewhere")
    (path / "tier" / EXTENTS).symlink_to(path / "elsewhere")


def open_to_others(path: Path) -> None:
    (path / "tier" / EXTENTS).chmod(0o644)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_header, "the record table has no header"),
        (shorten_index, "the record table has 100 bytes"),
        (shorten_extents, f"its file has {PAGE} bytes instead of {CAPACITY + PAGE}"),
        (lose_index, None),
        (lose_extents, None),
        (link_extents, "Too many levels of symbolic links"),
        (open_to_others, None),
    ],
)
def test_files_that_do_not_fit_are_made_anew(tmp_path: Path, damage: object, reason: str | None) -> None:
    tier, of = open_tier(tmp_path), space()
    write(tier, of, range(3))
    tier.close()
    assert callable(damage)
    damage(tmp_path)
    with structlog.testing.capture_logs() as said:
        tier = open_tier(tmp_path)
    if reason is not None:
        (line,) = [line for line in said if line["log_level"] == "warning"]
        assert line["reason"].startswith(reason)
    assert (tier.stats().blocks, tier.stats().kept_blocks) == (0, 0)
    assert write(tier, of, range(3)) == [WriteEnd.DONE] * 3
    tier.close()
    tier = open_tier(tmp_path)
    assert set(read(tier, of, range(3)).values()) == {ReadEnd.DONE}
    tier.close()
    assert not (tmp_path / "tier" / EXTENTS).is_symlink()


def test_another_capacity_starts_empty(tmp_path: Path) -> None:
    tier, of = open_tier(tmp_path), space()
    write(tier, of, range(3))
    tier.close()
    tier = open_tier(tmp_path, 2 * CAPACITY)
    assert (tier.stats().blocks, tier.stats().capacity_bytes) == (0, 2 * CAPACITY)
    assert len(there(tier, of, range(3))) == 0
    tier.close()
    assert (tmp_path / "tier" / EXTENTS).stat().st_size == 2 * CAPACITY + PAGE


def test_an_index_that_ends_each_start_is_given_up(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, space(), range(3))
    tier._files.table.starts = MAX_STARTS
    tier.close()
    with structlog.testing.capture_logs() as said:
        tier = open_tier(tmp_path)
    assert "3 starts in a row" in said[0]["reason"]
    assert (tier.stats().blocks, tier._files.table.starts) == (0, 0)
    tier.close()


def test_an_index_that_cannot_be_read_in_an_unthought_of_way_starts_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    write(tier, space(), range(3))
    tier.close()
    real, calls = DiskBackend._make_cache, 0

    def fail_once(self: DiskBackend, facts: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return real(self, facts)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskBackend, "_make_cache", fail_once)
    tier = open_tier(tmp_path)
    assert tier.stats().kept_blocks == 0
    assert write(tier, space(), range(3)) == [WriteEnd.DONE] * 3
    tier.close()


# -- the directory --------------------------------------------------------------------------------------------------


@processes
def test_a_second_process_is_refused_and_the_first_goes_on(tier: DiskBackend, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kvsidecar.tiers.disk.backend import DiskBackend\n"
        f"DiskBackend(Path(sys.argv[1]), {CAPACITY}, slab_bytes={SLAB}, lock_seconds=0)\n"
    )
    write(tier, space(), range(3))
    command = [sys.executable, "-c", program, str(tmp_path / "tier")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"TierFailed: the disk tier's directory {tmp_path}/tier is in use by another process" in ran.stderr
    assert set(read(tier, space(), range(3)).values()) == {ReadEnd.DONE}


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "tier").symlink_to(tmp_path / "real")
    with pytest.raises(TierFailed, match=r"cannot be opened: (Not a directory|Too many levels)"):
        open_tier(tmp_path)
    assert list((tmp_path / "real").iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier").chmod(mode)
    with pytest.raises(TierFailed, match=f"has mode {mode:04o}: others could write to it; chmod it to 0700"):
        open_tier(tmp_path)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tier").mkdir(mode=0o700)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(TierFailed, match=f"belongs to uid {me}, not to this process"):
        open_tier(tmp_path)


def test_what_is_made_is_for_nobody_else(tier: DiskBackend, tmp_path: Path) -> None:
    made = tmp_path / "tier"
    assert made.stat().st_mode & 0o777 == 0o700
    assert {file.name: file.stat().st_mode & 0o777 for file in made.iterdir()} == dict.fromkeys(
        (EXTENTS, INDEX, NAMES), 0o600
    )


def test_a_capacity_without_room_is_refused_in_one_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TierFailed, match=r"the disk tier needs .* are free: lower"):
        DiskBackend(tmp_path / "tier", 1 << 60, slab_bytes=1 << 30)
    # Where the room goes between the question and the allocation.
    monkeypatch.setattr(directory.DiskDirectory, "_check_room", lambda *_: None)
    real = os.posix_fallocate

    def full(fd: int, at: int, nbytes: int) -> None:
        if nbytes > CAPACITY:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, at, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFailed, match=r"no disk tier can be created in .*: No space left on device"):
        open_tier(tmp_path)
    assert list((tmp_path / "tier").iterdir()) == []
    monkeypatch.undo()
    open_tier(tmp_path).close()


def test_no_room_for_the_index_is_an_error_of_the_write_and_no_signal(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TierFailed, match=r"there is no room for the disk tier's index in .*: No space left on device"):
        write(tier, space(), [1])
    monkeypatch.undo()
    assert tier.stats().used_bytes == 0
    assert write(tier, space(), [1]) == [WriteEnd.DONE]


def test_a_buffered_file_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system does not take O_DIRECT."""
    monkeypatch.setattr(directory, "_open_direct", lambda _: False)
    tier, of = open_tier(tmp_path), space(nbytes=2 * PAGE - 3)
    assert not tier._files.direct
    write(tier, of, range(9))
    assert set(read(tier, of, [8, 1, 2, 0]).values()) == {ReadEnd.DONE}
    tier.probe()
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@processes
def test_a_full_file_system(tmp_path: Path) -> None:
    """Not enough room at the start is refused; a disk that others fill afterwards does not matter: all is allocated."""
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(tmp_path / "small")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        with pytest.raises(TierFailed, match=r"the disk tier needs 12\.\d+ MiB in .*, where 6 MiB are free"):
            DiskBackend(tmp_path / "small" / "tier", 8 << 20)
        tier, of = open_tier(tmp_path / "small"), space()
        with suppress(OSError), (tmp_path / "small" / "others").open("wb") as others:
            while True:
                others.write(bytes(PAGE))
                others.flush()
        ends: set[WriteEnd] = set()
        with suppress(TierFailed):  # the index may need a page more
            for number in range(200):
                ends |= set(write(tier, of, [number]))
        assert ends <= {WriteEnd.DONE}
        assert set(read(tier, of, there(tier, of, range(200))).values()) <= {ReadEnd.DONE}
        (tmp_path / "small" / "others").unlink()
        assert write(tier, of, [1000]) == [WriteEnd.DONE]
        tier.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def test_too_many_spaces_forget_the_one_that_was_not_used_for_longest(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "MAX_SPACES", 3)
    spaces = [space(f"model {number}") for number in range(4)]
    for of in spaces[:3]:
        write(tier, of, [1, 2])
    read(tier, spaces[0], [1])
    assert write(tier, spaces[3], [1]) == [WriteEnd.DONE]
    assert [there(tier, of, [1, 2]) for of in spaces] == [[1, 2], [], [1, 2], [1]]
    assert tier.stats().evicted_blocks == 2
    assert set(read(tier, spaces[0], [1, 2]).values()) == {ReadEnd.DONE}


def test_a_shard_that_is_removed_while_it_is_read_or_written_is_gone_afterwards(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = space()
    write(tier, of, range(4))
    real_read, real_write = os.preadv, os.pwritev

    def read_and_forget(fd: int, buffers: list[memoryview], at: int) -> int:
        assert tier.forget(of.namespace) == 4
        return real_read(fd, buffers, at)

    def write_and_forget(fd: int, buffers: list[memoryview], at: int) -> int:
        assert tier.forget(of.namespace) == 0
        return real_write(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", read_and_forget)
    assert set(read(tier, of, range(4)).values()) == {ReadEnd.DONE}
    monkeypatch.undo()
    assert (there(tier, of, range(4)), tier.stats().used_bytes) == ([], 0)
    write(tier, space("two"), [5])
    monkeypatch.setattr(os, "pwritev", write_and_forget)
    write(tier, of, range(4))
    monkeypatch.undo()
    assert tier.stats().used_bytes == PAGE * tier.stats().blocks
    assert set(read(tier, of, there(tier, of, range(4))).values()) <= {ReadEnd.DONE}


def test_what_is_read_is_not_evicted_meanwhile(tier: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    of = space()
    write(tier, of, range(64))
    real = os.preadv

    def fill_meanwhile(fd: int, buffers: list[memoryview], at: int) -> int:
        monkeypatch.setattr(os, "preadv", real)
        for first in range(100, 200, 10):
            write(tier, of, range(first, first + 10))
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", fill_meanwhile)
    assert set(read(tier, of, range(5)).values()) == {ReadEnd.DONE}
    assert set(range(5)) <= set(there(tier, of, range(200)))

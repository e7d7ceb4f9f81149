"""What every engine must do: `kvsidecar.tiers.engine.Engine`. A new engine adds itself to the fixture `engine`.

Tests that take `local` or `make` are of engines that alone decide what is there, and outlive their process.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from kvsidecar.tiers.disk.engine import DiskEngine
from kvsidecar.tiers.engine import Engine, ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.files.engine import FilesEngine
from kvsidecar.tiers.messages import split
from tests.mooncake_cluster import OwnMemory
from tests.tiers.support import EMPTY, PAGE, content, key, memory, read, space, there, write

CAPACITY = 64 * PAGE
Make = Callable[[Path], Engine]
LOCAL: dict[str, Make] = {"disk": lambda path: DiskEngine(path / "tier", CAPACITY, slab_bytes=16 * PAGE)}
SHARED: dict[str, Make] = {"files": lambda path: FilesEngine(path / "tier", CAPACITY)}
CLUSTER = "cluster"
SIZES = [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7]


@pytest.fixture(params=["tmp", "shm"])
def place(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory of a real file system, and one in memory."""
    base = None if request.param == "tmp" else "/dev/shm"
    if base is not None and not Path(base).is_dir():
        pytest.skip("there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir=base) as path:
        yield Path(path)


@pytest.fixture(params=LOCAL)
def make(request: pytest.FixtureRequest) -> Make:
    return LOCAL[request.param]


@pytest.fixture
def local(make: Make, place: Path) -> Iterator[Engine]:
    opened = make(place)
    yield opened
    opened.close()


@pytest.fixture(params=[*LOCAL, *SHARED, pytest.param(CLUSTER, marks=pytest.mark.cluster)])
def engine(request: pytest.FixtureRequest, place: Path) -> Iterator[Engine]:
    opened: Engine
    if request.param == CLUSTER:
        opened = OwnMemory(request.getfixturevalue("cluster"))
    else:
        opened = (LOCAL | SHARED)[request.param](place)
    yield opened
    opened.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(engine: Engine, nbytes: int) -> None:
    of = space(nbytes=nbytes)
    assert write(engine, of, range(9)) == [WriteEnd.DONE] * 9
    assert there(engine, of, range(12)) == list(range(9))
    backwards = [11, *reversed(range(9))]
    assert read(engine, of, backwards) == {11: ReadEnd.MISS} | dict.fromkeys(range(9), ReadEnd.DONE)


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_there_is_counted(local: Engine, nbytes: int) -> None:
    of = space(nbytes=nbytes)
    assert write(local, of, range(9)) == [WriteEnd.DONE] * 9
    stats = local.stats()
    assert (stats.blocks, stats.evicted_blocks) == (9, 0)
    assert 9 * nbytes <= stats.used_bytes <= stats.capacity_bytes


def test_the_bytes_beyond_a_shard_stay_as_they_are(engine: Engine) -> None:
    of = space(nbytes=PAGE + 5)
    write(engine, of, range(3))
    slots = memory(of, 3)
    engine.read(of, [key(number) for number in range(3)], slots)
    area = slots[0].obj
    assert isinstance(area, object)
    whole = memoryview(area)  # type: ignore[arg-type]
    for at in range(0, 6 * PAGE, 2 * PAGE):
        assert set(whole[at + PAGE + 5 : at + 2 * PAGE]) == {EMPTY}


def test_what_is_there_is_not_written_again(engine: Engine) -> None:
    of = space()
    write(engine, of, [1, 2])
    assert write(engine, of, [0, 1, 2, 3], version=1) == [
        WriteEnd.DONE,
        WriteEnd.PRESENT,
        WriteEnd.PRESENT,
        WriteEnd.DONE,
    ]
    assert set(read(engine, of, [1, 2]).values()) == {ReadEnd.DONE}


def test_spaces_do_not_see_each_other(engine: Engine) -> None:
    spaces = [space(), space("two"), space(shard=1), space(group=1), space(nbytes=PAGE - 8)]
    for at, of in enumerate(spaces):
        write(engine, of, [at, 100])
    for at, of in enumerate(spaces):
        assert there(engine, of, [*range(5), 100]) == [at, 100]
        assert read(engine, of, [*range(5), 100]) == {
            number: ReadEnd.DONE if number in (at, 100) else ReadEnd.MISS for number in (*range(5), 100)
        }


def test_a_given_checksum_is_believed_and_a_wrong_one_is_found_by_the_read(engine: Engine) -> None:
    of = space()
    slots = memory(of, 2)
    for number in range(2):
        slots[number][:] = content(of, number)
    right = xxhash.xxh3_64_intdigest(content(of, 0))
    engine.write(of, [key(0), key(1)], slots, [right, right])
    assert read(engine, of, [0, 1]) == {0: ReadEnd.DONE, 1: ReadEnd.CORRUPT}
    assert read(engine, of, [0, 1]) == {0: ReadEnd.DONE, 1: ReadEnd.MISS}
    assert there(engine, of, [0, 1]) == [0]
    assert write(engine, of, [1]) == [WriteEnd.DONE]
    assert read(engine, of, [1]) == {1: ReadEnd.DONE}


def test_the_least_recently_used_go_first(local: Engine) -> None:
    of = space()
    for first in range(0, 64, 8):
        write(local, of, range(first, first + 8))
    read(local, of, range(8))
    write(local, of, range(64, 72))
    left = there(local, of, range(72))
    assert set(range(8)) | set(range(64, 72)) <= set(left)
    assert not set(range(8, 16)) & set(left)
    assert local.stats().evicted_blocks == 72 - len(left)


def test_of_more_than_fits_the_first_stay(local: Engine) -> None:
    of = space()
    ends = write(local, of, range(100))
    assert ends == [WriteEnd.DONE] * ends.count(WriteEnd.DONE) + [WriteEnd.FULL] * ends.count(WriteEnd.FULL)
    assert there(local, of, range(100)) == list(range(ends.count(WriteEnd.DONE)))
    assert ends.count(WriteEnd.DONE) >= 32


def test_a_shard_that_never_fits_is_refused(local: Engine) -> None:
    assert write(local, space(nbytes=100 * PAGE), [1]) == [WriteEnd.FULL]
    assert write(local, space(), [1]) == [WriteEnd.DONE]


def test_a_namespace_is_forgotten_or_all(engine: Engine) -> None:
    one, two = space(), space("two")
    other_shard = space(shard=1)
    write(engine, one, range(4))
    write(engine, other_shard, [1])
    write(engine, two, range(7))
    assert engine.forget(one.namespace) == 5
    assert engine.forget(one.namespace) == 0
    assert (there(engine, one, range(5)), there(engine, two, range(7))) == ([], list(range(7)))
    assert there(engine, other_shard, [1]) == []
    assert engine.forget(None) == 7
    assert (engine.stats().blocks, engine.stats().used_bytes) == (0, 0)
    assert write(engine, one, range(5)) == [WriteEnd.DONE] * 5
    assert set(read(engine, one, range(5)).values()) == {ReadEnd.DONE}


def test_the_next_run_finds_it_all(make: Make, place: Path) -> None:
    spaces = [space(), space(shard=1, nbytes=2 * PAGE), space("two", nbytes=99)]
    first = make(place)
    for of in spaces:
        write(first, of, range(6))
    first.close()
    second = make(place)
    assert (second.stats().kept_blocks, second.stats().dropped_blocks) == (18, {})
    for of in spaces:
        assert set(read(second, of, range(6)).values()) == {ReadEnd.DONE}
    assert second.forget(spaces[0].namespace) == 12
    second.close()
    third = make(place)
    assert third.stats().kept_blocks == 6
    assert there(third, spaces[0], range(6)) == []
    third.close()


def test_the_probe_works_and_leaves_nothing(engine: Engine) -> None:
    of = space()
    write(engine, of, range(64))
    before = engine.stats()
    for _ in range(3):
        engine.probe()
    assert engine.stats() == before
    assert set(read(engine, of, there(engine, of, range(64))).values()) == {ReadEnd.DONE}


def test_many_threads_at_once(engine: Engine) -> None:
    """More is written than there is room for, while it is read and removed: what is done is right."""
    spaces = [space(), space("two", nbytes=2 * PAGE - 9)]
    together = threading.Barrier(6, timeout=60)

    def work(thread: int) -> int:
        together.wait()
        done = 0
        for turn in range(30):
            of: ShardSpace = spaces[(thread + turn) % 2]
            numbers = [(thread * 7 + turn * 5 + each) % 60 for each in range(6)]
            write(engine, of, numbers)
            done += list(read(engine, of, numbers).values()).count(ReadEnd.DONE)
            if turn % 10 == 9 and thread == 0:
                engine.forget(of.namespace)
        return done

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 0
    numbers = there(engine, spaces[0], range(60))
    assert set(read(engine, spaces[0], numbers).values()) <= {ReadEnd.DONE}
    assert engine.forget(None) >= len(numbers)
    assert engine.stats().used_bytes == 0


def test_what_is_there_is_listed_by_shard_space(engine: Engine) -> None:
    one, two = space(), space("two", shard=1)
    write(engine, one, range(5))
    write(engine, two, [3])
    keys = engine.keys()
    if keys is None:
        pytest.skip("it cannot tell what is there")
    found = {digest: set(split(hashes, width)) for digest, hashes, width in keys}
    assert found == {one.digest: set(map(key, range(5))), two.digest: {key(3)}}

"""What every backend must do: `kvsidecar.tiers.backend.Backend`. A new backend adds itself to the fixture `backend`.

Tests that take `local` are of backends that alone decide what is there.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from kvsidecar.tiers.backend import Backend, ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.disk.backend import DiskBackend
from kvsidecar.tiers.messages import split
from kvsidecar.tiers.shared_directory.backend import SharedBackend
from tests.mooncake_cluster import OwnMemory
from tests.tiers.support import EMPTY, PAGE, content, key, memory, read, space, there, write

CAPACITY = 64 * PAGE
Make = Callable[[Path], Backend]
LOCAL: dict[str, Make] = {"disk": lambda path: DiskBackend(path / "tier", CAPACITY, slab_bytes=16 * PAGE)}
SHARED: dict[str, Make] = {"shared": lambda path: SharedBackend(path / "tier", CAPACITY)}
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
def local(request: pytest.FixtureRequest, place: Path) -> Iterator[Backend]:
    opened = LOCAL[request.param](place)
    yield opened
    opened.close()


@pytest.fixture(params=[*LOCAL, *SHARED, pytest.param(CLUSTER, marks=pytest.mark.cluster)])
def backend(request: pytest.FixtureRequest, place: Path) -> Iterator[Backend]:
    opened: Backend
    if request.param == CLUSTER:
        opened = OwnMemory(request.getfixturevalue("cluster"))
    else:
        opened = (LOCAL | SHARED)[request.param](place)
    yield opened
    opened.close()


@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read(backend: Backend, nbytes: int) -> None:
    of = space(nbytes=nbytes)
    assert write(backend, of, range(9)) == [WriteEnd.DONE] * 9
    assert there(backend, of, range(12)) == list(range(9))
    backwards = [11, *reversed(range(9))]
    assert read(backend, of, backwards) == {11: ReadEnd.MISS} | dict.fromkeys(range(9), ReadEnd.DONE)


def test_the_bytes_beyond_a_shard_stay_as_they_are(backend: Backend) -> None:
    of = space(nbytes=PAGE + 5)
    write(backend, of, range(3))
    slots = memory(of, 3)
    backend.read(of, [key(number) for number in range(3)], slots)
    area = slots[0].obj
    assert isinstance(area, object)
    whole = memoryview(area)  # type: ignore[arg-type]
    for at in range(0, 6 * PAGE, 2 * PAGE):
        assert set(whole[at + PAGE + 5 : at + 2 * PAGE]) == {EMPTY}


def test_what_is_there_is_not_written_again(backend: Backend) -> None:
    of = space()
    write(backend, of, [1, 2])
    assert write(backend, of, [0, 1, 2, 3], version=1) == [
        WriteEnd.DONE,
        WriteEnd.PRESENT,
        WriteEnd.PRESENT,
        WriteEnd.DONE,
    ]
    assert set(read(backend, of, [1, 2]).values()) == {ReadEnd.DONE}


def test_spaces_do_not_see_each_other(backend: Backend) -> None:
    spaces = [space(), space("two"), space(shard=1), space(group=1), space(nbytes=PAGE - 8)]
    for at, of in enumerate(spaces):
        write(backend, of, [at, 100])
    for at, of in enumerate(spaces):
        assert there(backend, of, [*range(5), 100]) == [at, 100]
        assert read(backend, of, [*range(5), 100]) == {
            number: ReadEnd.DONE if number in (at, 100) else ReadEnd.MISS for number in (*range(5), 100)
        }


def test_a_given_checksum_is_believed_and_a_wrong_one_is_found_by_the_read(backend: Backend) -> None:
    of = space()
    slots = memory(of, 2)
    for number in range(2):
        slots[number][:] = content(of, number)
    right = xxhash.xxh3_64_intdigest(content(of, 0))
    backend.write(of, [key(0), key(1)], slots, [right, right])
    assert read(backend, of, [0, 1]) == {0: ReadEnd.DONE, 1: ReadEnd.CORRUPT}
    assert read(backend, of, [0, 1]) == {0: ReadEnd.DONE, 1: ReadEnd.MISS}
    assert there(backend, of, [0, 1]) == [0]
    assert write(backend, of, [1]) == [WriteEnd.DONE]
    assert read(backend, of, [1]) == {1: ReadEnd.DONE}


def test_the_least_recently_used_go_first(local: Backend) -> None:
    of = space()
    for first in range(0, 64, 8):
        write(local, of, range(first, first + 8))
    read(local, of, range(8))
    write(local, of, range(64, 72))
    left = there(local, of, range(72))
    assert set(range(8)) | set(range(64, 72)) <= set(left)
    assert not set(range(8, 16)) & set(left)
    assert local.stats().evicted_blocks == 72 - len(left)


def test_of_more_than_fits_the_first_stay(local: Backend) -> None:
    of = space()
    ends = write(local, of, range(100))
    assert ends == [WriteEnd.DONE] * ends.count(WriteEnd.DONE) + [WriteEnd.FULL] * ends.count(WriteEnd.FULL)
    assert there(local, of, range(100)) == list(range(ends.count(WriteEnd.DONE)))
    assert ends.count(WriteEnd.DONE) >= 32


def test_a_shard_that_never_fits_is_refused(local: Backend) -> None:
    assert write(local, space(nbytes=100 * PAGE), [1]) == [WriteEnd.FULL]
    assert write(local, space(), [1]) == [WriteEnd.DONE]


def test_a_namespace_is_forgotten_or_all(backend: Backend) -> None:
    one, two = space(), space("two")
    other_shard = space(shard=1)
    write(backend, one, range(4))
    write(backend, other_shard, [1])
    write(backend, two, range(7))
    assert backend.forget(one.namespace) == 5
    assert backend.forget(one.namespace) == 0
    assert (there(backend, one, range(5)), there(backend, two, range(7))) == ([], list(range(7)))
    assert there(backend, other_shard, [1]) == []
    assert backend.forget(None) == 7
    assert (backend.stats().blocks, backend.stats().used_bytes) == (0, 0)
    assert write(backend, one, range(5)) == [WriteEnd.DONE] * 5
    assert set(read(backend, one, range(5)).values()) == {ReadEnd.DONE}


def test_the_probe_works_and_leaves_nothing(backend: Backend) -> None:
    of = space()
    write(backend, of, range(64))
    before = backend.stats()
    for _ in range(3):
        backend.probe()
    assert backend.stats() == before
    assert set(read(backend, of, there(backend, of, range(64))).values()) == {ReadEnd.DONE}


def test_many_threads_at_once(backend: Backend) -> None:
    """More is written than there is room for, while it is read and removed: what is done is right."""
    spaces = [space(), space("two", nbytes=2 * PAGE - 9)]
    together = threading.Barrier(6, timeout=60)

    def work(thread: int) -> int:
        together.wait()
        done = 0
        for turn in range(30):
            of: ShardSpace = spaces[(thread + turn) % 2]
            numbers = [(thread * 7 + turn * 5 + each) % 60 for each in range(6)]
            write(backend, of, numbers)
            done += list(read(backend, of, numbers).values()).count(ReadEnd.DONE)
            if turn % 10 == 9 and thread == 0:
                backend.forget(of.namespace)
        return done

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 0
    numbers = there(backend, spaces[0], range(60))
    assert set(read(backend, spaces[0], numbers).values()) <= {ReadEnd.DONE}
    assert backend.forget(None) >= len(numbers)
    assert backend.stats().used_bytes == 0


def test_what_is_there_is_listed_by_shard_space(backend: Backend) -> None:
    one, two = space(), space("two", shard=1)
    write(backend, one, range(5))
    write(backend, two, [3])
    keys = backend.keys()
    if keys is None:
        pytest.skip("it cannot tell what is there")
    found = {digest: set(split(hashes, width)) for digest, hashes, width in keys}
    assert found == {one.digest: set(map(key, range(5))), two.digest: {key(3)}}

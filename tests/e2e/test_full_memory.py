"""Others fill the file system of a kept pool: stores evict or are declined, starts are cold, nothing gets a SIGBUS."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.client import Blocks
from kvsidecar.pool.kept_files import FILES
from tests.e2e.restarts import all_there, cold_reason, kill, started
from tests.harness import NUM_BLOCKS, Rank, done, hashes

PAGE = 4096
POOL, TABLE = FILES
NO_ROOM = "no room for more records in the pool's table: stores evict to reuse records, or are declined"


@pytest.fixture
def small(short_dir: Path) -> Iterator[Path]:
    """A tmpfs of 100 MiB, with room for the pool, its table and little more."""
    directory = short_dir / "memory"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=0700", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounts are not allowed here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """A file that has all the memory that is left."""
    filler = directory / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(fd, bytes(PAGE))
    except OSError:
        return filler
    finally:
        os.close(fd)


def make_sparse(file: Path) -> None:
    """What a daemon has left that gave memory only to the pages that it wrote."""
    content = file.read_bytes()
    file.unlink()
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, len(content))
    for at in range(0, len(content), PAGE):
        if any(piece := content[at : at + PAGE]):
            os.pwrite(fd, piece, at)
    os.close(fd)


def flags(directory: Path) -> tuple[str, ...]:
    return ("--pool-dir", str(directory), "--pool-size", "64MiB", "--lock-wait", "60")


def try_store(rank: Rank, name: str) -> str | None:
    rank.fill(0, name)
    return rank.finish(rank.client.store([Blocks(0, hashes(name), [0])])).reason


def leave_a_block(short_dir: Path, small: Path) -> None:
    """A daemon has stored "a", and was killed."""
    with started(short_dir, *flags(small)) as daemon:
        rank = Rank(daemon)
        done(rank.store("a"))
        rank.close()
        kill(daemon)


def test_a_store_whose_records_find_no_room_is_declined_until_there_is_some(short_dir: Path, small: Path) -> None:
    with started(short_dir, *flags(small)) as daemon:
        filler = fill(small)
        rank = Rank(daemon)
        assert try_store(rank, "a") == "table_full"
        assert try_store(rank, "b") == "table_full"
        assert "No space left" in daemon.wait_log(NO_ROOM)["reason"]
        assert daemon.refused("table_full") == 2
        assert rank.hits("a", "b") == 0
        filler.unlink()
        done(rank.store("a"))
        daemon.wait_log("there is room in the pool's table again")
        filler = fill(small)
        done(rank.store("b"))  # in the slab whose records have memory
        rank.close()
        kill(daemon)
    with started(short_dir, *flags(small)) as daemon:  # all that a start needs has memory since the first one
        assert cold_reason(daemon) == ""
        all_there(daemon, "a", "b")
        filler.unlink()


def test_stores_go_on_in_the_slabs_that_there_are_and_evict_the_oldest(short_dir: Path, small: Path) -> None:
    with started(short_dir, *flags(small)) as daemon:
        rank = Rank(daemon)
        done(rank.store("a"))
        filler = fill(small)
        number = 0
        while not daemon.metric("kvsidecar_evicted_blocks_total"):
            done(rank.store(*range(number, number + NUM_BLOCKS)))
            number += NUM_BLOCKS
        for _ in range(3):
            done(rank.store(*range(number, number + NUM_BLOCKS)))
            number += NUM_BLOCKS
            assert rank.hits(*range(number - NUM_BLOCKS, number)) == NUM_BLOCKS
        assert daemon.metric("kvsidecar_pool_free_bytes") > (64 << 20) / 2, "the pool is full, and this tests nothing"
        assert rank.hits("a") == 0
        assert daemon.refused("table_full") == 0
        daemon.wait_log(NO_ROOM)
        filler.unlink()
        before = daemon.metric("kvsidecar_evicted_blocks_total")
        used = daemon.metric("kvsidecar_pool_used_bytes")
        while daemon.metric("kvsidecar_pool_used_bytes") < 2 * used:
            done(rank.store(*range(number, number + NUM_BLOCKS)))
            number += NUM_BLOCKS
        assert daemon.metric("kvsidecar_evicted_blocks_total") == before
        daemon.wait_log("there is room in the pool's table again")
        rank.close()
        kill(daemon)
    with started(short_dir, *flags(small)) as daemon:
        assert cold_reason(daemon) == ""
        rank = Rank(daemon)
        assert rank.hits(*range(number - NUM_BLOCKS, number)) == NUM_BLOCKS
        rank.close()


def test_a_start_without_room_for_a_sparse_table_is_cold_and_says_why(short_dir: Path, small: Path) -> None:
    leave_a_block(short_dir, small)
    make_sparse(small / TABLE)
    filler = fill(small)
    with started(short_dir, *flags(small)) as daemon:
        (line,) = [each for each in daemon.log if each["event"] == "the pool of an earlier daemon is not used"]
        assert line["reason"] == "there is no room for the pages of its table: No space left on device"
        assert "more than --pool-dir has room for" in cold_reason(daemon)
        rank = Rank(daemon)
        assert rank.hits("a") == 0
        done(rank.store("b"))
        rank.close()
        assert daemon.terminate() == 0
    filler.unlink(missing_ok=True)
    with started(short_dir, *flags(small)) as daemon:
        rank = Rank(daemon)
        assert rank.hits("a") == 0
        rank.close()


@pytest.mark.parametrize("sparse_pool", [False, True])
def test_a_sparse_table_with_room_is_taken_over_and_then_has_memory(
    short_dir: Path, small: Path, sparse_pool: bool
) -> None:
    leave_a_block(short_dir, small)
    make_sparse(small / TABLE)
    if sparse_pool:
        make_sparse(small / POOL)
    with started(short_dir, *flags(small)) as daemon:
        assert cold_reason(daemon) == ""
        filler = fill(small)
        all_there(daemon, "a")
        rank = Rank(daemon)
        done(rank.store("b"))
        rank.close()
        filler.unlink()

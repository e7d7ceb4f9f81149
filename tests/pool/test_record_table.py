from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvsidecar.cache import adoption
from kvsidecar.cache.arrays import Words
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.errors import KeptRefused
from kvsidecar.pool import record_table
from kvsidecar.pool.record_table import BOOT_TIME, MAX_OWNERS, Owner, RecordTable, TableFacts, map_table
from kvsidecar.support.units import GiB, MiB
from tests.cache.support import PAGE, open_space, readable, store
from tests.marks import processes

ROOT = Path(__file__).parents[2]
FACTS = TableFacts(16 * PAGE, 4 * PAGE, "small", "this boot")


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("table")
    os.ftruncate(fd, RecordTable.file_bytes(FACTS))
    yield fd
    os.close(fd)


def cache_of(table: RecordTable) -> BlockCache:
    return BlockCache(SlotAllocator(FACTS.pool_bytes, FACTS.slab_bytes), records=table.records)


def test_the_next_run_finds_what_this_one_has_stored(file: int) -> None:
    cache = cache_of(RecordTable.create(map_table(file), FACTS))
    store(cache, open_space(cache), 1, 2, 3)
    again = cache_of(RecordTable.open(map_table(file), FACTS))
    assert again.adopted.kept_blocks == 3
    assert again.adopted.kept_bytes == 3 * PAGE
    assert not again.adopted.dropped
    assert readable(again, open_space(again), 1, 2, 3, 4) == [True, True, True, False]


def test_a_long_read_of_the_records_is_in_the_log(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(RecordTable.create(map_table(file), FACTS))
    store(cache, open_space(cache), 1, 2, 3)
    monkeypatch.setattr(adoption, "SLICE", 1)
    for seconds, lines in ((0.0, [1, 2, 3]), (3600.0, [])):
        monkeypatch.setattr(record_table, "LOG_SECONDS", seconds)
        with capture_logs() as logged:
            assert cache_of(RecordTable.open(map_table(file), FACTS)).adopted.kept_blocks == 3
        assert [each["read"] for each in logged][: len(lines)] == lines
        assert bool(logged) == bool(lines)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (replace(FACTS, pool_bytes=20 * PAGE), "the pool had 64 KiB; now it is 80 KiB"),
        (replace(FACTS, slab_bytes=8 * PAGE), "its slabs had 16 KiB; now it is 32 KiB"),
        (replace(FACTS, page_kind="huge"), "its pages were small; now it is huge"),
        (replace(FACTS, boot_id="another boot"), "before the last boot"),
        (replace(FACTS, clock=BOOT_TIME), "its times were those of the clock of the wall; now it is boot time"),
    ],
)
def test_a_table_of_another_pool_is_refused_and_stays_as_it_is(file: int, now: TableFacts, why: str) -> None:
    words = map_table(file)
    cache = cache_of(RecordTable.create(words, FACTS))
    store(cache, open_space(cache), 1, 2, 3)
    before = words.copy()
    with pytest.raises(KeptRefused, match=why):
        RecordTable.open(words, now)
    assert (words == before).all()


@pytest.mark.parametrize(
    ("word", "value", "why"),
    [
        (0, 0, "no header"),
        (0, 1, "no header"),
        (1, 1, "format 1; this daemon reads 4"),
        (2, 5, "damaged"),
        (3, 1 << 60, "damaged"),
        (5, 7, "damaged"),
    ],
)
def test_a_header_of_another_format_or_a_damaged_one_is_refused(file: int, word: int, value: int, why: str) -> None:
    words = map_table(file)
    RecordTable.create(words, FACTS)
    words[word] = value
    with pytest.raises(KeptRefused, match=why):
        RecordTable.open(words, FACTS)


@pytest.mark.parametrize("kept", [0, 1, 8 * 500, PAGE, 3 * PAGE, 100_000])
def test_a_file_of_another_length_is_refused(file: int, kept: int) -> None:
    RecordTable.create(map_table(file), FACTS)
    os.ftruncate(file, kept)
    with pytest.raises(KeptRefused, match="bytes"):
        RecordTable.open(map_table(file), FACTS)


def test_a_new_file_is_no_table_and_has_no_owners(file: int) -> None:
    words = map_table(file)
    assert RecordTable.owners(words) == []
    with pytest.raises(KeptRefused, match="no header"):
        RecordTable.open(words, FACTS)


def test_pages_of_records_that_were_never_written_have_no_memory() -> None:
    facts = TableFacts(64 * GiB, 64 * MiB, "small", "this boot")
    fd = os.memfd_create("table")
    try:
        os.ftruncate(fd, RecordTable.file_bytes(facts))
        for table in (RecordTable.create(map_table(fd), facts), RecordTable.open(map_table(fd), facts)):
            cache = BlockCache(SlotAllocator(facts.pool_bytes, facts.slab_bytes), records=table.records)
            store(cache, open_space(cache, shards=(512,)), *range(64))
        assert os.fstat(fd).st_size == pytest.approx(2 * GiB, rel=0.01)
        assert os.fstat(fd).st_blocks * 512 < 220 * PAGE, "those of the units alone have less than a MiB"
    finally:
        os.close(fd)


# -- owners ----------------------------------------------------------------------------------------------------------


class Watched(np.ndarray[tuple[int, ...], np.dtype[np.uint64]]):
    """Notes the owners after every word that is written."""

    root: Words | None = None
    seen: list[set[Owner]]

    def __array_finalize__(self, source: object) -> None:
        if isinstance(source, Watched):
            self.root, self.seen = source.root, source.seen

    def __setitem__(self, where: object, value: object) -> None:
        super().__setitem__(where, value)  # type: ignore[call-overload]
        if self.root is not None:
            self.seen.append(set(RecordTable.owners(np.asarray(self.root))))


def test_at_every_instant_each_owner_is_named_that_was_and_will_be(file: int) -> None:
    words = map_table(file).view(Watched)
    words.root, words.seen = words, []
    table = RecordTable.create(words, FACTS)
    lists = [
        [Owner(10, 1)],
        [Owner(10, 1), Owner(11, 5), Owner(12, 5)],
        [Owner(10, 2), Owner(11, 5)],
        [Owner(n, n) for n in range(1, MAX_OWNERS - 2)],
        [],
    ]
    before: list[Owner] = []
    for now in lists:
        words.seen.clear()
        table.set_owners(now)
        assert words.seen[-1] == set(now)
        for seen in words.seen:
            assert set(before) & set(now) <= seen
            # One that is being written has its start time first: no process is named that was never an owner.
            assert seen <= set(before) | set(now)
        assert set(RecordTable.owners(map_table(file))) == set(now)
        before = now
    with pytest.raises(ValueError, match=str(MAX_OWNERS)):
        table.set_owners([Owner(n, n) for n in range(1, MAX_OWNERS + 2)])


def test_owners_are_known_although_the_table_is_refused(file: int) -> None:
    RecordTable.create(map_table(file), FACTS).set_owners([Owner(10, 7)])
    words = map_table(file)
    with pytest.raises(KeptRefused):
        RecordTable.open(words, replace(FACTS, boot_id="another boot"))
    assert RecordTable.owners(words) == [Owner(10, 7)]


# -- kills -----------------------------------------------------------------------------------------------------------


def kills(count: int, *options: str) -> dict[str, int]:
    # One thread: the process forks.
    answer = subprocess.run(
        [sys.executable, "-m", "tests.pool.kill_and_adopt", "--kills", str(count), *options],
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, int] = json.loads(answer.stdout)
    return result


@processes
def test_after_each_of_200_kills_every_block_that_is_found_has_the_bytes_that_were_stored() -> None:
    result = kills(200)
    assert result["wrong"] == 0
    assert result["found"] > 5 * 200
    assert result["clears"] > 0


@processes
def test_the_same_kills_find_wrong_bytes_if_records_are_never_unsealed() -> None:
    # Luck decides which of them hit a slot that is being filled: usually one of ten, fewer on a machine without pause.
    assert kills(5000, "--never-unseal", "--until-wrong")["wrong"] > 0

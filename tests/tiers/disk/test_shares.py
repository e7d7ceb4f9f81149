"""Shares of tenants on a disk: the most that each may have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsidecar.tiers.disk import engine as module
from kvsidecar.tiers.disk.engine import DiskEngine
from kvsidecar.tiers.engine import ReadEnd, TierShare, WriteEnd
from tests.tiers.support import PAGE, read, space, there, write

CAPACITY = 64
A, A2, B = space("team-a/chat"), space("team-a/batch"), space("team-b")
SHARES = (TierShare("a", ("team-a/*",), 8 * PAGE), TierShare("b", ("team-b",), None))


def opened(path: Path) -> DiskEngine:
    return DiskEngine(path / "tier", CAPACITY * PAGE, slab_bytes=4 * PAGE, lock_seconds=0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskEngine]:
    engine = opened(tmp_path)
    engine.set_shares(SHARES)
    yield engine
    engine.close()


def write_each(engine: DiskEngine, of: module.ShardSpace, count: int, first: int = 0) -> list[WriteEnd]:
    return [write(engine, of, [number])[0] for number in range(first, first + count)]


def test_a_share_beyond_its_maximum_evicts_its_own_and_nobody_elses(tier: DiskEngine) -> None:
    assert set(write_each(tier, B, 20)) == {WriteEnd.DONE}
    assert set(write_each(tier, A, 20)) == {WriteEnd.DONE}
    assert there(tier, B, range(20)) == list(range(20))
    assert there(tier, A, range(20)) == list(range(12, 20)), "the newest 8"
    assert set(read(tier, A, range(12, 20)).values()) == {ReadEnd.DONE}


def test_all_namespaces_of_a_share_together_have_its_maximum(tier: DiskEngine) -> None:
    write_each(tier, A, 6)
    write_each(tier, A2, 6)
    assert there(tier, A2, range(6)) == list(range(6))
    assert there(tier, A, range(6)) == [4, 5]


def test_a_write_that_is_larger_than_the_maximum_keeps_what_fits(tier: DiskEngine) -> None:
    ends = write(tier, A, range(20))
    assert 0 < ends.count(WriteEnd.DONE) <= 8
    assert ends.count(WriteEnd.FULL) == 20 - ends.count(WriteEnd.DONE)


def test_without_shares_or_a_maximum_there_is_none(tier: DiskEngine) -> None:
    other = space("nobody's")
    assert set(write_each(tier, other, 30)) == {WriteEnd.DONE}
    assert len(there(tier, other, range(30))) == 30
    tier.set_shares(())
    write_each(tier, A, 20)
    assert len(there(tier, A, range(20))) == 20


def test_a_smaller_maximum_moves_nothing_until_the_share_writes(tier: DiskEngine) -> None:
    tier.set_shares(())
    write_each(tier, A, 20)
    tier.set_shares(SHARES)
    assert len(there(tier, A, range(20))) == 20
    assert write_each(tier, A, 20, first=20)[-8:] == [WriteEnd.DONE] * 8
    assert there(tier, A, range(40)) == list(range(32, 40))


def test_what_was_kept_counts_from_the_first_call_that_names_it(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.set_shares(SHARES)
    write_each(before, A, 8)
    write_each(before, A2, 8)
    write_each(before, B, 8)
    before.close()
    after = opened(tmp_path)
    after.set_shares(SHARES)
    kept = len(there(after, A, range(8))) + len(there(after, A2, range(8)))
    assert kept == 8
    write_each(after, A, 4, first=100)
    assert len(there(after, A, [*range(8), *range(100, 104)])) + len(there(after, A2, range(8))) <= 8
    assert there(after, A, range(100, 104)) == list(range(100, 104))
    assert len(there(after, B, range(8))) == 8
    after.close()


def test_names_that_were_only_asked_for_are_forgotten(tier: DiskEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 10)
    write_each(tier, A, 4)
    write_each(tier, A2, 4)
    for number in range(50):
        there(tier, space(f"made up {number}"), [1])
    assert len(tier._namespaces) <= 10
    tier.set_shares(SHARES)
    write_each(tier, A, 4, first=50)
    assert len(there(tier, A, range(60))) + len(there(tier, A2, range(4))) == 8, "both are still known"

"""Shares of tenants on a disk: what is guaranteed to each, and the most that each may have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvsidecar.tiers.backend import ReadEnd, ShardSpace, TierShare, WriteEnd, namespace_digest
from kvsidecar.tiers.disk import backend as module
from kvsidecar.tiers.disk.backend import DiskBackend
from tests.marks import examples
from tests.tiers.support import PAGE, read, space, there, write

CAPACITY = 64
A, A2, B = space("team-a/chat"), space("team-a/batch"), space("team-b")
SHARES = (TierShare("a", ("team-a/*",), 8 * PAGE), TierShare("b", ("team-b",), None))


def opened(path: Path) -> DiskBackend:
    return DiskBackend(path / "tier", CAPACITY * PAGE, slab_bytes=4 * PAGE, lock_seconds=0)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskBackend]:
    backend = opened(tmp_path)
    backend.set_shares(SHARES)
    yield backend
    backend.close()


def write_each(backend: DiskBackend, of: ShardSpace, count: int, first: int = 0) -> list[WriteEnd]:
    return [write(backend, of, [number])[0] for number in range(first, first + count)]


def test_a_share_beyond_its_maximum_evicts_its_own_and_nobody_elses(tier: DiskBackend) -> None:
    assert set(write_each(tier, B, 20)) == {WriteEnd.DONE}
    assert set(write_each(tier, A, 20)) == {WriteEnd.DONE}
    assert there(tier, B, range(20)) == list(range(20))
    assert there(tier, A, range(20)) == list(range(12, 20)), "the newest 8"
    assert set(read(tier, A, range(12, 20)).values()) == {ReadEnd.DONE}


def test_all_namespaces_of_a_share_together_have_its_maximum(tier: DiskBackend) -> None:
    write_each(tier, A, 6)
    write_each(tier, A2, 6)
    assert there(tier, A2, range(6)) == list(range(6))
    assert there(tier, A, range(6)) == [4, 5]


def test_a_write_that_is_larger_than_the_maximum_keeps_what_fits(tier: DiskBackend) -> None:
    ends = write(tier, A, range(20))
    assert 0 < ends.count(WriteEnd.DONE) <= 8
    assert ends.count(WriteEnd.FULL) == 20 - ends.count(WriteEnd.DONE)


def test_without_shares_or_a_maximum_there_is_none(tier: DiskBackend) -> None:
    other = space("nobody's")
    assert set(write_each(tier, other, 30)) == {WriteEnd.DONE}
    assert len(there(tier, other, range(30))) == 30
    tier.set_shares(())
    write_each(tier, A, 20)
    assert len(there(tier, A, range(20))) == 20


def test_a_smaller_maximum_moves_nothing_until_the_share_writes(tier: DiskBackend) -> None:
    tier.set_shares(())
    write_each(tier, A, 20)
    tier.set_shares(SHARES)
    assert len(there(tier, A, range(20))) == 20
    assert write_each(tier, A, 20, first=20)[-8:] == [WriteEnd.DONE] * 8
    assert there(tier, A, range(40)) == list(range(32, 40))


def guaranteed(a: int, b: int = 0) -> tuple[TierShare, ...]:
    return TierShare("a", ("team-a/*",), None, a * PAGE), TierShare("b", ("team-b",), None, b * PAGE)


def test_what_is_guaranteed_to_a_share_stays_whatever_others_write(tier: DiskBackend) -> None:
    tier.set_shares(guaranteed(10))
    write_each(tier, A, 20)
    assert set(write_each(tier, B, 3 * CAPACITY)) == {WriteEnd.DONE}
    assert there(tier, A, range(20)) == list(range(10, 20)), "what it had borrowed is gone"
    assert set(read(tier, A, range(10, 20)).values()) == {ReadEnd.DONE}
    use = {each.name: (each.used // PAGE, each.guaranteed // PAGE, each.most) for each in tier.stats().shares}
    assert use == {"a": (10, 10, None), "b": (CAPACITY - 10, 0, None), "unassigned": (0, 0, None)}


def test_of_a_disk_that_is_guaranteed_to_others_nothing_is_written_and_that_is_counted(tier: DiskBackend) -> None:
    tier.set_shares(())
    write_each(tier, space("nobody's"), 3)
    tier.set_shares(guaranteed(40, CAPACITY - 40))
    assert write(tier, space("nobody's"), [10, 11]) == [WriteEnd.FULL] * 2
    assert set(read(tier, space("nobody's"), range(3)).values()) == {ReadEnd.MISS}, "read, it could not be given back"
    assert tier.stats().quota_blocks == 5
    assert set(write_each(tier, A, 40)) == {WriteEnd.DONE}
    tier.set_shares(guaranteed(40, CAPACITY - 42))
    assert list(read(tier, space("nobody's"), range(3)).values()) == [ReadEnd.DONE, ReadEnd.MISS, ReadEnd.MISS]
    assert tier.stats().quota_blocks == 7


def test_spaces_that_are_too_many_cost_no_share_its_guarantee(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 4)
    tier.set_shares(guaranteed(10))
    write_each(tier, A, 10)
    for number in range(10):
        assert write(tier, space(f"another {number}"), [1]) == [WriteEnd.DONE]
    assert len(there(tier, A, range(10))) == 10
    for number in range(3):
        assert write(tier, space(f"team-a/{number}"), [1]) == [WriteEnd.DONE]
    assert write(tier, A2, [1]) == [WriteEnd.DONE], "of its own it may lose one"
    assert not there(tier, A, range(10))


def test_a_guarantee_keeps_no_more_spaces_than_a_shares_part_of_them(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 6)
    tier.set_shares(guaranteed(10))
    mine = [space(f"team-a/{number}") for number in range(6)]
    for each in mine:
        write(tier, each, [1])
    for number in range(20):
        assert write(tier, space(f"another {number}"), [1]) == [WriteEnd.DONE]
    assert [bool(there(tier, each, [1])) for each in mine] == [False] * 4 + [True] * 2


def test_a_space_that_a_share_has_borrowed_is_forgotten_as_any_other(
    tier: DiskBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 6)
    tier.set_shares(guaranteed(10))
    write_each(tier, A, 10)
    write_each(tier, A2, 2)
    others = [space(f"another {number}") for number in range(5)]
    for each in others:
        write(tier, each, [1])
    assert (len(there(tier, A, range(10))), there(tier, A2, range(2))) == (10, [])
    assert [there(tier, each, [1]) for each in others] == [[1]] * 5


def test_what_was_kept_counts_at_once(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.set_shares(SHARES)
    write_each(before, A, 8)
    write_each(before, A2, 8)
    write_each(before, B, 8)
    before.close()
    after = opened(tmp_path)
    after.set_shares(SHARES)
    assert {each.name: each.used for each in after.stats().shares} == {"a": 8 * PAGE, "b": 8 * PAGE, "unassigned": 0}
    write_each(after, A, 4, first=100)
    assert len(there(after, A, [*range(8), *range(100, 104)])) + len(there(after, A2, range(8))) <= 8
    assert there(after, A, range(100, 104)) == list(range(100, 104))
    assert len(there(after, B, range(8))) == 8
    after.close()


def test_names_that_were_only_asked_for_are_forgotten(tier: DiskBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SPACES", 10)
    write_each(tier, A, 4)
    write_each(tier, A2, 4)
    for number in range(50):
        there(tier, space(f"made up {number}"), [1])
    assert len(tier._namespaces) <= 10
    tier.set_shares(SHARES)
    write_each(tier, A, 4, first=50)
    assert len(there(tier, A, range(60))) + len(there(tier, A2, range(4))) == 8, "both are still known"


SPACES = {"a": (A, A2), "b": (B,), "other": (space("nobody's"),)}
PARTS = st.sampled_from([(4, 2), (8, 0), (0, 0), (3, 5), (2, 6)])
NUMBERS = st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4)
WHICH = st.sampled_from([(share, at) for share, spaces in SPACES.items() for at in range(len(spaces))])


class DiskSharesMachine(RuleBasedStateMachine):
    """Any calls, reloads and restarts, on a disk of eight extents: no call costs another share what it is guaranteed,
    and a share can write what is guaranteed to it."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)

    @initialize(parts=PARTS)
    def start(self, parts: tuple[int, int]) -> None:
        self.parts = parts
        self.open()

    def open(self) -> None:
        path = Path(self.place.name) / "tier"
        self.tier = DiskBackend(path, 8 * PAGE, slab_bytes=4 * PAGE, lock_seconds=0)
        self.tier.set_shares(guaranteed(*self.parts))

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close()
        self.place.cleanup()

    def pages(self) -> dict[str, int]:
        """Of each share. Nothing is looked up: that would tell the backend whose it is."""
        of = {namespace_digest(each.namespace): share for share, spaces in SPACES.items() for each in spaces}
        found = dict.fromkeys(SPACES, 0)
        for each in self.tier._cache.spaces:
            found[of[each.namespace.model]] += each.blocks.readable
        return found

    def check(self, share: str, before: dict[str, int]) -> None:
        promised = dict(zip(("a", "b"), self.parts, strict=True))
        for other, pages in self.pages().items():
            assert other == share or pages >= min(before[other], promised.get(other, 0)), f"{share} took from {other}"

    @rule(which=WHICH, numbers=NUMBERS)
    def write(self, which: tuple[str, int], numbers: list[int]) -> None:
        share, at = which
        before = self.pages()
        ends = write(self.tier, SPACES[share][at], numbers)
        if before[share] + len(numbers) <= dict(zip("ab", self.parts, strict=True)).get(share, 0):
            assert WriteEnd.FULL not in ends, "within its guarantee"
        self.check(share, before)

    @rule(which=WHICH, numbers=NUMBERS)
    def read(self, which: tuple[str, int], numbers: list[int]) -> None:
        before = self.pages()
        read(self.tier, SPACES[which[0]][which[1]], numbers)
        assert self.pages() == before

    @rule(which=WHICH)
    def forget(self, which: tuple[str, int]) -> None:
        before = self.pages()
        self.tier.forget(SPACES[which[0]][which[1]].namespace)
        self.check(which[0], before)

    @rule(parts=PARTS)
    def reload(self, parts: tuple[int, int]) -> None:
        before = self.pages()
        self.parts = parts
        self.tier.set_shares(guaranteed(*parts))
        assert self.pages() == before, "a reload moves nothing"

    @rule()
    def reopen(self) -> None:
        before = self.pages()
        self.tier.close()
        self.open()
        assert self.pages() == before


DiskSharesMachine.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
TestDiskShares = pytest.mark.no_cover(DiskSharesMachine.TestCase)

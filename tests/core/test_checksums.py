from __future__ import annotations

import numpy as np
import pytest

from kvsidecar.cache.arrays import FEW
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.copier.messages import Checks
from kvsidecar.core.checksums import SAMPLE, Checksums
from kvsidecar.types import Verify
from tests.cache.cuts import recorded_cache, words_for
from tests.cache.support import PAGE, begin, key, keys, new_cache, open_space

HASHES = [bytes([0, byte]) for byte in range(256)]
BIG = (1 << 64) - 1
"""A checksum has 64 bits, and no sign."""
NOT_RECORDED = new_cache(2)


@pytest.mark.parametrize(("verify", "share"), [(Verify.OFF, 0.0), (Verify.SAMPLE, 1 / SAMPLE), (Verify.ALWAYS, 1.0)])
def test_the_share_of_blocks_that_is_checked(verify: Verify, share: float) -> None:
    checksums = Checksums(verify, NOT_RECORDED)
    assert sum(map(checksums.chosen, HASHES)) / 256 == share
    checks = checksums.to_take([(HASHES, range(0, 256 * 8, 8), 8)])
    assert (0 if checks is None else len(checks)) / 256 == share
    if checks is None:
        return
    checksums.keep(StoreGrant(), checks, range(len(checks)))
    expected, _ = checksums.to_compare([(HASHES, range(0, 256 * 8, 8), 8)])
    assert expected is not None
    assert len(expected) / 256 == share


def test_what_was_taken_is_what_is_expected_wherever_it_comes_in_a_load() -> None:
    checksums = Checksums(Verify.ALWAYS, NOT_RECORDED)
    taken = checksums.to_take([(HASHES[:2], [0, 4096], 4000), (HASHES[:1], [8192], 100)])
    assert taken is not None
    assert taken[["slot", "nbytes"]].tolist() == [(0, 4000), (4096, 4000), (8192, 100)]
    checksums.keep(StoreGrant(), taken, [5, BIG, 7])
    unknown = 1 << 20
    expected, places = checksums.to_compare([(HASHES[:1], [8192], 100), (HASHES[:3], [4096, unknown, 0], 4000)])
    assert expected is not None
    assert expected.tolist() == [(8192, 100, 7), (4096, 4000, BIG), (0, 4000, 5)]
    assert places == [(0, 0), (1, 0), (1, 2)]


def test_a_slot_that_was_filled_anew_has_the_new_checksum() -> None:
    checksums = Checksums(Verify.ALWAYS, NOT_RECORDED)
    for value in (1, 2):
        checks = checksums.to_take([(HASHES[:1], [0], 4096)])
        assert checks is not None
        checksums.keep(StoreGrant(), checks, [value])
    expected, _ = checksums.to_compare([(HASHES[:1], [0], 4096)])
    assert expected is not None
    assert np.array_equal(expected["expected"], [2])


def test_blocks_without_checksums_ask_for_nothing() -> None:
    assert Checksums(Verify.ALWAYS, NOT_RECORDED).to_compare([(HASHES[:2], [0, 4096], 4000)]) == (None, [])


# -- a cache that the next daemon takes over ---------------------------------------------------------------------------

MANY = 2 * FEW
"""More than a loop is for."""


class Runs:
    """Daemons one after the other, with the records of one pool."""

    def __init__(self) -> None:
        self.words = np.zeros(words_for(4 * MANY, 2 * MANY), np.uint64)
        self.next(Verify.ALWAYS)

    def next(self, verify: Verify) -> None:
        self.cache = recorded_cache(self.words, 4 * MANY, 2 * MANY)
        self.space = open_space(self.cache)
        self.checksums = Checksums(verify, self.cache)

    def store(self, *names: int, first: int = 0) -> None:
        """Copiers find the checksums ``first``, ``first + 1``, ..."""
        grant = begin(self.cache, self.space, keys(*names))
        (part,) = grant.parts
        checks = self.checksums.to_take([([key(names[i]) for i in part.index], part.slots.tolist(), PAGE)])
        if checks is not None:
            self.checksums.keep(grant, checks, [first + i for i in range(len(checks))])
        self.cache.seal_all(grant)

    def expected(self, *names: int) -> list[int | None]:
        """What a load of these compares each of them with."""
        grant = self.cache.begin_load([(self.space, 0, keys(*names))], None, 0.0)
        assert not isinstance(grant, str), grant
        checks, places = self.checksums.to_compare([(keys(*names), grant.slots[0].tolist(), PAGE)])
        self.cache.end_load(grant)
        found = dict(zip([index for _, index in places], _expected(checks), strict=True))
        return [found.get(index) for index in range(len(names))]


def _expected(checks: Checks | None) -> list[int]:
    return [] if checks is None else checks["expected"].tolist()


@pytest.mark.parametrize("count", [1, FEW, MANY])
def test_the_next_daemon_compares_with_what_this_one_has_kept(count: int) -> None:
    runs, names = Runs(), range(count)
    runs.store(*names, first=BIG - MANY)
    for _ in range(2):
        assert runs.expected(*names) == [BIG - MANY + i for i in names]
        runs.next(Verify.ALWAYS)


def test_a_slot_that_the_next_daemon_fills_without_a_checksum_has_none() -> None:
    """Not that of the block that the slot held before."""
    runs = Runs()
    runs.store(*range(MANY))
    runs.next(Verify.OFF)
    runs.cache.clear()
    runs.store(*range(MANY, 2 * MANY), 3)
    runs.next(Verify.ALWAYS)
    assert runs.expected(*range(MANY, 2 * MANY), 3) == [None] * (MANY + 1)


def test_verify_may_change_from_daemon_to_daemon() -> None:
    sampled, other = (next(n for n in range(99) if (key(n)[-1] % SAMPLE == 0) == wanted) for wanted in (True, False))
    runs = Runs()
    runs.store(sampled, other, first=1)
    runs.next(Verify.OFF)
    assert runs.expected(sampled, other) == [None, None]
    runs.store(100)
    runs.next(Verify.SAMPLE)
    assert runs.expected(sampled, other, 100) == [1, None, None]
    runs.next(Verify.ALWAYS)
    assert runs.expected(sampled, other, 100) == [1, 2, None]


@pytest.mark.parametrize("count", [1, MANY])
def test_a_store_that_ends_after_its_namespace_was_cleared_leaves_no_checksum(count: int) -> None:
    """Its slots are free as soon as they are sealed, and their slab is whole again."""
    runs = Runs()
    grant = begin(runs.cache, runs.space, keys(*range(count)))
    slots = grant.parts[0].slots.tolist()
    checks = runs.checksums.to_take([(keys(*range(count)), slots, PAGE)])
    assert checks is not None
    runs.cache.clear()
    runs.checksums.keep(grant, checks, [7] * count)
    runs.cache.seal_all(grant)
    assert runs.cache.stats().free_bytes == runs.cache.stats().total_bytes
    runs.checksums = Checksums(Verify.OFF, runs.cache)
    runs.store(*range(count))
    runs.checksums = Checksums(Verify.ALWAYS, runs.cache)
    assert runs.expected(*range(count)) == [None] * count


@pytest.mark.parametrize("recorded", [True, False])
def test_fewer_values_than_checks_end_the_store_before_it_is_sealed(*, recorded: bool) -> None:
    runs = Runs()
    checksums = runs.checksums if recorded else Checksums(Verify.ALWAYS, NOT_RECORDED)
    checks = checksums.to_take([(HASHES[:2], [0, PAGE], PAGE)])
    assert checks is not None
    with pytest.raises(ValueError, match="short"):
        checksums.keep(StoreGrant(), checks, [1])

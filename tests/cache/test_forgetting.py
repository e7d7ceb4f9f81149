"""What an operator wants gone: some blocks, or those that nobody uses."""

from __future__ import annotations

import pytest

from kvsidecar.cache import expiry
from kvsidecar.cache.grants import LoadGrant
from kvsidecar.cache.shares import ShareLimits
from tests.cache.cache_machine import Told
from tests.cache.integrity import check_integrity
from tests.cache.support import keys, lease, names_readable, one_space, store, table_of


def test_single_blocks_are_cleared_also_those_in_use() -> None:
    cache, space = one_space(8, shards=(1, 1))
    store(cache, space, "a", "b")
    store(cache, space, "half", shard=0)
    held = lease(cache, space, "a")
    loading = cache.begin_load([(space, 0, keys("a"))], held, 0)
    assert isinstance(loading, LoadGrant)
    assert cache.clear_blocks(space, keys("a", "half", "never")) == 1
    check_integrity(cache)
    assert names_readable(cache, space, "a", "b") == ["b"]
    assert cache.stats().blocks == 1
    store(cache, space, "a")
    cache.end_load(loading)
    cache.release(held)
    check_integrity(cache)
    assert names_readable(cache, space, "a", "b") == ["a", "b"]


def test_blocks_that_nobody_has_used_are_cleared_and_no_others() -> None:
    cache, space = one_space(8)
    cache.expire(0.0)
    store(cache, space, "old", "used", "held")
    held = lease(cache, space, "held", ttl=1e6)
    for now in range(1, 2000):
        cache.expire(float(now))
        if now == 1500:
            cache.release(lease(cache, space, "used", now=now))
        if now == 1900:
            store(cache, space, "new")
    assert sum(cache.clear_unused(space, 1960)) == 1
    check_integrity(cache)
    assert names_readable(cache, space, "old", "used", "held", "new") == ["used", "held", "new"]
    assert sum(cache.clear_unused(space, 700)) == 0
    assert sum(cache.clear_unused(space, 400)) == 1
    assert names_readable(cache, space, "old", "used", "held", "new") == ["held", "new"]
    assert sum(cache.clear_unused(space, 3000)) == 0
    cache.release(held)
    assert len(table_of(cache).times._ticks) < 600, "times are kept for ever"
    assert sum(cache.clear_unused(space, 0)) <= 2


def test_blocks_in_use_are_taken_back_together_however_many_are_cleared() -> None:
    """One by one, 100,000 of them stopped the daemon for two seconds."""
    cache, space = one_space(2000)
    told = Told(cache)
    store(cache, space, *range(2000))
    lease(cache, space, *range(1000))
    assert cache.clear_blocks(space, keys(*range(1500))) == 1500
    assert told.said == ["stored", "removed", "removed"], "those in use, and the others"
    assert told.readable == {0: set(keys(*range(1500, 2000)))}


def test_expired_blocks_in_use_that_are_stored_again_are_taken_back_together() -> None:
    cache, space = one_space(4000)
    told = Told(cache)
    cache.set_shares([ShareLimits("m", lambda _: True, ttl=5.0)])
    cache.expire(0.0)
    store(cache, space, *range(1000))
    held = lease(cache, space, *range(1000), ttl=100.0)
    cache.expire(6.0)
    store(cache, space, *range(1000))
    assert told.said == ["stored", "removed", "stored"]
    cache.expire(12.0)
    loading = cache.begin_load([(space, 0, keys(*range(500)))], held, 12.0)
    assert isinstance(loading, LoadGrant), "the lease holds the old ones"
    cache.end_load(loading)
    check_integrity(cache)


def test_blocks_without_a_use_are_cleared_in_steps_between_which_anything_happens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expiry, "SWEEP", 2)
    monkeypatch.setattr(expiry, "SCAN", 3)
    monkeypatch.setattr("kvsidecar.cache.space_blocks.SPARSE", 1)
    monkeypatch.setattr("kvsidecar.cache.space_blocks.FIRST_ROWS", 1)
    cache, space = one_space(40)
    cache.expire(0.0)
    store(cache, space, *range(12))
    cache.expire(1.0)
    cache.expire(100.0)
    clearing = cache.clear_unused(space, 50)
    cleared = next(clearing)
    cache.release(lease(cache, space, 8, now=100.0))
    store(cache, space, 9, "new")
    cache.sweep()  # the table is rebuilt
    for blocks in clearing:
        check_integrity(cache)
        assert blocks <= 2
        cleared += blocks
    assert cleared == 10
    assert names_readable(cache, space, *range(12), "new") == [8, 9, "new"]
    clearing = cache.clear_unused(space, 0)
    next(clearing)
    cache.clear()
    store(cache, space, "after")
    assert sum(clearing) == 0
    assert names_readable(cache, space, "after") == ["after"]

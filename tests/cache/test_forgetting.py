"""What an operator wants gone: some blocks, or those that nobody uses."""

from __future__ import annotations

from kvsidecar.cache.grants import LoadGrant
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
    assert cache.clear_unused(space, 1960) == 1
    check_integrity(cache)
    assert names_readable(cache, space, "old", "used", "held", "new") == ["used", "held", "new"]
    assert cache.clear_unused(space, 700) == 0
    assert cache.clear_unused(space, 400) == 1
    assert names_readable(cache, space, "old", "used", "held", "new") == ["held", "new"]
    assert cache.clear_unused(space, 3000) == 0
    cache.release(held)
    assert len(table_of(cache).times._ticks) < 600, "times are kept for ever"
    assert cache.clear_unused(space, 0) <= 2

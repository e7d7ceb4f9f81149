"""Namespaces that their engines have left: how many of them one user may have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvsidecar.cache import left_spaces
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import LimitExceeded
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, begin, keys, lease, limits, namespace, new_cache, readable, store

MOST = 3


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_spaces, "MOST_LEFT", MOST)


def attach(cache: BlockCache, name: str, user: int | None = 1000, group: int = 0) -> Space:
    return cache.open_space(namespace(name), group, 1, 0, PAGE, user)


def leave(cache: BlockCache, *names: str, user: int | None = 1000, groups: Sequence[int] = (0,)) -> None:
    """An engine stores a block into each group of these namespaces, and goes."""
    for name in names:
        spaces = [attach(cache, name, user, group) for group in groups]
        for space in spaces:
            store(cache, space, "block")
        for space in spaces:
            cache.close_space(space)


def swept(cache: BlockCache) -> list[str]:
    """The namespaces that there are when nothing is left to be done."""
    for _ in range(1000):
        if not cache.sweep():
            break
    else:
        pytest.fail("there is something left to be done for ever")
    check_integrity(cache)
    return [each.model for each in cache.namespaces]


def test_who_leaves_very_many_namespaces_loses_those_that_were_used_least_recently_and_is_told_of() -> None:
    cache = new_cache(64)
    told: list[tuple[str, object, int]] = []
    cache.left.on_cleared = lambda space, count: told.append((space.namespace.model, space.user, count))
    leave(cache, "a", "b", "c")
    assert swept(cache) == ["a", "b", "c"]
    space = cache.find_space(namespace("a"), 0)
    assert space is not None
    cache.release(lease(cache, space, "block"))
    leave(cache, "d", "e")
    assert swept(cache) == ["a", "d", "e"]
    assert told == [("b", 1000, 1), ("c", 1000, 1)]
    assert readable(cache, space, "block") == [True]
    assert cache.stats().free_bytes == 61 * PAGE


def test_nobody_loses_a_namespace_because_another_user_or_the_same_in_another_share_leaves_many() -> None:
    cache = new_cache(64)
    cache.set_shares(limits(mine=(4, None)))
    leave(cache, "theirs", user=1001)
    leave(cache, "mine")
    leave(cache, *(f"other {number}" for number in range(20)))
    assert swept(cache) == ["theirs", "mine", "other 17", "other 18", "other 19"]


def test_the_other_groups_of_a_namespace_go_with_it_unless_an_engine_or_another_user_has_them() -> None:
    cache = new_cache(64)
    leave(cache, "a", groups=(0, 1, 2))
    leave(cache, "a", groups=(3,), user=1001)
    attach(cache, "a", group=1)
    leave(cache, "b", "c")
    swept(cache)
    assert [space.group for space in cache.spaces_of(namespace("a"))] == [1, 3]


def test_what_is_leased_loaded_stored_into_or_attached_stays() -> None:
    cache = new_cache(64)
    leave(cache, "leased", "loaded", "filled", "attached", "idle")
    spaces = {space.namespace.model: space for space in cache.spaces}
    held = lease(cache, spaces["leased"], "block")
    load = cache.begin_load([(spaces["loaded"], 0, keys("block"))], None, 0.0)
    assert isinstance(load, LoadGrant)
    again = attach(cache, "filled")
    filling = begin(cache, again, keys("more"))
    cache.close_space(again)
    attach(cache, "attached")
    leave(cache, "newer")
    assert swept(cache) == ["leased", "loaded", "filled", "attached"], "what can go does, where the others cannot"
    leave(cache, "newest", "last")
    assert swept(cache) == ["leased", "loaded", "filled", "attached"]
    cache.release(held)
    cache.end_load(load)
    cache.abort_all(filling)
    leave(cache, "newest")
    assert swept(cache) == ["leased", "loaded", "attached", "newest"]


def test_a_user_who_keeps_leases_on_very_many_is_refused_new_ones_until_they_end() -> None:
    cache = new_cache(64)
    for number in range(2 * MOST):
        leave(cache, f"{number}")
        space = cache.find_space(namespace(f"{number}"), 0)
        assert space is not None
        lease(cache, space, "block")
    assert len(swept(cache)) == 2 * MOST
    with pytest.raises(LimitExceeded, match="release the leases"):
        attach(cache, "one more")
    leave(cache, "theirs", user=1001)
    cache.close_space(attach(cache, "0"))
    cache.drop_owner("o")
    assert len(swept(cache)) == MOST + 1
    leave(cache, "one more")


def test_namespaces_of_nobody_known_are_not_counted() -> None:
    """Those of an earlier run: it has kept no more than there are entries for."""
    cache = new_cache(64)
    leave(cache, *(f"{number}" for number in range(3 * MOST)), user=None)
    assert len(swept(cache)) == 3 * MOST
    leave(cache, "0", "1", "2", "3")
    assert swept(cache) == [f"{number}" for number in range(1, 3 * MOST)]


def test_one_step_looks_at_a_few_of_very_many_that_are_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_spaces, "LOOKED_AT", 2)
    cache = new_cache(64)
    leave(cache, *(f"{number}" for number in range(2 * MOST)))
    for space in cache.spaces[:3]:
        lease(cache, space, "block")
    cleared = []
    cache.left.on_cleared = lambda space, count: cleared.append(space.namespace.model)
    assert not cache.sweep()
    assert not cleared
    for _ in range(20):
        cache.sweep()
    assert cleared == ["3", "4", "5"]
    check_integrity(cache)

"""Leases of one user are limited; what is over is answered without a lease, and counted. Kept blocks are looked up
before the daemon is ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvsidecar.cache import grants
from kvsidecar.core import lookups as module
from kvsidecar.core.hashes import PackedHashes
from kvsidecar.core.lookups import LookupAnswer, LookupService
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.errors import InvalidRequest
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, limits, namespace, new_cache, open_space, store

NAMES = keys(*range(4))
USERS = {b"a1": [b"a1", b"a2"], b"a2": [b"a1", b"a2"], b"b": [b"b"]}


class World:
    def __init__(self, slots: int = 8) -> None:
        self.cache = new_cache(slots)
        self.metrics = Metrics("host")
        self.readiness = DaemonReadiness(1 << 20)
        self.readiness.pinning()
        self.readiness.become_ready()
        self.lookups = LookupService(
            self.cache, self.readiness, self.metrics, lambda: 0.0, lease_max=60.0, owners_of=USERS.__getitem__
        )
        store(self.cache, open_space(self.cache), *range(4))

    def lookup(self, owner: bytes | None, blocks: int = 1) -> LookupAnswer:
        packed = PackedHashes(b"".join(NAMES[:blocks]), 32)
        return self.lookups.lookup(namespace(), [(0, packed)], LookupMode.PREFIX, lease_seconds=9, owner=owner)

    @property
    def limited(self) -> float:
        return self.metrics.value("kvsidecar_refusals_total", reason="limit")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "MAX_LEASES", 3)
    monkeypatch.setattr(module, "MAX_LEASED_BLOCKS", 6)
    monkeypatch.setattr(grants, "LEAST_ROOM", 1)
    made = World()
    yield made
    check_integrity(made.cache)


def test_leases_are_counted_over_all_connections_of_a_user(world: World) -> None:
    taken = [world.lookup(owner) for owner in (b"a1", b"a2", b"a2", b"a1")]
    assert [each.lease is not None for each in taken] == [True, True, True, False]
    assert (taken[-1].groups[0].hits, taken[-1].lease_seconds) == (1, 0.0), "the answer itself is the same"
    assert world.limited == 1
    assert world.lookup(b"b").lease is not None
    assert world.lookup(None).lease is not None
    assert taken[1].lease is not None
    world.lookups.release(taken[1].lease)
    assert world.lookup(b"a1").lease is not None


def test_blocks_in_leases_are_counted_and_given_back_with_their_owner(world: World) -> None:
    assert world.lookup(b"a1", 4).lease is not None
    assert world.lookup(b"a2", 3).lease is None
    assert world.lookup(b"a2", 2).lease is not None
    world.cache.drop_owner(b"a1")
    assert world.lookup(b"a2", 4).lease is not None
    assert world.limited == 1


def test_a_lease_lasts_no_longer_than_the_daemon_allows(world: World) -> None:
    packed = PackedHashes(NAMES[0], 32)
    answer = world.lookups.lookup(namespace(), [(0, packed)], LookupMode.PREFIX, lease_seconds=1e9, owner=b"b")
    assert answer.lease is not None
    assert answer.lease_seconds == 60.0
    assert world.lookups.renew(answer.lease, 1e9) == 60.0
    assert world.cache.lease(answer.lease, 59.9) is not None
    assert world.cache.lease(answer.lease, 60.0) is None


def test_hits_that_cannot_be_leased_because_of_a_guarantee_are_answered_and_counted(world: World) -> None:
    world.cache.set_shares(limits(model=(0, None), other=(8, None)))
    answer = world.lookup(b"b", 4)
    assert (answer.groups[0].hits, answer.lease, answer.lease_seconds) == (4, None, 0.0)
    assert world.metrics.value("kvsidecar_refusals_total", reason="quota") == 1
    assert world.limited == 0


def test_kept_blocks_are_looked_up_and_leased_before_the_daemon_is_ready(world: World) -> None:
    world.readiness = world.lookups.readiness = DaemonReadiness(1 << 20)
    world.readiness.pinning(pinned_bytes=2 * PAGE)
    world.cache.reader.below = 2 * PAGE
    declined = world.lookup(b"b", 4)
    assert (declined.ready, declined.groups[0].hits, declined.lease) == (False, 0, None)
    assert world.metrics.value("kvsidecar_refusals_total", reason="not_ready") == 1
    world.readiness.serve_kept(True)
    found = world.lookup(b"b", 4)
    assert (found.ready, found.groups[0].hits) == (True, 2)
    assert found.lease is not None
    world.readiness.serve_kept(False)
    assert not world.lookup(b"b", 4).ready


def test_a_touch_is_a_use_of_the_head_last_and_no_lookup(world: World) -> None:
    """A prompt that was stored in pieces: without it, the pieces go in the order in which they came, the head first."""
    space, now = open_space(world.cache), PackedHashes(b"".join(keys(*range(10, 14))), 32)
    store(world.cache, space, 10, 11)
    store(world.cache, space, 12, 13)
    store(world.cache, space, *range(4))  # used again: they are younger
    answer = world.lookups.lookup(namespace(), [(0, now)], LookupMode.BITMAP, touch=True)
    assert (answer.groups[0].hits, answer.lease) == (4, None)
    assert world.cache.held(None) == (0, 0)
    assert world.metrics.value("kvsidecar_lookup_blocks_total", result="hit") == 0
    store(world.cache, space, *range(20, 26))
    assert world.lookups.lookup(namespace(), [(0, now)], LookupMode.PREFIX).groups[0].hits == 2


@pytest.mark.parametrize("mode", LookupMode)
def test_a_lookup_looks_for_no_more_blocks_than_one_may_and_misses_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch, mode: LookupMode
) -> None:
    monkeypatch.setattr(module, "MAX_LOOKUP_BLOCKS", 5)
    other = open_space(world.cache, group=1)
    store(world.cache, other, *range(4))
    packed = [PackedHashes(b"".join(keys(*range(count))), 32) for count in (4, 4, 1)]
    answer = world.lookups.lookup(namespace(), [(0, packed[0]), (1, packed[1]), (2, packed[2])], mode, owner=b"b")
    assert [each.hits for each in answer.groups] == [2, 2, 0]
    if mode is LookupMode.BITMAP:
        assert [list(each.found) for each in answer.groups] == [[True] * 2 + [False] * 2] * 2 + [[False]]
    assert world.limited == 1
    answer = world.lookups.lookup(namespace(), [(0, NAMES), (1, NAMES[:1])], mode)
    assert [each.hits for each in answer.groups] == [4, 1]
    assert world.limited == 1


def test_of_a_long_touch_only_what_is_looked_for_counts_as_used(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOOKUP_BLOCKS", 2)
    packed = PackedHashes(b"".join(NAMES), 32)
    world.lookups.lookup(namespace(), [(0, packed)], LookupMode.PREFIX, touch=True)
    store(world.cache, open_space(world.cache, "other"), *range(6))
    assert world.cache.lookup(world.cache.spaces[0], NAMES, LookupMode.BITMAP) == [True, True, False, False]


def tailed(world: World, tails: list[int], chain: int = 6, lease: bool = True) -> LookupAnswer:
    """Of 6 blocks, the first 4 are there in group 0, and all in group 1."""
    six = PackedHashes(b"".join(keys(*range(6))), 32)
    groups = [(0, six.part(0, chain)), *((1, six) for _ in tails[1:])]
    seconds = 9.0 if lease else 0.0
    return world.lookups.lookup(namespace(), groups, LookupMode.BITMAP, lease_seconds=seconds, owner=b"b", tails=tails)


@pytest.fixture
def two_groups(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(grants, "LEAST_ROOM", 1)
    world = World(slots=16)
    store(world.cache, open_space(world.cache, group=1), *range(6))
    return world


@pytest.mark.parametrize("lease", [True, False])
@pytest.mark.parametrize(
    ("chain", "tail", "first", "count"), [(6, 2, 2, 3), (3, 2, 1, 3), (6, 5, 0, 5), (6, 6, 0, 6), (6, 1 << 32, 0, 6)]
)
def test_a_tail_is_looked_for_at_the_end_of_what_other_groups_have_and_one_block_behind(
    two_groups: World, chain: int, tail: int, first: int, count: int, lease: bool
) -> None:
    answer = tailed(two_groups, [0, tail], chain, lease)
    whole, end = answer.groups
    assert list(whole.found) == [each < 4 for each in range(chain)]
    assert (end.group, end.first, list(end.found)) == (1, first, [True] * count)
    assert two_groups.cache.held(b"b") == ((1, min(chain, 4) + count) if lease else (0, 0)), "what is found is leased"


def test_the_tail_is_that_of_the_group_that_has_the_least(two_groups: World) -> None:
    six = PackedHashes(b"".join(keys(*range(6))), 32)
    groups = [(1, six), (1, six), (0, six.part(0, 5))]
    answer = two_groups.lookups.lookup(namespace(), groups, LookupMode.BITMAP, tails=[0, 1, 0])
    assert [(each.first, len(each.found)) for each in answer.groups] == [(0, 6), (3, 2), (0, 5)]


def test_where_nothing_is_there_the_tail_is_the_first_block(two_groups: World) -> None:
    six = PackedHashes(b"".join(keys(*range(6))), 32)
    answer = two_groups.lookups.lookup(namespace(), [(2, six), (1, six)], LookupMode.BITMAP, tails=[0, 2])
    assert [(each.hits, each.first, len(each.found)) for each in answer.groups] == [(0, 0, 6), (1, 0, 1)]


def test_tails_need_a_group_without_one_and_are_within_the_bound_of_a_lookup(
    two_groups: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="has a group without one"):
        tailed(two_groups, [1, 1])
    monkeypatch.setattr(module, "MAX_LOOKUP_BLOCKS", 9)
    assert tailed(two_groups, [0, 2]).groups[1].hits == 3
    with pytest.raises(InvalidRequest, match="at most 9 blocks"):
        tailed(two_groups, [0, 3])


def test_a_daemon_that_is_not_ready_says_so_of_tails_too(two_groups: World) -> None:
    two_groups.readiness.drain("for an update")
    answer = tailed(two_groups, [0, 2])
    assert (answer.ready, [each.hits for each in answer.groups]) == (False, [0, 0])

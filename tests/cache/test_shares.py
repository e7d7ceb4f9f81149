"""Shares of the pool: what each may have, whose blocks go, and that no request takes a guaranteed byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache import block_cache, shares
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import UNASSIGNED, Eviction, LookupMode, Priority
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    Limits,
    begin,
    keys,
    lease,
    limits,
    names_readable,
    namespace,
    new_cache,
    open_space,
    readable,
    store,
    table_of,
)
from tests.marks import examples, long


def two_teams(pool: int = 8, **shares: Limits) -> tuple[BlockCache, Space, Space]:
    cache = new_cache(pool)
    cache.set_shares(limits(**(shares or {"a": (4, None), "b": (2, None)})))
    return cache, open_space(cache, "a"), open_space(cache, "b")


def fill(cache: BlockCache, space: Space, count: int) -> None:
    """One store after the other: what is being filled could not be given back."""
    for name in range(count):
        store(cache, space, name)


def used(cache: BlockCache) -> dict[str, int]:
    """Pages by share."""
    return {share.name: share.used // PAGE for share in cache.shares}


def test_a_share_below_its_guarantee_does_not_evict_its_own_old_blocks() -> None:
    cache, a, b = two_teams()
    store(cache, a, "old")
    fill(cache, b, 7)
    store(cache, a, "new")
    assert names_readable(cache, a, "old", "new") == ["old", "new"]


def test_between_borrowers_the_least_recently_used_block_goes() -> None:
    cache, a, b = two_teams(8, a=(1, None), b=(1, None))
    store(cache, a, 0, 1, 2, 3)
    store(cache, b, 0, 1, 2, 3)
    store(cache, b, 4)
    assert len(names_readable(cache, a, *range(4))) == 3
    assert len(names_readable(cache, b, *range(5))) == 5


def test_a_store_beyond_the_maximum_evicts_its_own_though_there_is_room() -> None:
    cache, a, b = two_teams(8, a=(0, 3), b=(0, None))
    store(cache, b, "b")
    for name in range(6):
        store(cache, a, name)
        assert used(cache)["a"] <= 3
    assert names_readable(cache, a, *range(6)) == [3, 4, 5]
    assert readable(cache, b, "b") == [True]
    assert cache.begin_store([(a, 0, keys(*range(10, 14)))]) is Refusal.QUOTA, "more than the maximum at once"
    held = lease(cache, a, 3, 4, 5) if readable(cache, a, 3, 4, 5) == [True] * 3 else None
    assert held is not None
    assert cache.begin_store([(a, 0, keys("x"))]) is Refusal.QUOTA, "all of its own is leased"
    assert used(cache)["a"] == 3
    check_integrity(cache)


def test_borrowed_bytes_are_leased_and_loaded_only_as_far_as_no_guarantee_needs_them() -> None:
    cache, a, b = two_teams()
    fill(cache, b, 8)
    granted, hits = cache.lookup_and_lease([(b, keys(*range(5)))], LookupMode.PREFIX, 0, 10, "o")
    assert granted is None, "a could not take its four pages back before the lease ends"
    assert hits == [[True] * 5]
    assert cache.begin_load([(b, 0, keys(*range(5)))], None, 0) is Refusal.QUOTA
    lease(cache, b, 0, 1, 2, 3)
    lease(cache, b, 0, 1, 2, 3)  # nothing more is in use
    assert isinstance(cache.begin_load([(b, 0, keys(*range(4)))], None, 0), LoadGrant)
    assert cache.begin_load([(b, 0, keys(4))], None, 0) is Refusal.QUOTA
    store(cache, a, 0, 1, 2, 3)
    check_integrity(cache)


def test_a_reload_moves_the_bytes_and_the_sweep_brings_down_what_is_over() -> None:
    cache, a, _ = two_teams(8, a=(0, None), b=(0, None))
    fill(cache, a, 8)
    cache.set_shares(limits(a=(1, 3), b=(2, None)))
    assert used(cache) == {"a": 8, "b": 0, UNASSIGNED: 0}
    assert cache.begin_store([(a, 0, keys("x"))]) is Refusal.QUOTA
    check_integrity(cache)
    while cache.sweep(2):
        check_integrity(cache)
    assert used(cache)["a"] == 3
    store(cache, a, "x")
    cache.set_shares(limits(c=(1, None)))
    assert used(cache) == {"c": 0, UNASSIGNED: 3}
    cache.set_shares([])
    check_integrity(cache)


def test_very_many_namespaces_are_given_their_new_shares_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, 10,000 of them stopped the daemon for 300 ms."""
    monkeypatch.setattr(shares, "MATCHES", 8)
    cache = new_cache(48)
    cache.set_shares(limits(n0=(4, None)))
    spaces = [open_space(cache, f"n{number}") for number in range(12)]
    for space in spaces:
        store(cache, space, *range(4))
    held = lease(cache, spaces[11], 0)
    cache.set_shares(limits(n0=(2, None), n1=(4, None), n11=(4, 4)))
    moved = []
    while cache.sweep():
        check_integrity(cache)
        moved.append(sum(not space.share.retired for space in spaces))
    assert moved == [4, 6, 8, 10, 12, 12]
    assert used(cache) == {"n0": 4, "n1": 4, "n11": 4, UNASSIGNED: 36}
    cache.release(held)
    cache.set_shares(limits(n1=(1, 2)))
    cache.set_shares(limits(n2=(1, 2)))  # before the other has come to all
    assert cache.clear(namespace("n11"), sweep=0) == 4
    cache.close_space(spaces[5])
    store(cache, spaces[11], "x")
    while cache.sweep():
        check_integrity(cache)
    assert used(cache) == {"n2": 2, UNASSIGNED: 41}


def test_what_was_guaranteed_is_not_taken_while_shares_are_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MATCHES", 1)
    cache, a, b = two_teams(8, a=(4, None), b=(2, None))
    fill(cache, a, 4)
    fill(cache, b, 4)
    monkeypatch.setattr(block_cache, "TRIES", 0)
    cache.set_shares(limits(b=(2, None), a=(4, None)))
    assert [a.share.retired, b.share.retired] == [False, True]
    cache.set_shares(limits(b=(2, None), a=(4, None)))
    assert [a.share.retired, b.share.retired] == [False, True]
    store(cache, b, "x", "y")
    assert names_readable(cache, a, 0, 1, 2, 3) == [0, 1, 2, 3]
    cache.set_shares(limits(a=(4, None), b=(2, None)))
    cache.set_shares(limits(c=(1, None), a=(4, None), b=(2, None)))
    assert [a.share.retired, b.share.retired] == [False, True]
    for first in (10, 14):
        store(cache, a, *range(first, first + 4))
    assert len(names_readable(cache, b, *range(4), "x", "y")) == 2
    check_integrity(cache)


def test_a_slab_of_another_size_goes_only_if_all_of_it_is_borrowed() -> None:
    cache = new_cache(4, 2)
    cache.set_shares(limits(a=(2, None)))
    small, large = open_space(cache, "a"), open_space(cache, "b", shards=(2,))
    fill(cache, small, 4)
    store(cache, large, 0)
    assert used(cache) == {"a": 2, UNASSIGNED: 2}
    store(cache, large, 1)
    assert names_readable(cache, large, 0, 1) == [1]
    assert used(cache) == {"a": 2, UNASSIGNED: 2}


def test_what_is_cleared_is_paid_for_by_nobody() -> None:
    cache, a, _ = two_teams(8, a=(0, 4), b=(0, None))
    fill(cache, a, 4)
    cache.clear(namespace("a"), sweep=0)
    assert used(cache)["a"] == 0
    store(cache, a, *range(10, 14))
    assert used(cache)["a"] == 4
    check_integrity(cache)


@long
@pytest.mark.parametrize("eviction", Eviction)
def test_an_eviction_looks_at_few_of_ten_thousand_namespaces(
    monkeypatch: pytest.MonkeyPatch, eviction: Eviction
) -> None:
    cache = BlockCache(SlotAllocator(10_000 * PAGE, 10_000 * PAGE), eviction=eviction)
    spaces = [open_space(cache, str(number)) for number in range(10_001)]
    cache.expire(0.0)
    for space in spaces[:-1]:
        store(cache, space, "one")
    cache.expire(1000.0)
    begin(cache, spaces[-1], keys("first"))  # puts the ticks right, once
    seen: list[int] = []
    original = type(spaces[0].blocks).oldest_use
    monkeypatch.setattr(
        type(spaces[0].blocks),
        "oldest_use",
        lambda blocks, *args, **named: (seen.append(blocks.number), original(blocks, *args, **named))[1],
    )
    for name in range(200, 600):
        begin(cache, spaces[-1], keys(name))
    evicted = cache.stats().evicted_blocks
    assert evicted >= 400
    assert len(seen) < 4 * evicted, f"{len(seen)} tables were looked at to evict {evicted} blocks"


MODELS = ("a", "b", "c")
POOLS = ((5, 5), (6, 2), (7, 3))
"""Pages of the pool and of a slab."""
SHARES: Sequence[dict[str, Limits]] = (
    {"a": (2, None), "b": (1, None)},
    {"a": (2, 3), "b": (2, 4)},
    {"a": (4, None)},
    {"b": (0, 2)},
    {},
    {"a": (3, 4), "b": (1, 1), "c": (1, None)},
)
names = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
models = st.sampled_from(MODELS)


class SharesMachine(RuleBasedStateMachine):
    """Any requests of three tenants, and reloads."""

    @initialize(
        shape=st.sampled_from(POOLS),
        shares=st.sampled_from(SHARES),
        eviction=st.sampled_from(Eviction),
        slowly=st.booleans(),
    )
    def start(self, shape: tuple[int, int], shares: dict[str, Limits], eviction: Eviction, *, slowly: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        if slowly:  # one space is moved, and one block let go of, in each step
            self.patch.setattr("kvsidecar.cache.shares.MATCHES", 1)
            self.patch.setattr("kvsidecar.cache.block_cache.LET_GO", 1)
            self.patch.setattr("kvsidecar.cache.block_cache.TRIES", 1000)
        self.cache, self.now = new_cache(*shape, eviction=eviction), 0.0
        self.cache.set_shares(limits(**shares))
        self.spaces = {name: open_space(self.cache, name) for name in MODELS}
        self.stores: list[StoreGrant] = []
        self.loads: list[LoadGrant] = []
        self.leases: list[int] = []

    @property
    def committed(self) -> int:
        return table_of(self.cache).shares.committed

    def request(self, model: str, what: object) -> None:
        """Whatever it was, no other share has lost a guaranteed byte, or the prospect of one."""
        del what
        share = self.spaces[model].share
        for name, before in self.before.items():
            each = self.spaces[name].share
            if each is not share:
                assert self.used(name) >= min(before, each.spared), f"{share.name} took from {each.name}"
        now, total = self.committed, table_of(self.cache).slots.total_bytes
        assert now <= max(total, self.before_committed), f"{now} of {total} bytes are guaranteed or in use"
        assert share.most is None or share.used <= max(share.most, self.before[model])

    def used(self, model: str) -> int:
        """Bytes of the slots of a tenant."""
        return sum(blocks.used_bytes for blocks in self.spaces[model].tables)

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def look(self) -> None:
        self.before = {model: self.used(model) for model in MODELS}
        self.before_committed = self.committed

    @rule(model=models, names=names, priority=st.sampled_from(Priority))
    def store(self, model: str, names: list[int], priority: Priority) -> None:
        self.look()
        space = self.spaces[model]
        share, total = space.share, table_of(self.cache).slots.total_bytes
        present = sum(readable(self.cache, space, *names))
        wanted = (len(names) - present) * PAGE
        entitled = share.used + wanted <= share.guaranteed and self.committed <= total
        grant = self.cache.begin_store([(space, 0, keys(*names))], priority=priority)
        assert isinstance(grant, StoreGrant) or not entitled, f"{grant} within the guarantee"
        if isinstance(grant, StoreGrant):
            self.stores.append(grant)
        self.request(model, grant)

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), end=st.sampled_from(["seal_all", "seal_all", "abort_all"]))
    def end_store(self, data: st.DataObject, end: str) -> None:
        grant = data.draw(st.sampled_from(self.stores))
        self.stores.remove(grant)
        getattr(self.cache, end)(grant)

    @rule(model=models, names=names, mode=st.sampled_from(LookupMode))
    def lease(self, model: str, names: list[int], mode: LookupMode) -> None:
        self.look()
        parts = [(self.spaces[model], keys(*names))]
        granted, _ = self.cache.lookup_and_lease(parts, mode, self.now, 10, "o")
        if granted is not None:
            self.leases.append(granted.id)
        self.request(model, granted)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.leases))
        self.leases.remove(one)
        assert self.cache.release(one)

    @rule(model=models, names=names)
    def load(self, model: str, names: list[int]) -> None:
        self.look()
        grant = self.cache.begin_load([(self.spaces[model], 0, keys(*names))], None, 0)
        if isinstance(grant, LoadGrant):
            self.loads.append(grant)
        self.request(model, grant)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        grant = data.draw(st.sampled_from(self.loads))
        self.loads.remove(grant)
        self.cache.end_load(grant)

    @rule(seconds=st.sampled_from([1, 9, 100]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for ended in self.cache.expire(self.now):
            self.leases.remove(ended.id)

    @rule(model=models, sweep=st.integers(0, 2))
    def clear(self, model: str, sweep: int) -> None:
        self.cache.clear(namespace(model), sweep)

    @rule(shares=st.sampled_from(SHARES))
    def reload(self, shares: dict[str, Limits]) -> None:
        self.cache.set_shares(limits(**shares))

    @rule()
    def sweep(self) -> None:
        while self.cache.sweep(2):
            pass
        for share in self.cache.shares:
            assert not share.over or not share.evictable, f"{share.name} is not brought down"

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "cache"):
            check_integrity(self.cache)


SharesMachine.TestCase.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
TestShares = pytest.mark.no_cover(SharesMachine.TestCase)

"""Priorities: within a share low blocks go before normal ones, and these before high ones; between shares they count
for nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.cache.records import Records, num_words
from kvsidecar.cache.shares import ShareLimits
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.types import EVICTION_ORDER, Priority
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    hashes_of,
    keys,
    lease,
    limits,
    names_readable,
    new_cache,
    one_space,
    open_space,
    store,
)
from tests.marks import examples

LOW, NORMAL, HIGH = EVICTION_ORDER


def store_as(cache: BlockCache, space: Space, priority: Priority, *names: int | str) -> None:
    for shard in range(space.num_shards):
        grant = cache.begin_store([(space, shard, keys(*names))], priority=priority)
        assert isinstance(grant, StoreGrant), grant
        cache.seal_all(grant)


def fill_as(cache: BlockCache, space: Space, priority: Priority, names: Iterable[int | str]) -> None:
    """One store after the other: what is being filled could not be given back."""
    for name in names:
        store_as(cache, space, priority, name)


def evicted_in_order(cache: BlockCache, space: Space, filler: Space, *names: int | str) -> list[int | str]:
    """Which of these blocks go, one after the other, as another space takes their room."""
    order: list[int | str] = []
    there = names_readable(cache, space, *names)
    for number in range(100):
        if not there:
            return order
        store_as(cache, filler, HIGH, f"filler {number}")
        check_integrity(cache)
        still = names_readable(cache, space, *names)
        order += [name for name in there if name not in still]
        there = still
    raise AssertionError(f"{there} are never evicted")


def test_the_store_of_another_shard_does_not_change_the_priority_of_a_block() -> None:
    cache = new_cache(6)
    space, filler = open_space(cache, shards=(1, 1)), open_space(cache, "filler")
    for shard, priority in ((0, LOW), (1, HIGH)):
        grant = cache.begin_store([(space, shard, keys("low"))], priority=priority)
        assert isinstance(grant, StoreGrant)
        cache.seal_all(grant)
    store(cache, space, "a", "b")
    assert evicted_in_order(cache, space, filler, "low", "a", "b")[0] == "low"


def test_an_expired_block_goes_before_any_other() -> None:
    cache, space = one_space(3)
    cache.expire(0.0)
    grant = cache.begin_store([(space, 0, keys("expired"))], ttl=5, priority=HIGH)
    assert isinstance(grant, StoreGrant)
    cache.seal_all(grant)
    store_as(cache, space, LOW, "low")
    store(cache, space, "normal")
    cache.expire(6.0)
    store(cache, space, "new")
    assert names_readable(cache, space, "expired", "low", "normal", "new") == ["low", "normal", "new"]


def test_idle_blocks_of_every_priority_expire() -> None:
    cache = new_cache(8)
    cache.set_shares([ShareLimits("m", lambda _: True, idle_ttl=64)])
    space = open_space(cache)
    cache.expire(0.0)
    for priority in Priority:
        store_as(cache, space, priority, priority.name)
    for now in range(1, 70):
        cache.expire(float(now))
    while cache.sweep():
        check_integrity(cache)
    assert cache.stats().blocks == 0


def test_high_blocks_hold_nothing_that_is_borrowed_against_another_share() -> None:
    cache = new_cache(8)
    cache.set_shares(limits(a=(2, None), b=(2, None)))
    a, b = open_space(cache, "a"), open_space(cache, "b")
    fill_as(cache, a, HIGH, range(4))
    fill_as(cache, b, NORMAL, range(4))
    fill_as(cache, b, NORMAL, [4, 5])
    assert names_readable(cache, a, *range(4)) == [2, 3], "they are older than b's"
    assert names_readable(cache, b, *range(6)) == list(range(6))
    check_integrity(cache)


def test_a_share_pays_for_its_high_blocks_with_its_own() -> None:
    cache = new_cache(8)
    cache.set_shares(limits(a=(1, None), b=(1, None)))
    a, b = open_space(cache, "a"), open_space(cache, "b")
    fill_as(cache, a, HIGH, ["high"])
    fill_as(cache, b, NORMAL, range(4))
    fill_as(cache, a, NORMAL, ["n1", "n2"])
    fill_as(cache, b, NORMAL, [4])
    fill_as(cache, b, NORMAL, [5])
    assert names_readable(cache, a, "high", "n1", "n2") == ["high", "n2"]
    assert len(names_readable(cache, b, *range(6))) == 6
    check_integrity(cache)


def test_low_blocks_do_not_shield_the_others_of_their_share() -> None:
    """With fresh low blocks a share would seem young if the age of the next victim counted."""
    cache = new_cache(8)
    cache.set_shares(limits(a=(1, None), b=(1, None)))
    a, b = open_space(cache, "a"), open_space(cache, "b")
    fill_as(cache, a, HIGH, range(4))
    fill_as(cache, b, NORMAL, range(3))
    fill_as(cache, a, LOW, ["low"])
    fill_as(cache, b, NORMAL, [3, 4])
    assert len(names_readable(cache, b, *range(5))) == 5
    assert names_readable(cache, a, *range(4), "low") == [1, 2, 3]


def test_a_low_block_does_not_stand_in_the_way_of_a_guarantee() -> None:
    """Of a's pages two are borrowed, and b is entitled to them. The large block has as many; beside the low one it
    could not go."""
    cache = new_cache(6)
    large, small, b = open_space(cache, "a large", shards=(1, 1)), open_space(cache, "a small"), open_space(cache, "b")
    store(cache, large, "large")
    store_as(cache, small, LOW, "low")
    cache.set_shares(
        [
            ShareLimits("a", lambda space: space.model.startswith("a"), PAGE),
            ShareLimits("b", lambda space: space.model == "b", 5 * PAGE),
        ]
    )
    fill_as(cache, b, NORMAL, range(3))
    store(cache, b, 3, 4)
    assert names_readable(cache, b, *range(5)) == list(range(5)), "b has evicted its own"
    assert (names_readable(cache, large, "large"), names_readable(cache, small, "low")) == ([], ["low"])
    check_integrity(cache)


def test_a_share_at_its_maximum_evicts_its_low_blocks_first() -> None:
    cache = new_cache(8)
    cache.set_shares([ShareLimits("m", lambda _: True, most=3 * PAGE)])
    space = open_space(cache)
    fill_as(cache, space, HIGH, ["h"])
    fill_as(cache, space, NORMAL, ["n"])
    fill_as(cache, space, LOW, ["l"])
    store(cache, space, "x")
    assert names_readable(cache, space, "h", "n", "l", "x") == ["h", "n", "x"]
    store(cache, space, "y")
    assert names_readable(cache, space, "h", "n", "x", "y") == ["h", "x", "y"]


def test_a_slab_of_another_size_is_cut_anew_whatever_its_blocks_are() -> None:
    cache = new_cache(4, 2)
    small, large = open_space(cache, "small"), open_space(cache, "large", shards=(2,))
    fill_as(cache, small, HIGH, range(4))
    store(cache, large, 0)
    assert names_readable(cache, small, *range(4)) == [2, 3]
    check_integrity(cache)


@pytest.mark.parametrize("shards", [(1,), (1, 1)])
@pytest.mark.parametrize("each", [1, 3], ids=["single", "many"])
def test_priorities_outlive_a_warm_restart(shards: tuple[int, ...], each: int) -> None:
    pool, slab = 12 * len(shards), 6
    memory = np.zeros(num_words(pool * PAGE, slab * PAGE), np.uint64)

    def run() -> BlockCache:
        return BlockCache(SlotAllocator(pool * PAGE, slab * PAGE), records=Records(memory, pool * PAGE, slab * PAGE))

    cache = run()
    space = open_space(cache, shards=shards)
    names = {p: [f"{p.name} {i}" for i in range(3)] for p in Priority}
    for priority in (HIGH, NORMAL, LOW):
        for at in range(0, 3, each):
            store_as(cache, space, priority, *names[priority][at : at + each])
    again = run()
    assert again.adopted.dropped == {}
    assert again.adopted.kept_blocks == 9
    check_integrity(again)
    kept, filler = open_space(again, shards=shards), open_space(again, "filler", shards=shards)
    every = [name for each_priority in names.values() for name in each_priority]
    order = evicted_in_order(again, kept, filler, *every)
    assert [str(name).split()[0] for name in order] == ["LOW"] * 3 + ["NORMAL"] * 3 + ["HIGH"] * 3


def test_a_table_that_shrinks_keeps_the_priorities() -> None:
    cache, space = one_space(2048)
    store(cache, space, *range(1500))
    for priority in (HIGH, NORMAL, LOW):
        store_as(cache, space, priority, priority.name)
    cache.clear_blocks(space, keys(*range(1500)))
    while cache.sweep():
        check_integrity(cache)
    assert space.blocks.rebuilds == 1
    for priority in Priority:
        (rows,) = space.blocks.candidates(priority)
        assert hashes_of(space.blocks.index, rows) == keys(priority.name)


def test_an_eviction_does_not_look_at_the_blocks_that_stay() -> None:
    cache, space = one_space(4096)
    store_as(cache, space, HIGH, *range(4000))
    store_as(cache, space, LOW, *range(5000, 5096))
    blocks, looked = space.blocks, 0
    original = type(blocks).candidates

    def counting(self: object, priority: Priority = NORMAL) -> object:
        nonlocal looked
        for rows in original(blocks, priority):
            looked += len(rows)
            yield rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(blocks), "candidates", counting)
        for name in range(6000, 6050):
            store_as(cache, space, LOW, name)
    assert 0 < looked < 4000, f"{looked} blocks were looked at to evict 50"
    assert names_readable(cache, space, *range(4000)) == list(range(4000))


# -- any requests ----------------------------------------------------------------------------------------------------

MODELS = ("a", "b")
names_of = st.lists(st.integers(0, 7), min_size=1, max_size=3, unique=True)
priorities = st.sampled_from(EVICTION_ORDER)


class PrioritiesMachine(RuleBasedStateMachine):
    """Any requests of two namespaces in one share, beside a model that knows each block's priority and age."""

    @initialize(pool=st.integers(4, 7), limited=st.booleans())
    def start(self, pool: int, limited: bool) -> None:
        self.cache = new_cache(pool)
        if limited:
            self.cache.set_shares([ShareLimits("m", lambda _: True, PAGE)])
        self.spaces = {name: open_space(self.cache, name) for name in MODELS}
        self.known: dict[tuple[str, int], Priority] = {}
        self.age: dict[tuple[str, int], int] = {}
        self.leases: list[tuple[int, list[tuple[str, int]]]] = []
        self.clock = 0

    def there(self) -> set[tuple[str, int]]:
        return {(m, n) for m, space in self.spaces.items() for n in names_readable(self.cache, space, *range(8))}  # type: ignore[misc]

    @rule(model=st.sampled_from(MODELS), names=names_of, priority=priorities)
    def store(self, model: str, names: list[int], priority: Priority) -> None:
        before = self.there()
        grant = self.cache.begin_store([(self.spaces[model], 0, keys(*names))], priority=priority)
        if not isinstance(grant, StoreGrant):
            assert self.there() == before
            return
        gone = before - self.there()
        leased = {each for _, held in self.leases for each in held}
        stay = before - gone - leased - {(model, name) for name in names}
        for left in gone:
            for kept in stay:
                mine, theirs = (EVICTION_ORDER.index(self.known[each]) for each in (left, kept))
                assert (mine, self.age[left]) <= (theirs, self.age[kept]), f"{left} went before {kept}"
        for each in gone:
            del self.known[each]
        self.cache.seal_all(grant)
        self.clock += 1
        for name in names:
            self.known.setdefault((model, name), priority)
            self.age[model, name] = self.clock

    @rule(model=st.sampled_from(MODELS), names=names_of)
    def lease(self, model: str, names: list[int]) -> None:
        held = [(model, name) for name in names if (model, name) in self.there()]
        if held:
            self.leases.append((lease(self.cache, self.spaces[model], *(name for _, name in held)), held))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.leases))
        self.leases.remove(one)
        assert self.cache.release(one[0])
        self.clock += 1
        for each in one[1]:
            self.age[each] = self.clock

    @rule(model=st.sampled_from(MODELS))
    def clear(self, model: str) -> None:
        self.cache.clear(self.spaces[model].namespace)
        self.known = {each: priority for each, priority in self.known.items() if each[0] != model}
        self.leases = [(number, [each for each in held if each[0] != model]) for number, held in self.leases]

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "cache"):
            check_integrity(self.cache)
            assert self.there() == set(self.known)


PrioritiesMachine.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestPriorities = pytest.mark.no_cover(PrioritiesMachine.TestCase)


def test_a_cleared_table_is_passed_over_when_it_is_the_only_one_of_its_priority() -> None:
    """Its queue is left as it was, and names blocks that are gone or leased."""
    machine = PrioritiesMachine()
    machine.start(pool=4, limited=False)
    machine.store(model="a", names=[0, 1], priority=Priority.LOW)
    machine.lease(model="a", names=[0])
    machine.clear(model="a")
    machine.store(model="b", names=[0, 1, 2], priority=Priority.NORMAL)
    machine.store(model="a", names=[0], priority=Priority.LOW)
    machine.everything_adds_up()

"""Fetches and writes over a real cache, with calls of one or two tiers that end in any order, late, or not well."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.core.metrics import Metrics
from kvsidecar.core.tier_fetches import INTEREST_SECONDS, FetchGain, shard_space
from kvsidecar.core.tiering import Tiering, TierPlan
from kvsidecar.tiers.policy import Admission
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, open_space
from tests.core.scripted_tier import Call, ScriptedTier
from tests.marks import examples

SLOTS = 6
NAMES = 5
QUEUE = 4 * PAGE
prefixes = st.integers(1, NAMES).map(lambda length: list(range(length)))
index = st.integers(0, 99)


class Counts:
    """Of what is refused."""

    def __init__(self) -> None:
        self.unfetched = self.unwritten = self

    def labels(self, tier: str, reason: str) -> Counts:
        return self

    def inc(self, blocks: int) -> None:
        assert blocks > 0, f"a reason was counted for {blocks} blocks"


class TieringMachine(RuleBasedStateMachine):
    """Contents of slots are (space, shard, block, generation of the last clear before the store)."""

    TIERS = 1
    admission = Admission.ALL

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.memory: dict[int, Any] = dict.fromkeys(range(0, SLOTS * PAGE, PAGE), "nothing")
        self.cache = BlockCache(SlotAllocator(SLOTS * PAGE, 2 * PAGE))
        self.spaces = [open_space(self.cache, "one", shards=(1, 1)), open_space(self.cache, "other")]
        self.tiers = [ScriptedTier(self.memory, f"tier {number}") for number in range(self.TIERS)]
        self.tiering = Tiering(
            self.cache,
            [TierPlan(cast(Tier, tier), self.admission) for tier in self.tiers],
            cast(Metrics, Counts()),
            lambda: self.now,
            chunk_bytes=2 * PAGE,
            queue_bytes=QUEUE * self.TIERS,
            soon=lambda call: call(),
        )
        self.writes = [each.writes for each in self.tiering._tiers]
        self.fetches = [each.fetches for each in self.tiering._tiers]
        self.cleared = [0, 0]
        self.stores: list[tuple[StoreGrant, int]] = []
        self.loads: list[tuple[LoadGrant, int, int, list[int]]] = []

    # -- engines -------------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), names=prefixes, shard=st.integers(0, 1))
    def store(self, which: int, names: list[int], shard: int) -> None:
        space = self.spaces[which]
        shard %= space.num_shards
        grant = self.cache.begin_store([(space, shard, keys(*names))])
        if not isinstance(grant, StoreGrant):
            return
        for at, slot in zip(grant.parts[0].index.tolist(), grant.parts[0].slots.tolist(), strict=True):
            self.memory[slot] = (which, shard, names[at], self.cleared[which])
        self.stores.append((grant, which))

    @rule(which=st.integers(0, 1), names=prefixes)
    def store_whole(self, which: int, names: list[int]) -> None:
        for shard in range(self.spaces[which].num_shards):
            before = len(self.stores)
            self.store(which, names, shard)
            if len(self.stores) > before:
                self.end_store(before, ok=True)

    @rule(which=st.integers(0, 1))
    def evict(self, which: int) -> None:
        """As if others had needed the room; the tier keeps what it has."""
        self.cache.clear(self.spaces[which].namespace)

    @rule(which=st.integers(0, 1), names=prefixes, evicted=st.booleans(), written=st.booleans())
    def fetch(self, which: int, names: list[int], evicted: bool, written: bool) -> None:
        """Args: written: long ago, all of them."""
        if written and not any(each._then_forget for each in self.writes):
            for name in names:
                kept = self.tiers[name % self.TIERS].kept
                for shard in range(self.spaces[which].num_shards):
                    content = (which, shard, name, self.cleared[which])
                    kept[shard_space(self.spaces[which], shard), keys(name)[0]] = content
        if evicted:
            self.evict(which)
        for tier in self.tiers:
            tier.off = ""
            before = len(tier.finds)
            self.look_up(which, names)
            if len(tier.finds) > before:
                tier.end_find(tier.finds[before])

    @precondition(lambda self: self.stores)
    @rule(which=index, ok=st.booleans())
    def end_store(self, which: int, ok: bool) -> None:
        grant, _ = self.stores.pop(which % len(self.stores))
        if ok:
            self.cache.seal_all(grant)
            self.tiering.stored(grant)
        else:
            self.cache.abort_all(grant)

    @rule(which=st.integers(0, 1), names=prefixes, shard=st.integers(0, 1))
    def load(self, which: int, names: list[int], shard: int) -> None:
        space = self.spaces[which]
        shard %= space.num_shards
        grant = self.cache.begin_load([(space, shard, keys(*names))], None, self.now)
        if isinstance(grant, LoadGrant):
            self.loads.append((grant, which, shard, names))

    @precondition(lambda self: self.loads)
    @rule(which=index)
    def end_load(self, which: int) -> None:
        grant, space, shard, names = self.loads.pop(which % len(self.loads))
        for slot, name in zip(grant.slots[0].tolist(), names, strict=True):
            assert self.memory[slot][:3] == (space, shard, name), "a load has read other bytes"
        self.tiering.used(grant)
        self.cache.end_load(grant)

    @rule(which=st.integers(0, 1), names=prefixes)
    def look_up(self, which: int, names: list[int]) -> None:
        space = self.spaces[which]
        hits = self.cache.lookup(space, keys(*names), LookupMode.PREFIX)
        if False in hits:
            coming = self.tiering.coming(space, keys(*names), hits.index(False), 1e9, 0.0)
            assert coming.blocks <= NAMES

    @rule(which=st.integers(0, 1), names=prefixes, first=st.integers(0, NAMES - 1))
    def choose(self, which: int, names: list[int], first: int) -> None:
        """Fetch what the tier has from a block on, as for a window."""
        space = self.spaces[which]
        hits = self.cache.lookup(space, keys(*names), LookupMode.BITMAP)
        if False not in hits:
            return
        held = self.tiering.held(space, keys(*names), hits).places
        assert not any(hits[place] for place in held)
        wanted = [keys(*names)[place] for place in held][first:]
        if wanted:
            assert self.tiering.coming(space, wanted, 0, 1e9, 0.0, FetchGain(1, 1)).blocks <= NAMES

    @rule(which=st.integers(0, 1), all_of_them=st.booleans())
    def clear(self, which: int, all_of_them: bool) -> None:
        namespace = None if all_of_them else self.spaces[which].namespace
        self.tiering.forget(namespace)
        self.cache.clear(namespace)
        for each in range(2) if all_of_them else [which]:
            self.cleared[each] += 1

    # -- the tier ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(tier.finds for tier in self.tiers))
    @rule(which=index, ok=st.booleans())
    def end_find(self, which: int, ok: bool) -> None:
        tier, call = self.one(which, "finds")
        tier.end_find(call, ok=ok)

    @precondition(lambda self: any(tier.reads for tier in self.tiers))
    @rule(which=index, ok=st.booleans())
    def end_read(self, which: int, ok: bool) -> None:
        tier, call = self.one(which, "reads")
        tier.end_read(call, ok=ok)

    @precondition(lambda self: any(tier.reads for tier in self.tiers))
    @rule(which=index)
    def read_is_late(self, which: int) -> None:
        tier, call = self.one(which, "reads")
        tier.late(call)

    @precondition(lambda self: any(tier.reads for tier in self.tiers))
    @rule(which=index)
    def read_so_far(self, which: int) -> None:
        for slot in self.one(which, "reads")[1].slots:
            self.memory[slot] = "half"

    @precondition(lambda self: any(tier.writes for tier in self.tiers))
    @rule(which=index, ok=st.booleans(), full=st.booleans())
    def end_write(self, which: int, ok: bool, full: bool) -> None:
        tier, call = self.one(which, "writes")
        tier.end_write(call, ok=ok, full=full)

    @rule(which=index)
    def off_or_on(self, which: int) -> None:
        tier = self.tiers[which % self.TIERS]
        tier.off = "" if tier.off else "out of order"

    def one(self, which: int, calls: str) -> tuple[ScriptedTier, Call]:
        """A call of one of these that have not ended, and its tier."""
        found = [(tier, call) for tier in self.tiers for call in getattr(tier, calls)]
        return found[which % len(found)]

    @rule(seconds=st.sampled_from([0.01, INTEREST_SECONDS + 0.01]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_counted_wrong(self) -> None:
        check_integrity(self.cache)
        for fetches, writes in zip(self.fetches, self.writes, strict=True):
            assert fetches.waiting_blocks >= 0
            assert fetches.reading_bytes >= 0
            assert writes.writing_bytes >= 0
            assert writes.writing_bytes <= QUEUE

    @invariant()
    def what_is_readable_is_what_was_stored_since_the_last_clear(self) -> None:
        for which, space in enumerate(self.spaces):
            for name in range(NAMES):
                if self.cache.lookup(space, keys(name), LookupMode.BITMAP) != [True]:
                    continue
                (row,) = space.blocks.index.find(space.blocks.index.keys(keys(name))).tolist()
                for shard in range(space.num_shards):
                    content = self.memory[int(space.blocks.slots[shard, row])]
                    assert content[:3] == (which, shard, name)
                    assert content[3] == self.cleared[which], "a block came back that had been cleared"

    def teardown(self) -> None:
        """Every call ends, and nothing is left of any."""
        for tier in self.tiers:
            for find in tuple(tier.finds):
                tier.end_find(find)
        for tier in self.tiers:
            while tier.reads:
                tier.end_read(tier.reads[0])
            while tier.writes:
                tier.end_write(tier.writes[0])
        for grant, _ in self.stores:
            self.cache.abort_all(grant)
        for load, *_ in self.loads:
            self.cache.end_load(load)
        for fetches, writes in zip(self.fetches, self.writes, strict=True):
            assert fetches.waiting_blocks == fetches.reading_bytes == writes.writing_bytes == 0
        stats = self.cache.stats()
        assert (stats.reserved_bytes, stats.leased_bytes) == (0, 0)
        check_integrity(self.cache)


class TwoTiersMachine(TieringMachine):
    TIERS = 2


TestTieringMachine = pytest.mark.no_cover(TieringMachine.TestCase)
TestTieringMachine.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestTwoTiersMachine = pytest.mark.no_cover(TwoTiersMachine.TestCase)
TestTwoTiersMachine.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


class OnEvictMachine(TieringMachine):
    admission = Admission.ON_EVICT


TestOnEvictMachine = pytest.mark.no_cover(OnEvictMachine.TestCase)
TestOnEvictMachine.settings = TestTieringMachine.settings

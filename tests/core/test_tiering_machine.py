"""Fetches and writes over a real cache, with calls of the tier that end in any order, late, or not well."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvsidecar.cache.block import LoadGrant, StoreGrant
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.core.fetches import INTEREST_SECONDS, Fetches, shard_space
from kvsidecar.core.writes import Writes
from kvsidecar.tiers.policy import Admission, FetchRefusal, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import LookupMode
from tests.cache.integrity import check_integrity
from tests.cache.support import PAGE, keys, open_space
from tests.core.scripted_tier import ScriptedTier

SLOTS = 6
NAMES = 5
BIT = 1
QUEUE = 4 * PAGE
prefixes = st.integers(1, NAMES).map(lambda length: list(range(length)))
index = st.integers(0, 99)


class TieringMachine(RuleBasedStateMachine):
    """Contents of slots are (space, shard, block, generation of the last clear before the store)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.memory: dict[int, Any] = dict.fromkeys(range(0, SLOTS * PAGE, PAGE), "nothing")
        self.cache = BlockCache(SlotAllocator(SLOTS * PAGE, 2 * PAGE))
        self.spaces = [open_space(self.cache, "one", shards=(1, 1)), open_space(self.cache, "other")]
        self.tier = ScriptedTier(self.memory)
        self.unfetched: dict[FetchRefusal, int] = {}
        self.unwritten: dict[WriteRefusal, int] = {}
        tier = cast(Tier, self.tier)
        self.writes = Writes(
            self.cache,
            tier,
            BIT,
            Admission.ALL,
            WriteBudget(None, 0),
            lambda: self.now,
            self.count(self.unwritten),
            chunk_bytes=2 * PAGE,
            queue_bytes=QUEUE,
        )
        self.fetches = Fetches(
            self.cache,
            tier,
            BIT,
            lambda: self.now,
            self.count(self.unfetched),
            may_be_cleared=self.writes.may_bring_back,
            chunk_bytes=2 * PAGE,
        )
        self.cleared = [0, 0]
        self.stores: list[tuple[StoreGrant, int]] = []
        self.loads: list[tuple[LoadGrant, int, int, list[int]]] = []

    @staticmethod
    def count(counts: dict[Any, int]) -> Any:
        def refused(reason: Any, blocks: int) -> None:
            assert blocks > 0, f"{reason} was counted for {blocks} blocks"
            counts[reason] = counts.get(reason, 0) + blocks

        return refused

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
        if written and not self.writes._then_forget:
            for name in names:
                for shard in range(self.spaces[which].num_shards):
                    content = (which, shard, name, self.cleared[which])
                    self.tier.kept[shard_space(self.spaces[which], shard), keys(name)[0]] = content
        if evicted:
            self.evict(which)
        self.tier.off = ""
        before = len(self.tier.finds)
        self.look_up(which, names)
        if len(self.tier.finds) > before:
            self.tier.end_find(self.tier.finds[before])

    @precondition(lambda self: self.stores)
    @rule(which=index, ok=st.booleans())
    def end_store(self, which: int, ok: bool) -> None:
        grant, _ = self.stores.pop(which % len(self.stores))
        if ok:
            self.cache.seal_all(grant)
            self.writes.stored(grant)
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
        self.writes.used(grant)
        self.cache.end_load(grant)

    @rule(which=st.integers(0, 1), names=prefixes)
    def look_up(self, which: int, names: list[int]) -> None:
        space = self.spaces[which]
        hits = self.cache.lookup(space, keys(*names), LookupMode.PREFIX)
        if False in hits:
            coming = self.fetches.coming(space, keys(*names), hits.index(False), 1e9)
            assert coming.blocks <= NAMES

    @rule(which=st.integers(0, 1), all_of_them=st.booleans())
    def clear(self, which: int, all_of_them: bool) -> None:
        namespace = None if all_of_them else self.spaces[which].namespace
        self.fetches.forget(namespace)
        self.writes.forget(namespace)
        self.cache.clear(namespace)
        for each in range(2) if all_of_them else [which]:
            self.cleared[each] += 1

    # -- the tier ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.tier.finds)
    @rule(which=index, ok=st.booleans())
    def end_find(self, which: int, ok: bool) -> None:
        self.tier.end_find(self.tier.finds[which % len(self.tier.finds)], ok=ok)

    @precondition(lambda self: self.tier.reads)
    @rule(which=index, ok=st.booleans())
    def end_read(self, which: int, ok: bool) -> None:
        self.tier.end_read(self.tier.reads[which % len(self.tier.reads)], ok=ok)

    @precondition(lambda self: self.tier.reads)
    @rule(which=index)
    def read_is_late(self, which: int) -> None:
        self.tier.late(self.tier.reads[which % len(self.tier.reads)])

    @precondition(lambda self: self.tier.reads)
    @rule(which=index)
    def read_so_far(self, which: int) -> None:
        for slot in self.tier.reads[which % len(self.tier.reads)].slots:
            self.memory[slot] = "half"

    @precondition(lambda self: self.tier.writes)
    @rule(which=index, ok=st.booleans(), full=st.booleans())
    def end_write(self, which: int, ok: bool, full: bool) -> None:
        self.tier.end_write(self.tier.writes[which % len(self.tier.writes)], ok=ok, full=full)

    @rule()
    def off_or_on(self) -> None:
        self.tier.off = "" if self.tier.off else "out of order"

    @rule(seconds=st.sampled_from([0.01, INTEREST_SECONDS + 0.01]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # -- what must hold ------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_counted_wrong(self) -> None:
        check_integrity(self.cache)
        assert self.fetches.waiting_blocks >= 0
        assert self.fetches.reading_bytes >= 0
        assert self.writes.writing_bytes >= 0
        assert self.writes.writing_bytes <= QUEUE

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
        for find in tuple(self.tier.finds):
            self.tier.end_find(find)
        while self.tier.reads:
            self.tier.end_read(self.tier.reads[0])
        while self.tier.writes:
            self.tier.end_write(self.tier.writes[0])
        for grant, _ in self.stores:
            self.cache.abort_all(grant)
        for load, *_ in self.loads:
            self.cache.end_load(load)
        assert self.fetches.waiting_blocks == self.fetches.reading_bytes == self.writes.writing_bytes == 0
        stats = self.cache.stats()
        assert (stats.reserved_bytes, stats.leased_bytes) == (0, 0)
        check_integrity(self.cache)


TestTieringMachine = TieringMachine.TestCase
TestTieringMachine.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)

"""A state machine of the cache beside a model of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsidecar.cache import block_cache
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import LoadGrant, StoreGrant
from kvsidecar.cache.space_blocks import Space
from kvsidecar.errors import Refusal
from kvsidecar.types import Eviction, LookupMode, Residency
from tests.cache.integrity import check_integrity
from tests.cache.support import (
    PAGE,
    eviction_order,
    find,
    key,
    namespace,
    new_cache,
    open_space,
    reserved,
    slot_of,
    table_of,
)

Key = tuple[int, str]
"""Index of the space, name of the block."""

Token = tuple[object, ...]

Parts = list[tuple[int, int, list[str]]]
"""Index of the space, shard, names."""

SPACES = ("one", "two")

NAMES = ("a", "b", "c", "d")

POOLS = [
    # pages of the pool, of a slab, and of each shard in the two spaces
    (2, 2, (1,), (1,)),
    (3, 3, (1, 1), (1,)),
    (4, 2, (1, 1), (1, 1)),
    (4, 2, (1,), (2,)),
    (4, 4, (1, 1), (2,)),
    (6, 2, (1,), (2,)),
    (6, 3, (1, 2), (3,)),
    (7, 3, (1, 2), (2,)),
    (5, 4, (1,), (3,)),
    (8, 4, (1,), (2,)),
]

name_lists = st.lists(st.sampled_from(NAMES), min_size=1, max_size=2) | st.lists(st.sampled_from(NAMES), max_size=5)

space_ids = st.sampled_from([0, 1])

one_part = st.tuples(space_ids, st.integers(0, 1), name_lists)

shard_parts = st.lists(one_part, min_size=1, max_size=1) | st.lists(one_part, max_size=3)

modes = st.sampled_from(list(LookupMode))


@dataclass(eq=False)
class Reservation:
    slot: int
    pages: int
    shard: int
    key: Key
    token: Token
    grant: StoreGrant
    cleared: bool = False


@dataclass(eq=False)
class OpenLoad:
    grant: LoadGrant
    expected: list[tuple[int, int, Token]]
    """Slot, pages, token."""
    asked: list[tuple[int, int, Key]]
    """Part, index, block."""
    keys: list[Key] = field(default_factory=list)
    """Of blocks that were not cleared."""


@dataclass(eq=False)
class LiveLease:
    owner: str
    expires_at: float
    keys: list[Key]
    """Of blocks that were not cleared."""


class Told:
    """An outlet that follows what it is told."""

    def __init__(self, cache: BlockCache, name: str = "model") -> None:
        self.readable: dict[int, set[bytes]] = {}
        self.said: list[str] = []
        cache.watch(namespace(name), self._told)

    def _told(self, kind: Residency, group: int, hashes: bytes) -> None:
        self.said.append(kind.value)
        readable = self.readable.setdefault(group, set())
        match kind:
            case Residency.STORED:
                readable |= split(hashes)
            case Residency.REMOVED:
                assert split(hashes) <= readable, "it was not told that they were readable"
                readable -= split(hashes)
            case Residency.CLEARED:
                readable.clear()


def split(hashes: bytes) -> set[bytes]:
    return {hashes[i : i + 32] for i in range(0, len(hashes), 32)}


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        shape=st.sampled_from(POOLS),
        nodes=st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3),
        rebuilt=st.booleans(),
        slowly=st.booleans(),
        eviction=st.sampled_from(Eviction),
    )
    def start(
        self,
        shape: tuple[int, int, tuple[int, ...], tuple[int, ...]],
        nodes: list[int],
        *,
        rebuilt: bool,
        slowly: bool = False,
        eviction: Eviction = Eviction.LRU,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        if slowly:  # what has ended lets go of one block in each step
            self.patch.setattr(block_cache, "LET_GO", 1)
            self.patch.setattr(block_cache, "TRIES", 1000)
        if rebuilt:  # each table that has a row to spare, at each sweep
            self.patch.setattr("kvsidecar.cache.space_blocks.SPARSE", 1)
            self.patch.setattr("kvsidecar.cache.space_blocks.FIRST_ROWS", 1)
        pool, slab, *self.shards = shape
        self.cache: BlockCache = new_cache(pool, slab, nodes[: -(-pool // slab)], eviction)
        self.one_class = {pages for shards in self.shards for pages in shards} == {1}
        self.spaces = [open_space(self.cache, name, shards=self.shards[i]) for i, name in enumerate(SPACES)]
        self.told = [Told(self.cache, name) for name in SPACES]
        self.memory: list[Token | None] = [None] * pool
        self.sealed: dict[Key, dict[int, Token]] = {}
        self.open: list[Reservation] = []
        self.leases: dict[int, LiveLease] = {}
        self.dead_leases: list[int] = [77]
        """Those that ended, and one that never was."""
        self.released_leases: list[int] = []
        self.loads: list[OpenLoad] = []
        self.corrupt: tuple[int, int] | None = None
        self.now = 0.0
        self.serial = 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # -- the model -----------------------------------------------------------------------------------------------

    def is_readable(self, block: Key) -> bool:
        return len(self.sealed.get(block, ())) == len(self.shards[block[0]])

    def readable(self) -> list[Key]:
        return [block for block in self.sealed if self.is_readable(block)]

    def holders(self) -> list[LiveLease | OpenLoad]:
        return [*self.leases.values(), *self.loads]

    def referenced(self) -> set[Key]:
        return {block for holder in self.holders() for block in holder.keys}

    def filling(self) -> set[Key]:
        return {one.key for one in self.open if not one.cleared}

    def write(self, slot: int, pages: int, token: Token) -> None:
        for page in range(slot // PAGE, slot // PAGE + pages):
            self.memory[page] = token

    def parts(self, parts: list[tuple[int, list[str]]]) -> list[tuple[Space, list[bytes]]]:
        return [(self.spaces[space], [key(name) for name in names]) for space, names in parts]

    def contents(self) -> tuple[object, list[list[bytes]]]:
        """All that a refused store must leave as it was, the order of eviction included."""
        stats = self.cache.stats()
        # A store that finds no room frees what was cleared, also in vain.
        unused = stats.free_bytes + stats.evictable_bytes + stats.wasted_bytes
        stats = replace(stats, used_bytes=0, free_bytes=unused, evictable_bytes=0, wasted_bytes=0)
        return stats, [eviction_order(space) for space in self.cache.spaces]

    def check_refused(self, before: tuple[object, list[list[bytes]]], *, letting_go: bool) -> None:
        """A store was refused. If blocks waited to be let go of, some of these may have become evictable since."""
        stats, order = self.contents()
        if letting_go:
            kept = [each[: len(first)] for each, first in zip(order, before[1], strict=True)]
            assert kept == before[1], "a refused store changed something"
        else:
            assert (stats, order) == before, "a refused store changed something"

    # -- stores --------------------------------------------------------------------------------------------------

    @rule(space=space_ids, name=st.sampled_from(NAMES))
    def store_a_whole_block(self, space: int, name: str) -> None:
        """Most histories have few readable blocks without this."""
        for shard in range(len(self.shards[space])):
            before = len(self.open)
            self.begin_store([(space, shard, [name])], None)
            if len(self.open) > before:
                self.end_store(self.open[-1].grant, "seal")

    @rule(parts=shard_parts, node=st.sampled_from([None, 0, 1]))
    def begin_store(self, parts: Parts, node: int | None) -> None:
        parts = [(space, shard % len(self.shards[space]), names) for space, shard, names in parts]
        missing, present, in_flight = self.expected_of_store(parts)
        asked = {(space, name) for space, _, names in parts for name in names}
        before, free, letting_go = self.contents(), self.unused_pages(), bool(self.cache._ended)
        victims = self.evictable_pages(asked)

        request = [(self.spaces[space], shard, [key(name) for name in names]) for space, shard, names in parts]
        grant = self.cache.begin_store(request, node)

        need = sum(self.shards[space][shard] for space, shard, _ in missing)
        if isinstance(grant, Refusal):
            self.check_refused(before, letting_go=letting_go)
        if grant is Refusal.NOT_ADMITTED:
            return
        if grant in (Refusal.POOL_FULL, Refusal.POOL_FRAGMENTED):
            if self.one_class:
                assert free + sum(victims.values()) < need, "there was room"
            if grant is Refusal.POOL_FRAGMENTED:
                assert not self.one_class, "there is no slab of another class"
                slots = table_of(self.cache).slots  # a gap that fits no size in use may fit this one
                free = (self.cache.stats().free_bytes + slots.unfit_bytes) // PAGE
                assert free + sum(self.evictable_pages(set()).values()) >= need
            return
        assert isinstance(grant, StoreGrant)
        assert (grant.present, grant.in_flight) == (present, in_flight)
        evicted = self.see_evictions(victims)
        if self.one_class and evicted:
            assert free + sum(evicted) - min(evicted) < need, "more was evicted than needed"
        self.open_reservations(grant, parts, missing)

    def unused_pages(self) -> int:
        """Free, or waiting to be: of cleared blocks that nobody needs."""
        stats = self.cache.stats()
        evictable = sum(self.evictable_pages(set()).values())
        return stats.free_bytes // PAGE + stats.evictable_bytes // PAGE - evictable

    def expected_of_store(self, parts: Parts) -> tuple[dict[tuple[int, int, str], tuple[int, int]], int, int]:
        """(space, shard, name) -> (part, index) of what must be reserved, and how many are present and in flight."""
        missing: dict[tuple[int, int, str], tuple[int, int]] = {}
        present = in_flight = 0
        reserved = {(*one.key, one.shard) for one in self.open if not one.cleared}
        for part, (space, shard, names) in enumerate(parts):
            for index, name in enumerate(names):
                if shard in self.sealed.get((space, name), ()):
                    present += 1
                elif (space, name, shard) in reserved or (space, shard, name) in missing:
                    in_flight += 1
                else:
                    missing[space, shard, name] = (part, index)
        return missing, present, in_flight

    def evictable_pages(self, asked: set[Key]) -> dict[Key, int]:
        """Block -> pages, of those that may be evicted for a store of the asked ones."""
        busy = self.referenced() | self.filling() | asked
        return {
            block: sum(self.shards[block[0]][shard] for shard in shards)
            for block, shards in self.sealed.items()
            if block not in busy
        }

    def see_evictions(self, victims: dict[Key, int]) -> list[int]:
        """Forget what is gone; pages of each such block. Only those that may be evicted can be gone."""
        gone = [block for block in self.sealed if find(self.spaces[block[0]], key(block[1])) is None]
        for block in gone:
            assert block in victims, f"{block} was evicted, and was in use"
            del self.sealed[block]
        return [victims[block] for block in gone]

    def open_reservations(
        self,
        grant: StoreGrant,
        parts: Parts,
        missing: dict[tuple[int, int, str], tuple[int, int]],
    ) -> None:
        assert reserved(grant) == list(missing.values())
        for number, part in enumerate(grant.parts):
            space, shard, names = parts[number]
            assert part.shard == shard
            assert (part.slots[1:] > part.slots[:-1]).all(), "the slots of one part are not ascending"
            for index, slot in zip(part.index.tolist(), part.slots.tolist(), strict=True):
                self.serial += 1
                wanted = self.shards[space][shard]
                if self.corrupt is not None:
                    lost, pages = self.corrupt
                    assert not lost - wanted * PAGE < slot < lost + pages * PAGE, "a corrupt slot was given out"
                block = (space, names[index])
                self.open.append(Reservation(slot, wanted, shard, block, (block, shard, self.serial), grant))
                self.write(slot, wanted, ("half written", self.serial))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), end=st.sampled_from(["seal", "seal", "seal", "abort"]))
    def end_a_store(self, data: st.DataObject, end: str) -> None:
        self.end_store(data.draw(st.sampled_from(self.open)).grant, end)

    def end_store(self, grant: StoreGrant, end: str) -> None:
        became_readable = 0
        for one in [one for one in self.open if one.grant is grant]:
            self.open.remove(one)
            self.write(one.slot, one.pages, one.token)
            if end == "seal" and not one.cleared:
                self.sealed.setdefault(one.key, {})[one.shard] = one.token
                became_readable += self.is_readable(one.key)
        answer = getattr(self.cache, f"{end}_all")(grant)
        assert end != "seal" or answer == became_readable

    # -- lookups and leases --------------------------------------------------------------------------------------

    @precondition(lambda self: self.serial % 4 == 0)
    @rule(parts=st.lists(st.tuples(space_ids, name_lists), max_size=2), mode=modes)
    def lookup_anything(self, parts: list[tuple[int, list[str]]], mode: LookupMode) -> None:
        self.lookup_and_lease(parts, mode, 1, "x")

    @precondition(lambda self: self.readable())
    @rule(data=st.data(), mode=modes, ttl=st.integers(1, 3), owner=st.sampled_from(["x", "y"]))
    def lookup_readable_blocks(self, data: st.DataObject, mode: LookupMode, ttl: int, owner: str) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.readable()), min_size=1, max_size=3))
        added_to = data.draw(st.sampled_from([0, *sorted(self.leases)]))
        self.lookup_and_lease([(space, [name]) for space, name in blocks], mode, ttl, owner, added_to)

    def lookup_and_lease(
        self, parts: list[tuple[int, list[str]]], mode: LookupMode, ttl: int, owner: str, added_to: int = 0
    ) -> None:
        lease, hits = self.cache.lookup_and_lease(self.parts(parts), mode, self.now, ttl, owner, added_to)
        before = self.leases.get(added_to) if added_to else None
        if before is not None and (before.owner != owner or self.now >= before.expires_at):
            before = None
        held = []
        for (space, names), part_hits in zip(parts, hits, strict=True):
            expected = [self.is_readable((space, name)) for name in names]
            if mode is LookupMode.PREFIX and False in expected:
                expected[expected.index(False) :] = [False] * (len(expected) - expected.index(False))
            assert part_hits == expected
            held += [(space, name) for name, hit in zip(names, part_hits, strict=True) if hit]
        assert (lease is None) == (not held and before is None)
        if lease is not None:
            assert (lease.id == added_to) == (before is not None) or not added_to
            self.leases[lease.id] = LiveLease(owner, self.now + ttl, held + (before.keys if before else []))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), ttl=st.integers(1, 3))
    def renew(self, data: st.DataObject, ttl: int) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        lease = self.leases[lease_id]
        alive = self.now < lease.expires_at
        assert self.cache.renew(lease_id, self.now, ttl) == alive
        if alive:
            lease.expires_at = self.now + ttl

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        assert self.cache.release(lease_id)
        del self.leases[lease_id]
        self.released_leases.append(lease_id)

    @rule(seconds=st.sampled_from([0, 1, 2, 40]), sweep=st.booleans())
    def pass_time(self, seconds: int, sweep: bool) -> None:
        self.now += seconds
        if sweep:
            expired = [lease_id for lease_id, lease in self.leases.items() if lease.expires_at <= self.now]
            assert sorted(lease.id for lease in self.cache.expire(self.now)) == sorted(expired)
            for lease_id in expired:
                self.end_lease(lease_id)

    @precondition(lambda self: self.leases)
    @rule(owner=st.sampled_from(["x", "y"]))
    def drop_owner(self, owner: str) -> None:
        dropped = [lease_id for lease_id, lease in self.leases.items() if lease.owner == owner]
        assert sorted(lease.id for lease in self.cache.drop_owner(owner)) == sorted(dropped)
        for lease_id in dropped:
            self.end_lease(lease_id)

    def end_lease(self, lease_id: int) -> None:
        del self.leases[lease_id]
        self.dead_leases.append(lease_id)

    # -- loads ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.serial % 4 == 1)
    @rule(data=st.data(), parts=shard_parts)
    def begin_load_of_anything(self, data: st.DataObject, parts: Parts) -> None:
        lease_id = data.draw(st.sampled_from([None, *self.leases, *self.dead_leases, *self.released_leases]))
        self.begin_load(parts, lease_id)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def begin_load_of_readable_blocks(self, data: st.DataObject) -> None:
        """Few loads of just any blocks would find them all."""
        blocks = data.draw(st.lists(st.sampled_from(self.readable()), min_size=1, max_size=3))
        alive = [lease_id for lease_id, lease in self.leases.items() if self.now < lease.expires_at]
        lease_id = data.draw(st.sampled_from([None, *alive]))
        shard = data.draw(st.integers(0, 1))
        self.begin_load([(space, shard, [name]) for space, name in blocks], lease_id)

    def begin_load(self, parts: Parts, lease_id: int | None) -> None:
        parts = [(space, shard % len(self.shards[space]), names) for space, shard, names in parts]
        request = [(self.spaces[space], shard, [key(name) for name in names]) for space, shard, names in parts]
        asked = [(space, name) for space, _, names in parts for name in names]
        grant = self.cache.begin_load(request, lease_id, self.now)
        lease = self.leases.get(lease_id) if lease_id is not None else None
        if lease_id in self.dead_leases or (lease is not None and lease.expires_at <= self.now):
            assert grant is Refusal.STALE_LEASE
        elif not all(map(self.is_readable, asked)):
            assert grant is Refusal.NOT_FOUND
        else:
            assert isinstance(grant, LoadGrant)
            places = [(part, index) for part, (_, _, names) in enumerate(parts) for index in range(len(names))]
            load = OpenLoad(grant, [], [(*place, block) for place, block in zip(places, asked, strict=True)], asked)
            for (space, shard, names), slots in zip(parts, grant.slots, strict=True):
                for name, slot in zip(names, slots.tolist(), strict=True):
                    load.expected.append((slot, self.shards[space][shard], self.sealed[space, name][shard]))
            self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(self.loads))
        self.loads.remove(load)
        self.cache.end_load(load.grant)

    @precondition(lambda self: self.corrupt is None and any(load.asked for load in self.loads))
    @rule(data=st.data())
    def mark_corrupt(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from([load for load in self.loads if load.asked]))
        which = data.draw(st.integers(0, len(load.asked) - 1))
        part, index, block = load.asked[which]
        self.cache.mark_corrupt(load.grant, part, index)
        self.corrupt = load.expected[which][:2]
        if block in load.keys:  # else it was cleared, and the one of this name is another
            del self.sealed[block]
            for holder in self.holders():
                holder.keys = [other for other in holder.keys if other != block]

    # -- the rest ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.serial % 4 == 3)  # or histories would have little but clears and misses
    @rule(which=st.sampled_from([None, 0, 1]), sweep=st.integers(0, 3))
    def clear(self, which: int | None, sweep: int) -> None:
        spaces = {0, 1} if which is None else {which}
        cleared = [block for block in self.sealed if block[0] in spaces]
        readable = sum(map(self.is_readable, cleared))
        assert self.cache.clear(None if which is None else namespace(SPACES[which]), sweep) == readable
        for block in cleared:
            del self.sealed[block]
        for one in self.open:
            one.cleared |= one.key[0] in spaces
        for holder in self.holders():
            holder.keys = [block for block in holder.keys if block[0] not in spaces]

    @rule(limit=st.integers(0, 2))
    def sweep(self, limit: int) -> None:
        if not self.cache.sweep(limit):
            assert self.cache.stats().evictable_bytes // PAGE == sum(self.evictable_pages(set()).values())

    @precondition(lambda self: self.serial % 4 == 2)
    @rule(which=space_ids)
    def all_ranks_attach_again(self, which: int) -> None:
        for _ in self.shards[which]:
            self.cache.close_space(self.spaces[which])
        had_blocks = any(block[0] == which for block in self.sealed.keys() | self.filling())
        again = open_space(self.cache, SPACES[which], shards=self.shards[which])
        assert (again is self.spaces[which]) == had_blocks
        self.spaces[which] = again

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "cache"):
            check_integrity(self.cache)

    @invariant()
    def exactly_the_sealed_blocks_are_readable(self) -> None:
        if not hasattr(self, "cache"):
            return
        for number, space in enumerate(self.spaces):
            expected = [self.is_readable((number, name)) for name in NAMES]
            assert self.cache.lookup(space, [key(name) for name in NAMES], LookupMode.BITMAP) == expected

    @invariant()
    def whoever_watches_was_told_of_exactly_these(self) -> None:
        for number, told in enumerate(getattr(self, "told", [])):
            assert told.readable.get(0, set()) == {key(name) for name in NAMES if self.is_readable((number, name))}

    @invariant()
    def every_readable_block_holds_what_was_sealed(self) -> None:
        if not hasattr(self, "cache"):
            return
        for (number, name), shards in self.sealed.items():
            for shard, token in shards.items():
                self.check_pages(slot_of(self.spaces[number], key(name), shard), self.shards[number][shard], token)

    @invariant()
    def what_is_being_loaded_does_not_change(self) -> None:
        if not hasattr(self, "cache"):
            return
        for load in self.loads:
            for slot, pages, token in load.expected:
                self.check_pages(slot, pages, token)

    def check_pages(self, slot: int, pages: int, token: Token) -> None:
        found = self.memory[slot // PAGE : slot // PAGE + pages]
        assert found == [token] * pages, f"slot {slot} holds {found}, not {token}"

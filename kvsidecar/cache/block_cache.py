"""The blocks of the pool: lookup, lease, store, load and eviction. It decides; it moves no bytes.

Not thread-safe: the daemon calls it from its event loop only. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, KeysView, Sequence
from math import inf

import numpy as np

from kvsidecar.cache.adoption import AdoptReport, adopt
from kvsidecar.cache.arrays import NO_INTS, Ints, all_true, any_true, first_of_each
from kvsidecar.cache.block_table import BlockTable, require
from kvsidecar.cache.change_log import Outlet
from kvsidecar.cache.expiry import SCAN, SWEEP, Expiry
from kvsidecar.cache.grants import Chain, Lease, LoadGrant, StoreGrant
from kvsidecar.cache.leases import LeaseTable
from kvsidecar.cache.prompts import Prompts
from kvsidecar.cache.reader import Hashes, Reader
from kvsidecar.cache.records import Records
from kvsidecar.cache.room import Room
from kvsidecar.cache.shares import Share, ShareLimits, Shares
from kvsidecar.cache.slots import SlotAllocator
from kvsidecar.cache.space_blocks import Space
from kvsidecar.cache.stats import CacheStats, gather
from kvsidecar.cache.tier_copies import TierCopies
from kvsidecar.errors import InvalidRequest, Refusal
from kvsidecar.types import Eviction, LookupMode, Namespace, Priority

LET_GO = 8192
"""Blocks that one step lets go of at most: a millisecond."""
CHAIN = 256
"""A part of a lease counts as so many of them at least."""
TRIES = 4
"""So often a request that finds no room waits for such a step."""

Part = tuple[Space, Hashes]
"""Block hashes of one group, in prefix order. A request has one part per group."""
ShardPart = tuple[Space, int, Hashes]
"""A `Part` with the shard to store or load."""


class BlockCache:
    """Decides about blocks for the daemon. Every call is O(number of hashes in the request or grant).

    A grant ends exactly once. Ending it again, or closing a space more often than it was opened, raises
    AssertionError: from then on a slot could be allocated twice.

    Args:
        allocator: for the pool; no slot is in use.
        next_id: source of lease ids. Default: 1, 2, 3, ...; with a random source clients cannot guess others' leases.
        seed: a secret; without it clients cannot choose hashes that make the index slow.
        records: where sealed slots are recorded, so that the next run finds them. What an earlier run has left there is
            taken over: see `adopted`. Default: nothing is recorded.
        eviction: which blocks go first. `Eviction.RHYTHM` needs the time, as expiry does: see `expire`.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        next_id: Callable[[], int] | None = None,
        seed: int = 0,
        records: Records | None = None,
        eviction: Eviction = Eviction.LRU,
    ) -> None:
        self.eviction = eviction
        self.freed = allocator.freed
        """What is to be zeroed; None: nothing is."""
        self._table = BlockTable(allocator, seed, eviction)
        self.adopted = AdoptReport() if records is None else adopt(self._table, records)
        """What was taken over from an earlier run."""
        self._prompts = None if self._table.rhythm is None else Prompts(self._table.rhythm, allocator.total_bytes)
        self._expiry = Expiry(self._table)
        self._room = Room(self._table, self._expiry)
        self._leases = LeaseTable(next_id)
        self._ended: deque[list[Chain]] = deque()
        """The blocks whose references are to be dropped, because their lease or load has ended."""
        self._chores: deque[Callable[[int], bool]] = deque(
            (
                self._drop_ended,
                lambda _: self._table.rebuild_sparse(),
                lambda _: self._table.free_dropped(),
                lambda _: self._table.shares.move(),
                self._shrink,
                lambda _: self._table.clear_left(),
                self._table.sweep,
                self._expiry.collect,
            )
        )
        """What `sweep` does in turns. Each does a step, if there is one, and returns whether there was."""
        self._stores: set[StoreGrant] = set()
        self._loads: set[LoadGrant] = set()
        self._tick = self.adopted.last_tick
        """Number of the request; it becomes ``last_used`` of the blocks that the request uses."""
        self.left = self._table.left
        """The spaces that no rank has open."""
        self.reader = Reader(self._expiry)
        self.tiers = TierCopies(self._table, self._room, self._next_tick)

    # -- shares ------------------------------------------------------------------------------------------------

    @property
    def shares(self) -> list[Share]:
        """The shares of the limits, in their order; the last one is that of all other namespaces."""
        return self._table.shares.current

    def set_shares(self, limits: Sequence[ShareLimits]) -> None:
        """Divide the pool again. A share that is over its maximum then is brought down by `sweep`; what others have
        borrowed of a guarantee is evicted when its share stores. Of thousands of spaces some belong to their shares of
        before until `sweep` has come to them."""
        self._table.set_shares(Shares(limits))

    def busy_room(self, space: Space) -> int:
        """Bytes that the share of this space may still reference or fill."""
        return self._room.busy_room(space.share)

    # -- spaces ------------------------------------------------------------------------------------------------

    @property
    def spaces(self) -> list[Space]:
        """All spaces with ranks or blocks."""
        return list(self.each_space())

    def each_space(self) -> Iterator[Space]:
        """The spaces with ranks or blocks, one by one; between two of them any space may come and go."""
        for groups in list(self._table.groups.values()):
            yield from list(groups.values())

    @property
    def namespaces(self) -> KeysView[Namespace]:
        """The namespaces with ranks or blocks, as a live view."""
        return self._table.groups.keys()

    def namespaces_of(self, share: str) -> list[Namespace]:
        """The namespaces of a share."""
        groups = self._table.groups.items()
        return [each for each, spaces in groups if next(iter(spaces.values())).share.name == share]

    def spaces_of(self, namespace: Namespace) -> list[Space]:
        """The spaces of one namespace."""
        return list(self._table.groups.get(namespace, {}).values())

    def first_space(self, namespace: Namespace) -> Space | None:
        return next(iter(self._table.groups.get(namespace, {}).values()), None)

    def find_space(self, namespace: Namespace, group: int) -> Space | None:
        return self._table.groups.get(namespace, {}).get(group)

    def readable_hashes(self, namespace: Namespace, group: int, rows: int) -> Iterator[bytes]:
        """The joined hashes of a space's readable blocks, from ``rows`` of its table at a time, as they are when each
        piece is asked for. It begins again if the space gets another table, or its rows are renumbered."""
        first, index = 0, None
        while (space := self.find_space(namespace, group)) is not None:
            blocks = space.blocks
            if index is not blocks.index:
                first, index = 0, blocks.index
            if first >= blocks.rows_used:
                return
            yield blocks.readable_hashes(first, first + rows)
            first += rows

    def empty_space(self, hash_bytes: int) -> Space:
        """A space that never has blocks: every lookup misses, in the time of any other lookup."""
        return self._table.empty_space(hash_bytes)

    def open_space(
        self, namespace: Namespace, group: int, num_shards: int, shard: int, shard_bytes: int, user: Hashable = None
    ) -> Space:
        """Open the space of a namespace and group for a rank that holds ``shard``, ``shard_bytes`` bytes per block.

        Each call needs one `close_space`.

        Args:
            user: whose rank it is: who leaves too many spaces loses the oldest (`kvsidecar.cache.left_spaces`). None:
                nobody's, and it may be left until its blocks go.

        Raises:
            InvalidRequest: the numbers are invalid, or no slab is large enough for the shard.
            LimitExceeded: this user has left too many, which are in use.
            NamespaceMismatch: another rank registered a different number of shards or size of this shard.
        """
        return self._table.open_space(namespace, group, num_shards, shard, shard_bytes, user)

    def close_space(self, space: Space) -> None:
        """Close the space for one rank. It is removed when it has neither ranks nor blocks."""
        self._table.close_space(space)

    # -- lookup and leases -------------------------------------------------------------------------------------

    def lookup(self, space: Space, hashes: Hashes, mode: LookupMode) -> list[bool]:
        """Whether each hash is readable; with `LookupMode.PREFIX`, False from the first miss on.

        Counts hits and misses. A lookup does not count as a use of the blocks; a lease, a load or a store does.
        """
        answer: list[bool] = self.reader.find(space, hashes, mode)[1].tolist()
        return answer

    def touch(self, parts: Sequence[Part], pause: float = 0.0) -> list[list[bool]]:
        """Count what is there of these blocks as used now, the deepest of each part as the oldest: neither a hit nor a
        miss, nor a use that tells a rhythm. Returns which are readable.

        Args:
            pause: seconds until their prompt is expected to be used again, infinity if it will not be; 0: it is not
                known. With `Eviction.LRU` only infinity changes anything: they do not count as used.
        """
        tick = self._next_tick()
        answers = []
        for space, hashes in parts:
            keys = space.blocks.index.keys(hashes)
            rows = space.blocks.index.find(keys)
            if self._prompts is not None:
                self._prompts.touch(space.blocks, keys, rows, self._expiry.at, pause)
            if self._prompts is not None or pause != inf:
                self._table.touch_rows(space.blocks, rows, tick)
            answers.append(self.reader.readable(space, rows).tolist())
        return answers

    def lookup_and_lease(
        self,
        parts: Sequence[Part],
        mode: LookupMode,
        now: float,
        ttl: float,
        owner: Hashable,
        lease_id: int = 0,
        lease_last: Sequence[int] = (),
    ) -> tuple[Lease | None, list[list[bool]]]:
        """Look up all parts and lease all hits until ``now + ttl``. No lease if there is no hit, or if it would take
        what is guaranteed to another share.

        Args:
            lease_id: a lease of this owner that these hits are added to, and that is renewed in any case. If there is
                none with this id, a new one is taken.
            lease_last: by part, how many of its hits are leased, the last ones; 0, or nothing for any part: all.
        """
        chains, answers, found = [], [], []
        for place, (space, hashes) in enumerate(parts):
            rows, hits, keys = self.reader.find(space, hashes, mode)
            if any_true(hits):
                leased = rows[hits]
                chains.append(_chain(space, leased[-lease_last[place] :] if lease_last else leased))
            answers.append(hits.tolist())
            found.append((space.blocks, keys, rows, hits))
        lease = self._leases.get(lease_id, now) if lease_id else None
        if lease is not None and lease.owner != owner:
            lease = None
        if chains and self._may_reference(chains):
            if self._prompts is not None:
                for blocks, keys, rows, hits in found:
                    self._prompts.end_announcements(blocks, keys, rows, hits)
            self._table.add_refs(chains)
            if lease is None:
                lease = self._leases.add(owner, chains, now + ttl)
            else:
                self._leases.extend(lease, chains, now + ttl)
        elif lease is not None:
            self._leases.renew(lease.id, now, now + ttl)
        if self._prompts is not None:  # now that the hits count as used
            for each in found:
                self._prompts.look_up(*each, now)
        return lease, answers

    def lease(self, lease_id: int, now: float) -> Lease | None:
        """The lease, or None if it was released or has expired."""
        return self._leases.get(lease_id, now)

    def held(self, owner: Hashable) -> tuple[int, int]:
        """Number of leases of an owner, and of their blocks. A block in two leases counts twice, and of a lookup that
        adds few to a lease `LEAST_ROOM`."""
        return self._leases.held(owner)

    def renew(self, lease_id: int, now: float, ttl: float) -> bool:
        """Extend the lease to ``now + ttl``. False if it was released or has expired."""
        return self._leases.renew(lease_id, now, now + ttl)

    def release(self, lease_id: int) -> bool:
        """End a lease. False if it does not exist."""
        lease = self._leases.release(lease_id)
        return lease is not None and bool(self._end_leases([lease]))

    def expire(self, now: float) -> list[Lease]:
        """End and return the leases that have expired. It is ``now`` for the expiry of blocks, and for their rhythm,
        until the next call."""
        self._expiry.set_time(now, self._tick)
        return self._end_leases(self._leases.pop_expired(now))

    def drop_owner(self, owner: Hashable) -> list[Lease]:
        """End and return all leases of an owner."""
        return self._end_leases(self._leases.pop_owner(owner))

    # -- store -------------------------------------------------------------------------------------------------

    def begin_store(
        self,
        parts: Sequence[ShardPart],
        node: int | None = None,
        ttl: float = 0.0,
        priority: Priority = Priority.NORMAL,
        idle_ttl: float = 0.0,
        *,
        wanted: bool = False,
    ) -> StoreGrant | Refusal:
        """Reserve a slot for every block whose shard is neither sealed nor being filled.

        All or nothing: if a slot cannot be allocated, it returns `Refusal.POOL_FULL`, ``POOL_FRAGMENTED`` or ``QUOTA``
        and changes nothing. ``TABLE_FULL``: the same, but blocks may have been evicted. Where the records of a new slab
        find no memory, blocks are evicted whose records have some, although there is room. ``NOT_ADMITTED``: blocks
        would have to go that go after those to be stored (`Eviction.RHYTHM` only).

        Args:
            parts: what to store; may contain a hash twice.
            node: NUMA node to prefer.
            ttl: seconds from its end after which the blocks that it stores expire; 0: when their share's do.
            priority: of the blocks that are new.
            idle_ttl: seconds after their last use after which the blocks that it stores expire; 0: when their share's
                do. More than `MAX_IDLE_SECONDS` count as these.
            wanted: somebody is about to load these blocks; they are admitted in any case.

        Raises:
            InvalidRequest: no rank with this shard has attached.
            AssertionError: the space is closed.
        """
        terms = StoreGrant(ttl=ttl, idle_ttl=idle_ttl, wanted=wanted)
        given = self._begin_store(parts, node, priority, terms)
        if given is Refusal.TABLE_FULL:
            with self._table.slots.no_new_places():
                terms = StoreGrant(ttl=ttl, idle_ttl=idle_ttl, wanted=wanted)
                again = self._begin_store(parts, node, priority, terms)
            return given if isinstance(again, Refusal) else again
        return given

    def _begin_store(
        self, parts: Sequence[ShardPart], node: int | None, priority: Priority, grant: StoreGrant
    ) -> StoreGrant | Refusal:
        """`begin_store`, with the places that slabs can have now. Fills the grant."""
        for space, shard, _ in parts:
            require(space.users > 0, "the space is closed")
            _check_shard(space, shard)
        table = self._table
        declined = False
        keys = [space.blocks.index.keys(hashes) for space, _, hashes in parts]  # may raise: before anything changes
        for (space, shard, _), part_keys in zip(parts, keys, strict=True):
            self._expiry.drop(space.blocks, part_keys)
            part, present = table.claim(space, shard, part_keys)
            if priority is not Priority.NORMAL:
                part.blocks.set_priority(part.created, priority)
            if self._prompts is not None:
                declined |= self._prompts.store(part, self._expiry.at)
            grant.parts.append(part)
            grant.present += present
            grant.in_flight += len(part_keys) - present - len(part.index)
        needs: dict[int, int] = {}
        for part in grant.parts:
            if len(part.index):
                needs[part.slot_size] = needs.get(part.slot_size, 0) + len(part.index)
        if not needs:
            table.touch(grant.parts, self._next_tick())
            self._stores.add(grant)
            return grant
        refusal = Refusal.NOT_ADMITTED if declined and not grant.wanted else self._room.make(needs, grant)
        for _ in range(TRIES):
            if refusal in (None, Refusal.NOT_ADMITTED) or not (self._drop_ended() or self._table.shares.move()):
                break
            refusal = self._room.make(needs, grant)
        if refusal is not None:
            if self._prompts is not None and refusal is Refusal.NOT_ADMITTED and not declined:
                for part in grant.parts:
                    self._prompts.decline(part)
            for part in reversed(grant.parts):
                table.unclaim(part)
            return refusal
        if node is not None and not table.slots.can_prefer(node, needs):
            node = None  # cutting a slab there might take it from another size class of this request
        # Larger size classes first, as `AllocationPlan` counts.
        for part in sorted(grant.parts, key=lambda part: part.slot_size, reverse=True):
            table.reserve(part, node)
        self._stores.add(grant)
        if not table.record_cuts():
            self.abort_all(grant)
            return Refusal.TABLE_FULL
        return grant

    def seal_all(self, grant: StoreGrant) -> int:
        """End a store whose bytes are complete. Returns the number of blocks that became readable.

        Counts as a use of these blocks and of those that were present.
        """
        self._end_store(grant)
        if not grant.reserved:
            return 0  # all blocks were present; `begin_store` has counted their use
        tick = self._next_tick()
        records, checked = self._table.records, grant.checksums
        # Known before the slots are sealed: those of a cleared space are free afterwards, and maybe of no size.
        places = NO_INTS if checked is None else self._table.slots.places(checked[0])
        expires, idle = self._expiry.set_times(grant)
        readable = sum([self._table.seal(part, tick, expires, idle) for part in reversed(grant.parts)])
        if records is not None and checked is not None:
            records.set_checksums(places, checked[1])
        if grant.present:
            self._table.touch(grant.parts, tick)
        return readable

    def abort_all(self, grant: StoreGrant) -> None:
        """End a store that failed: free its slots. No copy may still write to them."""
        self._end_store(grant)
        for part in grant.parts:
            self._table.slots.free(part.slots)
            self._table.discard(part, self._next_tick())

    def _end_store(self, grant: StoreGrant) -> None:
        _close(grant)
        self._stores.remove(grant)

    # -- load --------------------------------------------------------------------------------------------------

    def begin_load(self, parts: Sequence[ShardPart], lease_id: int | None, now: float) -> LoadGrant | Refusal:
        """Reference all blocks until `end_load`, and return the slots of this shard.

        All or nothing: `Refusal.STALE_LEASE` if the named lease has expired or never existed, `Refusal.NOT_FOUND` if a
        block is not readable, `Refusal.QUOTA` if that would take what is guaranteed to another share. A lease that its
        client has just released is ignored, as if none was named: the release may have overtaken the load.

        Raises:
            InvalidRequest: no rank with this shard has attached.
        """
        for space, shard, _ in parts:
            _check_shard(space, shard)
        lease = None if lease_id is None else self._leases.get(lease_id, now)
        if lease is None and lease_id is not None and not self._leases.was_released(lease_id):
            return Refusal.STALE_LEASE
        found = []
        for space, _, hashes in parts:
            rows = self.reader.find_leased(space, hashes, lease)
            if not all_true(self.reader.readable(space, rows, leased=True)):
                return Refusal.NOT_FOUND
            found.append(rows)
        chains = [_chain(space, rows) for (space, _, _), rows in zip(parts, found, strict=True)]
        if not self._may_reference(chains):
            return Refusal.QUOTA
        self._table.add_refs(chains)
        slots = [space.blocks.slots[shard, rows] for (space, shard, _), rows in zip(parts, found, strict=True)]
        grant = LoadGrant(slots, found, chains)
        self._loads.add(grant)
        return grant

    def end_load(self, grant: LoadGrant) -> None:
        """End a load: nothing reads the slots any more."""
        _close(grant)
        self._loads.remove(grant)
        self._let_go([list(grant.chains)])

    def mark_corrupt(self, grant: LoadGrant, part: int, index: int) -> None:
        """Report that a shard differs from the bytes that were sealed. Its block is a miss from now on, and its slot is
        never reused. The load must still be ended."""
        require(grant.open, "the load has already ended")
        blocks, row, slot = grant.chains[part].blocks, grant.rows[part][index], grant.slots[part][index]
        self._table.mark_corrupt(blocks, int(row), int(slot))

    def forget(self, grant: LoadGrant, part: int, index: int) -> None:
        """Make a block a miss, as `mark_corrupt` does, but free its slot once nothing reads it: its memory is good."""
        require(grant.open, "the load has already ended")
        self._table.forget(grant.chains[part].blocks, grant.rows[part][index : index + 1])

    @property
    def recorded(self) -> bool:
        """Whether sealed slots are recorded."""
        return self._table.records is not None

    def checksums(self, slots: Ints) -> list[int | None]:
        """The recorded checksum of each of these sealed slots; None if it has none."""
        if self._table.records is None or not len(slots):
            return [None] * len(slots)
        sums, known = self._table.records.checksums(self._table.slots.places(slots))
        return [value if is_known else None for value, is_known in zip(sums.tolist(), known.tolist(), strict=True)]

    def chain(self, space: Space, hashes: Hashes) -> Chain:
        """The blocks with these hashes, where they exist. Valid in this step only."""
        index = space.blocks.index
        rows = index.find(index.keys(hashes))
        return _chain(space, rows[rows >= 0])

    def find_place(self, below: int) -> tuple[int, int] | None:
        """Offset and bytes of a place below this offset that holds no block. Nothing is reserved: a store may take it.
        If there is none, the oldest block with a slot there is evicted. None: all of them are in use."""
        return self._room.place_below(below)

    # -- residency ---------------------------------------------------------------------------------------------

    def watch(self, namespace: Namespace, outlet: Outlet | None) -> None:
        """Tell ``outlet`` of every change of what is readable in this namespace from now on; None: nobody."""
        if outlet is None:
            self._table.outlets.pop(namespace, None)
        else:
            self._table.outlets[namespace] = outlet

    # -- clear and stats ---------------------------------------------------------------------------------------

    def clear_blocks(self, space: Space, hashes: Hashes) -> int:
        """Delete these blocks. Returns how many are no longer readable. Slots in use are freed when that ends."""
        before = self._table.readable_blocks
        blocks, rows = space.blocks, self.chain(space, hashes).rows
        held = rows[(blocks.refs[rows] > 0) & (blocks.missing[rows] == 0)]
        if len(held):
            self._table.forget(blocks, held)
        self._table.evict(Chain(blocks, rows[blocks.evictable[rows]]))
        return before - self._table.readable_blocks

    def clear_old(self, space: Space, hashes: Container[bytes]) -> Iterator[None]:
        """No lease finds a block of these any more that had expired and was stored again. In steps."""
        blocks, first = space.blocks, 0
        while blocks.num_superseded and first < blocks.rows_used:
            rows = blocks.superseded[first : first + SCAN].nonzero()[0][:SWEEP] + first
            first = int(rows[-1]) + 1 if len(rows) == SWEEP else first + SCAN
            width = space.namespace.hash_bytes
            packed = blocks.index.hashes_of(rows)
            gone = [packed[i * width : (i + 1) * width] in hashes for i in range(len(rows))]
            blocks.forget_old(rows[np.array(gone, np.bool_)])
            yield

    def clear_unused(self, space: Space, seconds: float) -> Iterator[int]:
        """Delete the blocks that nobody has used for so long, or since the daemon started. In steps: how many were
        readable of each."""
        blocks = space.blocks
        for rows in self._expiry.unused(blocks, seconds):
            before = self._table.readable_blocks
            self._table.evict(Chain(blocks, rows))
            yield before - self._table.readable_blocks

    def clear(self, namespace: Namespace | None = None, sweep: int = SWEEP) -> int:
        """Delete the blocks of one namespace, or all blocks. Returns how many are no longer readable.

        From now on lookups miss all of them. The slots of the first ``sweep`` blocks are freed at once, the others by
        `sweep` or by a store that needs them. Slots in use by a lease, a load or a store are freed at its end.
        """
        before = self._table.readable_blocks
        for space in self.spaces if namespace is None else self.spaces_of(namespace):
            self._table.clear(space)
        self._table.sweep(sweep)
        return before - self._table.readable_blocks

    def sweep(self, limit: int = SWEEP) -> bool:
        """One step of what is left to be done: drop references that leases and loads had, free the slots of up to
        ``limit`` cleared or expired blocks, evict as many of a share that is over its maximum, clear a namespace of a
        user who has left too many, or shrink one table that lost most of its blocks.

        Returns False when nothing is left to do. Call it until then, and again from time to time.
        """
        for _ in range(len(self._chores)):
            self._chores.rotate(-1)
            if self._chores[0](limit):
                return True
        return False

    def _shrink(self, limit: int) -> bool:
        return any(self._room.shrink(share, limit) for share in self._table.shares if share.over)

    def stats(self) -> CacheStats:
        """Current gauges and counters; O(gaps between slabs)."""
        return gather(self._table, leases=len(self._leases), loads=len(self._loads))

    def _end_leases(self, leases: list[Lease]) -> list[Lease]:
        self._let_go([lease.chains for lease in leases])
        return leases

    def _let_go(self, ended: list[list[Chain]]) -> None:
        """Drop one reference to each of these blocks; of many, to some of them in this step."""
        behind = bool(self._ended)
        self._ended += ended
        if not behind:  # else `sweep` is at those before
            self._drop_ended()

    def _drop_ended(self, _: int = 0) -> bool:
        """Drop references of leases and loads that have ended, to `LET_GO` blocks. False if there are none left."""
        if not self._ended:
            return False
        left = LET_GO
        while self._ended and left > 0:
            chains, some = self._ended[0], list[Chain]()
            while chains and left > 0:
                chain = chains.pop()  # the last blocks of a prompt first: they are to go first
                if len(chain.rows) > left:
                    chains.append(Chain(chain.blocks, chain.rows[:-left]))
                    chain = Chain(chain.blocks, chain.rows[-left:])
                some.append(chain)
                left -= max(len(chain.rows), CHAIN)
            if not chains:
                self._ended.popleft()
            self._table.drop_refs(reversed(some), self._next_tick())
        return True

    def _may_reference(self, chains: Sequence[Chain]) -> bool:
        """`Room.may_reference`, asked again after some references of ended leases and loads were dropped."""
        if self._room.may_reference(chains):
            return True
        return any(self._drop_ended() and self._room.may_reference(chains) for _ in range(TRIES))

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick


def _chain(space: Space, rows: Ints) -> Chain:
    return Chain(space.blocks, rows[first_of_each(rows)] if len(rows) > 1 else rows)


def _check_shard(space: Space, shard: int) -> None:
    if not 0 <= shard < space.num_shards or space.shard_bytes[shard] is None:
        raise InvalidRequest(f"group {space.group}: no rank has registered shard {shard} (of {space.num_shards})")


def _close(grant: StoreGrant | LoadGrant) -> None:
    require(grant.open, "the store or load has already ended")
    grant.open = False

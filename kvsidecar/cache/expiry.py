"""Blocks that expire: a time after they were stored, or after they were last used.

An expired block is a miss, and goes before any other. The time of a store is kept in its record, so that a restart does
not lengthen a block's life; the time since the last use begins again there. A share may bound the latter, and a store,
whose bound is in the record, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, floor

import numpy as np

from kvsidecar.cache.arrays import Bools, Ints, any_true
from kvsidecar.cache.block_index import Keys
from kvsidecar.cache.block_table import BlockTable
from kvsidecar.cache.grants import Chain, StoreGrant
from kvsidecar.cache.shares import NO_AGE, Share, TableOrder
from kvsidecar.cache.space_blocks import SpaceBlocks
from kvsidecar.cache.use_times import IDLE_STEPS
from kvsidecar.types import MAX_IDLE_SECONDS

SCAN = 1 << 16
"""Rows of a table to look at in one step: less than a millisecond."""
SCAN_IDLE = 1 << 14
"""Rows to look at in one step where blocks expire without a use: finding the time of each last use takes longer."""
SWEEP = 2048
"""Blocks to delete in one step: about a millisecond."""
STEP_SECONDS = 0.25
"""How often the times of the last uses are looked at."""
LAST_SECOND = (1 << 32) - 1


@dataclass(slots=True)
class _Scan:
    """A search of a table for expired blocks."""

    number: int
    row: int = 0
    """The next row to look at."""
    rebuilds: int = 0
    """The table's `rebuilds` when the search began with row 0."""
    next: int = 0
    """When the first of the others, and of those that came meanwhile, expires; 0: none does."""

    def see(self, second: int) -> None:
        if not self.next or second < self.next:
            self.next = second


class Expiry:
    """Finds the blocks of a table that have expired. Times are seconds on the cache's clock, which continues across
    daemons: where records outlive the daemon, it is the time since the boot, the same in all processes."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.now = 0
        self.at = 0.0
        """`now`, not rounded."""
        self._stepped = float("-inf")
        self._due: list[tuple[int, int]] = []
        """Heap of (second, number of a table): not later than the table's next block expires."""
        self._scan: _Scan | None = None
        self._uses: dict[str, deque[tuple[float, int]]] = {}
        """Share -> recorded times, and the tick of the last request before each."""
        for blocks in table.tables.values():
            if blocks.next_expiry:
                heappush(self._due, (blocks.next_expiry, blocks.number))

    def set_time(self, now: float, tick: int) -> None:
        """Set the time, and the tick of the last request."""
        self.now, self.at = floor(now), now
        if now < self._stepped + STEP_SECONDS:
            return
        self._stepped = now
        self._table.times.note(now, tick)
        if self._table.rhythm is not None:
            self._table.rhythm.set_time(now)
        for share in self._table.shares.idling:
            uses = self._uses.setdefault(share.name, deque())
            assert share.idle_ttl is not None
            if not uses or uses[-1][0] + share.idle_ttl / IDLE_STEPS <= now:
                uses.append((now, tick))
            while uses and uses[0][0] + share.idle_ttl <= now:
                share.idle_tick = uses.popleft()[1]

    def unused(self, blocks: SpaceBlocks, seconds: float) -> Iterator[Ints]:
        """The blocks of a table that are not in use and were not used for this long, or up to one part in `IDLE_STEPS`
        longer. In pieces, between which anything may happen: none has a block that was used since the first one."""
        tick = self._table.times.tick_at(self.now - seconds)
        first, rebuilds = 0, blocks.rebuilds
        while not blocks.cleared and first < blocks.rows_used:
            window = slice(first, min(first + SCAN, blocks.rows_used))
            found = (blocks.evictable[window] & (blocks.last_used[window] <= tick)).nonzero()[0][:SWEEP] + first
            first = int(found[-1]) + 1 if len(found) == SWEEP else window.stop
            yield found
            if rebuilds != blocks.rebuilds:
                first, rebuilds = 0, blocks.rebuilds

    def set_times(self, grant: StoreGrant) -> tuple[int, int]:
        """This store is sealed now. Returns the second at which its blocks expire, and the seconds without a use after
        which they do; 0 if they do not."""
        expires, idle = self._expires(grant), min(ceil(grant.idle_ttl), MAX_IDLE_SECONDS)
        for part in grant.parts if expires or idle else ():
            if expires:
                part.blocks.expires[part.rows] = expires
                self._look_at(part.blocks, expires)
            if idle:
                part.blocks.idling = True
                part.blocks.idle[part.rows] = idle
                self._look_at(part.blocks, self.now + idle)
        return expires, idle

    def _expires(self, grant: StoreGrant) -> int:
        if not grant.parts:
            return 0
        times = [seconds for seconds in (grant.ttl, grant.parts[0].blocks.space.share.ttl) if seconds]
        return min(self.now + ceil(min(times)), LAST_SECOND) if times else 0

    def _look_at(self, blocks: SpaceBlocks, second: int) -> None:
        """Note that some of these blocks may expire at this second."""
        if self._scan is not None and self._scan.number == blocks.number:
            self._scan.see(second)
        if not blocks.next_expiry or second < blocks.next_expiry:
            blocks.next_expiry = second
            heappush(self._due, (second, blocks.number))

    def expired(self, blocks: SpaceBlocks, rows: Ints) -> Bools:
        """One flag per block: true if it has expired. It may be in use."""
        seconds = blocks.expires[rows]
        gone: Bools = (seconds != 0) & (seconds <= self.now)
        if tick := blocks.space.share.idle_tick:
            gone |= (blocks.last_used[rows] <= tick) & blocks.evictable[rows]
        if blocks.idling:
            gone |= (blocks.idle[rows] > 0) & (self._idle_until(blocks, rows) <= self.now)
        return gone

    def _idle_until(self, blocks: SpaceBlocks, rows: Ints) -> Ints:
        """The second at which a block expires for lack of use, if it is not used until then: not earlier, and up to one
        part in `IDLE_STEPS` and two seconds later."""
        used = self._table.times.latest(blocks.last_used[rows], self.now + 1)
        used[~blocks.evictable[rows]] = self.now + 1  # in use
        until: Ints = used + blocks.idle[rows]
        return until

    def drop(self, blocks: SpaceBlocks, keys: Keys) -> None:
        """Remove the expired ones of these blocks: they are going to be stored again."""
        if not blocks.expiring:
            return
        rows = blocks.index.find(keys)
        rows = rows[rows >= 0]
        gone = np.unique(rows[self.expired(blocks, rows)])
        held = gone[(blocks.refs[gone] > 0) & (blocks.missing[gone] == 0)]
        if len(held):
            self._table.forget(blocks, held)
            blocks.supersede(held)
        self._evict(blocks, gone)

    def collect(self, limit: int) -> bool:
        """Evict up to ``limit`` expired blocks, or look for some. False if there are none at present."""
        return self._collect_timed(limit) or any(
            self._collect_idle(share, order, limit)
            for share in self._table.shares.idling
            for order in share.used_orders
            if order
        )

    def _collect_timed(self, limit: int) -> bool:
        if self._scan is None:
            while self._due and self._due[0][1] not in self._table.tables:
                heappop(self._due)
            if not self._due or self._due[0][0] > self.now:
                return False
            self._scan = _Scan(heappop(self._due)[1])
        scan = self._scan
        blocks = self._table.tables.get(scan.number)
        if blocks is None:
            self._scan = None
            return True
        if scan.rebuilds != blocks.rebuilds:
            scan.row, scan.rebuilds = 0, blocks.rebuilds
        first, scanned = scan.row, min(scan.row + (SCAN_IDLE if blocks.idling else SCAN), blocks.rows_used)
        window = slice(first, scanned)
        seconds, evictable = blocks.expires[window], blocks.evictable[window]
        gone = (seconds != 0) & (seconds <= self.now)
        if any_true(gone & (blocks.refs[window] > 0)):
            scan.see(self.now + 1)  # as soon as nobody needs them
        later = seconds[seconds > self.now]
        if len(later):
            scan.see(int(later.min()))
        if blocks.idling:
            # Rows without a block have what their last block had.
            timed = ((blocks.idle[window] > 0) & (evictable | (blocks.refs[window] > 0))).nonzero()[0]
            until = self._idle_until(blocks, timed + first)
            gone[timed] |= until <= self.now
            if len(until := until[until > self.now]):
                scan.see(int(until.min()))
        rows = (gone & evictable).nonzero()[0] + first
        if len(rows) > limit:
            rows = rows[:limit]
            scanned = int(rows[-1]) + 1 if limit else first
        scan.row = scanned
        if scan.row >= blocks.rows_used:
            self._scan = None
            blocks.next_expiry = scan.next
            if scan.next:
                heappush(self._due, (scan.next, blocks.number))
        self._evict(blocks, rows)
        return True

    def _collect_idle(self, share: Share, order: TableOrder, limit: int) -> bool:
        oldest_first = order.oldest_first()
        (_, last_used), _, _, blocks = next(oldest_first, (NO_AGE, 0, order.priority, None))
        oldest_first.close()
        if blocks is None or last_used > share.idle_tick:
            return False
        rows = next(blocks.candidates(order.priority, by_use=True))[:limit]
        self._evict(blocks, rows[blocks.last_used[rows] <= share.idle_tick])
        return True

    def _evict(self, blocks: SpaceBlocks, rows: Ints) -> None:
        rows = rows[blocks.evictable[rows]]
        if len(rows) and not blocks.cleared:
            self._table.expired_blocks += len(rows)
            self._table.evict(Chain(blocks, rows))

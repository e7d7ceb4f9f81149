"""Blocks that are worth it are written to a slower tier, behind their use. Nobody waits for a write.

Blocks in the queue cannot be evicted, so it is short. Behind it is a list of names: these blocks may be evicted before
it is their turn. What does not fit the list is dropped, and counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

import numpy as np

from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import Chain, LoadGrant, StoreGrant, WriteGrant
from kvsidecar.cache.space_blocks import Space, SpaceBlocks
from kvsidecar.core.tier_fetches import CHUNK_BYTES, shard_space
from kvsidecar.errors import TierFailed
from kvsidecar.support.tasks import heard
from kvsidecar.tiers.backend import WriteEnd
from kvsidecar.tiers.policy import Admission, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import Namespace

CHUNKS: Final = 8
"""Chunks that are handed to the tier at a time: a chunk that waits there for others is soon late, and would be taken
for a failure."""
QUEUE_SHARE: Final = 16
"""At most one in this many bytes of the pool waits to be written, or is being written: it cannot be evicted
meanwhile."""
SMALL_QUEUE: Final = 64 << 20
"""Least size of the queue, but never more than half of the pool."""
AHEAD_BYTES: Final = 8 << 30
"""At most this much of the pool, and half of the queue, is evicted before a store needs it (`Admission.ON_EVICT`)."""
AHEAD_CHUNKS: Final = 32
"""Chunks that are begun ahead in one step."""
MAX_NAMES: Final = 1 << 16
"""Blocks that wait without a reference, by name: 4 MiB of the longest hashes."""


def queue_share(pool_bytes: int) -> int:
    """Bytes that may wait to be written to all tiers together."""
    return max(pool_bytes // QUEUE_SHARE, min(pool_bytes // 2, SMALL_QUEUE))


@dataclass(slots=True, eq=False)
class _Write:
    grant: WriteGrant
    nbytes: int
    kept: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """One flag per block: true unless a write of it has failed."""
    calls: int = 1
    """Calls that have not ended; one more until they are handed over."""
    failed: WriteRefusal | None = None


@dataclass(eq=False)
class Writes:
    """Used from the event loop.

    Args:
        bit: the tier's bit in `SpaceBlocks.tiers`.
        clock: monotonic seconds.
        refused: called with the reason and a number of blocks.
        chunk_bytes: approximate size of a chunk.
        queue_bytes: the most bytes that wait to be written, or are being written.
        soon: makes a call a little later: a job's answer goes first. The blocks have references already.
    """

    cache: BlockCache
    tier: Tier
    bit: int
    admission: Admission
    budget: WriteBudget
    clock: Callable[[], float]
    refused: Callable[[WriteRefusal, int], object]
    _: KW_ONLY
    chunk_bytes: int = CHUNK_BYTES
    queue_bytes: int
    soon: Callable[[Callable[[], object]], object] = lambda call: call()

    def __post_init__(self) -> None:
        self._under_way: set[_Write] = set()
        self._waiting: deque[_Write] = deque()
        """Writes that the tier has not been handed yet."""
        self._handing_over = False
        self._then_forget: dict[Namespace | None, set[_Write]] = {}
        """Cleared namespaces, and the writes that may bring them back: the tier forgets them once more when these have
        ended."""
        self._names: deque[tuple[Space, bytes]] = deque()
        """Spaces and joined hashes of blocks that did not fit the queue."""
        self._num_names = 0
        self._ahead: tuple[Space, ...] = ()
        """Spaces of the last use, which the next stores are expected to need room for."""
        self._evicted_unkept = self.cache.tiers.evicted_unkept
        """Evictions without a copy that have been counted."""
        self.writing_bytes = 0

    @property
    def budget_left(self) -> int | None:
        """Bytes that may be written now; None for no limit."""
        self._see_spent()
        return self.budget.left(self.clock())

    def _see_spent(self) -> None:
        """Adopt the budget of the tier's process, which knows what earlier daemons have spent, too."""
        stats = self.tier.stats
        if stats is not None and stats.write_bytes_left is not None:
            self.budget.at_most(stats.write_bytes_left)

    def stored(self, grant: StoreGrant) -> None:
        """A store was sealed in this step."""
        if self.admission is Admission.ALL:
            for part in grant.parts:
                self._write(Chain(part.blocks, part.rows))
        elif self.admission is Admission.ON_EVICT:
            self._write_ahead(tuple([part.blocks.space for part in grant.parts]))

    def used(self, grant: LoadGrant) -> None:
        """The blocks of a load, which are referenced, are used again."""
        if self.admission is Admission.ON_EVICT:
            self._write_ahead(tuple([chain.blocks.space for chain in grant.chains]))
        elif self.admission is not Admission.NONE:
            for chain in grant.chains:
                self._write(chain)

    def may_bring_back(self, namespace: Namespace) -> bool:
        """Whether the tier may have blocks of it that were cleared: writes of them had begun before."""
        return bool(self._then_forget) and (namespace in self._then_forget or None in self._then_forget)

    def forget(self, namespace: Namespace | None) -> None:
        """A namespace is cleared, or all."""
        self.tier.forget(namespace)
        kept = [each for each in self._names if namespace not in (None, each[0].namespace)]
        self._names = deque(kept)
        self._num_names = sum([self._count(*each) for each in kept])
        writes = {each for each in self._under_way if namespace in (None, each.grant.chain.blocks.space.namespace)}
        if writes:
            self._then_forget.setdefault(namespace, set()).update(writes)

    def _write(self, chain: Chain) -> None:
        rows = self.cache.tiers.unwritten(chain, self.bit)
        space = chain.blocks.space
        if not len(rows) or None in space.shard_bytes:
            return
        if self.tier.off:
            self.refused(WriteRefusal.OFF, len(rows))
            return
        room = min(max(0, self.queue_bytes - self.writing_bytes), self.cache.busy_room(space)) // space.block_bytes
        rows, rest = rows[:room], rows[room:]  # the beginning of a prefix first: without it the rest is of no use
        spent = not self._write_rows(chain.blocks, rows)
        if len(rest) and spent:
            self.refused(WriteRefusal.BUDGET, len(rest))
        elif len(rest):
            self._keep_names(Chain(chain.blocks, rest))

    def _write_ahead(self, spaces: tuple[Space, ...]) -> None:
        """Write what the next stores to these spaces would evict, so that they find room whose blocks are kept."""
        self._ahead = spaces
        left = self.budget_left
        if lost := self.cache.tiers.evicted_unkept - self._evicted_unkept:
            self._evicted_unkept += lost
            spent = left is not None and left < max([space.block_bytes for space in spaces], default=0)
            reason = WriteRefusal.BUDGET if spent else WriteRefusal.QUEUE
            self.refused(WriteRefusal.OFF if self.tier.off else reason, lost)
        if self.tier.off:
            return
        sizes = {size for space in spaces for size in space.slot_sizes if size}
        wanted = min(AHEAD_BYTES, self.queue_bytes // 2) - self.writing_bytes
        needs = {size: count for size in sizes if (count := wanted // len(sizes) // size) > 0}
        room = min(wanted, self.chunk_bytes * AHEAD_CHUNKS, wanted if left is None else left)
        for chain in self.cache.tiers.evict_ahead(needs, self.bit, spaces[0]) if needs else ():
            space = chain.blocks.space
            most = min(room, self.cache.busy_room(space)) // space.block_bytes
            rows = self.cache.tiers.unwritten(chain, self.bit)[:most]
            if len(rows) and None not in space.shard_bytes:
                room -= len(rows) * space.block_bytes
                self._write_rows(chain.blocks, rows)

    def _write_rows(self, blocks: SpaceBlocks, rows: Ints) -> bool:
        """Write these blocks. False: the budget is used up, and the rest of them is counted."""
        space = blocks.space
        count = max(1, self.chunk_bytes // space.block_bytes)
        self._see_spent()
        for start in range(0, len(rows), count):
            piece = rows[start : start + count]
            affordable = self.budget.take(len(piece), space.block_bytes, self.clock())
            if affordable:
                grant = self.cache.tiers.begin_write(Chain(blocks, piece[:affordable]), self.bit)
                self._begin(grant, affordable * space.block_bytes)
            if affordable < len(piece):
                self.refused(WriteRefusal.BUDGET, len(rows) - start - affordable)
                return False
        return True

    def _keep_names(self, chain: Chain) -> None:
        """Remember these blocks by name, to be written later if they are still there."""
        left = len(chain.rows) if self.writing_bytes else 0  # else no end of a write would give them their turn
        left = min(left, MAX_NAMES - self._num_names)
        if left < len(chain.rows):
            self.refused(WriteRefusal.QUEUE, len(chain.rows) - left)
        if left:
            self._names.append((chain.blocks.space, chain.blocks.index.hashes_of(chain.rows[:left])))
            self._num_names += left

    def _write_named(self) -> None:
        """Write the blocks that wait by name, as far as there is room."""
        for _ in range(len(self._names)):
            if self.writing_bytes > self.queue_bytes // 2 or not self._names:
                return
            space, hashes = self._names.popleft()
            count = self._count(space, hashes)
            self._num_names -= count
            chain = self.cache.chain(space, hashes)
            if gone := count - len(chain.rows):
                self.refused(WriteRefusal.QUEUE, gone)
            if len(chain.rows):
                self._write(chain)

    @staticmethod
    def _count(space: Space, hashes: bytes) -> int:
        return len(hashes) // space.namespace.hash_bytes

    def _begin(self, grant: WriteGrant, nbytes: int) -> None:
        write = _Write(grant, nbytes, np.ones(len(grant.chain.rows), np.bool_))
        self._under_way.add(write)
        self._waiting.append(write)
        self.writing_bytes += nbytes
        self.soon(self._hand_over_some)

    def _hand_over_some(self) -> None:
        """Hand over as many writes as the tier takes at a time. One that fails at once must not begin another round."""
        if self._handing_over:
            return
        self._handing_over = True
        try:
            while self._waiting and len(self._under_way) - len(self._waiting) < CHUNKS:
                self._hand_over(self._waiting.popleft())
        finally:
            self._handing_over = False

    def _hand_over(self, write: _Write) -> None:
        grant, space = write.grant, write.grant.chain.blocks.space
        for shard in range(space.num_shards):
            slots = grant.slots[shard]
            try:
                self.tier.write(
                    shard_space(space, shard),
                    grant.hashes,
                    slots,
                    self.cache.checksums(slots),
                    partial(self._written, write),
                )
                write.calls += 1
            except TierFailed:
                self._fail(write, WriteRefusal.OFF)
            except Exception as error:  # noqa: BLE001 - reported; the other writes go on
                heard(f"blocks are not handed to the tier {self.tier.name}", error)
                self._fail(write, WriteRefusal.FAILED)
        self._ended(write)

    def _written(self, write: _Write, ends: Sequence[WriteEnd]) -> None:
        if not ends:
            self._fail(write, WriteRefusal.FAILED)
        else:
            write.kept &= np.array([end is not WriteEnd.FULL for end in ends])
            if WriteEnd.FULL in ends:
                write.failed = write.failed or WriteRefusal.FULL
        self._ended(write)

    def _fail(self, write: _Write, reason: WriteRefusal) -> None:
        write.failed = write.failed or reason
        write.kept[:] = False

    def _ended(self, write: _Write) -> None:
        write.calls -= 1
        if write.calls:
            return
        if write.failed is not None:
            self.refused(write.failed, int(np.count_nonzero(~write.kept)))
        self.writing_bytes -= write.nbytes
        self._under_way.remove(write)
        try:
            self.cache.tiers.end_write(write.grant, write.kept, evict=self.admission is Admission.ON_EVICT)
        except Exception as error:  # noqa: BLE001 - reported; the other writes go on
            heard(f"a write to the tier {self.tier.name} has not ended in order", error)
        for namespace, writes in tuple(self._then_forget.items()):
            writes.discard(write)
            if not writes:
                del self._then_forget[namespace]
                self.tier.forget(namespace)
        self._hand_over_some()
        self._write_named()
        if self._ahead:
            self._write_ahead(self._ahead)

"""Statistics of the cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.cache.block_table import BlockTable
from kvsidecar.cache.slots import SlotState


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Gauges and counters. ``used + free + reserved + quarantined + wasted`` bytes add up to the whole pool."""

    total_bytes: int
    used_bytes: int
    """Sealed slots."""
    free_bytes: int
    reserved_bytes: int
    """Slots being filled."""
    quarantined_bytes: int
    """Slots that a store of unknown outcome may still write to; never reused."""
    wasted_bytes: int
    """Ends of slabs that are too short for a slot, and gaps between them that are too short for any size in use."""
    evictable_bytes: int
    """Part of ``used_bytes`` that a store could evict now."""
    leased_bytes: int
    """Part of ``used_bytes`` that leases and loads reference."""
    blocks: int
    """Blocks that are readable, being filled, or partly sealed."""
    readable_blocks: int
    leases: int
    loads: int
    """Running loads; a load of unknown outcome never ends."""
    evicted_blocks: int
    evicted_bytes: int
    expired_blocks: int = 0
    """Part of ``evicted_blocks``."""
    unzeroed_bytes: int = 0
    """Bytes of slots that have been freed and are to be zeroed, including cleared blocks that nobody uses."""
    spaces_not_kept: int = 0
    """How often the blocks of a namespace's group could not be recorded for the next daemon."""


def gather(table: BlockTable, *, leases: int, loads: int) -> CacheStats:
    """The statistics of a table with this many leases and running loads."""
    slots = table.slots
    evictable, unfit, freed = slots.bytes_in(SlotState.EVICTABLE), slots.unfit_bytes, slots.freed
    return CacheStats(
        total_bytes=slots.total_bytes,
        used_bytes=slots.bytes_in(SlotState.IN_USE) + evictable,
        free_bytes=slots.bytes_in(SlotState.FREE) - unfit,
        reserved_bytes=slots.bytes_in(SlotState.RESERVED),
        quarantined_bytes=slots.bytes_in(SlotState.QUARANTINED),
        wasted_bytes=slots.wasted_bytes + unfit,
        evictable_bytes=evictable,
        leased_bytes=table.leased_bytes,
        blocks=table.num_blocks,
        readable_blocks=table.readable_blocks,
        leases=leases,
        loads=loads,
        evicted_blocks=table.evicted_blocks,
        evicted_bytes=table.evicted_bytes,
        expired_blocks=table.expired_blocks,
        unzeroed_bytes=0 if freed is None else freed.nbytes + table.cleared_bytes,
        spaces_not_kept=0 if table.records is None else table.records.spaces_not_kept,
    )

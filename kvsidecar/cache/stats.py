"""What the cache says of itself."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Part of ``used_bytes`` that leases and loads pin."""
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
    """Of slots that have been freed and are to be zeroed, those of cleared blocks included that nobody uses."""

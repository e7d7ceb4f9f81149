"""What a slot is: its size, and its states."""

from __future__ import annotations

from enum import IntEnum

from kvsidecar.cache.freed import PAGE_BYTES

SLOT_ALIGN = PAGE_BYTES
"""Offsets and sizes of slots are multiples of this many bytes. A page (and a cache line) then holds bytes of one slot
only, two DMAs never share a line, and sizes that differ by a few bytes share a class."""

NO_OWNER = -1
"""Owner of a slot that is free or quarantined."""


class SlotState(IntEnum):
    """States of a slot in a cut slab."""

    FREE = 0
    RESERVED = 1
    """Being filled by a store."""
    IN_USE = 2
    """Sealed, but not evictable: its block is referenced, or another shard of it is being filled."""
    EVICTABLE = 3
    """Sealed, and not in use by a lease, copy or store."""
    QUARANTINED = 4
    """It held wrong bytes; never reused."""


def size_class(nbytes: int) -> int:
    """Bytes of a slot for a shard of ``nbytes`` bytes."""
    return -(-nbytes // SLOT_ALIGN) * SLOT_ALIGN

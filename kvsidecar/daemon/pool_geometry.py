"""The pool and its parts on this machine, from the settings. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvsidecar.daemon.setting_types import PAGE_BYTES
from kvsidecar.daemon.settings import Settings
from kvsidecar.errors import ConfigError
from kvsidecar.support import memory_limits
from kvsidecar.support.units import MiB, format_size

if TYPE_CHECKING:
    from kvsidecar.pool.host_pool import PoolSpec


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Sizes in bytes. A chunk is a whole number of slabs."""

    pool_bytes: int
    slab_bytes: int
    chunk_bytes: int


def auto_slab_bytes(pool_bytes: int) -> int:
    """The largest power of two up to 1/32 of the pool, but 4 MiB to 64 MiB (the whole pool if it is smaller).

    Large slabs keep blocks of one size together, and cost less for each; small ones let several sizes share a pool.
    """
    part = max(1, pool_bytes // 32)
    smallest = min(pool_bytes, 4 * MiB) // PAGE_BYTES * PAGE_BYTES
    return max(smallest, min(1 << (part.bit_length() - 1), 64 * MiB))


def pool_geometry(settings: Settings, root: Path = memory_limits.ROOT) -> PoolGeometry:
    """Resolve percentages and "auto" for this machine.

    Raises:
        ConfigError: a percentage comes to less than one slab.
    """
    pool, chunk = memory_limits.resolve_size(settings.pool_size, root), settings.chunk_size
    slab = auto_slab_bytes(pool) if settings.slab_size == "auto" else settings.slab_size
    if settings.slab_size == "auto" and chunk % slab:
        # The lowest set bit is the largest power of two that divides the chunk.
        slab = min(slab, chunk & -chunk)
        if chunk % slab:
            chunk = slab  # the pool is one slab of an odd size, smaller than the chunk
    if pool < max(slab, PAGE_BYTES):
        here = f"{settings.called('pool_size')}={settings.pool_size} comes to {format_size(pool)} on this machine"
        raise ConfigError(f"{here}, less than one slab ({format_size(max(slab, PAGE_BYTES))})")
    return PoolGeometry(pool, slab, chunk)


def pool_spec(settings: Settings, geometry: PoolGeometry, near: Sequence[int | None]) -> PoolSpec:
    """The pool to reserve.

    Args:
        near: the NUMA node nearest to each device that copies from and to it; None: unknown.
    """
    from kvsidecar.pool.host_pool import PoolSpec

    online = memory_limits.numa_nodes()
    of_devices = tuple(dict.fromkeys(node for node in near if node is not None))
    return PoolSpec(
        nbytes=geometry.pool_bytes,
        slab_bytes=geometry.slab_bytes,
        chunk_bytes=geometry.chunk_bytes,
        huge_pages=settings.huge_pages,
        numa_nodes=() if settings.numa == "off" or len(online) < 2 else of_devices or tuple(online),
        prefault_threads=settings.prefault_threads,
        memory_check=settings.memory_check,
        num_pins=max(1, len(near)),
    )

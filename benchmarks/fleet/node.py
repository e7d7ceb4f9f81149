"""Nodes in simulated time: an engine's prefix cache, the daemon's pool, and what is behind it.

Everything that decides is the daemon's: `BlockCache` for each level, `Fetches`, `Writes` and `Estimate` between them.
A block is one slot of 4 KiB here, whatever it has in truth, and every rate is scaled alike, so that no array is as
long as a real pool has pages. Not modelled: a wait for the GPU, the time of a store, the KV of answers (the traces
name prompts only), failures.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final, cast

from benchmarks.fleet.trace import BLOCK_TOKENS, Request
from kvsidecar.cache.arrays import Ints
from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.cache.grants import Lease, LoadGrant, StoreGrant
from kvsidecar.cache.slots import SLOT_ALIGN, SlotAllocator
from kvsidecar.cli.size.hits import HASH_BYTES, LEASE_SECONDS, packed
from kvsidecar.core import tier_writes
from kvsidecar.core.tier_fetches import Fetches
from kvsidecar.core.tier_writes import Writes
from kvsidecar.errors import Refusal
from kvsidecar.tiers.backend import ReadEnd, ShardSpace, WriteEnd
from kvsidecar.tiers.policy import GUESSED_PREFILL, Admission, FetchRefusal, WriteBudget, WriteRefusal
from kvsidecar.tiers.tier import Tier
from kvsidecar.types import LookupMode, Namespace

UNIT: Final = SLOT_ALIGN
"""Bytes of a block here."""
NAMESPACE: Final = Namespace("fleet", "bf16", "layout", BLOCK_TOKENS, 1, 1, "number", HASH_BYTES)
SLAB_BLOCKS: Final = 64
FIND_SECONDS: Final = 0.0005
AGAIN_SECONDS: Final = 0.02
"""Between lookups of a request that waits."""
LATE_SECONDS: Final = 2.0
STORE_BLOCKS: Final = 16
"""Of one store: an engine computes a long prompt in pieces."""


@dataclass(frozen=True)
class Hardware:
    """One node, and what all nodes share. Bytes are real ones; rates are bytes a second."""

    block_bytes: int
    """Of `BLOCK_TOKENS` tokens, of all shards."""
    gpu_bytes: int
    """The engine's own KV cache."""
    pool_bytes: int
    disk_bytes: int = 0
    cluster_bytes: int = 0
    """Of all nodes together; each reaches all of it."""
    admission: str = Admission.SECOND_USE.value
    prefill_rate: float = GUESSED_PREFILL
    """Tokens a second."""
    link_rate: float = 50e9
    disk_read: float = 6.5e9
    disk_write: float = 3.5e9
    cluster_rate: float = 10e9
    """Of each node, in each direction."""
    patience: float = 1.0
    """Seconds that a request waits for a slower tier: `fetch_patience` of the connector."""
    write_bytes_per_day: int | None = None
    """To each tier."""
    chunk_blocks: int = 1
    """That are read or written in one call. More make a simulation of many nodes faster."""


class Loop:
    """Simulated time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = count()

    def at(self, when: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._events, (when, next(self._number), call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


class Kept:
    """One level: a cache and its only space, of whose slabs each has few blocks, so that they decide nothing. None of
    its bytes exist."""

    def __init__(self, blocks: int) -> None:
        self.cache = BlockCache(SlotAllocator(blocks * UNIT, min(blocks, SLAB_BLOCKS) * UNIT))
        self.space = self.cache.open_space(NAMESPACE, 0, 1, 0, UNIT)

    def find(self, hashes: Sequence[bytes] | bytes, mode: LookupMode) -> list[bool]:
        return self.cache.lookup(self.space, hashes, mode)

    def begin_load(
        self, hashes: Sequence[bytes] | bytes, lease: int | None = None, now: float = 0.0
    ) -> LoadGrant | None:
        grant = self.cache.begin_load([(self.space, 0, hashes)], lease, now)
        return None if isinstance(grant, Refusal) else grant

    def reserve(self, hashes: Sequence[bytes] | bytes) -> StoreGrant | None:
        grant = self.cache.begin_store([(self.space, 0, hashes)])
        return None if isinstance(grant, Refusal) else grant


class Device:
    """Moves one piece after the other."""

    def __init__(self, loop: Loop, rate: float) -> None:
        self._loop, self._rate, self.busy_until = loop, rate, 0.0

    def take(self, blocks: int, then: Callable[[], object]) -> None:
        self.busy_until = max(self._loop.now, self.busy_until) + blocks * UNIT / self._rate
        self._loop.at(self.busy_until, then)


class SimulatedTier:
    """Implements what `kvsidecar.core` uses of `kvsidecar.tiers.tier.Tier`, over what one engine keeps.

    Args:
        rates: bytes a second that it reads and writes, scaled.
        count: called with what it did, and a number of blocks.
    """

    off, stats = "", None

    def __init__(
        self, name: str, kept: Kept, loop: Loop, rates: tuple[float, float], count: Callable[[str, int], None]
    ) -> None:
        self.name, self.kept, self._loop, self._count = name, kept, loop, count
        self.read_rate = rates[0]
        self._reads, self.writes = Device(loop, rates[0]), Device(loop, rates[1])

    def may_have(self, _: ShardSpace, block_hash: bytes) -> bool:
        return self.kept.find([block_hash], LookupMode.BITMAP)[0]

    def find(self, _: ShardSpace, hashes: bytes, on_end: Callable[[list[bool]], None]) -> None:
        self._loop.at(self._loop.now + FIND_SECONDS, lambda: on_end(self.kept.find(hashes, LookupMode.BITMAP)))

    def read(
        self,
        _: ShardSpace,
        hashes: bytes,
        slots: Ints,
        on_end: Callable[[list[ReadEnd]], None],
        on_late: Callable[[], None],
    ) -> None:
        names = split(hashes)
        hits = self.kept.find(names, LookupMode.BITMAP)
        grant = self.kept.begin_load([name for name, hit in zip(names, hits, strict=True) if hit])
        assert grant is not None, "what has just been found cannot be pinned"
        over = False

        def ended() -> None:
            nonlocal over
            over = True
            self._count("read", sum(hits))
            self.kept.cache.end_load(grant)
            on_end([ReadEnd.DONE if hit else ReadEnd.MISS for hit in hits])

        self._reads.take(sum(hits), ended)
        if self._reads.busy_until > self._loop.now + LATE_SECONDS:
            self._loop.at(self._loop.now + LATE_SECONDS, lambda: None if over else on_late())

    def write(
        self,
        _: ShardSpace,
        hashes: bytes,
        slots: Ints,
        checksums: Sequence[int | None],
        on_end: Callable[[list[WriteEnd]], None],
    ) -> None:
        names = split(hashes)
        grant, room = None, len(names)
        while room and (grant := self.kept.reserve(names[:room])) is None:
            room //= 2
        new = set(grant.parts[0].index.tolist()) if grant else set()

        def ended() -> None:
            if grant is not None:
                self.kept.cache.seal_all(grant)
            self._count("written", len(new))
            ends = [WriteEnd.DONE if each in new else WriteEnd.PRESENT for each in range(room)]
            on_end(ends + [WriteEnd.FULL] * (len(names) - room))

        self.writes.take(len(new), ended)

    def forget(self, namespace: Namespace | None) -> None:
        raise AssertionError("nothing is cleared here")


@dataclass(slots=True)
class _Waiting:
    """A request whose blocks are being looked up."""

    request: Request
    rest: bytes
    """Hashes of the blocks that the GPU does not have."""
    in_pool: int = -1
    """Hits of the first lookup; the others came from a slower tier."""
    hits: int = 0
    tier: str = ""
    """That it waits for."""
    brought: Counter[str] = field(default_factory=Counter)
    """Hits by tier."""
    lease: Lease | None = None


class Node:
    """One engine with its daemon.

    Args:
        cluster: what all nodes share.
        count: called with the name of a count and how many.
    """

    def __init__(
        self, hardware: Hardware, loop: Loop, cluster: Kept | None, count: Callable[[str, float], None]
    ) -> None:
        self._loop, self._count, self._hardware = loop, count, hardware
        scale = UNIT / hardware.block_bytes
        self.gpu = Kept(max(1, hardware.gpu_bytes // hardware.block_bytes))
        self.pool = Kept(max(1, hardware.pool_bytes // hardware.block_bytes))
        self.tiers: list[tuple[SimulatedTier, Fetches, Writes]] = []
        self._link_rate = hardware.link_rate * scale
        found: list[tuple[str, Kept, tuple[float, float]]] = []
        if hardware.disk_bytes:
            disk = Kept(max(1, hardware.disk_bytes // hardware.block_bytes))
            found.append(("disk", disk, (hardware.disk_read, hardware.disk_write)))
        if cluster is not None:
            found.append(("cluster", cluster, (hardware.cluster_rate, hardware.cluster_rate)))
        most = max(
            hardware.pool_bytes // tier_writes.QUEUE_SHARE, min(hardware.pool_bytes // 2, tier_writes.SMALL_QUEUE)
        )
        per_day, chunk_bytes = hardware.write_bytes_per_day, hardware.chunk_blocks * UNIT
        for number, (name, kept, (read, write)) in enumerate(found):
            tier = SimulatedTier(name, kept, loop, (read * scale, write * scale), self._counter(name))
            bit = 1 << number
            self.tiers.append(
                (
                    tier,
                    Fetches(
                        self.pool.cache,
                        cast(Tier, tier),
                        bit,
                        lambda: loop.now,
                        self._refusals(f"{name} unfetched"),
                        chunk_bytes=chunk_bytes,
                    ),
                    Writes(
                        self.pool.cache,
                        cast(Tier, tier),
                        bit,
                        Admission(hardware.admission),
                        WriteBudget(None if per_day is None else int(per_day * scale), loop.now),
                        lambda: loop.now,
                        self._refusals(f"{name} unwritten"),
                        chunk_bytes=chunk_bytes,
                        queue_bytes=max(UNIT, int(most * scale)),
                    ),
                )
            )

    def _counter(self, name: str) -> Callable[[str, int], None]:
        return lambda what, blocks: self._count(f"{name} {what}", blocks)

    def _refusals(self, name: str) -> Callable[[FetchRefusal | WriteRefusal, int], None]:
        return lambda reason, blocks: self._count(f"{name} {reason.value}", blocks)

    # -- a request -------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A prompt: what the GPU has is used, the rest is looked up in the pool and behind it."""
        hashes = packed(request.blocks)
        hits = self.gpu.find(hashes, LookupMode.PREFIX).count(True)
        if hits and (grant := self.gpu.begin_load(hashes[: hits * HASH_BYTES])) is not None:
            self.gpu.cache.end_load(grant)
        self._count("requests", 1)
        self._count("blocks", len(request.blocks))
        self._count("gpu hits", hits)
        self._look_up(_Waiting(request, hashes[hits * HASH_BYTES :]))

    def _look_up(self, waiting: _Waiting) -> None:
        now, cache = self._loop.now, self.pool.cache
        if not waiting.rest:
            self._load(waiting)
            return
        held = waiting.lease
        waiting.lease, (found,) = cache.lookup_and_lease(
            [(self.pool.space, waiting.rest)], LookupMode.PREFIX, now, LEASE_SECONDS, None
        )
        if held is not None:
            cache.release(held.id)
        hits = found.count(True)
        if waiting.in_pool < 0:
            waiting.in_pool = hits
        elif hits > waiting.hits:
            waiting.brought[waiting.tier] += hits - waiting.hits
        waiting.hits = hits
        waited = now - waiting.request.at
        if hits < len(found) and waited < self._hardware.patience:
            names = split(waiting.rest)
            for tier, fetcher, _ in self.tiers:
                left = self._hardware.patience - waited
                coming = fetcher.coming(self.pool.space, names, hits, left, self._hardware.prefill_rate)
                if coming.asking or coming.blocks:
                    waiting.tier = tier.name
                    self._loop.at(now + AGAIN_SECONDS, lambda: self._look_up(waiting))
                    return
        self._load(waiting)

    def _load(self, waiting: _Waiting) -> None:
        now, cache, request = self._loop.now, self.pool.cache, waiting.request
        hits = waiting.hits
        grant = None
        if hits:
            assert waiting.lease is not None
            grant = self.pool.begin_load(waiting.rest[: hits * HASH_BYTES], waiting.lease.id, now)
            assert grant is not None, "leased blocks cannot be loaded"
            cache.release(waiting.lease.id)
        loading = hits * UNIT / self._link_rate
        by_tier = {"pool": max(0, waiting.in_pool), **waiting.brought}
        for tier, blocks in by_tier.items():
            self._count(f"{tier} hits", blocks)
        gpu_hits = len(request.blocks) - len(waiting.rest) // HASH_BYTES
        self._count("misses", len(waiting.rest) // HASH_BYTES - hits)
        waited = now - request.at
        self._count("waited seconds", waited)
        self._count("waits", waited > 0)
        self._count("saved seconds", hits * BLOCK_TOKENS / self._hardware.prefill_rate - waited - loading)
        computing = (request.input_tokens - (gpu_hits + hits) * BLOCK_TOKENS) / self._hardware.prefill_rate
        self._count("prefill seconds", computing)

        def loaded() -> None:
            if grant is not None:
                for _, _, writer in self.tiers:
                    writer.used(grant)
                cache.end_load(grant)
            self._compute(waiting.request.blocks, waiting.rest[hits * HASH_BYTES :], computing)

        if grant is None:
            loaded()
        else:
            self._loop.at(now + loading, loaded)

    def _compute(self, blocks: Ints, rest: bytes, seconds: float) -> None:
        """What is computed is stored in pieces; all of the prompt is in the GPU at the end."""
        pieces = [rest[at : at + STORE_BLOCKS * HASH_BYTES] for at in range(0, len(rest), STORE_BLOCKS * HASH_BYTES)]
        for number, piece in enumerate(pieces, 1):
            self._loop.at(self._loop.now + seconds * number / len(pieces), partial(self._store, piece))
        self._loop.at(self._loop.now + seconds, partial(self._keep_in_gpu, packed(blocks)))

    def _keep_in_gpu(self, hashes: bytes) -> None:
        if (grant := self.gpu.reserve(hashes)) is None:
            self._count("gpu full", 1)
        else:
            self.gpu.cache.seal_all(grant)

    def _store(self, hashes: bytes) -> None:
        if (grant := self.pool.reserve(hashes)) is None:
            self._count("pool full", len(hashes) // HASH_BYTES)
            return
        self.pool.cache.seal_all(grant)
        for _, _, writer in self.tiers:
            writer.stored(grant)

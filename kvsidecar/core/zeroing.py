"""Zeroes what is freed (``--zero-freed``): in a thread, slice by slice, so that the event loop keeps running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvsidecar.cache.freed import Freed
from kvsidecar.cache.grants import StoreGrant
from kvsidecar.core.metrics import Metrics
from kvsidecar.support import failpoints, host_memory

SLICE_BYTES: Final = 8 << 20
"""Bytes zeroed at a time: about a millisecond, for which a store may have to wait."""
TURN_SECONDS: Final = 0.5
"""A freed slot is zeroed if it has not been given out again for this long, or up to twice as long."""


class Memory(Protocol):
    """The pool, see `kvsidecar.pool.host_pool.HostPool`."""

    @property
    def address(self) -> int: ...


class Zeroing:
    """Used from the event loop.

    Args:
        freed: the slots to zero.
        memory: mapped as long as `run` runs.
    """

    def __init__(self, freed: Freed, memory: Memory, metrics: Metrics) -> None:
        self._freed = freed
        self._memory = memory
        self._zeroed_bytes = metrics.zeroed_bytes
        self._begun: Sequence[tuple[int, int]] = ()
        """What is being zeroed."""
        self._later: list[Callable[[], object]] = []

    def may_write(self, grant: StoreGrant, later: Callable[[], object]) -> bool:
        """Whether this store may write into its slots now. Ask once, before it does.

        Args:
            later: called once when it may, if it may not now.
        """
        zeroing = False
        for part in grant.parts:
            if len(part.slots):
                self._zero_ends(part.slots.tolist(), part.blocks.space.shard_bytes[part.shard] or 0, part.slot_size)
                zeroing |= self._freed.is_zeroing(part.slots, part.slot_size)
        if zeroing:
            self._later.append(later)
        return not zeroing

    def _zero_ends(self, slots: Sequence[int], shard_bytes: int, slot_size: int) -> None:
        """Zero the ends of slots that are a little larger than their shard: the store does not write there. Less than a
        page each."""
        if shard_bytes < slot_size:
            for slot in slots:
                host_memory.zero(self._memory.address + slot + shard_bytes, slot_size - shard_bytes)

    async def run(self) -> None:
        """Zero what is freed until cancelled. When this returns, nothing is being written.

        May be called again after an unexpected error. What was being zeroed then is zeroed first: until it is, no store
        may write there, since some of it may have been given out."""
        if self._begun:
            await self._zero(self._begun)
        while True:
            await asyncio.sleep(TURN_SECONDS)
            self._freed.next_turn()
            while self._freed.waits:
                pieces = self._freed.begin(SLICE_BYTES)
                if pieces:
                    await self._zero(tuple(pieces))
                await asyncio.sleep(0)

    async def _zero(self, pieces: Sequence[tuple[int, int]]) -> None:
        self._begun = pieces
        work = asyncio.ensure_future(asyncio.to_thread(_zero_pieces, self._memory.address, pieces))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            while not work.done():  # the memory is going to be unmapped
                await asyncio.wait([work])
            self._end()
            raise
        work.result()
        self._end()
        self._zeroed_bytes.inc(sum([nbytes for _, nbytes in pieces]))

    def _end(self) -> None:
        self._begun = ()
        self._freed.end()
        later, self._later = self._later, []
        for call in later:
            call()


def _zero_pieces(address: int, pieces: Sequence[tuple[int, int]]) -> None:
    failpoints.hit("zeroing.slice")
    for offset, nbytes in pieces:
        host_memory.zero(address + offset, nbytes)

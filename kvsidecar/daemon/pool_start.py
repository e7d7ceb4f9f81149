"""Leads from started copiers to a pinned and tested pool: all that must be done before the daemon is ready."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvsidecar.cache.block_cache import BlockCache
from kvsidecar.copier.copiers import START_ATTEMPTS, Copier, Copiers
from kvsidecar.copier.messages import CopyPart
from kvsidecar.core.holds import Holds
from kvsidecar.core.jobs import JobRunner
from kvsidecar.core.readiness import DaemonReadiness
from kvsidecar.device.base import ScratchSource
from kvsidecar.errors import DeviceError, DeviceLost, PinFailed
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.pool.pinning import PinProgress
from kvsidecar.support import log
from kvsidecar.types import Direction, GroupLayout, Region

SELF_TEST_BYTES = 64 * 1024
SELF_TEST_SESSION = 0
"""A session of no rank: theirs have odd ids."""

_log = log.get("daemon")


@dataclass(eq=False)
class PoolStart:
    """Pins the pool in every copier, chunk by chunk, and has each copier copy to it and back.

    Args:
        holds: they may have to leave a place for the self-test.
    """

    pool: HostPool
    copiers: Copiers
    cache: BlockCache
    runner: JobRunner
    holds: Holds
    readiness: DaemonReadiness

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._serves_kept = False
        self.progress = PinProgress(self.pool.nbytes, 0, 0.0, None, 0.0)

    def stop(self) -> None:
        """End `pin` with `PinStopped`, if it is still under way."""
        self._stop.set()

    async def pin(self) -> None:
        """Pin the pool, after the copiers have started.

        Raises:
            DeviceError, PinFailed, PoolRefused, PinStopped: nothing stays pinned.
        """
        loop = asyncio.get_running_loop()

        def progressed(progress: PinProgress) -> None:
            asyncio.run_coroutine_threadsafe(self._progressed(progress), loop).result()

        def before_unpin() -> None:
            asyncio.run_coroutine_threadsafe(self._end_loads(), loop).result()

        await asyncio.to_thread(self.pool.pin, progressed, self._stop, before_unpin)
        if not self._has_kept:
            nbytes = min(SELF_TEST_BYTES, self.pool.nbytes)
            await self._self_test({0, self.pool.nbytes - nbytes}, nbytes)
        self.cache.reader.below = None

    @property
    def _has_kept(self) -> bool:
        return bool(self.cache.adopted.kept_blocks)

    async def _progressed(self, progress: PinProgress) -> None:
        """Note that the first chunks are pinned in every copier. The next one is pinned after this.

        Raises:
            DeviceError, PinFailed: the self-test failed.
        """
        self.cache.reader.below = progress.pinned_bytes
        self.readiness.pinning(
            pinned_bytes=progress.pinned_bytes,
            bytes_per_second=progress.bytes_per_second,
            eta_seconds=progress.eta_seconds,
        )
        self.progress = progress
        _log.debug("pinning", pinned_bytes=progress.pinned_bytes, total_bytes=progress.total_bytes)
        if not self._serves_kept and progress.pinned_bytes and self._has_kept:
            place = self._place_among_kept(progress)
            if place is None:
                return
            offset, nbytes = place  # which stays free: stores are declined until the daemon is ready
            await self._self_test([offset], min(SELF_TEST_BYTES, nbytes))
            self._serves_kept = True
            self.readiness.serve_kept(True)
            _log.info("serving kept blocks", pinned_bytes=progress.pinned_bytes, total_bytes=progress.total_bytes)

    def _place_among_kept(self, progress: PinProgress) -> tuple[int, int] | None:
        """A place for the self-test. None: operators hold all memory so far, but there is more to come.

        Raises:
            PinFailed: there is none.
        """
        while (place := self.cache.find_place(progress.pinned_bytes)) is None:
            if progress.pinned_bytes < progress.total_bytes:
                return None
            if not (name := self.holds.give_up()):
                raise PinFailed("the self-test finds no free slot among the kept blocks")
            _log.warning("a pin was ended: pins held the whole pool, and the self-test needs a slot", pin=name)
        return place

    async def _end_loads(self) -> None:
        """Begin no more loads, and wait for those that run: chunks that they read are going to be unpinned."""
        self.readiness.serve_kept(False)
        await self.runner.wait_for(Direction.LOAD)

    async def _self_test(self, offsets: Iterable[int], nbytes: int) -> None:
        """Make each copier copy a random pattern from these places in the pool to its device and back.

        Raises:
            DeviceError: the copy failed or came back different, or each of `START_ATTEMPTS` processes ended over it.
        """
        for copier in self.copiers:
            processes = set[int]()
            while True:
                await copier.working()
                processes.add(copier.pid)
                try:
                    await self._copy_with(copier, offsets, nbytes)
                    break
                except DeviceLost as error:  # it is replaced
                    if len(processes) == START_ATTEMPTS:
                        raise DeviceLost(f"{copier.uuid}: the self-test was not over: {error}") from error
                    await asyncio.sleep(0)  # its supervision learns of it too

    async def _copy_with(self, copier: Copier, offsets: Iterable[int], nbytes: int) -> None:
        layout = GroupLayout(0, 1, 0, 1, (Region(0, 0, nbytes, nbytes, nbytes, 1),))
        _, process = await copier.open(SELF_TEST_SESSION, [ScratchSource(nbytes)], [layout], [])
        try:
            for offset in offsets:
                await self._copy_there_and_back(copier, offset, nbytes)
        finally:
            await copier.close_session(SELF_TEST_SESSION, process)

    async def _copy_there_and_back(self, copier: Copier, offset: int, nbytes: int) -> None:
        window = self.pool.view()[offset : offset + nbytes]
        pattern = np.frombuffer(secrets.token_bytes(nbytes), np.uint8)
        parts = [CopyPart(0, np.zeros(1, np.int64), np.array([offset], np.int64))]
        window[:] = pattern
        await copier.live().submit(SELF_TEST_SESSION, Direction.LOAD, parts).ended
        window[:] = 0
        await copier.live().submit(SELF_TEST_SESSION, Direction.STORE, parts).ended
        came_back = np.array_equal(window, pattern)
        window[:] = 0
        if not came_back:
            raise DeviceError(f"the self-test copy to {copier.uuid} and back returned different bytes")

"""The devices in use and their copy workers: opened when first needed, stopped once, at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvsidecar.copier.worker import CopyWorker
from kvsidecar.device.base import Device, Platform
from kvsidecar.errors import DeviceLost
from kvsidecar.support.cpu_sleep import NO_GUARD, SleepGuard
from kvsidecar.types import Direction


@dataclass(frozen=True, slots=True)
class StuckCopy:
    """A copy that makes no progress."""

    device: str
    direction: Direction
    seconds: float

    def __str__(self) -> str:
        return f"a {self.direction} on {self.device} has been in flight for {self.seconds:.0f} s"


class DeviceHub:
    """One `Device` per UUID and one `CopyWorker` per (device, direction). Used from the event loop.

    Calls into a driver take from microseconds to a second (a context), so they run in threads.

    Args:
        platform: where devices come from.
        on_worker_failure: called in a worker's thread with (device UUID, direction, error) when an error ends it.
        store_chunk: bytes of stores in flight at a time while an engine is busy on their device; None for no bound.
        guard: as in `CopyWorker`.
    """

    def __init__(
        self,
        platform: Platform,
        on_worker_failure: Callable[[str, Direction, BaseException], None],
        *,
        store_chunk: int | None = None,
        guard: SleepGuard = NO_GUARD,
    ) -> None:
        self.platform = platform
        self._guard = guard
        self._on_worker_failure = on_worker_failure
        self.store_chunk = store_chunk
        self.busy: frozenset[str] = frozenset()
        """UUIDs of the devices on which an engine computes: its own small copies, such as those of sampled tokens, must
        pass the stores there. Elsewhere stores may use the whole link."""
        self.pool_address: int | None = None
        """Set when the pool is pinned: workers may copy from then on."""
        self.lost: dict[str, str] = {}
        """Why each lost device is lost: it had an error that its context does not survive, and is never used again."""
        self._devices: dict[str, Device] = {}
        self._workers: dict[tuple[str, Direction], CopyWorker] = {}
        self._opening = asyncio.Lock()

    def chunk(self, uuid: str, direction: Direction) -> int | None:
        """The most bytes in flight at a time now, None for the whole link. Called from the workers' threads.

        Only stores are bounded: copies to the device do not delay those from it (measured).
        """
        return self.store_chunk if direction is Direction.STORE and uuid in self.busy else None

    async def device(self, uuid: str) -> Device:
        """The device, made usable at the first call.

        Raises:
            DeviceNotFound: no such device; the text lists those that are visible.
            DeviceLost: it is lost.
        """
        self._refuse_lost(uuid)
        if uuid not in self._devices:
            async with self._opening:
                self._devices[uuid] = await asyncio.to_thread(self.platform.device, uuid)
        return self._devices[uuid]

    async def worker(self, uuid: str, direction: Direction) -> CopyWorker:
        """The worker of one direction of one device, started at the first call. One that an unexpected error has ended
        is replaced: only its copies were lost.

        Raises:
            DeviceLost: the device is lost.
        """
        self._refuse_lost(uuid)
        worker = self._workers.get((uuid, direction))
        if worker is not None and worker.alive:
            return worker
        device = await self.device(uuid)
        async with self._opening:
            self._refuse_lost(uuid)
            worker = self._workers.get((uuid, direction))
            if worker is None or not worker.alive:
                worker = await asyncio.to_thread(self._start, device, direction)
                self._workers[uuid, direction] = worker
        return worker

    def _refuse_lost(self, uuid: str) -> None:
        if (reason := self.lost.get(uuid)) is not None:
            raise DeviceLost(f"device {uuid} is lost: {reason}; restart the daemon when it is well again")

    def _start(self, device: Device, direction: Direction) -> CopyWorker:
        if self.pool_address is None:
            raise RuntimeError("a worker was requested before the pool was pinned")
        return CopyWorker(
            device,
            direction,
            pool_address=self.pool_address,
            chunk=lambda: self.chunk(device.uuid, direction),
            guard=self._guard,
            on_failure=lambda error: self._on_worker_failure(device.uuid, direction, error),
        )

    def workers(self) -> Iterator[tuple[str, Direction, CopyWorker]]:
        """All workers that were started."""
        for (uuid, direction), worker in self._workers.items():
            yield uuid, direction, worker

    def stuck(self, bound_seconds: float) -> StuckCopy | None:
        """A copy that has been in flight for longer than this, or None."""
        for uuid, direction, worker in self.workers():
            age = worker.oldest_inflight_seconds()
            if worker.running and age > bound_seconds:
                return StuckCopy(uuid, direction, age)
        return None

    async def close(self, timeout: float) -> bool:
        """Finish the queued copies and stop the workers. Returns whether all have ended within ``timeout`` seconds.

        The platform stays open: memory is unpinned through it.
        """
        closing = [asyncio.to_thread(worker.close, timeout) for _, _, worker in self.workers()]
        return all(await asyncio.gather(*closing))

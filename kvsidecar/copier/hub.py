"""The devices in use and their copy workers: opened at the first need, stopped once, at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvsidecar.copier.worker import CopyWorker
from kvsidecar.device.base import Device, Platform
from kvsidecar.errors import DeviceLost
from kvsidecar.support.keep_awake import NO_GUARD, SleepGuard
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
        on_worker_failure: told (device UUID, direction, error) when a worker can copy no more. Called in the
            worker's thread.
        store_chunk: bytes of stores in flight at a time while an engine is busy on their device; None for no bound.
        guard: as that of `CopyWorker`.
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
        self._store_chunk = store_chunk
        self._busy: frozenset[str] = frozenset()
        self._pool_address: int | None = None
        self._devices: dict[str, Device] = {}
        self._workers: dict[tuple[str, Direction], CopyWorker] = {}
        self._lost: dict[str, str] = {}
        self._opening = asyncio.Lock()

    def use_pool(self, address: int) -> None:
        """The pool is pinned and lies at ``address``; workers may copy from now on."""
        self._pool_address = address

    def set_store_chunk(self, store_chunk: int | None) -> None:
        """In force from the next call that a worker issues."""
        self._store_chunk = store_chunk

    def set_busy(self, uuids: frozenset[str]) -> None:
        """Devices on which an engine computes: its own small copies, such as those of sampled tokens, must pass the
        stores there. Elsewhere stores may use the whole link."""
        self._busy = uuids

    def chunk(self, uuid: str, direction: Direction) -> int | None:
        """Most bytes in flight at a time now, None for the whole link. Called from the workers' threads.

        Only stores are bounded: copies to the device do not delay those from it (measured).
        """
        return self._store_chunk if direction is Direction.STORE and uuid in self._busy else None

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
        """The worker of one direction of one device, started at the first call.

        One whose thread ended by an error that nobody expected is replaced: only the copies it had were lost.

        Raises:
            DeviceLost: the device can copy no more.
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

    def mark_lost(self, uuid: str, reason: str) -> None:
        """The device had an error that its context does not survive. It is never used again in this run."""
        self._lost.setdefault(uuid, reason)

    @property
    def lost(self) -> dict[str, str]:
        """Devices that are lost, and why."""
        return dict(self._lost)

    def _refuse_lost(self, uuid: str) -> None:
        if (reason := self._lost.get(uuid)) is not None:
            raise DeviceLost(f"device {uuid} is lost: {reason}; restart the daemon when it is well again")

    def _start(self, device: Device, direction: Direction) -> CopyWorker:
        if self._pool_address is None:
            raise RuntimeError("a worker was asked for before the pool was pinned")
        return CopyWorker(
            device,
            direction,
            pool_address=self._pool_address,
            chunk=lambda: self.chunk(device.uuid, direction),
            guard=self._guard,
            on_failure=lambda error: self._on_worker_failure(device.uuid, direction, error),
        )

    def workers(self) -> Iterator[tuple[str, Direction, CopyWorker]]:
        """Every worker that was started."""
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
        """Finish what is queued and stop the workers. The platform stays open: memory is unpinned through it.

        Returns:
            Whether all of them have ended within ``timeout`` seconds.
        """
        closing = [asyncio.to_thread(worker.close, timeout) for _, _, worker in self.workers()]
        return all(await asyncio.gather(*closing))

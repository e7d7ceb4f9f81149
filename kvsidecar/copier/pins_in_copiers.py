"""Passes each chunk of the pool that `kvsidecar.pool.pinning` has faulted in to every copier, which pins it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvsidecar.copier.copiers import Copiers
from kvsidecar.copier.link import PoolFile
from kvsidecar.pool.host_pool import HostPool


class PinsInCopiers:
    """Implements `kvsidecar.pool.pinning.Pinner`. Created in the event loop; called in other threads, which wait."""

    pool: HostPool
    """Set before it is pinned."""

    def __init__(self, copiers: Copiers) -> None:
        self._copiers = copiers
        self._loop = asyncio.get_running_loop()
        self._mapped = False

    @property
    def name(self) -> str:
        return self._copiers.hello.platform

    def pin_limit(self) -> int | None:
        return self._copiers.hello.pin_limit

    def pin(self, address: int, nbytes: int) -> None:
        pool = self.pool
        if not self._mapped:
            self._wait(self._copiers.map(PoolFile(pool.fd, pool.nbytes, pool.pages, pool.boundary)))
            self._mapped = True
        self._wait(self._copiers.pin(address - pool.address, nbytes))

    def unpin(self, address: int, nbytes: int) -> None:
        self._wait(self._copiers.unpin(address - self.pool.address, nbytes))

    def _wait(self, steps: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(steps, self._loop).result()

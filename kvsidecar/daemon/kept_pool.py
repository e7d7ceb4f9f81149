"""The pool's second life: finds the files that an earlier daemon has left, and says whether they may be used.

They may be once nothing of that daemon can write to them any more: a copy that its copier had begun would land in a
slot that this daemon has given to another block. What cannot be used is replaced by new files, never refused, and a
slot of them is never one of the old ones.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from kvsidecar.core.readiness import WarmStart
from kvsidecar.daemon.config import Settings
from kvsidecar.daemon.systemd import NotifySocket, given_descriptors
from kvsidecar.errors import PoolRefused, SocketInUse
from kvsidecar.pool.host_pool import HostPool
from kvsidecar.pool.kept_files import FILES, Carrier, DescriptorStore, KeptFiles, PoolDirectory
from kvsidecar.pool.owners import NUM_BYTES, read_owners, write_owners
from kvsidecar.support import host_memory, log, memory_limits
from kvsidecar.support.file_lock import lock_within
from kvsidecar.support.process_ids import ProcessId, Watched, process_id

_log = log.get("pool")


async def open_carrier(settings: Settings, manager: NotifySocket, stop: asyncio.Event) -> Carrier | None:
    """Who holds the pool while there is no daemon; None if nobody does, or if ``stop`` was set meanwhile.

    Raises:
        ConfigError: the directory cannot be used.
        SocketInUse: another daemon uses it.
    """
    given = given_descriptors(os.environ, os.getpid())
    if settings.pool_dir is None:
        return DescriptorStore(manager.send, given) if manager.listens else None
    for name, fd in given.items():
        os.close(fd)
        if name in FILES:  # of a start without --pool-dir: nobody would ever take them back
            manager.send("FDSTOREREMOVE=1", f"FDNAME={name}")
    directory = PoolDirectory(Path(settings.pool_dir))
    # Before the first attempt: who holds the lock then, and is to be seen from here, is among these.
    with Watched(_owners_in(directory)) as watched:
        contended: list[bool] = []

        def waits() -> None:
            contended.append(True)
            _log.warning("waiting for another daemon to leave the pool's directory", directory=settings.pool_dir)

        try:
            if not await lock_within(directory.lock, settings.lock_wait, stop, waits):
                return None
        except TimeoutError:
            raise SocketInUse(
                f"another kvsidecar has its pool in {settings.pool_dir}: stop it, or set pool_dir to another directory"
            ) from None
        directory.left_by_stranger = bool(contended) and not watched
    return directory


def _owners_in(directory: PoolDirectory) -> list[ProcessId]:
    files = directory.find()
    if files is None:
        return []
    try:
        return read_owners(files.table_fd)
    finally:
        files.close()


class KeptPool:
    """Gives the pool its file. Used from the event loop.

    Args:
        carrier: holds the files.
        pool: not pinned yet.
    """

    def __init__(self, carrier: Carrier, pool: HostPool, settings: Settings) -> None:
        self._carrier, self._pool, self._settings = carrier, pool, settings
        self._files: KeptFiles | None = None

    async def open(self) -> WarmStart:
        """Wait for the former owner, and give the pool its file: the kept one, or a new one.

        Raises:
            PoolRefused: there is no room for a new one.
        """
        files = self._carrier.find()
        reason = "there was no pool to take over" if files is None else await self._problem(files)
        if reason:
            if files is not None:
                _log.warning("the kept pool is not used", carrier=self._carrier.name, reason=reason)
                files.close()
            files = await asyncio.to_thread(self._carrier.create, self._pool.nbytes, NUM_BYTES, self._pool.check)
        assert files is not None
        self._files = files
        self._pool.use(files.pool_fd)
        return WarmStart(self._carrier.name, reason)

    async def _problem(self, files: KeptFiles) -> str:
        """Why these files cannot be used; empty if they can."""
        try:
            owners = read_owners(files.table_fd)
        except OSError as error:
            return f"its table cannot be read: {error.strerror}"
        with Watched(owners) as living:
            # Also where they are not used: the memory of the old ones is free only then.
            if not await living.wait(self._settings.lock_wait):
                return "a process of the former daemon still lives, and may write to the pool"
        if self._settings.cold_start:
            return "--cold-start is set"
        if self._carrier.left_by_stranger:
            return "another daemon has just left it, and its processes cannot be seen from here"
        if (found := os.fstat(files.pool_fd).st_size) != self._pool.nbytes:
            return f"it has {found} bytes instead of {self._pool.nbytes}"
        huge_page_bytes = host_memory.huge_page_bytes(files.pool_fd) or 0
        try:
            memory_limits.pages_of_file(self._settings.huge_pages, found, huge_page_bytes)
        except PoolRefused as error:
            return str(error)
        return ""

    def set_owners(self, pids: Iterable[int]) -> None:
        """Write down who may write to the pool from now on. The next daemon waits for the end of all of them."""
        if self._files is not None:
            write_owners(self._files.table_fd, [found for pid in pids if (found := process_id(pid)) is not None])

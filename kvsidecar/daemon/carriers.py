"""Opens the holder of the pool while there is no daemon. Imports little: the first copier starts after it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from kvsidecar.daemon.settings import Settings
from kvsidecar.daemon.systemd import NotifySocket, given_descriptors
from kvsidecar.errors import KeptRefused, SocketInUse
from kvsidecar.pool.kept_files import FILES, Carrier, DescriptorStore, PoolDirectory
from kvsidecar.support import log
from kvsidecar.support.file_lock import lock_within
from kvsidecar.support.process_ids import ProcessId, Watched

_log = log.get("pool")


async def open_carrier(settings: Settings, manager: NotifySocket, stop: asyncio.Event) -> Carrier | None:
    """The holder of the pool while there is no daemon; None if there is none, or if ``stop`` was set meanwhile.

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
    while True:
        directory = PoolDirectory(Path(settings.pool_dir), settings.table_path, settings.called)
        if not await _lock(directory, settings, stop):
            return None
        if directory.is_there:
            directory.mark_running()
            return directory
        directory.close()


async def _lock(directory: PoolDirectory, settings: Settings, stop: asyncio.Event) -> bool:
    """False if ``stop`` was set while another daemon held the lock. Raises SocketInUse."""
    # Before the first attempt: who holds the lock then, and can be seen from here, is among these.
    with Watched(_owners_in(directory)) as watched:
        contended: list[bool] = []

        def waits() -> None:
            contended.append(True)
            _log.warning("waiting for another daemon to leave the pool's directory", directory=settings.pool_dir)

        try:
            if not await lock_within(directory.lock, settings.lock_wait, stop, waits):
                return False
        except TimeoutError:
            raise SocketInUse(
                f"another kvsidecar has its pool in {settings.pool_dir}: stop it, or set "
                f"{settings.called('pool_dir')} to another directory"
            ) from None
        # A daemon that was stopped has taken all owners out.
        directory.left_by_stranger = bool(contended and not watched and _owners_in(directory))
    return True


def _owners_in(directory: PoolDirectory) -> list[ProcessId]:
    files = directory.find()
    if files is None:
        return []
    from kvsidecar.pool.record_table import RecordTable, map_table

    try:
        return [ProcessId(*owner) for owner in RecordTable.owners(map_table(files.table_fd))]
    except (KeptRefused, OSError):
        return []  # not a table, and not to be taken over
    finally:
        files.close()

"""The pool's second life: takes over what an earlier daemon has left, once nothing of that daemon can write there any
more.

A copy that an old copier had begun would land in a slot that this daemon has given to another block. What cannot be
taken over is replaced by new files, whose memory is other memory; the start is a cold one then, never a failed one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvsidecar.core.readiness import WarmStart
from kvsidecar.errors import KeptRefused, PoolRefused
from kvsidecar.pool.kept_holds import KeptHolds
from kvsidecar.pool.record_table import BOOT_TIME, Owner, RecordTable, TableFacts, map_table
from kvsidecar.support import host_memory, log, memory_limits
from kvsidecar.support.boot import boot_id
from kvsidecar.support.process_ids import ProcessId, Watched, process_id

if TYPE_CHECKING:
    from kvsidecar.cache.arrays import Words
    from kvsidecar.cache.block_cache import BlockCache
    from kvsidecar.cache.records import Records, TakeRoom
    from kvsidecar.daemon.settings import Settings
    from kvsidecar.pool.host_pool import HostPool
    from kvsidecar.pool.kept_files import Carrier, KeptFiles

MAX_STARTS = 5
"""Daemons that may end with the same kept files before they are ready. What they find there might be the reason."""
_log = log.get("pool")


class KeptPool:
    """Gives the pool its file, and the cache its records. Used from the event loop.

    Args:
        pool: not pinned yet.
    """

    def __init__(self, carrier: Carrier, pool: HostPool, slab_bytes: int, settings: Settings) -> None:
        self._carrier, self._pool, self._slab_bytes, self._settings = carrier, pool, slab_bytes, settings
        self._table: RecordTable | None = None
        self._table_fd = -1
        self._without_room = ""
        """Why the table could not grow the last time."""
        self.holds: KeptHolds | None = None
        """None: no file could be had."""
        self._began = time.monotonic()
        self.found = WarmStart()

    async def open(self) -> None:
        """Wait for the former owner, and give the pool its file: the kept one, or a new one."""
        found, reason = await self._find()
        if found is None:
            try:
                found = await asyncio.to_thread(self._create)
            except (KeptRefused, OSError, PoolRefused) as error:
                # A pool that is refused for its size is refused again when it is pinned, where that is said.
                _log.error("the cache will end with this daemon", carrier=self._carrier.name, reason=str(error))
                self.found = WarmStart("", str(error))
                return
        self._take(*found, reason)

    def _take(self, files: KeptFiles, table: RecordTable, holds: KeptHolds, reason: str) -> None:
        self._table, self.holds = table, holds
        self._pool.use(files.pool_fd)
        if self._table_fd >= 0:
            os.close(self._table_fd)
        self._table_fd = files.table_fd
        table.records.take_room = self._take_room_logged(table.records.take_room)
        self.found = WarmStart(files.carrier, reason)

    async def _find(self) -> tuple[tuple[KeptFiles, RecordTable, KeptHolds] | None, str]:
        """The kept files, their table and holds; or None, and why none can be used."""
        files = self._carrier.find()
        if files is None:
            return None, "there is no pool of an earlier daemon"
        try:
            return (files, *await self._open(files)), ""
        except (KeptRefused, OSError) as error:
            _log.warning("the pool of an earlier daemon is not used", carrier=files.carrier, reason=str(error))
            files.close()
            return None, str(error)

    async def _open(self, files: KeptFiles) -> tuple[RecordTable, KeptHolds]:
        """Raises KeptRefused, OSError."""
        memory = map_table(files.table_fd)
        with Watched(ProcessId(*owner) for owner in RecordTable.owners(memory)) as owners:
            # Also if the files are not used: the old memory is free only then.
            if not await owners.wait(0):
                _log.info("waiting for the processes of the earlier daemon to end", processes=len(owners))
            if not await owners.wait(self._settings.lock_wait):
                raise KeptRefused("a process of the earlier daemon is still alive and may write to its pool")
        if self._settings.cold_start:
            raise KeptRefused("--cold-start is set")
        if self._carrier.left_by_stranger:
            raise KeptRefused(
                "another daemon has just left it, and it cannot be seen from here whether its processes have ended"
            )
        facts = self._facts(files)
        table_words, hold_words = _split(memory, facts)
        table = RecordTable.open(table_words, facts)
        if (found := os.fstat(files.pool_fd).st_size) != self._pool.nbytes:
            raise KeptRefused(f"its file has {found} bytes instead of {self._pool.nbytes}")
        try:
            memory_limits.pages_of_file(self._settings.huge_pages, found, _huge_page_bytes(files))
        except PoolRefused as error:
            raise KeptRefused(str(error)) from error
        try:
            self._take_room(files, table, facts)
        except OSError as error:
            raise KeptRefused(f"there is no room for the pages of its table: {error.strerror}") from error
        if table.starts >= MAX_STARTS:
            raise KeptRefused(f"{table.starts} daemons in a row have ended before they were ready with it")
        table.starts += 1
        return table, KeptHolds(hold_words)

    def _create(self) -> tuple[KeptFiles, RecordTable, KeptHolds]:
        """Raises KeptRefused, OSError, PoolRefused."""
        table_bytes = _table_bytes(TableFacts(self._pool.nbytes, self._slab_bytes, "", ""))
        files = self._carrier.create(self._pool.nbytes, table_bytes, self._pool.check)
        try:
            facts = self._facts(files)
            os.posix_fallocate(files.table_fd, 0, RecordTable.fixed_bytes(facts))
            table_words, hold_words = _split(map_table(files.table_fd), facts)
            table = RecordTable.create(table_words, facts)
            self._take_room(files, table, facts)
            return files, table, KeptHolds(hold_words)
        except OSError as error:
            files.close()
            raise PoolRefused(f"there is no room for the pages of the pool's table: {error.strerror}") from error
        except BaseException:
            files.close()
            raise

    @staticmethod
    def _take_room(files: KeptFiles, table: RecordTable, facts: TableFacts) -> None:
        """Get memory for all of the table that is going to be read or written unchecked: where others have filled the
        file system, a page without memory is a SIGBUS. Raises OSError."""
        records = RecordTable.file_bytes(facts)
        os.posix_fallocate(files.table_fd, records, KeptHolds.file_bytes(facts.pool_bytes))
        table.take_room_by(partial(os.posix_fallocate, files.table_fd))

    def _take_room_logged(self, take_room: TakeRoom | None) -> TakeRoom | None:
        """``take_room``, with a line in the log when room runs out, and when there is some again."""
        if take_room is None:
            return None

        def take(first: int, count: int) -> None:
            try:
                take_room(first, count)
            except OSError as error:
                if not self._without_room:
                    self._without_room = error.strerror or str(error)
                    _log.error(
                        "no room for more records in the pool's table: stores evict to reuse records, or are declined",
                        carrier=self._carrier.name,
                        reason=self._without_room,
                        hint="free room in --pool-dir, or memory",
                    )
                raise
            if self._without_room:
                self._without_room = ""
                _log.info("there is room in the pool's table again")

        return take

    def _facts(self, files: KeptFiles) -> TableFacts:
        huge = _huge_page_bytes(files)
        kind = f"explicit huge pages of {huge} bytes" if huge else "those of shared memory"
        return TableFacts(self._pool.nbytes, self._slab_bytes, kind, boot_id(), BOOT_TIME)

    def fill(self, make_cache: Callable[[Records | None], BlockCache]) -> BlockCache:
        """Make the cache, with the blocks that were kept.

        Args:
            make_cache: called with the records of the table, or None if no file could be had.
        """
        if self._table is None:
            return make_cache(None)
        try:
            cache = make_cache(self._table.records)
        except Exception as error:  # noqa: BLE001 - whatever it is, the start goes on
            # A table that cannot be read in a way that nobody has thought of would end every start from now on.
            _log.exception("the blocks of an earlier daemon cannot be read")
            reason = f"its table cannot be read: {type(error).__name__}: {error}"
            try:
                self._take(*self._create(), reason)
            except (KeptRefused, OSError, PoolRefused) as refused:
                # The file stays the pool's memory; it has no name any more, so that nobody takes it over.
                _log.error("the cache will end with this daemon", carrier=self._carrier.name, reason=str(refused))
                self._table = self.holds = None
                self.found = WarmStart("", f"{reason}; {refused}")
            cache = make_cache(None if self._table is None else self._table.records)
        report = cache.adopted
        self.found = replace(
            self.found,
            kept_blocks=report.kept_blocks,
            dropped=dict(report.dropped),
            seconds=time.monotonic() - self._began,
        )
        return cache

    def started(self) -> None:
        """Note that the daemon is ready, or ends as requested: what it has found does no harm."""
        if self._table is not None:
            self._table.starts = 0

    def set_owners(self, pids: Iterable[int]) -> None:
        """Record the processes that may write to the pool from now on. The next daemon waits for the end of all of
        them."""
        if self._table is not None:
            living = filter(None, map(process_id, pids))
            self._table.set_owners(Owner(*each) for each in living)


def _huge_page_bytes(files: KeptFiles) -> int:
    return host_memory.huge_page_bytes(files.pool_fd) or 0


def _table_bytes(facts: TableFacts) -> int:
    """Size of the table's file: the table, then the holds."""
    return RecordTable.file_bytes(facts) + KeptHolds.file_bytes(facts.pool_bytes)


def _split(memory: Words, facts: TableFacts) -> tuple[Words, Words]:
    """The words of the table and of the holds. A file of another size is all table, which is refused then."""
    at = RecordTable.file_bytes(facts) if memory.nbytes == _table_bytes(facts) else memory.nbytes
    return memory[: at // 8], memory[at // 8 :]

"""The files of a disk tier: the extents, preallocated, and the index of their contents. One process has them open."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvsidecar.cache.records import RECORD_WORDS, record_words
from kvsidecar.cache.slabs import Grid
from kvsidecar.errors import KeptRefused, TierFailed
from kvsidecar.pool.record_table import RecordTable, TableFacts, map_table
from kvsidecar.support import log, private_files
from kvsidecar.support.file_lock import RETRY_SECONDS, try_lock
from kvsidecar.support.units import format_size
from kvsidecar.tiers.disk.extents import PAGE
from kvsidecar.tiers.private_directory import open_directory

EXTENTS: Final = "kvsidecar-disk-extents"
INDEX: Final = "kvsidecar-disk-index"
KIND: Final = "extents of a disk tier, format 1"
"""In the index's header. It changes whenever another version would misread an extent or the checksum of one."""
MAX_STARTS: Final = 3
"""Unfinished starts in a row with one index before it is given up: reading it may kill the process."""
RECORD_BYTES: Final = 8 * RECORD_WORDS

_log = log.get("disk tier")


@dataclass(slots=True)
class DiskFiles:
    """The two files, open."""

    extents_fd: int
    index_fd: int
    table: RecordTable
    direct: bool
    """The extents' file is open with O_DIRECT, and takes it."""
    facts: TableFacts

    def allocate_records(self, first: int, count: int) -> None:
        """Take disk space for this many records from the first one on: without it, a full disk would be a SIGBUS.

        Raises:
            OSError: there is none.
        """
        first_record = RecordTable.file_bytes(self.facts) - _records_bytes(self.facts)
        os.posix_fallocate(self.index_fd, first_record + first * RECORD_BYTES, count * RECORD_BYTES)

    def close(self) -> None:
        os.close(self.extents_fd)
        os.close(self.index_fd)


class DiskDirectory:
    """A directory with a disk tier. Nobody else may write to it, and one process at a time uses it.

    The lock is on the directory itself, which nobody can remove and replace. It is free when all threads of the process
    that held it have ended, hence when none of their reads and writes is under way any more.

    Args:
        path: is made, with mode 0700, if only its last part is missing.
        lock_seconds: longest wait for another process that uses it.

    Raises:
        TierFailed: it cannot be used; the text is one sentence.
    """

    def __init__(self, path: Path, lock_seconds: float) -> None:
        self.path = path
        self.fd = open_directory(path, "disk")
        try:
            self._lock(lock_seconds)
        except BaseException:
            os.close(self.fd)
            raise

    def _lock(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            while not try_lock(self.fd):
                if time.monotonic() >= deadline:
                    raise TierFailed(f"the disk tier's directory {self.path} is in use by another process")
                time.sleep(RETRY_SECONDS)
        except OSError as error:
            raise TierFailed(f"the disk tier's directory {self.path} cannot be locked: {error.strerror}") from error

    def open(self, facts: TableFacts) -> tuple[DiskFiles, bool]:
        """The files that an earlier run has left, if they fit, else new ones. Returns them, and whether they are new.

        Raises:
            TierFailed: no files can be made.
        """
        try:
            return self._open(facts), False
        except FileNotFoundError:
            pass
        except (KeptRefused, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            _log.warning("the disk tier of an earlier run is not used", directory=str(self.path), reason=reason)
        return self.create(facts), True

    def _open(self, facts: TableFacts) -> DiskFiles:
        with ExitStack() as opened:
            extents = private_files.open_file(EXTENTS, self.fd)
            opened.callback(os.close, extents)
            if (found := os.fstat(extents).st_size) != file_bytes(facts):
                raise KeptRefused(f"its file has {found} bytes instead of {file_bytes(facts)}")
            index = private_files.open_file(INDEX, self.fd)
            opened.callback(os.close, index)
            table = RecordTable.open(map_table(index), facts)
            table.take_room_by(partial(os.posix_fallocate, index))  # as below: somebody has made holes in it
            table.records.take_room = None  # the backend takes it, see `DiskFiles.allocate_records`
            if table.starts >= MAX_STARTS:
                raise KeptRefused(f"{table.starts} starts in a row with it have not completed")
            table.starts += 1
            if os.fstat(extents).st_blocks * 512 < file_bytes(facts):
                os.posix_fallocate(extents, 0, file_bytes(facts))
            files = DiskFiles(extents, index, table, _open_direct(extents), facts)
            opened.pop_all()
            return files

    def create(self, facts: TableFacts) -> DiskFiles:
        """New files in the place of any earlier ones. Raises TierFailed: they cannot be made."""
        made: list[int] = []
        try:
            # The index first, so that none of earlier extents ever stands beside the new ones.
            for name in (INDEX, EXTENTS):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self.fd)
            self._check_room(facts)
            made.append(private_files.make_file(EXTENTS, self.fd, file_bytes(facts)))
            os.posix_fallocate(made[0], 0, file_bytes(facts))
            made.append(private_files.make_file(INDEX, self.fd, RecordTable.file_bytes(facts)))
            os.posix_fallocate(made[1], 0, RecordTable.file_bytes(facts) - _records_bytes(facts))
            table = RecordTable.create(map_table(made[1]), facts)
            return DiskFiles(made[0], made[1], table, _open_direct(made[0]), facts)
        except OSError as error:
            for fd in made:
                os.close(fd)
            for name in (INDEX, EXTENTS):  # a part of what was asked for must not fill the disk
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.fd)
            raise TierFailed(f"no disk tier can be created in {self.path}: {error.strerror}") from error

    def _check_room(self, facts: TableFacts) -> None:
        """Refuse early: where the file system cannot preallocate, trying takes long."""
        free = os.fstatvfs(self.fd)
        room, need = free.f_bavail * free.f_frsize, needs(facts)
        if room < need:
            raise TierFailed(
                f"the disk tier needs {format_size(need)} in {self.path}, where "
                f"{format_size(room)} are free: lower its capacity, or make room"
            )

    def close(self) -> None:
        os.close(self.fd)


def needs(facts: TableFacts) -> int:
    """Bytes of the disk that new files take."""
    return file_bytes(facts) + RecordTable.file_bytes(facts) - _records_bytes(facts)


def file_bytes(facts: TableFacts) -> int:
    """Size of the file of extents, with a page for probes."""
    return facts.pool_bytes + PAGE


def _records_bytes(facts: TableFacts) -> int:
    """Size of the end of the index, which is allocated slab by slab."""
    return 8 * record_words(Grid(facts.pool_bytes, facts.slab_bytes))


def _open_direct(fd: int) -> bool:
    """Make reads and writes of this file bypass the page cache, if one page can be read so."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, PAGE) as page:
            os.preadv(fd, [page], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True

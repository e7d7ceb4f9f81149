"""The file beside the pool that records its contents: a header, then the records of `kvsidecar.cache.records`.

The header identifies the pool. It is written once, its magic number last. A table whose header does not fit is refused
with the reason, and the daemon starts with an empty pool and a new table.

It also names the processes that may still write to the pool: the daemon, and copiers whose DMA runs. A daemon that
takes the pool over waits for their ends first.
"""

from __future__ import annotations

import json
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from kvsidecar.cache.arrays import Words
from kvsidecar.cache.records import Records, TakeRoom, num_words, record_words
from kvsidecar.cache.slabs import Grid
from kvsidecar.errors import KeptRefused
from kvsidecar.support import log
from kvsidecar.support.units import format_size

FORMAT = 4
"""Version of the file's format. Changes whenever another daemon would misread a header, a space entry or a record."""
MAX_OWNERS = 128
LOG_SECONDS = 1.0
BOOT_TIME = "boot time"
"""The kernel's clock (`kvsidecar.support.boot.boot_time`), the same for all processes of a boot: nobody can set it."""

_MAGIC = int.from_bytes(b"KVSCtabl", "little")
_HEADER_WORDS = 1024
"""Two pages: magic, format, CRC and length of the facts, facts as JSON; in the second page the owners, and at its end
`RecordTable.starts`."""
_FACTS = 4
_OWNERS = 512
_STARTS = 1023


_log = log.get("pool")


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What must be the same for a pool and its table to be taken over."""

    pool_bytes: int
    slab_bytes: int
    page_kind: str
    """Kind of the pool's pages: other pages would be another file."""
    boot_id: str
    """The kernel's boot (``/proc/sys/kernel/random/boot_id``): no memory outlives it."""
    clock: str = ""
    """The clock of the times in it, such as `BOOT_TIME`; empty if nothing in it has a time, and in old tables, whose
    only clock was the wall clock."""


def _progress_logger(facts: TableFacts) -> Callable[[int, int], None]:
    """Logs every `LOG_SECONDS` how many records have been read: millions of blocks take seconds."""
    logged_at = time.monotonic()

    def log_progress(read: int, total: int) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at = time.monotonic()
            size = format_size(facts.pool_bytes)
            _log.info("reading the records of an earlier run", size=size, read=read, total=total)

    return log_progress


class Owner(NamedTuple):
    """A process that may write to the pool. The start time tells it from a later process with the same pid."""

    pid: int
    started: int
    """Field 22 of ``/proc/pid/stat``."""


class RecordTable:
    """A table whose header fits: see `create` and `open`.

    Attributes:
        records: for `kvsidecar.cache.block_cache.BlockCache`.
    """

    def __init__(self, memory: Words, facts: TableFacts) -> None:
        self._starts = memory[_STARTS : _STARTS + 1]
        self._owners = memory[_OWNERS : _OWNERS + 2 * MAX_OWNERS].reshape(MAX_OWNERS, 2)
        self.records = Records(memory[_HEADER_WORDS:], facts.pool_bytes, facts.slab_bytes)
        self.records.on_progress = _progress_logger(facts)

    def take_room_by(self, take_room: TakeRoom) -> None:
        """Make records take memory through this function before they are written; in a table that was opened, the
        existing ones do so at once.

        Args:
            take_room: takes bytes of the file: the first, and how many.

        Raises:
            OSError: there is none.
        """
        self.records.take_room = lambda word, count: take_room(8 * (_HEADER_WORDS + word), 8 * count)
        self.records.have_room_for_kept()

    @classmethod
    def create(cls, memory: Words, facts: TableFacts) -> RecordTable:
        """Write the header of a new table.

        Args:
            memory: see `map_table`; only zeros, as in a new file.
        """
        text = json.dumps(asdict(facts)).encode()
        words = -(-len(text) // 8)
        memory[_FACTS : _FACTS + words] = np.frombuffer(text.ljust(8 * words, b"\0"), np.uint64)
        memory[1:_FACTS] = (FORMAT, zlib.crc32(text), len(text))
        memory[0] = _MAGIC
        return cls(memory, facts)

    @classmethod
    def open(cls, memory: Words, facts: TableFacts) -> RecordTable:
        """The table that an earlier run has left.

        Raises:
            KeptRefused: it is not of this pool; nothing was changed.
        """
        kept = _read_facts(memory)
        if kept.boot_id != facts.boot_id:
            raise KeptRefused("the record table was written before the last boot of this machine")
        for name, was, now in (
            ("the pool had", format_size(kept.pool_bytes), format_size(facts.pool_bytes)),
            ("its slabs had", format_size(kept.slab_bytes), format_size(facts.slab_bytes)),
            ("its pages were", kept.page_kind, facts.page_kind),
            ("its times were those of the clock", kept.clock or "of the wall", facts.clock or "of the wall"),
        ):
            if was != now:
                raise KeptRefused(f"{name} {was}; now it is {now}")
        if kept != facts:
            raise KeptRefused(f"the record table is of {kept}; now it is {facts}")
        if memory.nbytes != cls.file_bytes(facts):
            raise KeptRefused(f"the record table has {memory.nbytes} bytes; it must have {cls.file_bytes(facts)}")
        return cls(memory, facts)

    @staticmethod
    def file_bytes(facts: TableFacts) -> int:
        """Size of the file: 3 % of the pool, but only the pages of records that were ever written have memory."""
        return 8 * (_HEADER_WORDS + num_words(facts.pool_bytes, facts.slab_bytes))

    @staticmethod
    def fixed_bytes(facts: TableFacts) -> int:
        """Size of its beginning, which needs memory before it is created or opened. The rest is for records."""
        return RecordTable.file_bytes(facts) - 8 * record_words(Grid(facts.pool_bytes, facts.slab_bytes))

    @staticmethod
    def owners(memory: Words) -> list[Owner]:
        """The processes that may write to the pool, as named by the last daemon; empty if this is no table."""
        if len(memory) < _HEADER_WORDS or memory.item(0) != _MAGIC:
            return []
        words = memory[_OWNERS : _OWNERS + 2 * MAX_OWNERS].reshape(MAX_OWNERS, 2).tolist()
        return [Owner(pid, started) for pid, started in words if pid]

    def set_owners(self, owners: Iterable[Owner]) -> None:
        """Name the processes that may write to the pool from now on. Name a process before it gets the pool: at every
        instant each one is named that was named before and is named after.

        Raises:
            ValueError: there are more than `MAX_OWNERS`, the former ones included.
        """
        wanted = set(owners)
        named = {Owner(*words): at for at, words in enumerate(self._owners.tolist()) if words[0]}
        free = [at for at, words in enumerate(self._owners.tolist()) if not words[0]]
        if len(wanted - named.keys()) > len(free):
            raise ValueError(f"more than {MAX_OWNERS} processes have the pool")
        for owner, at in zip(sorted(wanted - named.keys()), free, strict=False):
            self._owners[at, 1] = owner.started
            self._owners[at, 0] = owner.pid
        for owner in named.keys() - wanted:
            self._owners[named[owner], 0] = 0

    @property
    def starts(self) -> int:
        """How many daemons have begun to start with this table since one became ready, or was stopped."""
        return int(self._starts[0])

    @starts.setter
    def starts(self, count: int) -> None:
        self._starts[0] = count


def map_table(fd: int) -> Words:
    """All words of a file of `RecordTable.file_bytes`, shared with all processes that have it open. They stay mapped as
    long as the array is in use.

    Raises:
        KeptRefused: the file is too short to be a table.
        OSError: it cannot be mapped, or its header finds no memory.
    """
    nbytes = os.fstat(fd).st_size
    if nbytes < 8 * _HEADER_WORDS or nbytes % 8:
        raise KeptRefused(f"the record table has {nbytes} bytes, less than its header, or not a whole number of words")
    os.posix_fallocate(fd, 0, 8 * _HEADER_WORDS)
    words: Words = np.frombuffer(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED), np.uint64)
    return words


def _read_facts(memory: Words) -> TableFacts:
    if len(memory) < _HEADER_WORDS or memory.item(0) != _MAGIC:
        raise KeptRefused("the record table has no header")
    if memory.item(1) != FORMAT:
        raise KeptRefused(f"the record table has format {memory.item(1)}; this daemon reads {FORMAT}")
    text = memory[_FACTS:_OWNERS].tobytes()[: memory.item(3)]
    if zlib.crc32(text) != memory.item(2):
        raise KeptRefused("the header of the record table is damaged")
    try:
        return TableFacts(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise KeptRefused("the header of the record table is damaged") from error

"""One direction of messages between two processes: records in shared memory, and a doorbell.

A record costs its sender one system call and its receiver one, and is copied once on each side. A round trip takes 10
us, over a Unix socket 26 (benchmarks/history.md, "Findings").

The doorbell is an eventfd. Its value is the number of records that were written since it was last read; the receiver
takes exactly that many. This also orders memory: a record is written before the system call that counts it, and read
after the one that returns the count. How much was taken is a word in the ring; it is written after another system call,
so that no processor shows it before the records were read.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from typing import Final

RING_BYTES: Final = 16 << 20
"""Only pages that were ever written have memory."""
_HEADER: Final = 64
_LENGTH = struct.Struct("<I")
_ALIGN: Final = 8
_SKIP: Final = 0xFFFFFFFF
"""In the place of a length: the next record lies at the start."""


class RingFull(Exception):
    """A record does not fit even into an empty ring."""


class Ring:
    """Shared memory of one direction, made by the daemon; both sides map it.

    Args:
        memory: a memfd of ``nbytes``.
        bell: an eventfd, non-blocking.
    """

    def __init__(self, memory: int, bell: int, nbytes: int = RING_BYTES) -> None:
        self.memory, self.bell, self.nbytes = memory, bell, nbytes
        self._map = mmap.mmap(memory, nbytes)
        self._view = memoryview(self._map)
        self._taken = self._view[:8].cast("Q")
        """Bytes that the receiver has taken so far; only the receiver writes it."""
        self.progress = self._view[8:24].cast("d")
        """Two words of the receiver; see `kvsidecar.copier.messages.Progress`."""
        self._room = (nbytes - _HEADER) // _ALIGN * _ALIGN
        self._records = self._view[_HEADER : _HEADER + self._room]

    @classmethod
    def create(cls, nbytes: int = RING_BYTES) -> Ring:
        memory = os.memfd_create("kvsidecar-ring", os.MFD_CLOEXEC)
        os.ftruncate(memory, nbytes)
        return cls(memory, os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), nbytes)

    def close(self) -> None:
        for view in (self._taken, self.progress, self._records, self._view):
            view.release()
        self._map.close()
        os.close(self.memory)
        os.close(self.bell)


class Sender:
    """Writes records. Used by one thread at a time."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._written = 0
        """Bytes so far, including those that were skipped."""
        self._waiting: deque[bytes] = deque()
        """Records for which there is no room yet."""
        self._waiting_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of records for which there is no room yet."""
        return self._waiting_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes that the receiver has taken so far."""
        return int(self.ring._taken[0])

    @property
    def untaken_bytes(self) -> int:
        """Bytes that were written and that the receiver has not taken."""
        return self._written - self.taken_bytes

    def send(self, record: bytes) -> None:
        """Write a record, or keep it until `flush` finds room for it. Raises RingFull."""
        if len(record) + _LENGTH.size > self.ring._room // 2:
            raise RingFull(f"a record of {len(record)} bytes is too long for a ring of {self.ring.nbytes}")
        if self._waiting or not self._write(record):
            self._waiting.append(record)
            self._waiting_bytes += len(record)

    def flush(self) -> None:
        """Write the records that wait, as far as there is room."""
        while self._waiting and self._write(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())

    def _write(self, record: bytes) -> bool:
        ring = self.ring
        length = len(record)
        size = -(-(_LENGTH.size + length) // _ALIGN) * _ALIGN
        start = self._written % ring._room
        skipped = ring._room - start if start + size > ring._room else 0
        if self._written + skipped + size - ring._taken[0] > ring._room:
            return False
        if skipped:
            _LENGTH.pack_into(ring._records, start, _SKIP)
            start = 0
        ring._records[start + _LENGTH.size : start + _LENGTH.size + length] = record
        _LENGTH.pack_into(ring._records, start, length)
        self._written += skipped + size
        os.eventfd_write(ring.bell, 1)
        return True


class Receiver:
    """Takes records. Used by one thread, which waits until the bell is readable."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.bell = ring.bell
        self._read = 0

    def take(self) -> list[bytes]:
        """All records that the bell has counted, in order. Never waits."""
        ring = self.ring
        try:
            count = os.eventfd_read(ring.bell)
        except BlockingIOError:
            return []
        records, room, found = ring._records, ring._room, []
        for _ in range(count):
            start = self._read % room
            (length,) = _LENGTH.unpack_from(records, start)
            if length == _SKIP:
                self._read += room - start
                start = 0
                (length,) = _LENGTH.unpack_from(records, start)
            first = start + _LENGTH.size
            found.append(bytes(records[first : first + length]))
            self._read += -(-(_LENGTH.size + length) // _ALIGN) * _ALIGN
        os.sched_yield()  # for the order of memory: see the module's text
        ring._taken[0] = self._read
        return found

"""Framing of messages on the attach socket, in both directions. Does no I/O.

A frame is the length of the payload (4 bytes, little endian) followed by the payload. A reader feeds a `FrameReader`
with received bytes, in pieces of any size, and takes whole payloads out.
"""

from __future__ import annotations

import struct

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""gRPC's own default, named here because it is a promise: 100,000 blocks of 32-byte hashes fit."""

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class FrameTooLong(ValueError):
    """The length in a frame is over the limit. The rest of the stream cannot be parsed."""

    def __init__(self, length: int, limit: int) -> None:
        super().__init__(f"a message of {length} bytes is over the limit of {limit}")
        self.length = length


def frame(payload: bytes) -> bytes:
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Splits the bytes of one connection into payloads.

    Args:
        limit: maximum length of a payload in bytes.
    """

    def __init__(self, limit: int = MAX_MESSAGE_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._start = 0
        """Start of the bytes that have not been taken out."""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next complete payload, or None. Raises FrameTooLong."""
        arrived = len(self._buffer)
        if arrived > self._start and (length := self.announced) is not None:
            first = self._start + HEADER_BYTES
            if arrived - first >= length:
                self._start = first + length
                return bytes(memoryview(self._buffer)[first : self._start])
        # Not after every payload, since a read brings many; not later, since the next call may come much later.
        if self._start:
            del self._buffer[: self._start]
            self._start = 0
        return None

    @property
    def announced(self) -> int | None:
        """Length of the next payload; None until its header has arrived. Raises FrameTooLong."""
        if len(self._buffer) - self._start < HEADER_BYTES:
            return None
        length: int = _LENGTH.unpack_from(self._buffer, self._start)[0]
        if length > self._limit:
            raise FrameTooLong(length, self._limit)
        return length

    @property
    def missing(self) -> int:
        """Number of bytes that complete the header, or else the payload. A caller that reads at most this many never
        reads past the frame. Raises FrameTooLong."""
        length = self.announced
        return (HEADER_BYTES if length is None else HEADER_BYTES + length) - (len(self._buffer) - self._start)

    @property
    def buffered(self) -> int:
        """Bytes that were fed and have not been taken out."""
        return len(self._buffer) - self._start

    def clear(self) -> None:
        self._buffer.clear()
        self._start = 0

"""The daemon's requests to a copier, other than copies: one at a time, each with an answer, over a Unix socket, which
carries file descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from kvsidecar.device.base import CudaIpcSource, MemfdSource, MemorySource, ScratchSource
from kvsidecar.errors import ImportRefused
from kvsidecar.protocol.framing import FrameReader, frame
from kvsidecar.support.peer import recv_fds
from kvsidecar.types import GroupLayout, Region

MAX_CONTROL_BYTES: Final = 32 << 20
"""More than the largest registration that the daemon takes, with its handles as text."""
_fields_of = attrgetter("allocation", "offset", "row_stride", "block_stride", "row_bytes", "num_rows")


class Control:
    """One end of the socket between the daemon and a copier."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader(MAX_CONTROL_BYTES)

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """May wait for the other end to read.

        Raises:
            ConnectionError: the other end has gone.
            OSError: nothing was sent: a descriptor is not open, or there are too many.
        """
        data = memoryview(frame(json.dumps(message).encode()))
        sent = socket.send_fds(self._connection, [data[:1]], fds) if fds else 0
        self._connection.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the next message. Its descriptors are the caller's. None: the other end has gone."""
        fds: list[int] = []
        while (payload := self._frames.next()) is None:
            data, more, _ = recv_fds(self._connection, 1 << 18)
            fds += more
            if not data:
                return None
            self._frames.feed(data)
        message: dict[str, Any] = json.loads(payload)
        return message, fds


def pack_source(source: MemorySource, fds: list[int]) -> dict[str, Any]:
    """A source as part of a message; its descriptor, if it has one, is appended to ``fds``."""
    match source:
        case CudaIpcSource(handle):
            return {"handle": handle.hex()}
        case MemfdSource(fd):
            fds.append(fd)
            return {"fd": len(fds) - 1}
        case ScratchSource(nbytes):
            return {"scratch": nbytes}


def source_of(message: dict[str, Any], fds: Sequence[int]) -> MemorySource:
    """The source of a message. Raises ImportRefused: its descriptor did not arrive."""
    if "handle" in message:
        return CudaIpcSource(bytes.fromhex(message["handle"]))
    if "scratch" in message:
        return ScratchSource(message["scratch"])
    return MemfdSource(descriptor(fds, message["fd"]))


def descriptor(fds: Sequence[int], index: int) -> int:
    """One of the descriptors of a message. Raises ImportRefused: it did not arrive."""
    if index >= len(fds):  # the kernel drops those for which the process has no room
        raise ImportRefused("the copier has no file descriptors left: raise its limit (ulimit -n, LimitNOFILE=)")
    return fds[index]


def pack_layouts(layouts: Sequence[GroupLayout]) -> list[list[Any]]:
    return [
        [
            each.group,
            each.num_blocks,
            each.shard,
            each.num_shards,
            [list(_fields_of(region)) for region in each.regions],
            each.slices,
        ]
        for each in layouts
    ]


def layouts_of(message: Sequence[Sequence[Any]]) -> list[GroupLayout]:
    return [
        GroupLayout(group, num_blocks, shard, num_shards, tuple(Region(*region) for region in regions), tuple(slices))
        for group, num_blocks, shard, num_shards, regions, slices in message
    ]

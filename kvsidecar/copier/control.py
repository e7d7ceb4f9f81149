"""Memory and layouts in the daemon's requests to a copier, other than copies."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from kvsidecar.device.base import CudaIpcSource, MemfdSource, MemorySource, RangesSource, ScratchSource
from kvsidecar.errors import ImportRefused
from kvsidecar.types import GroupLayout, Region

_fields_of = attrgetter("allocation", "offset", "row_stride", "block_stride", "row_bytes", "num_rows")


def pack_source(source: MemorySource, fds: list[int]) -> dict[str, Any]:
    """A source as part of a message; its descriptors are appended to ``fds``."""
    match source:
        case CudaIpcSource(handle):
            return {"handle": handle.hex()}
        case MemfdSource(fd):
            fds.append(fd)
            return {"fd": len(fds) - 1}
        case RangesSource(ranges):
            fds += [fd for fd, _ in ranges]
            return {"ranges": [[len(fds) - len(ranges) + index, size] for index, (_, size) in enumerate(ranges)]}
        case ScratchSource(nbytes):
            return {"scratch": nbytes}


def source_of(message: dict[str, Any], fds: Sequence[int]) -> MemorySource:
    """The source of a message. Raises ImportRefused: one of its descriptors did not arrive."""
    if "handle" in message:
        return CudaIpcSource(bytes.fromhex(message["handle"]))
    if "scratch" in message:
        return ScratchSource(message["scratch"])
    if "ranges" in message:
        return RangesSource(tuple((descriptor(fds, index), nbytes) for index, nbytes in message["ranges"]))
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

"""Regions, block ids and slots -> the copies that move them. Pure: numpy and arithmetic, no clock, no driver.

An engine registers, per KV cache group, strided regions of its allocations (`Region`). `check_regions` refuses what
does not fit them, `bind` prepares the arrays once, and `plan_copies` turns one job into pitched copies without a
Python loop per block. A slot holds the regions one after another: region ``i`` starts at the sum of ``block_bytes``
of the regions before it, its rows without a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.device.base import PITCHED_COPY, CopyPlan
from kvsidecar.errors import InvalidRequest
from kvsidecar.types import GroupLayout, Region

MAX_BLOCKS: Final = 2**31 - 1
"""Block ids are 32-bit in every engine we know; a larger count is a unit mistake (bytes or tokens for blocks)."""
MAX_ROWS: Final = 2**16
"""Rows of all regions of one group. A thousand layers x K/V x heads still fit; it bounds the work of a check."""
MAX_BYTES: Final = 2**62 - 1
"""Of every size, stride and end: the sum of two must fit a signed 64-bit integer, where numpy wraps silently."""
MERGE_BOUNDARY: Final = 2 * 1024 * 1024
"""Copies are not merged across a pool offset that is a multiple of this many bytes; see `plan_copies`."""


def check_regions(layout: GroupLayout, allocation_bytes: Sequence[int]) -> None:
    """Refuse a group whose regions leave their allocations or overlap.

    Overlap matters: two extents on the same bytes make a load write one block over another, silently. The check
    accepts rows outermost, blocks outermost and regions interleaved with the same block stride. It is sound for
    everything else too: a layout it cannot prove disjoint is refused.

    Args:
        layout: what the client says.
        allocation_bytes: true sizes of the imported allocations, in the registration's order.

    Raises:
        InvalidRequest: the text says which region, with both numbers.
    """
    name = f"group {layout.group}"
    if not 1 <= layout.num_blocks <= MAX_BLOCKS:
        raise InvalidRequest(f"{name}: num_blocks is {layout.num_blocks}; it must be 1 to {MAX_BLOCKS}")
    if not layout.regions:
        raise InvalidRequest(f"{name} has no regions; name at least one")
    rows = 0
    for index, region in enumerate(layout.regions):
        _check_region(f"{name} region {index}", region, layout.num_blocks, allocation_bytes)
        rows += region.num_rows
        if rows > MAX_ROWS:  # inside the loop: num_rows of the next region may be huge
            raise InvalidRequest(f"{name}: its regions have more than {MAX_ROWS} rows together")
    for allocation in sorted({region.allocation for region in layout.regions}):
        _check_disjoint(name, layout, allocation)


def _check_region(name: str, region: Region, num_blocks: int, allocation_bytes: Sequence[int]) -> None:
    """Sizes, strides and bounds of one region; Python integers, so that nothing can wrap."""
    if not 0 <= region.allocation < len(allocation_bytes):
        raise InvalidRequest(
            f"{name} names allocation {region.allocation}; {len(allocation_bytes)} are registered (0 is the first)"
        )
    if region.row_bytes < 1 or region.num_rows < 1:
        raise InvalidRequest(
            f"{name}: row_bytes is {region.row_bytes} and num_rows is {region.num_rows}; both must be at least 1"
        )
    if region.offset < 0 or region.row_stride < 0 or region.block_stride < 0:
        raise InvalidRequest(
            f"{name}: offset {region.offset}, row_stride {region.row_stride} and block_stride {region.block_stride} "
            "must not be negative"
        )
    if max(region.offset, region.row_stride, region.block_stride, region.row_bytes, region.num_rows) > MAX_BYTES:
        raise InvalidRequest(f"{name}: a size or stride is more than {MAX_BYTES} bytes")
    if region.num_rows > 1 and region.row_stride < region.row_bytes:
        raise InvalidRequest(
            f"{name}: rows overlap: row_stride {region.row_stride} is less than row_bytes {region.row_bytes}"
        )
    if num_blocks > 1 and region.block_stride < region.row_bytes:
        raise InvalidRequest(
            f"{name}: blocks overlap: block_stride {region.block_stride} is less than row_bytes {region.row_bytes}"
        )
    end, size = region.end(num_blocks), allocation_bytes[region.allocation]
    if end > size:
        raise InvalidRequest(
            f"{name}: its last byte is {end - 1}, but allocation {region.allocation} has {size} bytes; "
            f"check num_blocks ({num_blocks}) and the strides"
        )
    if end > MAX_BYTES:  # no allocation is that large; what its size is called may be
        raise InvalidRequest(f"{name}: it ends at byte {end}, after the last addressable one ({MAX_BYTES})")


def _check_disjoint(name: str, layout: GroupLayout, allocation: int) -> None:
    """No two (row, block) extents of the group overlap in this allocation.

    Every row of every region repeats with its block stride: it spans ``[start, start + (blocks-1)*stride + width)``.
    Rows whose spans do not touch are disjoint (rows outermost). Rows whose spans do interleave are disjoint if they
    have the same stride and their places within one period are disjoint (blocks outermost). Sorting by start finds
    the clusters of touching spans in one pass; a proof for the whole cluster is slightly stricter than one for each
    pair, and real layouts pass it.
    """
    members = [(i, region) for i, region in enumerate(layout.regions) if region.allocation == allocation]
    counts = [region.num_rows for _, region in members]
    owner = np.repeat(np.array([i for i, _ in members], dtype=np.int64), counts)
    start = np.concatenate([r.offset + np.arange(r.num_rows, dtype=np.int64) * r.row_stride for _, r in members])
    width = np.repeat(np.array([r.row_bytes for _, r in members], dtype=np.int64), counts)
    # One block does not repeat: a period longer than everything makes the check below that of plain intervals.
    strides = [r.block_stride if layout.num_blocks > 1 else MAX_BYTES for _, r in members]
    stride = np.repeat(np.array(strides, dtype=np.int64), counts)
    end = start + width + (layout.num_blocks - 1) * stride

    order = np.argsort(start, kind="stable")
    owner, start, width, stride, end = owner[order], start[order], width[order], stride[order], end[order]
    reach = np.maximum.accumulate(end)
    firsts = np.flatnonzero(np.concatenate([[True], start[1:] >= reach[:-1]]))
    for first, last in zip(firsts, [*firsts[1:], len(start)], strict=True):
        part = slice(first, last)
        if last - first > 1:
            _check_cluster(name, owner[part], start[part], width[part], stride[part])


def _check_cluster(
    name: str,
    owner: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    width: npt.NDArray[np.int64],
    stride: npt.NDArray[np.int64],
) -> None:
    """Rows whose spans touch: the same stride, and disjoint places within one period of it."""
    period = int(stride[0])
    odd = np.flatnonzero(stride != period)
    if odd.size:
        raise InvalidRequest(
            f"{name}: regions {owner[0]} and {owner[odd[0]]} interleave with different block strides ({period} and "
            f"{stride[odd[0]]}), so their blocks may overlap; give them the same block_stride or separate ranges"
        )
    place = start % period
    order = np.argsort(place, kind="stable")
    place, width, owner, start = place[order], width[order], owner[order], start[order]
    # Each must end before the next begins; the last before the first of the next period.
    following = np.concatenate([place[1:], [place[0] + period]])
    bad = np.flatnonzero(place + width > following)
    if bad.size:
        a, b = int(bad[0]), int((bad[0] + 1) % len(place))
        raise InvalidRequest(
            f"{name}: a row of region {owner[a]} at byte {start[a]} ({width[a]} bytes) and a row of region {owner[b]} "
            f"at byte {start[b]} ({width[b]} bytes) overlap in some block (block_stride {period}); check row_stride, "
            "block_stride and the offsets"
        )


def check_block_ids(ids: npt.NDArray[np.int64], num_blocks: int) -> None:
    """Refuse ids outside ``0 .. num_blocks - 1`` and ids that come twice (two writers to one block).

    Raises:
        InvalidRequest: the text names the first bad id.
    """
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise InvalidRequest(f"block ids must be one row of int64; these are {ids.dtype} with {ids.ndim} dimensions")
    bad = np.flatnonzero((ids < 0) | (ids >= num_blocks))
    if bad.size:
        raise InvalidRequest(f"block id {ids[bad[0]]} is outside 0 .. {num_blocks - 1} (number {bad[0]} of the list)")
    order = np.argsort(ids, kind="stable")
    again = order[1:][ids[order[1:]] == ids[order[:-1]]]
    if again.size:
        first = again.min()
        raise InvalidRequest(f"block id {ids[first]} comes twice (number {first} of the list); a block has one writer")


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """The regions of one group at their addresses: arrays of one entry a region, made once per registration."""

    num_blocks: int
    shard_bytes: int
    """Bytes of one slot's content."""
    allocation: npt.NDArray[np.int64]
    address: npt.NDArray[np.uint64]
    """Of row 0 of block 0."""
    block_stride: npt.NDArray[np.uint64]
    pitch: npt.NDArray[np.uint64]
    row_bytes: npt.NDArray[np.uint64]
    num_rows: npt.NDArray[np.uint64]
    slot_offset: npt.NDArray[np.uint64]
    """Where the region's rows begin in a slot."""


def bind(layout: GroupLayout, base_addresses: Sequence[int]) -> BoundGroup:
    """Put a checked layout at the addresses of its allocations.

    Args:
        layout: passed `check_regions`.
        base_addresses: where each allocation is mapped in this process, in the registration's order.
    """
    regions = layout.regions
    # Rows without a gap are one row: a plain copy is faster than a pitched one, and it can merge with its neighbour.
    shapes = [
        (r.block_bytes, r.block_bytes, 1)
        if r.num_rows == 1 or r.row_stride == r.row_bytes
        else (r.row_stride, r.row_bytes, r.num_rows)
        for r in regions
    ]
    sizes = np.array([r.block_bytes for r in regions], dtype=np.uint64)
    return BoundGroup(
        num_blocks=layout.num_blocks,
        shard_bytes=layout.shard_bytes,
        allocation=np.array([r.allocation for r in regions], dtype=np.int64),
        address=np.array([base_addresses[r.allocation] + r.offset for r in regions], dtype=np.uint64),
        block_stride=np.array([r.block_stride for r in regions], dtype=np.uint64),
        pitch=np.array([pitch for pitch, _, _ in shapes], dtype=np.uint64),
        row_bytes=np.array([row_bytes for _, row_bytes, _ in shapes], dtype=np.uint64),
        num_rows=np.array([num_rows for _, _, num_rows in shapes], dtype=np.uint64),
        slot_offset=np.cumsum(sizes) - sizes,
    )


def plan_copies(
    bound: BoundGroup,
    block_ids: npt.NDArray[np.int64],
    slot_offsets: npt.NDArray[np.int64],
    *,
    boundary: int = MERGE_BOUNDARY,
) -> CopyPlan:
    """The copies between blocks and slots: one per (block, region), neighbours merged where both sides touch.

    Args:
        bound: from `bind`.
        block_ids: passed `check_block_ids`. Checked for range again: a bad one here is a write into memory that
            belongs to someone else.
        slot_offsets: where each block's slot begins, in bytes from the pool's base. Slots lie in one pin chunk each.
        boundary: copies do not merge over a pool offset that is a multiple of this. The driver refuses a copy that
            spans two registrations, so the pin chunk size must be a multiple of it.

    Raises:
        InvalidRequest: an id is out of range.
        ValueError: the arrays differ in length.
    """
    if len(block_ids) != len(slot_offsets):
        raise ValueError(f"{len(block_ids)} block ids but {len(slot_offsets)} slots")
    if len(block_ids) == 0:
        return CopyPlan(copies=np.zeros(0, dtype=PITCHED_COPY), nbytes=0)
    if int(block_ids.min()) < 0 or int(block_ids.max()) >= bound.num_blocks:
        check_block_ids(block_ids, bound.num_blocks)
    # Unsigned throughout: numpy makes floats of uint64 with int64, and floats lose the low bits of an address.
    blocks = block_ids.astype(np.uint64)[:, np.newaxis]
    slots = slot_offsets.astype(np.uint64)[:, np.newaxis]
    copies = np.empty((len(block_ids), len(bound.address)), dtype=PITCHED_COPY)
    copies["device_address"] = bound.address + blocks * bound.block_stride
    copies["device_pitch"] = bound.pitch
    copies["host_offset"] = slots + bound.slot_offset
    copies["row_bytes"] = bound.row_bytes
    copies["num_rows"] = bound.num_rows
    allocation = np.broadcast_to(bound.allocation, copies.shape).ravel()
    merged = _merge(copies.ravel(), allocation, boundary)
    return CopyPlan(copies=merged, nbytes=len(block_ids) * bound.shard_bytes)


def _merge(copies: npt.NDArray[np.void], allocation: npt.NDArray[np.int64], boundary: int) -> npt.NDArray[np.void]:
    """Join each single-row copy with the next one where both sides go on without a gap.

    Not over two allocations, even if they lie side by side: the driver refuses a copy that spans two mappings.
    """
    single = copies["num_rows"] == 1
    host_end = copies["host_offset"] + copies["row_bytes"]
    device_end = copies["device_address"] + copies["row_bytes"]
    joins = (
        single[:-1]
        & single[1:]
        & (host_end[:-1] == copies["host_offset"][1:])
        & (device_end[:-1] == copies["device_address"][1:])
        & (allocation[:-1] == allocation[1:])
        & (host_end[:-1] % np.uint64(boundary) != 0)
    )
    if not joins.any():
        return copies
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    merged = copies[firsts]
    merged["row_bytes"] = np.add.reduceat(copies["row_bytes"], firsts)
    return merged


def concat(plans: Sequence[CopyPlan]) -> CopyPlan:
    """One plan of several, in their order."""
    if not plans:
        return CopyPlan(copies=np.zeros(0, dtype=PITCHED_COPY), nbytes=0)
    return CopyPlan(copies=np.concatenate([plan.copies for plan in plans]), nbytes=sum(plan.nbytes for plan in plans))

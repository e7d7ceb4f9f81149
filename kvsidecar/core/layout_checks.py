"""Checks of a layout: regions that fit their allocations, block ids that fit the layout. Pure.

An engine registers, per KV cache group, strided regions of its allocations (`Region`). `checking_regions` refuses
regions that do not fit or may overlap, `check_block_ids` the block ids of a bad job. `kvsidecar.copier.copy_plan` makes
the copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.errors import InvalidRequest
from kvsidecar.types import GroupLayout, Region

MAX_BLOCKS: Final = 2**31 - 1
"""Block ids are 32-bit in every engine we know; a larger count is a unit mistake (bytes or tokens for blocks)."""
MAX_REGIONS: Final = 4096
"""Regions that all groups of one rank may have. Engines have one for each layer, or two for K and V: some hundred."""
MAX_ROWS: Final = 16384
"""Rows that all regions of one rank may have. 128 layers x K/V x 64 heads still fit; it bounds the work of a check."""
STEP: Final = 128
"""Regions checked in one step: less than a millisecond."""
DISJOINT_STEP: Final = 8
"""Allocations in which regions are compared in one step."""
MAX_BYTES: Final = 2**62 - 1
"""The largest size, stride or end: the sum of two must fit a signed 64-bit integer, where numpy wraps silently."""


def checking_regions(layout: GroupLayout, allocation_bytes: Sequence[int]) -> Generator[None, None, None]:
    """Refuse a group whose regions leave their allocations or overlap, in small steps (see `LoopTime.run`).

    Overlap matters: two extents on the same bytes make a load write one block over another, silently. The check
    accepts rows outermost, blocks outermost and regions interleaved with the same block stride. It is sound for
    everything else too: a layout it cannot prove disjoint is refused.

    Args:
        allocation_bytes: sizes of the allocations, in the registration's order.

    Raises:
        InvalidRequest: the text says which region, with both numbers.
    """
    name = f"group {layout.group}"
    if not 1 <= layout.num_blocks <= MAX_BLOCKS:
        raise InvalidRequest(f"{name}: num_blocks is {layout.num_blocks}; it must be 1 to {MAX_BLOCKS}")
    if not layout.regions:
        raise InvalidRequest(f"{name} has no regions; name at least one")
    if layout.slices and (min(layout.slices) < 1 or sum(layout.slices) != len(layout.regions)):
        sizes = ", ".join(map(str, layout.slices[:8]))
        raise InvalidRequest(f"{name}: slices of {sizes} regions do not add up to its {len(layout.regions)}")
    rows = 0
    by_allocation: defaultdict[int, list[int]] = defaultdict(list)
    for index, region in enumerate(layout.regions):
        _check_region(f"{name} region {index}", region, layout.num_blocks, allocation_bytes)
        by_allocation[region.allocation].append(index)
        rows += region.num_rows
        if rows > MAX_ROWS:  # inside the loop: num_rows of the next region may be huge
            raise InvalidRequest(f"{name}: its regions have more than {MAX_ROWS} rows together")
        if index % STEP == STEP - 1:
            yield
    for step, members in enumerate(by_allocation.values()):
        _check_disjoint(name, layout, members)
        if len(members) > 1 and step % DISJOINT_STEP == 0:
            yield


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


def _check_disjoint(name: str, layout: GroupLayout, members: Sequence[int]) -> None:
    """Refuse regions of one allocation of which two (row, block) extents overlap.

    Every row of every region repeats with its block stride: it spans ``[start, start + (blocks-1)*stride + width)``.
    Rows whose spans do not touch are disjoint (rows outermost). Rows whose spans do interleave are disjoint if they
    have the same stride and their places within one period are disjoint (blocks outermost). Sorting by start finds
    the clusters of touching spans in one pass; a proof for the whole cluster is slightly stricter than one for each
    pair, and real layouts pass it.

    Args:
        members: indices of all regions of the group in this allocation.
    """
    regions = [layout.regions[index] for index in members]
    if len(regions) == 1 and regions[0].num_rows == 1:
        return
    counts = np.array([r.num_rows for r in regions], dtype=np.int64)

    def of_each_row(values: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.repeat(np.array(values, dtype=np.int64), counts)

    owner = of_each_row(members)
    row = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = of_each_row([r.offset for r in regions]) + row * of_each_row([r.row_stride for r in regions])
    width = of_each_row([r.row_bytes for r in regions])
    # One block does not repeat: a period longer than everything makes the check below that of plain intervals.
    stride = of_each_row([r.block_stride if layout.num_blocks > 1 else MAX_BYTES for r in regions])
    end = start + width + (layout.num_blocks - 1) * stride

    order = np.argsort(start, kind="stable")
    owner, start, width, stride, end = owner[order], start[order], width[order], stride[order], end[order]
    reach = np.maximum.accumulate(end)
    begins = np.concatenate([[True], start[1:] >= reach[:-1]])
    _check_clusters(name, owner, start, width, stride, np.cumsum(begins) - 1, np.flatnonzero(begins))


def _check_clusters(
    name: str,
    owner: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    width: npt.NDArray[np.int64],
    stride: npt.NDArray[np.int64],
    cluster: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64],
) -> None:
    """Refuse rows whose spans touch, unless they have one stride, and disjoint places within one period of it.

    Args:
        cluster: per row the number of its cluster, ascending.
        firsts: per cluster its first row.
    """
    period = stride[firsts][cluster]
    odd = np.flatnonzero(stride != period)
    if odd.size:
        first = firsts[cluster[odd[0]]]
        raise InvalidRequest(
            f"{name}: regions {owner[first]} and {owner[odd[0]]} interleave with different block strides "
            f"({stride[first]} and {stride[odd[0]]}), so their blocks may overlap; give them the same block_stride or "
            "separate ranges"
        )
    place = start % period
    order = np.lexsort((place, cluster))
    place, width, owner, start = place[order], width[order], owner[order], start[order]
    # Each row must end before the next begins; the last of a cluster before its first of the next period.
    after = np.arange(1, len(place) + 1)
    lasts = np.append(firsts[1:], len(place)) - 1
    after[lasts] = firsts
    following = place[after]
    following[lasts] += period[lasts]
    bad = np.flatnonzero(place + width > following)
    if bad.size:
        a, b = int(bad[0]), int(after[bad[0]])
        raise InvalidRequest(
            f"{name}: a row of region {owner[a]} at byte {start[a]} ({width[a]} bytes) and a row of region {owner[b]} "
            f"at byte {start[b]} ({width[b]} bytes) overlap in some block (block_stride {period[a]}); check "
            "row_stride, block_stride and the offsets"
        )


def check_block_ids(ids: npt.NDArray[np.int64], num_blocks: int) -> None:
    """Refuse ids outside ``0 .. num_blocks - 1``, and duplicates: two writers to one block.

    Raises:
        InvalidRequest: the text names the first bad id.
    """
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise InvalidRequest(f"block ids must be one row of int64; these are {ids.dtype} with {ids.ndim} dimensions")
    if not len(ids):
        return
    ordered = np.sort(ids)
    if ordered[0] >= 0 and ordered[-1] < num_blocks and not np.count_nonzero(ordered[1:] == ordered[:-1]):
        return
    bad = np.flatnonzero((ids < 0) | (ids >= num_blocks))
    if bad.size:
        raise InvalidRequest(f"block id {ids[bad[0]]} is outside 0 .. {num_blocks - 1} (number {bad[0]} of the list)")
    order = np.argsort(ids, kind="stable")
    first = order[1:][ids[order[1:]] == ids[order[:-1]]].min()
    raise InvalidRequest(f"block id {ids[first]} appears twice (number {first} of the list); a block has one writer")

"""Converts the shapes and strides of arrays to regions. Pure; `kvsidecar.client.torch` calls it for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvsidecar.errors import NotExportable
from kvsidecar.types import Region


@dataclass(frozen=True, slots=True)
class StridedView:
    """A strided array in an allocation. One of its dimensions counts blocks."""

    allocation: int
    offset: int
    """Bytes from the allocation's base to element 0."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides in bytes."""
    itemsize: int
    block_dim: int

    @property
    def num_blocks(self) -> int:
        return self.shape[self.block_dim]


def regions_of(views: Sequence[StridedView]) -> tuple[Region, ...]:
    """The regions of one KV cache group: rows in the order of the views, adjacent regions joined where strides allow.

    Equal views (layers that share KV) count once.

    Args:
        views: the group's layers, all with the same number of blocks.

    Raises:
        NotExportable: a view has overlapping elements, or they disagree on the number of blocks.
    """
    if not views:
        raise NotExportable("a KV cache group needs at least one tensor")
    counts = {view.num_blocks for view in views}
    if len(counts) > 1:
        raise NotExportable(f"the tensors of one group hold different numbers of blocks: {sorted(counts)}")
    regions: list[Region] = []
    for view in dict.fromkeys(views):
        regions.extend(_split(view))
    return _join(regions)


def _split(view: StridedView) -> list[Region]:
    """Split one view into regions: its contiguous inner dimensions form a row, one outer dimension counts the rows."""
    dims = sorted(
        (stride, size)
        for dim, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True))
        if dim != view.block_dim and size != 1
    )
    if any(stride <= 0 for stride, _ in dims) or (view.num_blocks > 1 and view.strides[view.block_dim] <= 0):
        raise NotExportable(
            f"a tensor of shape {view.shape} has strides {view.strides}: it was expanded, so its "
            "elements overlap: copy it first"
        )
    row_bytes = view.itemsize
    while dims and dims[0][0] == row_bytes:
        row_bytes *= dims.pop(0)[1]
    outer: list[tuple[int, int]] = []
    for stride, size in dims:
        if outer and outer[-1][0] * outer[-1][1] == stride:
            outer[-1] = (outer[-1][0], outer[-1][1] * size)
        else:
            outer.append((stride, size))
    row_stride, num_rows = outer.pop(0) if outer else (row_bytes, 1)
    first = Region(
        allocation=view.allocation,
        offset=view.offset,
        row_stride=row_stride,
        block_stride=view.strides[view.block_dim] if view.num_blocks > 1 else row_bytes,
        row_bytes=row_bytes,
        num_rows=num_rows,
    )
    starts = product(*(range(0, stride * size, stride) for stride, size in reversed(outer)))
    return [replace(first, offset=view.offset + sum(start)) for start in starts]


def _join(regions: Sequence[Region]) -> tuple[Region, ...]:
    """Join adjacent regions into one with more rows: layers at a constant distance in one allocation.

    Each block of the joined region is then one pitched copy instead of one copy per layer.
    """
    joined: list[Region] = []
    for region in regions:
        if joined and (both := _as_rows(joined[-1], region)) is not None:
            joined[-1] = both
        else:
            joined.append(region)
    return tuple(joined)


def _as_rows(first: Region, then: Region) -> Region | None:
    """``first`` followed by the rows of ``then``, if all of them have one stride; else None."""
    same = (first.allocation, first.block_stride, first.row_bytes) == (
        then.allocation,
        then.block_stride,
        then.row_bytes,
    )
    if not same or (then.num_rows > 1 and first.num_rows > 1 and then.row_stride != first.row_stride):
        return None
    if first.num_rows > 1:
        stride = first.row_stride
    elif then.num_rows > 1:
        stride = then.row_stride
    else:
        stride = then.offset - first.offset
    if stride < first.row_bytes or then.offset != first.offset + first.num_rows * stride:
        return None
    return replace(first, row_stride=stride, num_rows=first.num_rows + then.num_rows)

"""What every block of a layout needs: its columns, by kind of copy, and what they cost. Pure: numpy and arithmetic.

Three kinds of copies, and what each costs (NVIDIA H200, PCIe 5 x16; docs/benchmarks.md, "Copy methods"):

* a **piece**, a contiguous range, in a batch with hundreds of others: its time on the link, but never less than the
  host needs to issue it;
* a **pitched copy**: equally spaced rows in one operation, a few microseconds more than its time on the link. The rows
  of one block in a layer-stacked region, or one row of many consecutive blocks (a **run**);
* a piece of a block-contiguous region, joined with its neighbour where both sides go on without a gap.

`pitched_pays` decides between the first two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.types import GroupLayout

LINK_BYTES_PER_US: Final = 55_000.0
"""PCIe 5 x16, one direction."""
PIECE_ISSUE_US: Final = 0.7
"""The host issues one piece of a batch in 0.2 to 0.45 µs if it does nothing else, and in up to 1.6 while it issues
copies of the other direction, too; smaller pieces than it moves in this time starve the link. With this value, rows of
32 KiB are pitched copies, which is twice as fast both ways, and rows of 64 KiB are pieces, where both are level."""
PIECE_GAP_US: Final = 0.03
"""The link idles between two pieces of a batch."""
PITCHED_US: Final = 3.0
"""The link idles between two pitched copies."""
BATCH_US: Final = 10.0
"""The start-up cost of a batch."""

SLICE_BYTES: Final = 128 << 20
"""Bytes of a slice of a job, of which each is planned while the one before it is copied, in less time. No run is
longer."""


def pitched_pays(
    num_rows: int | npt.NDArray[np.uint64], row_bytes: int | npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Whether one pitched copy of these rows takes less time than a batch with a piece for each."""
    pays: npt.NDArray[np.bool_] = _pitched_us(num_rows, row_bytes) < num_rows * _piece_us(row_bytes)
    return pays


def _pitched_us(
    num_rows: int | npt.NDArray[np.uint64], row_bytes: int | npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    return PITCHED_US + num_rows * (np.asarray(row_bytes) / LINK_BYTES_PER_US)


def _piece_us(row_bytes: int | npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    return np.maximum(PIECE_ISSUE_US, np.asarray(row_bytes) / LINK_BYTES_PER_US) + PIECE_GAP_US


def run_pays_from(row_bytes: int) -> int:
    """The least number of rows from which `pitched_pays`."""
    link = row_bytes / LINK_BYTES_PER_US
    return int(PITCHED_US / (max(PIECE_ISSUE_US, link) + PIECE_GAP_US - link)) + 1


@dataclass(frozen=True, slots=True)
class Columns:
    """The copies that every block needs: one entry per pitched copy or piece, bytes and addresses as uint64."""

    address: npt.NDArray[np.uint64]
    """Address of the entry's first row in block 0."""
    block_stride: npt.NDArray[np.uint64]
    pitch: npt.NDArray[np.uint64]
    row_bytes: npt.NDArray[np.uint64]
    num_rows: npt.NDArray[np.uint64]
    slot_offset: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.address)

    def where(self, mask: npt.NDArray[np.bool_] | npt.NDArray[np.int64] | slice) -> Columns:
        return Columns(*[getattr(self, each.name)[mask] for each in fields(self)])


@dataclass(frozen=True, slots=True)
class Recipe:
    """The columns of one group by kind of copy."""

    pitched: Columns
    """More than one row."""
    wide: Columns
    """One row; too large for runs of blocks to pay."""
    narrow: Columns
    """One row, so small that a run of blocks is better copied as one pitched copy."""
    contiguous: bool
    """There is one column with one row, and blocks follow each other without a gap: neighbours can be joined."""
    wide_us: float
    """Time for the pitched copies and the wide pieces of a block, without the start of their batches."""
    narrow_us: float
    """Time for a block's narrow copies as pieces."""
    narrow_link_us: float
    """The part of `narrow_us` on the link, which is all that they take in a long run."""
    piece_bytes: int
    """The most bytes of a piece; 0: there is none."""
    long_run: int
    """From this many blocks on, the narrow ones are better copied as runs; 0: never."""

    def microseconds(self, num_blocks: int, num_runs: int, in_runs: int, max_batch: int, call_bytes: int) -> float:
        """About how long the copies of these blocks take.

        Args:
            num_runs: runs that are long enough for pitched copies.
            in_runs: blocks in these runs.
            max_batch, call_bytes: most pieces, and bytes, of a call.
        """
        others = num_blocks - in_runs
        took = num_blocks * self.wide_us + others * self.narrow_us
        took += num_runs * len(self.narrow) * PITCHED_US + in_runs * self.narrow_link_us
        if pieces := num_blocks * len(self.wide) + others * len(self.narrow):
            batch = min(max_batch, max(1, call_bytes // self.piece_bytes))
            took += BATCH_US * max(1.0, pieces / batch)
        return took

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of copies of many blocks, for a trace; "runs" are a batch where no blocks lie side by side."""
        if self.contiguous:
            return ("contiguous",)
        columns = {"pitched": self.pitched, "batch": self.wide, "runs": self.narrow}
        return tuple(kind for kind, some in columns.items() if len(some))


@dataclass(frozen=True, slots=True)
class BoundGroup:
    """A layout, or a slice of one, at its addresses; made once per registration."""

    num_blocks: int
    nbytes: int
    """Bytes of one block."""
    few: Recipe
    """The recipe with the fewest copies."""
    fast: Recipe
    """The recipe that takes the least time when there are many copies."""


def bind(
    layout: GroupLayout, base_addresses: Sequence[int], number: int = 0, reservations: Sequence[int] = ()
) -> BoundGroup:
    """Put a checked layout at the addresses of its allocations.

    Args:
        layout: checked, with all of its regions.
        base_addresses: where each allocation is mapped in this process, in the registration's order.
        number: a slice of the layout, from 1 on; 0: all of it. A slice lies in the slot where it lies in the whole.
        reservations: each allocation's `kvsidecar.device.base.DeviceMemory.reservation`; 0 or missing: it has none.
    """
    regions = layout.regions

    def of_each(attribute: str) -> npt.NDArray[np.uint64]:
        return np.array([getattr(region, attribute) for region in regions], np.uint64)

    # The addresses of reservations are larger than any index of an allocation.
    spaces = [reservation or index for index, reservation in enumerate(reservations)] or range(len(base_addresses))
    space = np.array([spaces[region.allocation] for region in regions], np.uint64)
    num_rows, row_bytes = of_each("num_rows"), of_each("row_bytes")
    stride, nbytes = of_each("row_stride"), num_rows * row_bytes
    one_row = (num_rows == 1) | (stride == row_bytes)  # rows without a gap are one row
    columns = Columns(
        address=np.array([base_addresses[region.allocation] for region in regions], np.uint64) + of_each("offset"),
        block_stride=of_each("block_stride"),
        pitch=np.where(one_row, nbytes, stride),
        row_bytes=np.where(one_row, nbytes, row_bytes),
        num_rows=np.where(one_row, np.uint64(1), num_rows),
        slot_offset=np.cumsum(nbytes) - nbytes,
    )
    if number:
        first = sum(layout.slices[: number - 1])
        mine = slice(first, first + layout.slices[number - 1])
        columns, space, nbytes = columns.where(mine), space[mine], nbytes[mine]
    block_bytes = int(nbytes.sum())
    longest_run = max(1, SLICE_BYTES // block_bytes)
    columns, space = _stacked(*_joined_where_they_touch(columns, space))
    few = _recipe(columns, longest_run)
    split = (columns.num_rows > 1) & ~pitched_pays(columns.num_rows, columns.row_bytes)
    if not split.any():
        return BoundGroup(layout.num_blocks, block_bytes, few, few)
    counts = np.where(split, columns.num_rows, 1).astype(np.int64)
    rows, _ = _joined_where_they_touch(_one_by_one(columns, split, counts), np.repeat(space, counts))
    return BoundGroup(layout.num_blocks, block_bytes, few, _recipe(rows, longest_run))


def _one_by_one(columns: Columns, split: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]) -> Columns:
    """Replace each column of ``split`` by one column per row: ``counts`` says how many."""
    each = columns.where(np.repeat(np.arange(len(columns)), counts))
    split = np.repeat(split, counts)
    row = (np.arange(len(split)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64)
    return Columns(
        address=each.address + row * np.where(split, each.pitch, 0).astype(np.uint64),
        block_stride=each.block_stride,
        pitch=np.where(split, each.row_bytes, each.pitch),
        row_bytes=each.row_bytes,
        num_rows=np.where(split, np.uint64(1), each.num_rows),
        slot_offset=each.slot_offset + row * each.row_bytes,
    )


def _joined_where_they_touch(columns: Columns, space: npt.NDArray[np.uint64]) -> tuple[Columns, npt.NDArray[np.uint64]]:
    """Join neighbours that have no gap between them on either side, in every block.

    Args:
        space: each column's allocation or reservation, which no copy may leave: where two allocations lie side by side
            by chance, the driver refuses a copy that spans both.

    Returns:
        The columns, and the space of each.
    """
    single = columns.num_rows == 1
    joins = single[1:] & single[:-1] & (space[1:] == space[:-1])
    joins &= columns.block_stride[1:] == columns.block_stride[:-1]
    joins &= columns.address[1:] == columns.address[:-1] + columns.row_bytes[:-1]
    joins &= columns.slot_offset[1:] == columns.slot_offset[:-1] + columns.row_bytes[:-1]
    if not joins.any():
        return columns, space
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    row_bytes = np.add.reduceat(columns.row_bytes, firsts)
    kept = columns.where(firsts)
    alone = np.diff(np.append(firsts, len(columns))) == 1
    return replace(kept, row_bytes=row_bytes, pitch=np.where(alone, kept.pitch, row_bytes)), space[firsts]


def _stacked(columns: Columns, space: npt.NDArray[np.uint64]) -> tuple[Columns, npt.NDArray[np.uint64]]:
    """Join equal rows at a constant distance, layers for example, to pitched copies. See `_joined_where_they_touch`."""
    follows = (columns.num_rows[1:] == 1) & (columns.num_rows[:-1] == 1) & (space[1:] == space[:-1])
    follows &= columns.block_stride[1:] == columns.block_stride[:-1]
    follows &= columns.row_bytes[1:] == columns.row_bytes[:-1]
    follows &= columns.slot_offset[1:] == columns.slot_offset[:-1] + columns.row_bytes[:-1]
    follows &= columns.address[1:] >= columns.address[:-1] + columns.row_bytes[:-1]  # a pitch is not negative
    if not follows.any():
        return columns, space
    firsts, distance = [0], 0
    for index, (joins, step) in enumerate(zip(follows.tolist(), np.diff(columns.address).tolist(), strict=True), 1):
        if not joins or distance not in (0, step):
            firsts.append(index)
            distance = 0
        else:
            distance = step
    num_rows = np.diff(np.append(firsts, len(columns)))
    kept, last = columns.where(np.array(firsts)), np.array(firsts) + num_rows - 1
    reach = columns.address[last] - kept.address
    stacked = num_rows > 1
    return (
        replace(
            kept,
            pitch=np.where(stacked, reach // np.maximum(num_rows - 1, 1).astype(np.uint64), kept.pitch),
            num_rows=np.where(stacked, num_rows.astype(np.uint64), kept.num_rows),
        ),
        space[firsts],
    )


def _recipe(columns: Columns, longest_run: int) -> Recipe:
    pitched = columns.num_rows > 1
    narrow = ~pitched & pitched_pays(longest_run, columns.row_bytes)
    contiguous = len(columns) == 1 and bool(
        columns.num_rows[0] == 1 and columns.block_stride[0] == columns.row_bytes[0]
    )
    wide = ~pitched & ~narrow
    us = np.where(pitched, _pitched_us(columns.num_rows, columns.row_bytes), _piece_us(columns.row_bytes))
    return Recipe(
        pitched=columns.where(pitched),
        wide=columns.where(wide),
        narrow=columns.where(narrow),
        contiguous=contiguous,
        wide_us=float(us[~narrow].sum()),
        narrow_us=float(us[narrow].sum()),
        narrow_link_us=float(columns.row_bytes[narrow].sum() / LINK_BYTES_PER_US),
        piece_bytes=int(columns.row_bytes[~pitched].max(initial=0)),
        long_run=run_pays_from(int(columns.row_bytes[narrow].max())) if narrow.any() else 0,
    )

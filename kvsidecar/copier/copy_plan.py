"""Regions, block ids and slots -> the copies that move them. Pure: numpy and arithmetic, no clock, no driver.

`bind` prepares a checked layout once. `BlockCopies` is the plan of one job: it hands out the driver calls slice by
slice, so that the first bytes move while the rest is still being planned, without a Python loop per block or per row.
A slot holds the regions one after another: region ``i`` starts at the sum of ``block_bytes`` of the regions before
it, its rows without a gap.

Three kinds of copies, and what each costs (NVIDIA H200, PCIe 5 x16; docs/benchmarks.md, "Copy methods"):

* a **piece**, a contiguous range, in a batch with hundreds of others: its time on the link, but never less than the
  host needs to issue it;
* a **pitched copy**: equally spaced rows in one operation, a few microseconds more than its time on the link. The rows
  of one block in a layer-stacked region, or one row of many consecutive blocks (a **run**);
* a piece of a block-contiguous region, joined with its neighbour where both sides go on without a gap.

`pitched_pays` decides between the first two. The first slice of a job prefers few operations whatever they cost: a
batch of hundreds of pieces moves nothing until it has been issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.device.base import COPY, CopyCall
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

MAX_BATCH: Final = 256
"""Pieces in one call. Larger batches are slower: 45 GB/s with 16,384 pieces of 64 KiB, 54 with 256 (measured)."""
MAX_PITCHED: Final = 64
"""Pitched copies in one call; the call takes about a microsecond for each before it returns."""
CALL_BYTES: Final = 32 << 20
"""The most bytes of one call: progress is known at the end of a call, so this bounds how far a worker is behind."""
LEAD_BYTES: Final = 16 << 20
"""Bytes of the first slice."""
SLICE_BYTES: Final = 128 << 20
"""Bytes of the following slices: planning one takes less time than copying the one before."""
PACED_CALLS: Final = 8
"""Calls in one slice while stores are paced: whether they are is asked once a slice."""
FEW: Final = 4
"""Up to this many pieces are faster without a batch, which has a start-up cost of about 10 µs."""
CUT_BYTES: Final = 4096
"""A piece is cut at multiples of this, from its start."""


Copies = npt.NDArray[np.void]
"""dtype `COPY`, one dimension."""


def pitched_pays(
    num_rows: int | npt.NDArray[np.uint64], row_bytes: int | npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Whether one pitched copy of these rows takes less time than a batch with a piece for each."""
    link = np.asarray(row_bytes) / LINK_BYTES_PER_US
    pays: npt.NDArray[np.bool_] = PITCHED_US + num_rows * link < num_rows * (
        np.maximum(PIECE_ISSUE_US, link) + PIECE_GAP_US
    )
    return pays


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
    """Of one block."""
    few: Recipe
    """As few copies as possible."""
    fast: Recipe
    """The copies that take the least time when there are many."""


def bind(
    layout: GroupLayout, base_addresses: Sequence[int], number: int = 0, reservations: Sequence[int] = ()
) -> BoundGroup:
    """Put a checked layout at the addresses of its allocations.

    Args:
        layout: checked, with all of its regions.
        base_addresses: where each allocation is mapped in this process, in the registration's order.
        number: of a slice of the layout, from 1 on; 0: all of it. A slice lies in the slot where it lies in the whole.
        reservations: of each allocation, see `kvsidecar.device.base.DeviceMemory.reservation`; 0 or missing: of none.
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
        space: of each column, the allocation or reservation that no copy may leave: where two allocations lie side by
            side by chance, the driver refuses a copy that spans both.

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
    return Recipe(
        pitched=columns.where(pitched),
        wide=columns.where(~pitched & ~narrow),
        narrow=columns.where(narrow),
        contiguous=contiguous,
    )


class BlockCopies:
    """The plan of one job. Implements `kvsidecar.device.base.CopyPlan`.

    Args:
        parts: per group its layout, the block ids (checked) and the offset of each block's slot in
            the pool.
        boundary: no copy spans a pool offset that is a multiple of this: the driver refuses a copy over two
            registrations, so each of these must begin at such a multiple. What would is cut there.

    Raises:
        ValueError: the arrays of a part differ in length, or an id is out of range. (Checked again: a bad id would
            write into another client's memory.)
    """

    def __init__(
        self, parts: Sequence[tuple[BoundGroup, npt.NDArray[np.int64], npt.NDArray[np.int64]]], *, boundary: int
    ) -> None:
        self.nbytes = 0
        for bound, block_ids, slots in parts:
            if len(block_ids) != len(slots):
                raise ValueError(f"{len(block_ids)} block ids but {len(slots)} slots")
            if len(block_ids) and not 0 <= int(block_ids.min()) <= int(block_ids.max()) < bound.num_blocks:
                bad = next(each for each in block_ids.tolist() if not 0 <= each < bound.num_blocks)
                raise ValueError(f"block id {bad} is outside the {bound.num_blocks} blocks of its group")
            self.nbytes += len(block_ids) * bound.nbytes
        self._parts = parts
        self._boundary = boundary
        self.rewind()

    def rewind(self) -> None:
        """Begin with the first slice again."""
        self._part = self._next = 0
        self._lead = True

    def take(self, chunk: int | None) -> list[CopyCall]:
        """The next slice's calls; empty when there are none left.

        Args:
            chunk: the most bytes of one call, for paced stores; None for the fewest and fastest calls.
        """
        while self._part < len(self._parts):
            bound, block_ids, slots = self._parts[self._part]
            if self._next >= len(block_ids):
                self._part, self._next = self._part + 1, 0
                continue
            # Paced, a batch would be cut into small ones, each with its start-up cost: few operations are faster.
            few = self._lead or chunk is not None
            nbytes = SLICE_BYTES if not few else LEAD_BYTES if chunk is None else PACED_CALLS * chunk
            size = max(1, nbytes // bound.nbytes)
            first, self._next = self._next, self._next + size
            # Unsigned throughout: numpy makes floats of uint64 with int64, and floats lose the low bits of an address.
            ids = block_ids[first : self._next].astype(np.uint64)
            places = slots[first : self._next].astype(np.uint64)
            pitched, pieces = _copies(bound.few if few else bound.fast, ids, places, self._boundary)
            pitched, pieces = _apart(pitched, pieces, np.uint64(self._boundary))
            max_batch = MAX_PITCHED if self._lead else MAX_BATCH
            self._lead = False
            return _calls(pitched, MAX_PITCHED, chunk) + _calls(pieces, max_batch, chunk)
        return []


def _copies(
    recipe: Recipe, ids: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64], boundary: int
) -> tuple[Copies, Copies]:
    """Pitched copies, and pieces, of one slice of blocks."""
    pitched = _records(recipe.pitched, ids, slots)
    if recipe.contiguous or len(recipe.narrow):
        firsts, lengths, step = _runs(ids, slots, boundary)
        columns = recipe.wide if len(recipe.wide) else recipe.narrow
        if recipe.contiguous and step == int(columns.row_bytes[0]):  # no gaps between the slots
            joined = _records(columns, ids[firsts], slots[firsts])
            joined["row_bytes"] *= lengths.astype(np.uint64)
            return pitched, joined
        if not len(recipe.narrow):
            return pitched, _records(columns, ids, slots)
        long = lengths >= run_pays_from(int(recipe.narrow.row_bytes.max()))
        if long.any():
            runs = _records(recipe.narrow, ids[firsts[long]], slots[firsts[long]])
            runs["num_rows"] = np.repeat(lengths[long], len(recipe.narrow))
            runs["device_pitch"] = np.tile(recipe.narrow.block_stride, int(long.sum()))
            runs["host_pitch"] = step
            pitched = np.concatenate([pitched, runs])
        short = np.repeat(~long, lengths)
        pieces = _records(recipe.narrow, ids[short], slots[short])
        return pitched, np.concatenate([_records(recipe.wide, ids, slots), pieces])
    return pitched, _records(recipe.wide, ids, slots)


def _apart(pitched: Copies, pieces: Copies, boundary: np.uint64) -> tuple[Copies, Copies]:
    """Cut what spans a boundary. Few do: slots are much smaller than what is pinned in one call."""
    cut: list[tuple[int, int, int, int, int, int]] = []
    kept = []
    for copies in (pitched, pieces):
        last = copies["host_offset"] + (copies["num_rows"] - np.uint64(1)) * copies["host_pitch"]
        spans = copies["host_offset"] // boundary != (last + copies["row_bytes"] - np.uint64(1)) // boundary
        if not spans.any():
            kept.append(copies)
            continue
        kept.append(copies[~spans])
        for copy in copies[spans].tolist():
            cut += _cut_at(copy, int(boundary))
    if not cut:
        return pitched, pieces
    made = np.array(cut, COPY)
    rows = made["num_rows"] > 1
    return np.concatenate([kept[0], made[rows]]), np.concatenate([kept[1], made[~rows]])


def _cut_at(copy: tuple[int, ...], boundary: int) -> list[tuple[int, int, int, int, int, int]]:
    """One copy, as `COPY`, in parts that lie between two boundaries each."""
    device, device_pitch, host, host_pitch, row_bytes, num_rows = copy
    parts = []
    while num_rows:
        end = (host // boundary + 1) * boundary
        rows = num_rows if num_rows == 1 else min(num_rows, (end - host - row_bytes) // host_pitch + 1)
        if host + row_bytes <= end:
            parts.append((device, device_pitch, host, host_pitch, row_bytes, rows))
        else:
            rows, done = 1, 0
            while done < row_bytes:
                size = min(row_bytes - done, boundary - (host + done) % boundary)
                parts.append((device + done, size, host + done, size, size, 1))
                done += size
        device, host, num_rows = device + rows * device_pitch, host + rows * host_pitch, num_rows - rows
    return parts


def _records(columns: Columns, ids: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64]) -> Copies:
    """One copy per block and column, block by block."""
    copies = np.empty((len(ids), len(columns)), dtype=COPY)
    copies["device_address"] = columns.address + ids[:, np.newaxis] * columns.block_stride
    copies["device_pitch"] = columns.pitch
    copies["host_offset"] = slots[:, np.newaxis] + columns.slot_offset
    copies["host_pitch"] = columns.row_bytes
    copies["row_bytes"] = columns.row_bytes
    copies["num_rows"] = columns.num_rows
    return copies.ravel()


def _runs(
    ids: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64], boundary: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], int]:
    """Runs of consecutive blocks in equally spaced slots: index of the first, length, and the distance of slots."""
    distance = np.diff(slots.astype(np.int64))
    # A pitch is not negative, so both ids and slots must ascend.
    ascending = (np.diff(ids.astype(np.int64)) == 1) & (distance > 0)
    step = int(distance[ascending].min()) if ascending.any() else 0
    same_chunk = slots[1:] // np.uint64(boundary) == slots[:-1] // np.uint64(boundary)
    joins = ascending & (distance == step) & same_chunk
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    lengths = np.diff(np.append(firsts, len(ids)))
    return firsts, lengths, step


def _calls(copies: Copies, max_copies: int, chunk: int | None) -> list[CopyCall]:
    """Cut a list of copies into calls of a bounded number of copies and bytes."""
    if not len(copies):
        return []
    nbytes = copies["row_bytes"] * copies["num_rows"]
    limit = CALL_BYTES if chunk is None else chunk
    total = int(nbytes.sum())
    if total <= limit and len(copies) <= max_copies:
        return [CopyCall(copies, _batched(copies), total)]
    if chunk is not None or int(nbytes.max()) > limit:
        copies, number = _cut(copies, limit)
        nbytes = copies["row_bytes"] * copies["num_rows"]
    else:
        number = (np.cumsum(nbytes) - nbytes) // np.uint64(limit)
    within = np.arange(len(copies)) - np.searchsorted(number, number)
    starts = np.flatnonzero(within % max_copies == 0)
    ends = np.append(starts[1:], len(copies))
    totals = np.add.reduceat(nbytes, starts)
    return [
        CopyCall(copies[first:end], _batched(copies[first:end]), int(total))
        for first, end, total in zip(starts.tolist(), ends.tolist(), totals.tolist(), strict=True)
    ]


def _batched(copies: Copies) -> bool:
    return len(copies) > FEW and bool((copies["num_rows"] == 1).all())


def _cut(copies: Copies, limit: int) -> tuple[Copies, npt.NDArray[np.uint64]]:
    """Cut the copies so that each part lies in one call of about ``limit`` bytes.

    Put the bytes of all copies on one line, one copy after another, and let call ``k`` begin at byte ``k * limit``. A
    copy becomes one part per call that it overlaps. It can be cut only between two units, where a unit is
    `CUT_BYTES` of a plain copy and a row of a pitched one: each cut lies at the last end of a unit before the call
    ends. So a part may be a unit larger than ``limit``, or empty.

    Returns:
        The parts that are not empty, and the number of the call of each.
    """
    nbytes = (copies["row_bytes"] * copies["num_rows"]).astype(np.int64)
    start = np.cumsum(nbytes) - nbytes
    first_call, last_call = start // limit, (start + nbytes - 1) // limit
    counts = last_call - first_call + 1

    # From here on one entry per part. `begin` and `end` count bytes from the start of the copy.
    copy = np.repeat(np.arange(len(copies)), counts)
    parts, nbytes, start = copies[copy], nbytes[copy], start[copy]
    call = first_call[copy] + np.arange(len(copy)) - (np.cumsum(counts) - counts)[copy]
    plain = parts["num_rows"] == 1
    unit = np.where(plain, np.uint64(CUT_BYTES), parts["row_bytes"]).astype(np.int64)
    units_before = np.maximum(0, call * limit - start) // unit
    begin = units_before * unit
    end = np.where(call == last_call[copy], nbytes, ((call + 1) * limit - start) // unit * unit)

    # Unsigned from here on: numpy makes floats of uint64 with int64.
    skipped, unit, size = units_before.astype(np.uint64), unit.astype(np.uint64), (end - begin).astype(np.uint64)
    parts["device_address"] += skipped * np.where(plain, unit, parts["device_pitch"])
    parts["host_offset"] += skipped * np.where(plain, unit, parts["host_pitch"])
    parts["num_rows"] = np.where(plain, np.uint64(1), size // parts["row_bytes"])
    parts["row_bytes"] = np.where(plain, size, parts["row_bytes"])
    filled = size > 0
    return parts[filled], call[filled].astype(np.uint64)

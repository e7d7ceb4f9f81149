"""Recipes, block ids and slots -> the copies that move them. Pure: numpy and arithmetic, no clock, no driver.

`kvsidecar.copier.recipes.bind` prepares a checked layout once. `BlockCopies` is the plan of one job: it hands out the
driver calls slice by slice, so that the first bytes move while the rest is still being planned, without a Python loop
per block or per row. A slot holds the regions one after another: region ``i`` starts at the sum of ``block_bytes`` of
the regions before it, its rows without a gap.

The first slice of a job and paced stores go in small calls, each of which moves nothing until it has been issued: few
operations are better there, unless they take longer all the same (`_better_in_small_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvsidecar.copier import recipes
from kvsidecar.copier.recipes import BoundGroup, Columns, Recipe
from kvsidecar.device.base import COPY, CopyCall

MAX_BATCH: Final = 256
"""Pieces in one call. Larger batches are slower: 45 GB/s with 16,384 pieces of 64 KiB, 54 with 256 (measured)."""
MAX_PITCHED: Final = 64
"""Pitched copies in one call; the call takes about a microsecond for each before it returns."""
CALL_BYTES: Final = 32 << 20
"""The most bytes of one call: progress is known at the end of a call, so this bounds how far a worker is behind."""
LEAD_BYTES: Final = 16 << 20
"""Bytes of the first slice of a job. The others have `kvsidecar.copier.recipes.SLICE_BYTES`."""
PACED_CALLS: Final = 8
"""Calls in one slice while stores are paced: whether they are is asked once a slice."""
FEW: Final = 4
"""Up to this many pieces are faster without a batch."""
LEAST_ROW_BYTES: Final = 5500
"""The copy engine moves ten million rows a second: smaller ones take as long as rows of this size on the link."""
CUT_BYTES: Final = 4096
"""A piece is cut at multiples of this, from its start."""


Copies = npt.NDArray[np.void]
"""dtype `COPY`, one dimension."""


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
            small_calls = self._lead or chunk is not None
            nbytes = recipes.SLICE_BYTES if not small_calls else LEAD_BYTES if chunk is None else PACED_CALLS * chunk
            size = max(1, nbytes // bound.nbytes)
            first, self._next = self._next, self._next + size
            # Unsigned throughout: numpy makes floats of uint64 with int64, and floats lose the low bits of an address.
            ids = block_ids[first : self._next].astype(np.uint64)
            places = slots[first : self._next].astype(np.uint64)
            max_batch = MAX_PITCHED if self._lead else MAX_BATCH
            self._lead = False
            recipe = bound.fast
            if small_calls and bound.few is not bound.fast:
                recipe = _better_in_small_calls(bound, ids, places, max_batch, chunk or CALL_BYTES)
            pitched, pieces = _copies(recipe, ids, places)
            pitched, pieces = _apart(pitched, pieces, np.uint64(self._boundary))
            return _calls(pitched, MAX_PITCHED, chunk) + _calls(pieces, max_batch, chunk)
        return []


def _better_in_small_calls(
    bound: BoundGroup,
    ids: npt.NDArray[np.uint64],
    slots: npt.NDArray[np.uint64],
    max_batch: int,
    call_bytes: int,
) -> Recipe:
    """The recipe that takes less time for these blocks, with a start-up cost for each batch."""
    num_runs = in_runs = 0
    if len(bound.fast.narrow):
        _, lengths, _ = _runs(ids, slots)
        long = lengths[lengths >= bound.fast.long_run]
        num_runs, in_runs = len(long), int(long.sum())
    few, fast = (
        each.microseconds(len(ids), num_runs, in_runs, max_batch, call_bytes) for each in (bound.few, bound.fast)
    )
    return bound.fast if fast < few else bound.few


def _copies(recipe: Recipe, ids: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64]) -> tuple[Copies, Copies]:
    """Pitched copies, and pieces, of one slice of blocks."""
    pitched = _records(recipe.pitched, ids, slots)
    if recipe.contiguous or len(recipe.narrow):
        firsts, lengths, step = _runs(ids, slots)
        columns = recipe.wide if len(recipe.wide) else recipe.narrow
        if recipe.contiguous and step == int(columns.row_bytes[0]):  # no gaps between the slots
            joined = _records(columns, ids[firsts], slots[firsts])
            joined["row_bytes"] *= lengths.astype(np.uint64)
            return pitched, joined
        if not len(recipe.narrow):
            return pitched, _records(columns, ids, slots)
        long = lengths >= recipe.long_run
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
    ids: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], int]:
    """Runs of consecutive blocks in equally spaced slots: index of the first, length, and the distance of slots."""
    distance = np.diff(slots.astype(np.int64))
    # A pitch is not negative, so both ids and slots must ascend.
    ascending = (np.diff(ids.astype(np.int64)) == 1) & (distance > 0)
    step = int(distance[ascending].min()) if ascending.any() else 0
    joins = ascending & (distance == step)
    firsts = np.flatnonzero(np.concatenate([[True], ~joins]))
    lengths = np.diff(np.append(firsts, len(ids)))
    return firsts, lengths, step


def _calls(copies: Copies, max_copies: int, chunk: int | None) -> list[CopyCall]:
    """Cut a list of copies into calls of a bounded number of copies and bytes, and of a bounded time if they are
    paced."""
    if not len(copies):
        return []
    nbytes = copies["row_bytes"] * copies["num_rows"]
    total = int(nbytes.sum())
    limit = CALL_BYTES
    if chunk is not None:
        limit = max(1, min(chunk, chunk * total // (int(copies["num_rows"].sum()) * LEAST_ROW_BYTES)))
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

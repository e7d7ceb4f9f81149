"""A plan moves exactly the bytes that a naive triple loop moves, in the calls that are best for its layout."""

from __future__ import annotations

import dataclasses
import itertools
import random
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsidecar.copier import copy_plan
from kvsidecar.copier.copy_plan import BlockCopies
from kvsidecar.copier.recipes import bind, run_pays_from
from kvsidecar.core.layout_checks import check_block_ids, checking_regions
from kvsidecar.device.base import CopyCall
from kvsidecar.types import GroupLayout, Region
from tests.marks import examples
from tests.plans import calls_of, copies_of, owner_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
NO_BOUNDARY = 1 << 40


def group(*regions: Region, num_blocks: int = 4) -> GroupLayout:
    return GroupLayout(group=3, num_blocks=num_blocks, shard=0, num_shards=1, regions=regions)


def execute(calls: list[CopyCall], device: bytearray, pool: bytearray, *, store: bool) -> None:
    """The reference executor: what `COPY` says, byte by byte. Addresses are offsets into ``device``."""
    for call in calls:
        assert len(call.copies)
        assert call.nbytes == int((call.copies["row_bytes"] * call.copies["num_rows"]).sum())
        assert not call.batched or (call.copies["num_rows"] == 1).all()
        for address, pitch, host, host_pitch, row_bytes, num_rows in call.copies.tolist():
            assert num_rows == 1 or (pitch >= row_bytes and host_pitch >= row_bytes)  # what the driver insists on
            for row in range(num_rows):
                there = slice(address + row * pitch, address + row * pitch + row_bytes)
                here = slice(host + row * host_pitch, host + row * host_pitch + row_bytes)
                assert there.stop <= len(device)
                assert here.stop <= len(pool)
                if store:
                    pool[here] = device[there]
                else:
                    device[there] = pool[here]


def naive(
    layout: GroupLayout,
    bases: list[int],
    ids: list[int],
    slots: list[int],
    device: bytearray,
    pool: bytearray,
    *,
    store: bool,
) -> None:
    for block, slot in zip(ids, slots, strict=True):
        at = slot
        for region in layout.regions:
            for row in range(region.num_rows):
                first = bases[region.allocation] + region.offset + row * region.row_stride + block * region.block_stride
                for byte in range(region.row_bytes):
                    if store:
                        pool[at] = device[first + byte]
                    else:
                        device[first + byte] = pool[at]
                    at += 1


@st.composite
def legal_layouts(draw: st.DrawFn) -> tuple[GroupLayout, list[int]]:
    """A layout of a shape that engines have, and the sizes of its allocations."""
    num_blocks = draw(st.integers(1, 5))
    row_bytes = draw(st.integers(1, 6))
    num_rows = draw(st.integers(1, 4))
    gap = draw(st.integers(0, 3))
    lead = draw(st.integers(0, 5))
    shape = draw(st.sampled_from(["rows_outermost", "blocks_outermost", "per_layer", "interleaved", "per_row"]))
    step = row_bytes + gap
    regions: list[Region]
    if shape == "rows_outermost":  # one allocation, layer stride (vLLM since 0.33)
        regions = [Region(0, lead, num_blocks * step, step, row_bytes, num_rows)]
    elif shape == "blocks_outermost":
        regions = [Region(0, lead, step, num_rows * step + gap, row_bytes, num_rows)]
    elif shape == "per_layer":  # one allocation a layer, K and V apart in it
        regions = [Region(a, lead, num_blocks * step, step, row_bytes, 2) for a in range(num_rows)]
    elif shape == "interleaved":  # blocks outermost, one region a layer of different widths, one after another
        widths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
        stride = sum(widths) + gap
        regions = [Region(0, lead + sum(widths[:i]), 0, stride, width, 1) for i, width in enumerate(widths)]
    else:  # several regions one after another in one allocation
        regions = [Region(0, lead + i * num_blocks * step, 0, step, row_bytes, 1) for i in range(num_rows)]
    layout = group(*draw(st.permutations(regions)), num_blocks=num_blocks)
    count = 1 + max(r.allocation for r in regions)
    sizes = [max(r.end(num_blocks) for r in regions if r.allocation == a) for a in range(count)]
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(regions) - 1)), max_size=3)))
        ends = [*(cut for cut in cuts if cut < len(regions)), len(regions)]
        layout = dataclasses.replace(layout, slices=tuple(np.diff([0, *ends]).tolist()))
    return layout, sizes


bounds = st.fixed_dictionaries(
    {
        "PIECE_ISSUE_US": st.sampled_from([0.0, 0.45, 5.0]),
        "PITCHED_US": st.sampled_from([0.0, 1.0, 3.0]),
        "MAX_BATCH": st.integers(1, 9),
        "MAX_PITCHED": st.integers(1, 9),
        "CALL_BYTES": st.integers(1, 200),
        "LEAD_BYTES": st.integers(1, 40),
        "SLICE_BYTES": st.integers(1, 200),
        "FEW": st.integers(0, 4),
        "CUT_BYTES": st.integers(1, 4),
    }
)


@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(600), deadline=None)
@given(made=legal_layouts(), constants=bounds, data=st.data())
def test_a_plan_moves_what_the_triple_loop_moves(
    made: tuple[GroupLayout, list[int]], constants: dict[str, Any], data: st.DataObject
) -> None:
    layout, sizes = made
    list(checking_regions(layout, sizes))
    # Allocations side by side: a plan that merges over two of them is still byte-exact; another test looks at that.
    bases = [int(b) for b in np.cumsum([0, *sizes[:-1]])]
    ids = data.draw(st.lists(st.integers(0, layout.num_blocks - 1), unique=True, max_size=layout.num_blocks))
    places = data.draw(st.permutations(range(layout.num_blocks + 2)))[: len(ids)]
    if data.draw(st.booleans()):
        ids, places = sorted(ids), sorted(places)
    slot = layout.shard_bytes + data.draw(st.integers(0, 3))
    slots = [place * slot for place in places]
    check_block_ids(np.array(ids, dtype=np.int64), layout.num_blocks)
    boundary = data.draw(st.integers(1, 8 * slot))
    chunk = data.draw(st.sampled_from([None, 1, 5, 50]))
    split = data.draw(st.integers(0, len(ids)))  # two parts of one job
    with ExitStack() as patches:
        for name, value in constants.items():
            patches.enter_context(mock.patch.object(owner_of(name), name, value))
        # All slices, one after the other, are the whole.
        parts = [bind(layout, bases, number) for number in range(1, len(layout.slices) + 1)] or [bind(layout, bases)]
        calls: list[CopyCall] = []
        nbytes = 0
        for bound in parts:
            plan = BlockCopies(
                [(bound, ints(*ids[:split]), ints(*slots[:split])), (bound, ints(*ids[split:]), ints(*slots[split:]))],
                boundary=boundary,
            )
            calls += calls_of(plan, chunk)
            assert plan.take(chunk) == []
            nbytes += plan.nbytes
    assert nbytes == len(ids) * layout.shard_bytes == sum(call.nbytes for call in calls)
    # Rows of regions that touch are one row.
    each_recipe = [each for bound in parts for each in (bound.few, bound.fast)]
    rows = [kind.row_bytes.tolist() for each in each_recipe for kind in (each.pitched, each.narrow)]
    indivisible = max([constants["CUT_BYTES"], *itertools.chain(*rows)])
    for call in calls:
        assert len(call.copies) <= max(constants["MAX_BATCH"], constants["MAX_PITCHED"])
        limit = chunk if chunk is not None else constants["CALL_BYTES"]
        assert call.nbytes < limit + (indivisible if chunk is not None else max(limit, indivisible))
    for _, _, host, pitch, row_bytes, num_rows in copies_of_calls(calls):
        assert host // boundary == (host + (num_rows - 1) * pitch + row_bytes - 1) // boundary
    rng = random.Random(7)
    for store in (True, False):
        device = bytearray(rng.randbytes(sum(sizes)))
        pool = bytearray(rng.randbytes((len(ids) + 9) * slot))
        device_want, pool_want = bytearray(device), bytearray(pool)
        execute(calls, device, pool, store=store)
        naive(layout, bases, ids, slots, device_want, pool_want, store=store)
        assert device == device_want
        assert pool == pool_want


def copies_of_calls(calls: list[CopyCall]) -> list[tuple[int, ...]]:
    return [copy for call in calls for copy in call.copies.tolist()]


def ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


ROWS_OF_64 = group(Region(0, 0, 64, 16, 16, 2))


def test_the_plan_itself_refuses_a_block_outside() -> None:
    bound = bind(ROWS_OF_64, [4096])
    for bad in (4, -1):
        with pytest.raises(ValueError, match=f"block id {bad} is outside"):
            BlockCopies([(bound, ints(0, bad), ints(0, 32))], boundary=NO_BOUNDARY)
    with pytest.raises(ValueError, match="2 block ids but 1 slots"):
        BlockCopies([(bound, ints(0, 1), ints(0))], boundary=NO_BOUNDARY)


def test_neighbours_are_joined_where_both_sides_touch() -> None:
    def rows(layout: GroupLayout, ids: list[int], slots: list[int], boundary: int) -> list[tuple[int, int, int]]:
        base = 1 << 40
        copies = copies_of(BlockCopies([(bind(layout, [base, base]), ints(*ids), ints(*slots))], boundary=boundary))
        assert (copies["num_rows"] == 1).all()
        return [(address - base, host, width) for address, _, host, _, width, _ in copies.tolist()]

    contiguous = group(Region(0, 0, 0, 64, 64, 1), num_blocks=8)
    assert rows(contiguous, [2, 3, 4, 6], [0, 64, 128, 192], 1024) == [(128, 0, 192), (384, 192, 64)]
    # Slots apart, or in another order.
    assert len(rows(contiguous, [2, 3], [0, 128], 1024)) == 2
    assert len(rows(contiguous, [3, 2], [0, 64], 1024)) == 2
    # Two pin chunks.
    assert rows(contiguous, [0, 1, 2, 3], [0, 64, 128, 192], 128) == [(0, 0, 128), (128, 128, 128)]
    # Rows without a gap are one row; K and V that lie side by side are one piece.
    assert rows(group(Region(0, 0, 16, 64, 16, 4), num_blocks=8), [5], [0], 1024) == [(320, 0, 64)]
    side_by_side = group(Region(0, 0, 0, 64, 32, 1), Region(0, 32, 0, 64, 32, 1), num_blocks=8)
    assert rows(side_by_side, [5, 6], [0, 64], 1024) == [(320, 0, 128)]


def test_allocations_that_lie_side_by_side_stay_apart() -> None:
    """The driver refuses a copy that spans two mappings."""
    beside = bind(group(Region(0, 0, 0, 64, 64, 1), Region(1, 0, 0, 64, 64, 1), num_blocks=1), [4096, 4160])
    assert len(copies_of(BlockCopies([(beside, ints(0), ints(0))], boundary=NO_BOUNDARY))) == 2


def test_high_addresses_stay_exact() -> None:
    """uint64 mixed with int64 becomes float64 in numpy, which has 53 bits."""
    base = (1 << 63) + 1
    plan = BlockCopies([(bind(ROWS_OF_64, [base]), ints(3), ints((1 << 61) + 1))], boundary=NO_BOUNDARY)
    assert copies_of(plan).tolist() == [(base + 48, 64, (1 << 61) + 1, 16, 16, 2)]


# -- the chooser -------------------------------------------------------------------------------------------------------

NUM_BLOCKS = 4096


def stacked(num_rows: int, row_bytes: int) -> GroupLayout:
    """Layers in one allocation, a constant distance apart."""
    return group(Region(0, 0, NUM_BLOCKS * row_bytes, row_bytes, row_bytes, num_rows), num_blocks=NUM_BLOCKS)


def separate(num_layers: int, page_bytes: int) -> GroupLayout:
    """An allocation a layer."""
    regions = (Region(i, 0, 0, page_bytes, page_bytes, 1) for i in range(num_layers))
    return group(*regions, num_blocks=NUM_BLOCKS)


def halves(num_layers: int, page_bytes: int) -> GroupLayout:
    """An allocation a layer, K and V its halves."""
    starts = [(layer, half * NUM_BLOCKS * page_bytes) for layer in range(num_layers) for half in (0, 1)]
    return group(*(Region(*start, page_bytes, page_bytes, page_bytes, 1) for start in starts), num_blocks=NUM_BLOCKS)


def plan(
    layout: GroupLayout, ids: npt.NDArray[np.int64], chunk: int | None = None, *, physical: bool = False
) -> list[CopyCall]:
    """
    Args:
        physical: the allocations are of the CUDA VMM API, and laid at a constant distance in one reservation.
    """
    allocations = 1 + max(region.allocation for region in layout.regions)
    bases = [(1 << 40) + i * (64 * GIB) for i in range(allocations)]
    slots = np.arange(len(ids), dtype=np.int64) * layout.shard_bytes
    bound = bind(layout, bases, reservations=bases[:1] * allocations if physical else ())
    return calls_of(BlockCopies([(bound, ids, slots)], boundary=GIB), chunk)


def shuffled(count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(1).permutation(NUM_BLOCKS)[:count].astype(np.int64)


def consecutive(count: int) -> npt.NDArray[np.int64]:
    return np.arange(100, 100 + count, dtype=np.int64)


@pytest.mark.parametrize("row_bytes", [48 * KIB, 64 * KIB, 128 * KIB])
def test_wide_rows_go_as_pieces_behind_a_pitched_lead(row_bytes: int) -> None:
    layout = stacked(32, row_bytes)
    calls = plan(layout, shuffled(512))
    lead = [call for call in calls if not call.batched]
    assert calls[: len(lead)] == lead
    assert 0 < sum(call.nbytes for call in lead) <= copy_plan.LEAD_BYTES
    assert all((call.copies["num_rows"] == 32).all() for call in lead)
    for call in calls[len(lead) :]:
        assert len(call.copies) <= copy_plan.MAX_BATCH
        assert call.nbytes <= copy_plan.CALL_BYTES


@pytest.mark.parametrize(("num_rows", "row_bytes"), [(160, 4 * KIB), (80, 8 * KIB), (61, 18 * KIB), (32, 32 * KIB)])
def test_small_rows_go_pitched_a_copy_a_block(num_rows: int, row_bytes: int) -> None:
    calls = plan(stacked(num_rows, row_bytes), shuffled(512))
    assert sum(len(call.copies) for call in calls) == 512
    for call in calls:
        assert (call.copies["num_rows"] == num_rows).all()
        assert len(call.copies) <= copy_plan.MAX_PITCHED


def test_contiguous_blocks_go_as_pieces_joined_where_they_touch() -> None:
    layout = group(Region(0, 0, 0, 2 * MIB, 2 * MIB, 1), num_blocks=NUM_BLOCKS)
    assert sum(len(call.copies) for call in plan(layout, shuffled(512))) == 512
    assert sum(len(call.copies) for call in plan(layout, consecutive(512))) < 512 * 2 * MIB / copy_plan.CALL_BYTES + 10


@pytest.mark.parametrize(("row_bytes", "is_run"), [(4 * KIB, True), (32 * KIB, True), (2 * MIB, False)])
def test_contiguous_blocks_in_slots_with_gaps_go_as_runs_if_they_are_small(row_bytes: int, is_run: bool) -> None:
    """The slots hold other ranks' shards as well, or a load copies one slice of each block."""
    two = tuple(Region(i, 0, 0, row_bytes, row_bytes, 1) for i in range(2))
    ids = consecutive(512)
    slots = np.arange(512, dtype=np.int64) * 2 * row_bytes
    for number in (1, 2):
        bound = bind(dataclasses.replace(group(*two, num_blocks=NUM_BLOCKS), slices=(1, 1)), [1 << 40, 1 << 41], number)
        calls = calls_of(BlockCopies([(bound, ids, slots)], boundary=GIB), None)
        copies = np.concatenate([call.copies for call in calls])
        assert bool((copies["num_rows"] > 1).all()) == is_run
        assert int((copies["num_rows"] * copies["row_bytes"]).sum()) == 512 * row_bytes


def test_separate_allocations_of_large_pages_go_as_pieces() -> None:
    for ids in (shuffled(512), consecutive(512)):
        calls = plan(separate(32, 64 * KIB), ids)
        assert sum(len(call.copies) for call in calls) == 32 * 512
        assert all(call.batched for call in calls)


def test_rows_of_half_the_width_go_pitched_where_each_lies_in_physical_memory_of_its_own() -> None:
    for row_bytes, is_pitched in ((32 * KIB, True), (64 * KIB, False)):
        calls = plan(separate(32, row_bytes), shuffled(512), physical=True)
        assert (sum(len(call.copies) for call in calls) == 512) == is_pitched


def test_separate_allocations_of_small_pages_go_as_runs_where_blocks_are_consecutive() -> None:
    layout = separate(160, 4 * KIB)
    runs = plan(layout, consecutive(512))
    assert all((call.copies["num_rows"] >= run_pays_from(4 * KIB)).all() for call in runs)
    assert all((call.copies["device_pitch"] == 4 * KIB).all() for call in runs)
    assert all((call.copies["host_pitch"] == layout.shard_bytes).all() for call in runs)
    assert all((call.copies["num_rows"] == 1).all() for call in plan(layout, shuffled(512)))
    # A few consecutive blocks between others are not worth a pitched copy.
    pairs = np.sort(shuffled(512)) // 2 * 2
    pairs = np.unique(np.concatenate([pairs, pairs + 1]))
    lengths = {int(rows) for call in plan(layout, pairs) for rows in call.copies["num_rows"]}
    assert lengths & set(range(2, run_pays_from(4 * KIB))) == set()


def test_descending_slots_are_no_run() -> None:
    """A pitch is not negative, and an unsigned difference would be a large one."""
    layout = separate(2, 4 * KIB)
    ids = consecutive(32)
    slots = np.arange(32, dtype=np.int64)[::-1] * layout.shard_bytes
    copies = copies_of(BlockCopies([(bind(layout, [GIB, 2 * GIB]), ids, slots)], boundary=GIB))
    assert len(copies) == 64
    assert (copies["num_rows"] == 1).all()


def test_one_block_is_one_operation() -> None:
    for layout in (stacked(32, 64 * KIB), stacked(160, 4 * KIB), group(Region(0, 0, 0, MIB, MIB, 1))):
        (call,) = plan(layout, consecutive(1) if layout.num_blocks > 4 else ints(2))
        assert len(call.copies) == 1
        assert not call.batched


@pytest.mark.parametrize("chunk", [None, 4 * MIB])
def test_pairs_of_small_rows_go_as_runs_from_the_first_call_on_where_blocks_are_consecutive(chunk: int | None) -> None:
    """As pitched copies of two rows, a paced store of pages of one token took ten times as long."""
    layout, ids = halves(32, 2 * KIB), consecutive(1024)
    calls = plan(layout, ids, chunk)
    assert sum(len(call.copies) for call in calls) <= 8 * 64
    if chunk is not None:
        assert max(int(call.copies["num_rows"].sum()) for call in calls) <= chunk // copy_plan.LEAST_ROW_BYTES + 1


@pytest.mark.parametrize("chunk", [None, 4 * MIB])
@pytest.mark.parametrize("row_bytes", [2 * KIB, 32 * KIB, 128 * KIB])
def test_pairs_of_rows_go_as_pieces_from_the_first_call_on_where_blocks_are_scattered(
    row_bytes: int, chunk: int | None
) -> None:
    for call in plan(halves(32, row_bytes), shuffled(64), chunk):
        assert call.batched
        assert (call.copies["num_rows"] == 1).all()


@pytest.mark.parametrize("layout", [stacked(32, 64 * KIB), stacked(160, 4 * KIB), separate(32, 64 * KIB)])
def test_paced_calls_are_bounded_and_full(layout: GroupLayout) -> None:
    calls = plan(layout, shuffled(64), 3 * MIB)
    row = max(region.row_bytes for region in layout.regions)
    chunk = min(3 * MIB, 3 * MIB * row // copy_plan.LEAST_ROW_BYTES)  # small rows take as long as larger ones
    sizes = [call.nbytes for call in calls]
    assert max(sizes) <= chunk + row
    assert sum(size >= chunk - row for size in sizes) >= len(sizes) - 1 - sum(sizes) // copy_plan.LEAD_BYTES

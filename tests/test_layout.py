"""The plan moves exactly the bytes that a naive triple loop moves, and a layout that could overlap is refused."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvsidecar.device.base import PITCHED_COPY, CopyPlan
from kvsidecar.errors import InvalidRequest
from kvsidecar.layout import bind, check_block_ids, check_regions, concat, plan_copies
from kvsidecar.types import GroupLayout, Region

GUARD = 0xA5


def group(*regions: Region, num_blocks: int = 4) -> GroupLayout:
    return GroupLayout(group=3, num_blocks=num_blocks, shard=0, num_shards=1, regions=regions)


def extents(region: Region, num_blocks: int) -> list[tuple[int, int]]:
    """Every (first, end) of the region, by the definition in `Region`."""
    return [
        (start, start + region.row_bytes)
        for row in range(region.num_rows)
        for block in range(num_blocks)
        for start in [region.offset + row * region.row_stride + block * region.block_stride]
    ]


def execute(plan: CopyPlan, device: bytearray, pool: bytearray, *, store: bool) -> None:
    """The reference executor: what `PITCHED_COPY` says, byte by byte. Addresses are offsets into ``device``."""
    for address, pitch, host, row_bytes, num_rows in plan.copies.tolist():
        for row in range(num_rows):
            there = slice(address + row * pitch, address + row * pitch + row_bytes)
            here = slice(host + row * row_bytes, host + (row + 1) * row_bytes)
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
    return layout, sizes


@settings(max_examples=300, deadline=None)
@given(made=legal_layouts(), data=st.data())
def test_a_plan_moves_what_the_triple_loop_moves(made: tuple[GroupLayout, list[int]], data: st.DataObject) -> None:
    layout, sizes = made
    check_regions(layout, sizes)
    # Allocations side by side: a plan that merges over two of them is still byte-exact, so test_merges looks at that.
    bases = [int(b) for b in np.cumsum([0, *sizes[:-1]])]
    ids = data.draw(st.lists(st.integers(0, layout.num_blocks - 1), unique=True, max_size=layout.num_blocks))
    places = data.draw(st.permutations(range(layout.num_blocks + 2)))[: len(ids)]
    if data.draw(st.booleans()):
        ids, places = sorted(ids), sorted(places)
    slots = [place * layout.shard_bytes for place in places]
    check_block_ids(np.array(ids, dtype=np.int64), layout.num_blocks)
    plan = plan_copies(
        bind(layout, bases),
        np.array(ids, dtype=np.int64),
        np.array(slots, dtype=np.int64),
        boundary=data.draw(st.sampled_from([4, 16, 2**21])),
    )
    assert (
        plan.nbytes == len(ids) * layout.shard_bytes == int((plan.copies["row_bytes"] * plan.copies["num_rows"]).sum())
    )
    rng = random.Random(7)
    for store in (True, False):
        device, pool = (
            bytearray(rng.randbytes(sum(sizes))),
            bytearray(rng.randbytes((len(ids) + 9) * layout.shard_bytes)),
        )
        device_want, pool_want = bytearray(device), bytearray(pool)
        execute(plan, device, pool, store=store)
        naive(layout, bases, ids, slots, device_want, pool_want, store=store)
        assert device == device_want
        assert pool == pool_want


small = st.integers(0, 12)
any_region = st.builds(
    Region,
    allocation=st.integers(0, 1),
    offset=small,
    row_stride=small,
    block_stride=small,
    row_bytes=st.integers(1, 4),
    num_rows=st.integers(1, 4),
)


@settings(max_examples=1500, deadline=None)
@given(regions=st.lists(any_region, min_size=1, max_size=3), num_blocks=st.integers(1, 4))
def test_what_passes_is_disjoint_and_inside(regions: list[Region], num_blocks: int) -> None:
    sizes = [40, 40]
    try:
        check_regions(group(*regions, num_blocks=num_blocks), sizes)
    except InvalidRequest:
        assume(False)
    for allocation in (0, 1):
        every = sorted(e for r in regions if r.allocation == allocation for e in extents(r, num_blocks))
        assert all(before[1] <= after[0] for before, after in pairwise(every))
        assert all(end <= sizes[allocation] for _, end in every)


@settings(max_examples=600, deadline=None)
@given(region=any_region, num_blocks=st.integers(1, 4))
def test_one_region_is_refused_only_if_it_may_overlap(region: Region, num_blocks: int) -> None:
    """Completeness for one region of the two ordinary interleavings: nothing legal is refused."""
    rows_out = region.row_stride >= (num_blocks - 1) * region.block_stride + region.row_bytes
    blocks_out = region.block_stride >= (region.num_rows - 1) * region.row_stride + region.row_bytes
    region = replace(region, allocation=0)
    every = extents(region, num_blocks)
    disjoint = all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(every, 2))
    assume(disjoint and (rows_out or blocks_out))
    check_regions(group(region, num_blocks=num_blocks), [region.end(num_blocks)])


GOOD = Region(allocation=0, offset=0, row_stride=64, block_stride=16, row_bytes=16, num_rows=2)


@pytest.mark.parametrize(
    ("layout", "sizes", "text"),
    [
        (group(replace(GOOD, allocation=1)), [128], "names allocation 1; 1 are registered"),
        (group(replace(GOOD, allocation=-1)), [128], "names allocation -1"),
        (group(replace(GOOD, row_bytes=0)), [128], "row_bytes is 0"),
        (group(replace(GOOD, row_bytes=-4)), [128], "row_bytes is -4"),
        (group(replace(GOOD, num_rows=0)), [128], "num_rows is 0"),
        (group(replace(GOOD, offset=-1)), [128], "must not be negative"),
        (group(replace(GOOD, row_stride=-64)), [128], "must not be negative"),
        (group(replace(GOOD, block_stride=-16)), [128], "must not be negative"),
        (group(replace(GOOD, offset=1)), [128], "last byte is 128, but allocation 0 has 128 bytes"),
        (group(GOOD, num_blocks=9), [128], "num_blocks \\(9\\)"),
        (group(GOOD, num_blocks=0), [128], "num_blocks is 0"),
        (group(GOOD, num_blocks=2**31), [2**62], "num_blocks is 2147483648"),
        (group(), [128], "no regions"),
        (group(replace(GOOD, row_stride=8)), [128], "rows overlap: row_stride 8 is less than row_bytes 16"),
        (group(replace(GOOD, block_stride=8)), [128], "blocks overlap: block_stride 8 is less than row_bytes 16"),
        # row 1 begins inside the blocks of row 0
        (group(replace(GOOD, row_stride=40)), [128], "overlap in some block"),
        (group(GOOD, replace(GOOD, offset=8)), [256], "overlap in some block"),
        (group(GOOD, GOOD), [128], "region 0 .* region 1 .* overlap"),
        (
            group(replace(GOOD, num_rows=1), Region(0, 24, 0, 32, 8, 1)),
            [256],
            "different block strides \\(16 and 32\\)",
        ),
        (group(replace(GOOD, num_rows=2**16 + 1)), [2**62], "more than 65536 rows"),
        (group(replace(GOOD, row_stride=2**63)), [2**70], "more than 4611686018427387903 bytes"),
        (group(replace(GOOD, num_rows=1, row_stride=2**64)), [128], "more than 4611686018427387903"),
        (group(replace(GOOD, block_stride=2**61)), [2**70], "after the last addressable one"),
    ],
)
def test_refusals(layout: GroupLayout, sizes: list[int], text: str) -> None:
    check_regions(group(GOOD), [128])
    with pytest.raises(InvalidRequest, match=text):
        check_regions(layout, sizes)


def test_layouts_of_real_engines_pass() -> None:
    mib = 2**20
    stacked = Region(0, 0, 4096 * 65536, 65536, 65536, 32)
    check_regions(group(stacked, num_blocks=4096), [32 * 4096 * 65536])
    k = [Region(0, layer * 2 * 4096, 0, 80 * 2 * 4096, 4096, 1) for layer in range(80)]
    v = [replace(r, offset=r.offset + 4096) for r in k]
    check_regions(group(*k, *v, num_blocks=50_000), [50_000 * 80 * 2 * 4096])
    layers = [Region(a, 0, 1000 * 32768, 32768, 32768, 2) for a in range(61)]
    check_regions(group(*layers, num_blocks=1000), [2 * 1000 * 32768] * 61)
    check_regions(group(Region(0, 7, 0, 0, 2 * mib, 1), num_blocks=1), [2 * mib + 7])


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0, 4, 9], "block id 4 is outside 0 .. 3 \\(number 1 "),
        ([-1], "block id -1"),
        ([2, 1, 3, 1, 2], "block id 1 comes twice \\(number 3 "),
    ],
)
def test_bad_block_ids(ids: list[int], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_block_ids(np.array(ids, dtype=np.int64), 4)
    check_block_ids(np.array([3, 0, 2, 1], dtype=np.int64), 4)
    check_block_ids(np.array([], dtype=np.int64), 4)


def test_block_ids_must_be_int64() -> None:
    with pytest.raises(InvalidRequest, match="int64"):
        check_block_ids(np.array([1, 2], dtype=np.float64), 4)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_the_plan_itself_refuses_a_block_outside() -> None:
    bound = bind(group(GOOD), [4096])
    for bad in (4, -1):
        with pytest.raises(InvalidRequest, match=f"block id {bad} is outside"):
            plan_copies(bound, ints(0, bad), ints(0, 32))
    with pytest.raises(ValueError, match="2 block ids but 1 slots"):
        plan_copies(bound, ints(0, 1), ints(0))


def test_merges() -> None:
    contiguous = bind(group(Region(0, 0, 0, 64, 64, 1), num_blocks=8), [1 << 40])

    def rows(plan: CopyPlan) -> list[tuple[int, int, int]]:
        return [(a - (1 << 40), host, width) for a, _, host, width, _ in plan.copies.tolist()]

    assert rows(plan_copies(contiguous, ints(2, 3, 4, 6), ints(0, 64, 128, 192))) == [(128, 0, 192), (384, 192, 64)]
    # Slots apart, or in another order: no merge.
    assert len(plan_copies(contiguous, ints(2, 3), ints(0, 128)).copies) == 2
    assert len(plan_copies(contiguous, ints(3, 2), ints(0, 64)).copies) == 2
    # Not over a boundary of two pin chunks.
    assert rows(plan_copies(contiguous, ints(0, 1, 2, 3), ints(0, 64, 128, 192), boundary=128)) == [
        (0, 0, 128),
        (128, 128, 128),
    ]
    # Rows without a gap are one row.
    tight = bind(group(Region(0, 0, 16, 64, 16, 4), num_blocks=8), [1 << 40])
    assert rows(plan_copies(tight, ints(5), ints(0))) == [(320, 0, 64)]
    # Two allocations that happen to lie side by side stay two copies.
    beside = bind(group(Region(0, 0, 0, 64, 64, 1), Region(1, 0, 0, 64, 64, 1), num_blocks=1), [4096, 4160])
    assert len(plan_copies(beside, ints(0), ints(0)).copies) == 2
    # A pitched copy stays one copy a block.
    pitched = bind(group(GOOD), [0])
    assert plan_copies(pitched, ints(0, 1), ints(0, 32)).copies.tolist() == [(0, 64, 0, 16, 2), (16, 64, 32, 16, 2)]


def test_high_addresses_stay_exact() -> None:
    """uint64 mixed with int64 becomes float64 in numpy, which has 53 bits."""
    base = (1 << 63) + 1
    plan = plan_copies(bind(group(GOOD), [base]), ints(3), ints((1 << 62) + 1))
    assert plan.copies.tolist() == [(base + 48, 64, (1 << 62) + 1, 16, 2)]


def test_concat() -> None:
    bound = bind(group(GOOD), [0])
    one, two = plan_copies(bound, ints(0), ints(0)), plan_copies(bound, ints(1, 2), ints(32, 64))
    both = concat([one, two])
    assert both.nbytes == 96
    assert both.copies.tolist() == one.copies.tolist() + two.copies.tolist()
    assert both.copies.dtype == PITCHED_COPY
    empty = concat([])
    assert (empty.nbytes, len(empty.copies), empty.copies.dtype) == (0, 0, PITCHED_COPY)
    assert len(plan_copies(bound, ints(), ints()).copies) == 0

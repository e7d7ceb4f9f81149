"""A layout that could overlap, and a block id that is not there, are refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvsidecar.core.layout_checks import MAX_ROWS, check_block_ids, checking_regions
from kvsidecar.errors import InvalidRequest
from kvsidecar.types import GroupLayout, Region
from tests.marks import examples

GUARD = 0xA5


def group(*regions: Region, num_blocks: int = 4) -> GroupLayout:
    return GroupLayout(group=3, num_blocks=num_blocks, shard=0, num_shards=1, regions=regions)


def check_regions(layout: GroupLayout, allocation_bytes: list[int]) -> None:
    """All steps at once."""
    for _ in checking_regions(layout, allocation_bytes):
        pass


def extents(region: Region, num_blocks: int) -> list[tuple[int, int]]:
    """Every (first, end) of the region, by the definition in `Region`."""
    return [
        (start, start + region.row_bytes)
        for row in range(region.num_rows)
        for block in range(num_blocks)
        for start in [region.offset + row * region.row_stride + block * region.block_stride]
    ]


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


@pytest.mark.no_cover  # slow when every line is counted
@settings(max_examples=examples(1500), deadline=None)
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


@settings(max_examples=examples(600), deadline=None)
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
        (replace(group(GOOD), slices=(1, 1)), [128], "slices of 1, 1 regions do not add up to its 1"),
        (replace(group(GOOD), slices=(1, 0)), [128], "slices of 1, 0 regions"),
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
        (group(replace(GOOD, num_rows=MAX_ROWS + 1)), [2**62], f"more than {MAX_ROWS} rows"),
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
        ([2, 1, 3, 1, 2], "block id 1 appears twice \\(number 3 "),
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

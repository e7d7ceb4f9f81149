from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from kvsidecar.bench.errors import Skipped
from kvsidecar.bench.layouts import ALL_LAYOUTS, BLOCK_COUNTS, IN_FLIGHT, LAYOUTS, MOST_BLOCKS, STACKED, TINY, Layout
from kvsidecar.core.layout_checks import checking_regions
from kvsidecar.support.units import GiB

ALL = pytest.mark.parametrize("layout", [*ALL_LAYOUTS, TINY], ids=lambda layout: layout.name)


@ALL
def test_the_daemon_takes_its_regions_and_a_slot_holds_a_block(layout: Layout) -> None:
    group = layout.group()
    list(checking_regions(group, layout.allocation_bytes))
    assert group.shard_bytes == layout.block_bytes
    assert sum(layout.allocation_bytes) == layout.nbytes == layout.block_bytes * layout.num_blocks


@ALL
def test_extents_are_the_rows_of_the_regions_and_no_two_blocks_share_a_byte(layout: Layout) -> None:
    first, second = layout.extents(0), layout.extents(1)
    assert len(first) == layout.rows
    assert {nbytes for _, _, nbytes in first} == {layout.row_bytes}
    starts = sorted((allocation, start) for allocation, start, _ in first + second)
    for (allocation, start), (other, following) in itertools.pairwise(starts):
        assert allocation != other or following - start >= layout.row_bytes


@ALL
@pytest.mark.parametrize("count", BLOCK_COUNTS)
@pytest.mark.parametrize("jobs", IN_FLIGHT)
def test_ids_of_a_job_differ_and_jobs_in_flight_share_no_block_where_there_are_enough(
    layout: Layout, count: int, jobs: int
) -> None:
    ids = layout.block_ids(count, jobs, np.random.default_rng(1))
    assert [len(of_job) for of_job in ids] == [count] * jobs
    assert all(len(set(of_job)) == count for of_job in ids)
    assert all(0 <= block < layout.num_blocks for of_job in ids for block in of_job)
    if count * jobs <= layout.num_blocks:
        assert len({block for of_job in ids for block in of_job}) == count * jobs


def test_ids_follow_one_another_only_where_the_layout_says_so() -> None:
    rng = np.random.default_rng(1)
    for layout in LAYOUTS:
        (ids,) = layout.block_ids(64, 1, rng)
        assert (ids == list(range(ids[0], ids[0] + 64))) == layout.consecutive


def test_a_layout_gets_as_many_blocks_as_fit() -> None:
    assert STACKED.sized(None) == STACKED
    assert STACKED.sized(140 * GiB).num_blocks == MOST_BLOCKS
    assert STACKED.sized(140 * GiB).nbytes == 4 * GiB
    assert STACKED.sized(5 * GiB).num_blocks == MOST_BLOCKS // 2
    small = next(layout for layout in LAYOUTS if layout.name == "tp8-4k")
    assert small.sized(140 * GiB).num_blocks == 1024
    with pytest.raises(Skipped, match="stacked-64k needs 2 GiB of free GPU memory; 1 GiB are"):
        STACKED.sized(GiB)


def test_scaled_layouts_keep_their_rows() -> None:
    for layout in LAYOUTS:
        scaled = layout.scaled(64)
        assert (scaled.name, scaled.rows, scaled.row_bytes) == (layout.name, layout.rows, layout.row_bytes // 64)


def test_a_layout_survives_the_way_to_another_process() -> None:
    for layout in LAYOUTS:
        assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout

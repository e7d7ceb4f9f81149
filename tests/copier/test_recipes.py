"""What copies cost, and which are the best for a layout."""

from __future__ import annotations

import pytest

from kvsidecar.copier.recipes import BATCH_US, bind, pitched_pays, run_pays_from
from kvsidecar.types import GroupLayout, Region

KIB, MIB = 1 << 10, 1 << 20


def test_the_cost_model_prefers_what_was_measured_to_be_faster() -> None:
    """docs/benchmarks.md, "Copy methods"."""
    assert not pitched_pays(32, 64 * KIB)
    assert pitched_pays(32, 32 * KIB)
    assert pitched_pays(61, 18 * KIB)
    assert pitched_pays(160, 4 * KIB)
    for row_bytes in (4 * KIB, 8 * KIB, 16 * KIB):
        assert pitched_pays(run_pays_from(row_bytes), row_bytes)
        assert not pitched_pays(run_pays_from(row_bytes) - 1, row_bytes)


def test_a_recipe_takes_as_long_as_its_copies_and_the_start_of_its_batches() -> None:
    """A block of two pairs of rows in allocations of their own."""
    rows = tuple(Region(i // 2, i % 2 * MIB, 2 * KIB, 2 * KIB, 2 * KIB, 1) for i in range(4))
    bound = bind(GroupLayout(0, 512, 0, 1, rows), [1 << 40, 1 << 41])
    link = 2 * KIB / 55_000
    assert bound.few.microseconds(8, 0, 0, 64, MIB) == pytest.approx(8 * 2 * (3 + 2 * link))
    pieces = bound.fast.microseconds(8, 0, 0, 64, MIB)
    assert pieces == pytest.approx(8 * 4 * 0.73 + BATCH_US)
    assert bound.fast.microseconds(8, 0, 0, 16, MIB) == pytest.approx(pieces + BATCH_US), "two batches"
    assert bound.fast.microseconds(8, 0, 0, 64, 32 * KIB) == pytest.approx(pieces + BATCH_US), "two calls"
    in_runs = bound.fast.microseconds(300, 2, 300, 64, MIB)
    assert in_runs == pytest.approx(4 * (2 * 3 + 300 * link))
    assert bound.fast.microseconds(308, 2, 300, 64, MIB) == pytest.approx(in_runs + pieces)

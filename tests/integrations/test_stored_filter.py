from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.integrations.stored_filter import StoredFilter, Tags, tags_of
from kvsidecar.integrations.vllm.metadata import RankReport
from tests.integrations.engine import EPOCH, Allocated, Request, Step, TinyPool, beside, planned_load, stored_hashes


def tags(*numbers: int, group: int = 0, width: int = 32) -> Tags:
    hashes = b"".join(hashlib.sha256(str(number).encode()).digest()[:width] for number in numbers)
    return tags_of(group, hashes, len(numbers))


def test_what_was_added_is_known_in_its_group_until_it_is_discarded() -> None:
    stored_filter = StoredFilter()
    stored_filter.add(tags(1, 2, 3))
    assert stored_filter.find(tags(1, 4, 3)).tolist() == [True, False, True]
    assert stored_filter.find(tags(1, 2, 3, group=1)).tolist() == [False] * 3
    assert stored_filter.discard(tags(3, 4)).tolist() == [True, False]
    assert stored_filter.find(tags(1, 2, 3)).tolist() == [True, True, False]
    stored_filter.clear()
    assert not stored_filter.find(tags(1, 2)).any()


@pytest.mark.parametrize("width", [16, 32, 64])
def test_hashes_of_every_width_and_of_none(width: int) -> None:
    stored_filter = StoredFilter()
    stored_filter.add(tags(5, 6, group=2, width=width))
    assert stored_filter.find(tags(6, 7, 5, group=2, width=width)).tolist() == [True, False, True]
    assert stored_filter.find(tags_of(2, b"", 0)).tolist() == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_small_table_forgets_but_never_knows_what_was_not_added_or_was_discarded(
    steps: list[tuple[bool, int]],
) -> None:
    stored_filter, truth = StoredFilter(capacity=16), set()
    for add, number in steps:
        if add:
            stored_filter.add(tags(number))
            truth.add(number)
            assert stored_filter.find(tags(number)).all(), "the newest is stored_filter"
        else:
            stored_filter.discard(tags(number))
            truth.discard(number)
        found = stored_filter.find(tags(*range(41)))
        assert {i for i in range(41) if found[i]} <= truth


def test_a_table_that_grows_knows_what_it_knew_and_forgets_less() -> None:
    stored_filter = StoredFilter(capacity=16)
    stored_filter.add(tags(*range(4)))
    known = stored_filter.find(tags(*range(4)))
    stored_filter.fit(1000)
    assert stored_filter.find(tags(*range(4))).tolist() == known.tolist()
    many = tags(*range(1000))
    stored_filter.add(many)
    assert np.count_nonzero(stored_filter.find(many)) > 850
    stored_filter.fit(10)  # never shrinks
    assert np.count_nonzero(stored_filter.find(many)) > 850


def test_a_table_has_a_power_of_2_of_places() -> None:
    with pytest.raises(ValueError, match="12 is not a power of 2"):
        StoredFilter(capacity=12)


@pytest.mark.parametrize("known", ["with the load", "before it"])
def test_what_was_loaded_from_one_run_of_the_daemon_is_stored_in_the_next(known: str) -> None:
    pool = TinyPool(16)
    made, daemon = beside(pool=pool)
    request = Request("r", list(range(9)))
    daemon.put(0, request.block_hashes)
    made.get_num_new_matched_tokens(request, 0)
    blocks = pool.take(3)
    load = planned_load(made, request, Allocated([each.block_id for each in blocks]), 8)
    another, report = {0: EPOCH + 1}, RankReport(loaded={load.number: 1})
    if known == "before it":
        made.take_report(RankReport(attached=another))
    else:
        report = replace(report, attached=another)
    made.take_report(report)
    for block, each in zip(blocks, request.block_hashes, strict=False):
        pool.cache(block, each + bytes(4))
    request.num_computed_tokens = 8
    assert len(stored_hashes(made.build_plan(Step({"r": 1})).stores)) == 2

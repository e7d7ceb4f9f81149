from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsidecar.integrations.vllm.known import Known, Tags, tags_of


def tags(*numbers: int, group: int = 0, width: int = 32) -> Tags:
    hashes = b"".join(hashlib.sha256(str(number).encode()).digest()[:width] for number in numbers)
    return tags_of(group, hashes, len(numbers))


def test_what_was_added_is_known_in_its_group_until_it_is_discarded() -> None:
    known = Known()
    known.add(tags(1, 2, 3))
    assert known.find(tags(1, 4, 3)).tolist() == [True, False, True]
    assert known.find(tags(1, 2, 3, group=1)).tolist() == [False] * 3

    assert known.discard(tags(3, 4)).tolist() == [True, False]

    assert known.find(tags(1, 2, 3)).tolist() == [True, True, False]
    known.clear()
    assert not known.find(tags(1, 2)).any()


@pytest.mark.parametrize("width", [16, 32, 64])
def test_hashes_of_every_width_and_of_none(width: int) -> None:
    known = Known()
    known.add(tags(5, 6, group=2, width=width))
    assert known.find(tags(6, 7, 5, group=2, width=width)).tolist() == [True, False, True]
    assert known.find(tags_of(2, b"", 0)).tolist() == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_small_table_forgets_but_never_knows_what_was_not_added_or_was_discarded(
    steps: list[tuple[bool, int]],
) -> None:
    known, truth = Known(capacity=16), set()
    for add, number in steps:
        if add:
            known.add(tags(number))
            truth.add(number)
            assert known.find(tags(number)).all(), "the newest is known"
        else:
            known.discard(tags(number))
            truth.discard(number)
        found = known.find(tags(*range(41)))
        assert {i for i in range(41) if found[i]} <= truth


def test_a_table_has_a_power_of_2_of_places() -> None:
    with pytest.raises(ValueError, match="12 is no power of 2"):
        Known(capacity=12)

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from kvsidecar.cache.grants import LEAST_ROOM
from kvsidecar.cache.leases import EXPIRED, RELEASED, LeaseTable
from tests.cache.integrity import check_leases


def test_released_leases_are_known_for_a_while_and_ended_ones_are_not() -> None:
    table = LeaseTable()
    first, *others = (table.add("o", [], 10.0).id for _ in range(RELEASED + 2))
    assert table.release(first)
    assert not table.release(first)
    assert table.was_released(first)
    for lease_id in others[:-1]:
        assert table.release(lease_id)
    assert not table.was_released(first), "what nobody will ask for is kept for ever"
    assert table.was_released(others[0])
    table.pop_expired(10.0)
    assert not table.was_released(others[-1])
    check_leases(table)


def test_an_id_that_is_given_again_is_of_the_new_lease() -> None:
    table = LeaseTable(next_id=lambda: 5)
    table.release(table.add("o", [], 10.0).id)
    table.add("o", [], 10.0)
    assert not table.was_released(5)
    check_leases(table)


def test_an_owner_holds_the_blocks_of_those_leases_that_have_not_ended() -> None:
    table = LeaseTable()
    first, second, third = (table.add("o", [chain(blocks * 100)], float(blocks)) for blocks in (1, 2, 4))
    table.release(first.id)
    assert table.held("o") == (2, 600)
    assert table.pop_expired(2.0) == [second]
    assert table.held("o") == (1, 400)
    check_leases(table)
    assert table.pop_owner("o") == [third]
    assert table.held("o") == (0, 0)


def test_an_id_in_use_is_not_given_again() -> None:
    ids = iter([7, 7, 8])
    table = LeaseTable(lambda: next(ids))
    assert [table.add("o", [], 1.0).id, table.add("o", [], 1.0).id] == [7, 8]


def test_leases_that_never_expire_leave_nothing_behind_when_released() -> None:
    table = LeaseTable()
    kept = table.add("o", [], 50.0)
    for _ in range(10_000):
        table.pop(table.add("o", [], math.inf).id)
    assert len(table._expiries) < 200
    assert table.pop_expired(50.0) == [kept]


def test_a_lease_that_is_extended_has_all_of_its_blocks_and_a_new_end() -> None:
    table = LeaseTable()
    lease = table.add("o", [chain(300)], 10.0)
    table.extend(lease, [chain(200), chain(100)], 20.0)
    assert table.held("o") == (1, 600)
    check_leases(table)
    assert table.pop_expired(10.0) == []
    assert table.pop_expired(20.0) == [lease]
    assert table.held("o") == (0, 0)
    check_leases(table)


def test_a_lease_of_many_parts_with_few_blocks_counts_as_what_its_parts_take() -> None:
    """Else one user could have the daemon keep a gigabyte, and walk over millions of parts in one step."""
    table = LeaseTable()
    lease = table.add("o", [chain(1)], 10.0)
    for _ in range(99):
        table.extend(lease, [chain(1)], 10.0)
    assert (lease.num_blocks, table.held("o")) == (100, (1, 100 * LEAST_ROOM))
    check_leases(table)
    table.pop(lease.id)
    assert table.held("o") == (0, 0)


def test_of_very_many_leases_that_expire_together_some_end_at_a_time() -> None:
    table = LeaseTable()
    ids = {table.add("o", [], 10.0).id for _ in range(2 * EXPIRED + 1)}
    found = [table.pop_expired(10.0) for _ in range(4)]
    assert [len(each) for each in found] == [EXPIRED, EXPIRED, 1, 0]
    assert {lease.id for each in found for lease in each} == ids


def chain(blocks: int) -> Any:
    return SimpleNamespace(rows=range(blocks))

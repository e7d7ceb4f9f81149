from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from kvsidecar.cache.leases import RELEASED, LeaseTable
from tests.cache.integrity import check_leases


def test_a_lease_is_alive_until_its_expiry_and_not_at_it() -> None:
    table = LeaseTable()
    lease = table.add("o", [], 10.0)
    assert table.get(lease.id, 9.999) is lease
    assert table.get(lease.id, 10.0) is None


def test_a_lease_whose_time_is_over_cannot_be_renewed_even_before_the_sweep() -> None:
    table = LeaseTable()
    lease = table.add("o", [], 10.0)
    assert not table.renew(lease.id, 10.0, 20.0)
    assert table.pop_expired(10.0) == [lease]


def test_a_renewed_lease_ends_at_its_new_time_only() -> None:
    table = LeaseTable()
    lease = table.add("o", [], 10.0)
    assert table.renew(lease.id, 5.0, 20.0)
    assert table.pop_expired(19.0) == []
    assert table.pop_expired(20.0) == [lease]
    assert table.pop_expired(99.0) == []


def test_a_lease_can_be_renewed_to_end_sooner() -> None:
    table = LeaseTable()
    lease = table.add("o", [], 100.0)
    assert table.renew(lease.id, 1.0, 2.0)
    assert table.pop_expired(2.0) == [lease]
    check_leases(table)


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


def test_a_released_lease_does_not_expire() -> None:
    table = LeaseTable()
    lease = table.add("o", [], 10.0)
    assert table.pop(lease.id) is lease
    assert table.pop(lease.id) is None
    assert table.pop_expired(99.0) == []


def test_an_owner_loses_its_leases_and_no_other() -> None:
    table = LeaseTable()
    mine, theirs = table.add("me", [], 10.0), table.add("them", [], 10.0)
    assert table.pop_owner("me") == [mine]
    assert table.pop_owner("me") == []
    assert list(table._leases.values()) == [theirs]
    check_leases(table)


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
    lease = table.add("o", [chain(3)], 10.0)
    table.extend(lease, [chain(2), chain(1)], 20.0)
    assert table.held("o") == (1, 6)
    check_leases(table)
    assert table.pop_expired(10.0) == []
    assert table.pop_expired(20.0) == [lease]
    assert table.held("o") == (0, 0)
    check_leases(table)


def chain(blocks: int) -> Any:
    return SimpleNamespace(rows=range(blocks))
